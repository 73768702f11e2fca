"""Names and axes of parameters in other libraries: tables of rules for `weights/foreign.py`.

| library | families | source |
|---|---|---|
| tunix | Llama 3, Qwen 2, Qwen 3 with and without experts, Gemma 2, Gemma 3 | `tunix/models/*/model.py` of 0.1.7 |
| MaxText | Llama, Mistral, Qwen 3 without experts | its converter, `utils/ckpt_conversion`, in its state of 2025 |
"""

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.weights.foreign import Rule

_LAYER = r"model\.layers\.(?P<L>\d+)\."


def tunix_rules(cfg: ModelConfig) -> list[Rule]:
    """Rules of an `nnx.State` of tunix's model of this family.

    Raises:
        UnsupportedError: tunix does not have this family, or there is no table for it.
    """
    if cfg.model_type in ("gemma2", "gemma3_text"):
        return _tunix_gemma(cfg)
    if cfg.model_type not in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        raise UnsupportedError(f"no table of tunix's models has model_type {cfg.model_type!r}")
    own = r"layers.\g<L>."
    return [
        Rule(r"model\.embed_tokens\.weight", "embedder.input_embedding", "V D -> V D"),
        Rule(r"model\.norm\.weight", "final_norm.w", "D -> D"),
        Rule(r"lm_head\.weight", "lm_head.w", "D V -> V D"),
        Rule(_LAYER + r"(\w+_layernorm)\.weight", own + r"\2.w", "D -> D"),
        Rule(_LAYER + r"self_attn\.([qk])_norm\.weight", own + r"attn.\2_norm.w", "H -> H"),
        Rule(_LAYER + r"self_attn\.q_proj\.weight", own + "attn.q_proj.w", "D N H -> (N H) D"),
        Rule(_LAYER + r"self_attn\.([kv])_proj\.weight", own + r"attn.\2_proj.w", "D K H -> (K H) D"),
        Rule(_LAYER + r"self_attn\.o_proj\.weight", own + "attn.o_proj.w", "N H D -> D (N H)"),
        Rule(_LAYER + r"self_attn\.([qkv])_proj\.bias", own + r"attn.\2_bias", "O -> O"),
        Rule(_LAYER + r"mlp\.(\w+_proj)\.weight", own + r"mlp.\2.kernel", "I O -> O I"),
        Rule(_LAYER + r"mlp\.gate\.weight", own + "mlp.router.kernel", "D E -> E D"),
        Rule(_LAYER + r"mlp\.experts\.(\w+_proj)\.weight", own + r"mlp.\2", "E I O -> E O I"),
    ]


def _tunix_gemma(cfg: ModelConfig) -> list[Rule]:
    own = r"layers.\g<L>."
    if cfg.num_attention_heads == cfg.num_key_value_heads:
        joined = {part: ("qkv_einsum", f"{at}/3 N") for at, part in enumerate("qkv")}
    else:
        joined = {"q": ("q_einsum", "N"), "k": ("kv_einsum", "0/2 K"), "v": ("kv_einsum", "1/2 K")}
    norms = {
        "input_layernorm": "pre_attention_norm",
        "post_attention_layernorm": "post_attn_norm" if cfg.model_type == "gemma2" else "post_attention_norm",
        "pre_feedforward_layernorm": "pre_ffw_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    return [
        Rule(r"model\.embed_tokens\.weight", "embedder.input_embedding", "V D -> V D"),
        Rule(r"model\.norm\.weight", "final_norm.scale", "D -> D"),
        *(Rule(_LAYER + rf"{name}\.weight", own + f"{there}.scale", "D -> D") for name, there in norms.items()),
        *(
            Rule(
                _LAYER + rf"self_attn\.{part}_proj\.weight",
                own + f"attn.{there}.w",
                f"{heads} D H -> ({heads[-1]} H) D",
            )
            for part, (there, heads) in joined.items()
        ),
        Rule(_LAYER + r"self_attn\.o_proj\.weight", own + "attn.attn_vec_einsum.w", "N H D -> D (N H)"),
        Rule(_LAYER + r"self_attn\.q_norm\.weight", own + "attn._query_norm.scale", "H -> H"),
        Rule(_LAYER + r"self_attn\.k_norm\.weight", own + "attn._key_norm.scale", "H -> H"),
        Rule(_LAYER + r"mlp\.(\w+_proj)\.weight", own + r"mlp.\2.kernel", "I O -> O I"),
    ]


def maxtext_rules(cfg: ModelConfig, *, scanned: bool = True, prefix: str = "params.") -> list[Rule]:
    """Rules of the parameters of MaxText's model of this family.

    In MaxText, the two numbers of a rotary pair of Llama's and Mistral's queries and keys are adjacent, and their
    query weights are divided by the square root of the head width.

    Args:
        cfg: the model's configuration.
        scanned: layers are one tree, stacked along axis 1 (`scan_layers` with `param_scan_axis=1`, the default).
        prefix: common prefix of all paths.

    Raises:
        UnsupportedError: there is no table for this family.
    """
    if cfg.model_type not in ("llama", "mistral", "qwen3"):
        raise UnsupportedError(f"no table of MaxText's models has model_type {cfg.model_type!r}")
    own, at = (prefix + "decoder.layers.", "L ") if scanned else (prefix + r"decoder.layers_\g<L>.", "")
    head, scale = ("H", 1.0) if cfg.model_type == "qwen3" else ("(J P=2)", cfg.head_dim**0.5)
    rotated = head.replace("(J P=2)", "P J")
    attention = own + "self_attention."
    return [
        Rule(r"model\.embed_tokens\.weight", prefix + "token_embedder.embedding", "V D -> V D"),
        Rule(r"model\.norm\.weight", prefix + "decoder.decoder_norm.scale", "D -> D"),
        Rule(r"lm_head\.weight", prefix + "decoder.logits_dense.kernel", "D V -> V D"),
        Rule(_LAYER + r"input_layernorm\.weight", own + "pre_self_attention_layer_norm.scale", f"D {at}-> D"),
        Rule(_LAYER + r"post_attention_layernorm\.weight", own + "post_self_attention_layer_norm.scale", f"D {at}-> D"),
        Rule(
            _LAYER + r"self_attn\.q_proj\.weight",
            attention + "query.kernel",
            f"D {at}N {head} -> (N {rotated}) D",
            scale,
        ),
        Rule(_LAYER + r"self_attn\.k_proj\.weight", attention + "key.kernel", f"D {at}K {head} -> (K {rotated}) D"),
        Rule(_LAYER + r"self_attn\.v_proj\.weight", attention + "value.kernel", f"D {at}K H -> (K H) D"),
        Rule(_LAYER + r"self_attn\.o_proj\.weight", attention + "out.kernel", f"N {at}H D -> D (N H)"),
        Rule(_LAYER + r"self_attn\.q_norm\.weight", attention + "query_norm.scale", f"H {at}-> H"),
        Rule(_LAYER + r"self_attn\.k_norm\.weight", attention + "key_norm.scale", f"H {at}-> H"),
        Rule(_LAYER + r"mlp\.gate_proj\.weight", own + "mlp.wi_0.kernel", f"I {at}O -> O I"),
        Rule(_LAYER + r"mlp\.up_proj\.weight", own + "mlp.wi_1.kernel", f"I {at}O -> O I"),
        Rule(_LAYER + r"mlp\.down_proj\.weight", own + "mlp.wo.kernel", f"I {at}O -> O I"),
    ]
