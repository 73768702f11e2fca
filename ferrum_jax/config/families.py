"""Conversion of every family's `config.json` to the fields of a `ModelConfig`.

A family is one function here and one line of `FAMILIES`. A missing field has the default of Hugging Face's own
configuration class, except that key/value heads default to the number of attention heads; sizes, and numbers of experts
and groups, must be there, but for those that Gemma 3 4B leaves out. A setting of `CHANGES_ARITHMETIC` that the family's
forward does not implement is refused.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ferrum_jax.config.checks import check_integer
from ferrum_jax.config.components import ExpertsConfig, LatentConfig
from ferrum_jax.config.settings import Settings, read_rope, read_sizes
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, safe_repr

Fields = dict[str, Any]
CHANGES_ARITHMETIC = (  # settings that make a forward wrong if its family ignores them
    "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "num_experts", "num_local_experts", "n_routed_experts",
    "no_rope_layers", "quantization_config", "clip_qkv", "query_pre_attn_scalar", "kv_lora_rank", "swiglu_limit",
    "swiglu_alpha", "rope_local_base_freq", "use_bidirectional_attention", "attention_chunk_size", "per_layer_config",
)  # fmt: skip
_SILU = ("hidden_act", "silu", ("silu", "swish"))
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
_EXPERT_COUNTS = ("num_local_experts", "num_experts")


def _decoder(
    s: Settings,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    activation: tuple[str, str, Collection[str]] = _SILU,
    partial_rotary: bool = False,
) -> Fields:
    """Reads the fields of all families; attention is full in every layer, and one field sets all its biases."""
    s.activation(*activation)
    sizes, rope, bias = read_sizes(s, head_dim=head_dim), read_rope(s), s.flag("attention_bias")
    if rope["partial_rotary_factor"] != 1.0 and not partial_rotary:
        share = rope["partial_rotary_factor"]
        raise UnsupportedError(f"partial_rotary_factor {share} is not implemented, only 1.0 is")
    return {
        **sizes,
        **rope,
        "tie_word_embeddings": s.flag("tie_word_embeddings", tied),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "layer_windows": (None,) * sizes["num_hidden_layers"],
    }


def _every_layer(s: Settings) -> tuple[Any, ...]:
    return (s.get("sliding_window"),) * s.integer("num_hidden_layers")


def _is_even(layer: int) -> bool:
    return layer % 2 == 0


def _qwen_windows(s: Settings, slides: Callable[[int], bool] | None = None) -> Fields:
    """Reads the windows, if in use: for layers from `max_window_layers` on, or for those where `slides` is true."""
    window = s.get("sliding_window", 4096)
    slides = slides or (lambda layer: layer >= s.integer("max_window_layers", 28, 0))
    windows = s.windows(slides, window)
    return {"layer_windows": windows} if window is not None and s.flag("use_sliding_window") else {}


def _llama(s: Settings) -> Fields:
    return _decoder(s) | {"mlp_bias": s.flag("mlp_bias")}


def _mistral(s: Settings) -> Fields:
    # Ministral differs in `layer_types` alone. Neither reads `attention_bias`.
    s = s.defaulting(sliding_window=4096).replacing(model_type="mistral", attention_bias=False)
    return _decoder(s) | {"layer_windows": s.windows(lambda _: True, s.get("sliding_window"))}


def _qwen2(s: Settings) -> Fields:
    biases = {"attention_bias": True, "attention_out_bias": False}
    return _decoder(s) | biases | _qwen_windows(s)


def _qwen3(s: Settings) -> Fields:
    return _decoder(s, head_dim=128) | {"qk_norm": True} | _qwen_windows(s)


def _qwen2_moe(s: Settings) -> Fields:
    shared = s.integer("shared_expert_intermediate_size")
    return (
        _decoder(s)
        | {"attention_bias": s.flag("qkv_bias", True), "attention_out_bias": False}
        | {"experts": _qwen_experts(s, shared_expert_intermediate_size=shared)}
        | _qwen_windows(s, lambda layer: _is_even(layer) and layer < s.integer("max_window_layers", 28, 0))
    )


def _qwen3_moe(s: Settings) -> Fields:
    found = _decoder(s) | {"qk_norm": True, "experts": _qwen_experts(s)}
    return found | _qwen_windows(s.replacing(layer_types=None), lambda _: True)


def _qwen_experts(s: Settings, **sizes: Any) -> ExpertsConfig | None:
    """Reads the experts, with `sizes` that only some families have; None if no layer has experts."""
    count = _num_experts(s, "num_experts", "num_local_experts", least=0)  # newer checkpoints have the second name
    dense = [check_integer("a layer of mlp_only_layers", layer) for layer in s.entries("mlp_only_layers")]
    step = s.integer("decoder_sparse_step", 1)
    layers = range(s.integer("num_hidden_layers"))
    sparse = tuple(index not in dense and (index + 1) % step == 0 for index in layers)
    if count == 0 or not any(sparse):
        return None
    return ExpertsConfig(
        num_experts=count,
        num_experts_per_tok=s.integer("num_experts_per_tok"),
        moe_intermediate_size=s.integer("moe_intermediate_size"),
        norm_topk_prob=s.flag("norm_topk_prob"),
        sparse_layers=sparse,
        **sizes,
    )


def _num_experts(s: Settings, *names: str, least: int = 1) -> int:
    """Reads the number of experts under the first of these names that is present."""
    return s.integer(next((name for name in names if s.get(name) is not None), names[0]), least=least)


def _mixtral(s: Settings) -> Fields:
    found = _decoder(s.defaulting(rms_norm_eps=1e-5, rope_theta=1e6).replacing(attention_bias=False))
    return found | {"layer_windows": _every_layer(s), "experts": _local_experts(s, found)}


def _local_experts(s: Settings, found: Fields, **options: Any) -> ExpertsConfig:
    """Reads experts as Mixtral's: in every layer, as wide as `intermediate_size`."""
    return ExpertsConfig(
        num_experts=s.integer("num_local_experts"),
        num_experts_per_tok=s.integer("num_experts_per_tok"),
        moe_intermediate_size=found["intermediate_size"],
        norm_topk_prob=True,
        sparse_layers=(True,) * found["num_hidden_layers"],
        **options,
    )


def _gpt_oss(s: Settings) -> Fields:
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    s = s.defaulting(rms_norm_eps=1e-5, rope_theta=150000.0, attention_bias=True)
    if s.get("rope_parameters") is None and not s.section("rope_scaling").fields:
        s = s.replacing(rope_parameters=yarn)
    found = _decoder(s, head_dim=64, activation=("hidden_act", "silu", ("silu",)))
    window = s.get("sliding_window", 128)
    if window is None and any(s.windows(_is_even, 1)):
        raise ConfigError("sliding_window is null, but layer_types has layers with a window")
    swiglu = {"swiglu_limit": s.number("swiglu_limit", 7.0), "swiglu_alpha": s.number("swiglu_alpha", 1.702)}
    return found | {
        "attention_sinks": True,
        "layer_windows": s.windows(_is_even, window),
        "experts": _local_experts(s, found, **swiglu),
    }


def _olmo2(s: Settings) -> Fields:
    return _decoder(s.defaulting(rms_norm_eps=1e-5))


def _olmo3(s: Settings) -> Fields:
    """Reads OLMo 3: of its RoPE settings the scaling applies only to layers without a window.

    In the older spelling `rope_theta` is the base of all layers. transformers 5.24 gives layers with a window 500000
    whatever it says; published models have 500000.
    """
    s = s.defaulting(rms_norm_eps=1e-5, rope_theta=500000.0)
    base = s.number("rope_theta")
    kinds, local_theta = _ropes_by_kind(s, base, base)
    found = _decoder(s.replacing(rope_parameters=kinds, rope_scaling=None, original_max_position_embeddings=None))
    windows = _needed_windows(s, lambda layer: (layer + 1) % 4 != 0)
    return found | {"local_rope_theta": local_theta, "layer_windows": windows}


def _granite(s: Settings) -> Fields:
    multipliers = {name: s.number(name, 1.0) for name in _MULTIPLIERS}
    return _decoder(s) | multipliers | {"mlp_bias": s.flag("mlp_bias")}


def _phi3(s: Settings) -> Fields:
    """Reads dense Phi-3, Phi-3.5 and Phi-4, which also call LongRoPE `su` or `yarn`."""
    s = s.defaulting(rms_norm_eps=1e-5, original_max_position_embeddings=4096).replacing(attention_bias=False)
    for name in ("rope_parameters", "rope_scaling"):
        given = s.get(name)
        if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) in ("su", "yarn"):
            s = s.replacing(**{name: {**given, "rope_type": "longrope"}})
    found = _decoder(s, partial_rotary=True)
    scaling = found["rope_scaling"]
    if scaling is not None and scaling.rope_type != "longrope":
        raise UnsupportedError(f"rope_type {scaling.rope_type!r} is not implemented for phi3, only longrope is")
    return found | {"layer_windows": _every_layer(s)}


def _smollm3(s: Settings) -> Fields:
    found = _decoder(s.defaulting(num_key_value_heads=4, rope_theta=2e6), tied=True)
    layers, rotated = range(found["num_hidden_layers"]), s.get("no_rope_layers")  # true where there is a rotation
    if rotated is None:
        rotated = [(layer + 1) % s.integer("no_rope_layer_interval", 4) != 0 for layer in layers]
    if not isinstance(rotated, list) or len(rotated) < len(layers):
        raise ConfigError(f"no_rope_layers is {safe_repr(rotated)}, expected a list of at least {len(layers)} entries")
    if wrong := [entry for entry in rotated if type(entry) not in (bool, int) or entry not in (0, 1)]:
        raise ConfigError(f"no_rope_layers holds {safe_repr(wrong[0])}, expected only 0 and 1")
    window = s.get("sliding_window")
    slides = s.flag("use_sliding_window") and window is not None
    return found | {
        "layers_without_rope": tuple(layer for layer in layers if not rotated[layer]),
        "mlp_bias": s.flag("mlp_bias"),
        "layer_windows": s.windows(lambda layer: slides and not rotated[layer], window),
    }


def _gemma(
    s: Settings, name: str = "hidden_act", activations: Collection[str] = ("gelu_pytorch_tanh", "gelu")
) -> Fields:
    """Reads Gemma, whose `gelu` means the approximation by tanh, or what later Gemmas share with it."""
    found = _decoder(s, head_dim=256, tied=True, activation=(name, "gelu_pytorch_tanh", activations))
    return found | {"embedding_multiplier": found["hidden_size"] ** 0.5}


def _later_gemma(s: Settings) -> Fields:
    scale = s.number("query_pre_attn_scalar", 256.0) ** -0.5
    return _gemma(s, "hidden_activation", ("gelu_pytorch_tanh",)) | {"attention_multiplier": scale}


def _gemma2(s: Settings) -> Fields:
    return _later_gemma(s) | {
        "attn_logit_softcapping": s.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": s.get("final_logit_softcapping", 30.0),
        "layer_windows": s.windows(_is_even, s.get("sliding_window", 4096)),
    }


_GEMMA3_SIZES = {  # as the configuration of Gemma 3 4B leaves them out
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip


def _gemma3(s: Settings) -> Fields:
    """Reads Gemma 3: layers with a window have their own RoPE base; the scaling applies only to the other layers.

    A soft cap of scores is refused: Hugging Face's forward ignores it, and no checkpoint has one.
    """
    if (cap := s.get("attn_logit_softcapping")) is not None:
        raise UnsupportedError(f"attn_logit_softcapping {cap!r} is not implemented here")
    s = s.defaulting(**_GEMMA3_SIZES)
    kinds, local_theta = _ropes_by_kind(s, s.get("rope_theta", 1e6), s.get("rope_local_base_freq", 10000.0))
    found = _later_gemma(s.replacing(rope_parameters=kinds, rope_scaling=None, original_max_position_embeddings=None))
    return found | {
        "local_rope_theta": local_theta,
        "qk_norm": True,
        "final_logit_softcapping": s.get("final_logit_softcapping"),
        "layer_windows": _needed_windows(s, lambda layer: (layer + 1) % s.integer("sliding_window_pattern", 6) != 0),
    }


def _needed_windows(s: Settings, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Reads each layer's window, as `Settings.windows` does; raises ConfigError where the width is null."""
    if (window := s.get("sliding_window", 4096)) is None:
        raise ConfigError("sliding_window is null, expected the width of a window")
    return s.windows(slides, window)


def _ropes_by_kind(s: Settings, base: float, local_base: float) -> tuple[Fields, float]:
    """Reads RoPE settings of full-attention layers and the base of the others, in the newer or the older spelling.

    `base` and `local_base` are the RoPE bases where the configuration gives none. transformers does not read YaRN's
    `truncate` here, nor `type`, the older name of `rope_type`, in `rope_scaling`; the latter is refused.
    """
    older = s.section("rope_scaling").fields
    if "type" in older and "rope_type" not in older:
        raise UnsupportedError(f"rope_scaling {safe_repr(older)} has a type but no rope_type: name it rope_type")
    given = s.section("rope_parameters")
    local, full = given.section("sliding_attention"), given.section("full_attention").fields
    if (kind := local.get("rope_type", "default")) != "default":
        raise UnsupportedError(f"rope_type {kind!r} of layers with a window is not implemented")
    if given.fields and not given.fields.keys() & {"sliding_attention", "full_attention"}:
        raise UnsupportedError(f"rope_parameters {safe_repr(given.fields)} are not separate for each kind of layer")
    full = {"rope_theta": base, **full, **older, "truncate": True}
    is_linear = full.get("rope_type", full.get("type")) == "linear"
    if is_linear and full.get("factor") is not None:  # `max_position_embeddings` counts scaled positions
        original = int(s.integer("max_position_embeddings") / Settings(full).number("factor"))
        full = {"original_max_position_embeddings": original, **full}
    return full, local.number("rope_theta", local_base)


def _deepseek2(s: Settings) -> Fields:
    if s.flag("norm_topk_prob"):
        raise UnsupportedError("norm_topk_prob = true is not implemented for deepseek_v2")
    s = s.replacing(rope_interleave=True)
    methods = {"greedy": "softmax", "group_limited_greedy": "softmax"}
    return _deepseek(s, methods, first_dense=0) | {"mlp_bias": s.flag("mlp_bias")}


def _deepseek3(s: Settings) -> Fields:
    s = s.defaulting(norm_topk_prob=True, rope_interleave=True, routed_scaling_factor=2.5)
    return _deepseek(s, {"noaux_tc": "sigmoid"}, first_dense=3)


def _deepseek(s: Settings, methods: Mapping[str, str], first_dense: int) -> Fields:
    """Reads DeepSeek V2, V3 and R1, whose KV has one head, a latent.

    Args:
        s: the configuration.
        methods: supported methods of choosing experts, each with its scoring function; the first is the default.
        first_dense: default number of layers without experts at the beginning.
    """
    latent = LatentConfig(
        q_lora_rank=s.get("q_lora_rank", 1536),
        kv_lora_rank=s.integer("kv_lora_rank"),
        qk_nope_head_dim=s.integer("qk_nope_head_dim"),
        qk_rope_head_dim=s.integer("qk_rope_head_dim"),
        v_head_dim=s.integer("v_head_dim"),
        rope_interleave=s.flag("rope_interleave"),
    )
    found = _decoder(s)
    scaling, scale = found["rope_scaling"], (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5
    if scaling is not None and scaling.mscale_all_dim and scaling.factor > 1:
        scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2
    return found | {
        "num_key_value_heads": 1,
        "head_dim": latent.cached_dim,
        "attention_out_bias": False,
        "attention_multiplier": scale,
        "latent": latent,
        "experts": _deepseek_experts(s, methods, first_dense),
    }


def _deepseek_experts(s: Settings, methods: Mapping[str, str], first_dense: int) -> ExpertsConfig | None:
    method = s.get("topk_method", next(iter(methods)))
    scoring = s.get("scoring_func", next(iter(methods.values())))
    if methods.get(method) != scoring:
        raise UnsupportedError(f"topk_method {method!r} with scoring_func {scoring!r} is not implemented")
    if (frequency := s.get("moe_layer_freq", 1)) != 1:
        raise UnsupportedError(f"moe_layer_freq {frequency} is not implemented, only 1 is")
    first, grouped = s.integer("first_k_dense_replace", first_dense, 0), method != "greedy"
    sparse = tuple(index >= first for index in range(s.integer("num_hidden_layers")))
    if not any(sparse):
        return None
    width = s.integer("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=_num_experts(s, "n_routed_experts", *_EXPERT_COUNTS),
        num_experts_per_tok=s.integer("num_experts_per_tok"),
        moe_intermediate_size=width,
        norm_topk_prob=s.flag("norm_topk_prob"),
        shared_expert_intermediate_size=width * s.integer("n_shared_experts"),
        sparse_layers=sparse,
        scoring_func=scoring,
        n_group=s.integer("n_group") if grouped else 1,
        topk_group=s.integer("topk_group") if grouped else 1,
        routed_scaling_factor=s.number("routed_scaling_factor", 1.0),
    )


@dataclass(frozen=True)
class ConfigReader:
    """How a `config.json` is read, and which settings of `CHANGES_ARITHMETIC` the forward implements."""

    read: Callable[[Settings], Fields]
    computes: Collection[str] = ()


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq")
_LATENT = ("n_routed_experts", *_EXPERT_COUNTS, "kv_lora_rank")
FAMILIES: Mapping[str, ConfigReader] = {
    "llama": ConfigReader(_llama),
    "mistral": ConfigReader(_mistral),
    "ministral": ConfigReader(_mistral),
    "qwen2": ConfigReader(_qwen2),
    "qwen3": ConfigReader(_qwen3),
    "gemma": ConfigReader(_gemma),
    "gemma2": ConfigReader(_gemma2, _CAPS),
    "gemma3_text": ConfigReader(_gemma3, _CAPS),
    "phi3": ConfigReader(_phi3),
    "olmo2": ConfigReader(_olmo2),
    "olmo3": ConfigReader(_olmo3),
    "granite": ConfigReader(_granite, _MULTIPLIERS),
    "smollm3": ConfigReader(_smollm3, ("no_rope_layers",)),
    "mixtral": ConfigReader(_mixtral, _EXPERT_COUNTS),
    "qwen2_moe": ConfigReader(_qwen2_moe, _EXPERT_COUNTS),
    "qwen3_moe": ConfigReader(_qwen3_moe, _EXPERT_COUNTS),
    "deepseek_v2": ConfigReader(_deepseek2, _LATENT),
    "deepseek_v3": ConfigReader(_deepseek3, _LATENT),
    "gpt_oss": ConfigReader(_gpt_oss, ("num_local_experts", "swiglu_limit", "swiglu_alpha")),
}
# Multimodal models of which the language model alone is loaded, and the default `model_type` of that.
MULTIMODAL: Mapping[str, str] = {"gemma3": "gemma3_text", "mistral3": "mistral"}


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the language model, which a multimodal one has in its `text_config`."""
    kind = MULTIMODAL.get(str(config.get("model_type")))
    if kind is None:
        return config
    s = Settings(config)
    shared = {name: config[name] for name in ("dtype", "torch_dtype") if name in config}
    own = s.section("text_config")
    default = own.flag("tie_word_embeddings") if kind == "mistral" else True  # Mistral Small 3.1 omits it, untied
    text = {"model_type": kind, **shared, **own.fields, "tie_word_embeddings": s.flag("tie_word_embeddings", default)}
    return text | ({"layer_types": None} if text["model_type"] == "mistral" else {})  # transformers ignores them here


def says_tied(config: Mapping[str, Any]) -> bool:
    """True if a configuration says whether the head is tied to the embeddings.

    Mistral Small 3.1 and 3.2 do not, and have a head; nor do tied ones that transformers saved, without a head.
    """
    both = config, Settings(config).section("text_config").fields
    return any(one.get("tie_word_embeddings") is not None for one in both)


def read_fields(config: Mapping[str, Any]) -> Fields:
    """Reads the fields of a `ModelConfig`.

    Raises:
        UnsupportedError: the family is not supported, or does not implement a setting.
        ConfigError: a field is missing or has the wrong type.
    """
    names = config.get("architectures") or []
    config = text_settings(config)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join((*FAMILIES, *MULTIMODAL))
        raise UnsupportedError(f"model_type {name!r} {names}: supported are {known}")
    for setting in CHANGES_ARITHMETIC:
        if setting not in FAMILIES[name].computes and config.get(setting) not in (None, False, 0):
            raise UnsupportedError(f"{setting} = {config[setting]!r} is not implemented for {name}")
    if not (causal := config.get("is_causal", True)):
        raise UnsupportedError(
            f"is_causal = {causal!r} is not implemented for {name}: tokens attend to those before them"
        )
    return FAMILIES[name].read(Settings(config))
