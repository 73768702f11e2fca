"""Llama 2 to 3.2, and the families whose forward is the same up to a setting: Mistral, Qwen2, Qwen3.

Touvron et al. 2023, "Llama 2"; Jiang et al. 2023, "Mistral 7B" (sliding window); Qwen2 (biases of q, k and v); Qwen3
(RMSNorm of query and key heads). Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

import jax
import jax.numpy as jnp

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.batch import Batch, adapter_of_token, addresses, positions
from ferrum_jax.models.layers.attention import attend
from ferrum_jax.models.layers.linear import linear, vocabulary_logits
from ferrum_jax.models.layers.lora import low_rank, uses
from ferrum_jax.models.layers.norm import rms_norm
from ferrum_jax.models.layers.rope import rotate, rotations
from ferrum_jax.models.quantised import activation_dtype, rows_of
from ferrum_jax.models.rotary import frequencies
from ferrum_jax.models.specs import ParamSpec, ParamTree

Lora = tuple[ParamTree, jax.Array] | None  # stacks of one block, and bool [X, A]: which adapter each token uses


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Describes every parameter; weights of products are `[out, in]`."""
    specs: ParamTree = {
        "model": {
            "embed_tokens": {"weight": ParamSpec((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"))},
            "layers": [_layer_specs(cfg) for _ in range(cfg.num_hidden_layers)],
            "norm": _norm_spec(cfg.hidden_size),
        }
    }
    if not cfg.tie_word_embeddings:
        specs["lm_head"] = {"weight": ParamSpec((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"))}
    return specs


def _layer_specs(cfg: ModelConfig) -> ParamTree:
    model, wide = (cfg.hidden_size, "embed"), (cfg.intermediate_size, "mlp")
    queries = (cfg.num_attention_heads * cfg.head_dim, "heads")
    keys = (cfg.num_key_value_heads * cfg.head_dim, "kv_heads")
    attention = {
        "q_proj": _linear_specs(queries, model, cfg.attention_bias),
        "k_proj": _linear_specs(keys, model, cfg.attention_bias),
        "v_proj": _linear_specs(keys, model, cfg.attention_bias),
        "o_proj": _linear_specs(model, queries, cfg.attention_out_bias),
    }
    if cfg.qk_norm:
        attention |= {"q_norm": _norm_spec(cfg.head_dim, "head"), "k_norm": _norm_spec(cfg.head_dim, "head")}
    return {
        "input_layernorm": _norm_spec(cfg.hidden_size),
        "self_attn": attention,
        "post_attention_layernorm": _norm_spec(cfg.hidden_size),
        "mlp": {
            "gate_proj": _linear_specs(wide, model, cfg.mlp_bias),
            "up_proj": _linear_specs(wide, model, cfg.mlp_bias),
            "down_proj": _linear_specs(model, wide, cfg.mlp_bias),
        },
    }


def _linear_specs(out: tuple[int, str], into: tuple[int, str], bias: bool) -> ParamTree:
    specs: ParamTree = {"weight": ParamSpec((out[0], into[0]), (out[1], into[1]))}
    if bias:
        specs["bias"] = ParamSpec((out[0],), (out[1],), "zeros")
    return specs


def _norm_spec(size: int, axis: str = "embed") -> ParamTree:
    return {"weight": ParamSpec((size,), (axis,), "ones")}


def embed(params: ParamTree, tokens: jax.Array) -> jax.Array:
    """Looks up token embeddings: int32 `[X]` to `[X, D]`."""
    return rows_of(params["model"]["embed_tokens"]["weight"], tokens, activation_dtype(params))


def forward(
    params: ParamTree,
    kv: KvState[jax.Array],
    batch: Batch[jax.Array],
    cfg: ModelConfig,
    inputs_embeds: jax.Array | None = None,
    loras: ParamTree | None = None,
) -> tuple[jax.Array, KvState[jax.Array]]:
    """Runs all new tokens of a batch; gives float32 logits `[R, V]` of the rows asked for, and the KV written.

    `inputs_embeds` `[X, D]`, where given, take the place of the tokens' embeddings. `loras` are the stacks of
    models/adapters.py, in the parameters' dtype; they count where rows of the batch have adapters.

    Raises:
        InvalidParameterError: rows have adapters, but there are no `loras`.
    """
    tokens = jnp.concatenate([rows.tokens.ravel() for rows in batch.groups])
    at = jnp.concatenate([positions(rows).ravel() for rows in batch.groups])
    places = [addresses(rows, kv.v.shape[3], kv.v.shape[1]) for rows in batch.groups]
    block_ids, offsets = (jnp.concatenate([place[i].ravel() for place in places]) for i in (0, 1))
    turn = rotations(at, *frequencies(cfg))
    x = embed(params, tokens) if inputs_embeds is None else inputs_embeds
    adapted = _adapted(loras, batch, cfg)
    for index, layer in enumerate(params["model"]["layers"]):
        normed = rms_norm(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
        lora, places = adapted[index]["self_attn"], (block_ids, offsets)
        mixed, kv = _attention(layer["self_attn"], lora, normed, turn, kv, index, batch, places, cfg)
        x = x + mixed
        normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
        x = x + _mlp(layer["mlp"], adapted[index]["mlp"], normed)
    x = rms_norm(x[batch.logit_rows], params["model"]["norm"]["weight"], cfg.rms_norm_eps)
    head = params["model"]["embed_tokens"] if cfg.tie_word_embeddings else params["lm_head"]
    return vocabulary_logits(x, head["weight"]), kv


def _adapted(loras: ParamTree | None, batch: Batch[jax.Array], cfg: ModelConfig) -> list[dict[str, Lora]]:
    """Gives each layer what its two blocks add to their products: None where the step has no adapters."""
    adapters = adapter_of_token(batch)
    if adapters is None:
        return [{"self_attn": None, "mlp": None}] * cfg.num_hidden_layers
    if loras is None:
        raise InvalidParameterError("rows of the batch have adapters, but no stacks of adapters are given")
    layers = loras["model"]["layers"]
    used = uses(adapters, layers[0]["self_attn"]["q_proj"]["down"].shape[0])
    return [{name: (stacks, used) for name, stacks in layer.items()} for layer in layers]


def _attention(
    layer: ParamTree,
    lora: Lora,
    x: jax.Array,  # [X, D]
    turn: tuple[jax.Array, jax.Array],
    kv: KvState[jax.Array],
    index: int,
    batch: Batch[jax.Array],
    places: tuple[jax.Array, jax.Array],
    cfg: ModelConfig,
) -> tuple[jax.Array, KvState[jax.Array]]:
    def heads(name: str) -> jax.Array:
        return _project(x, layer, lora, name).reshape(len(x), -1, cfg.head_dim)

    q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")  # [X, heads, H]
    if cfg.qk_norm:
        q = rms_norm(q, layer["q_norm"]["weight"], cfg.rms_norm_eps)
        k = rms_norm(k, layer["k_norm"]["weight"], cfg.rms_norm_eps)
    q, k = rotate(q, *turn), rotate(k, *turn)
    kv = state.write(kv, index, *places, k, v)
    outs, start = [], 0
    for rows in batch.groups:
        size = rows.tokens.size
        mine = q[start : start + size].reshape(*rows.tokens.shape, -1, cfg.head_dim)
        out = attend(mine, kv, index, rows, scale=cfg.head_dim**-0.5, window=cfg.layer_windows[index])
        outs.append(out.reshape(size, -1))
        start += size
    return _project(jnp.concatenate(outs), layer, lora, "o_proj"), kv


def _mlp(layer: ParamTree, lora: Lora, x: jax.Array) -> jax.Array:
    gate = _project(x, layer, lora, "gate_proj")
    up = _project(x, layer, lora, "up_proj")
    return _project(jax.nn.silu(gate) * up, layer, lora, "down_proj")


def _project(x: jax.Array, block: ParamTree, lora: Lora, name: str) -> jax.Array:
    """One product of a block, `[X, in]` to `[X, out]`, and what each token's adapter adds to it."""
    y = linear(x, block[name]["weight"], block[name].get("bias"))
    if lora is None:
        return y
    stacks, used = lora
    return y + low_rank(x, stacks[name]["down"], stacks[name]["up"], used)
