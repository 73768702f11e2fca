"""Conversion of a GGUF file's metadata and tensors to the settings of a `config.json`.

The fields are defined by llama.cpp's `convert_hf_to_gguf.py`, which writes them. Values that files leave out because
llama.cpp has them in its code (`src/llama-model.cpp`) are the same here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ferrum_jax.config.checks import check_integer
from ferrum_jax.config.settings import MOST_LAYERS
from ferrum_jax.contract.errors import ConfigError, InvalidFormatError, UnsupportedError
from ferrum_jax.ops import rope
from ferrum_jax.weights.gguf_file import GgufFile

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # not parameters

# Fields that change the arithmetic: their neutral values, and the architectures that read them.
CHANGES_ARITHMETIC: Mapping[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "attention.causal": ((None, True), ()),
    "attention.clamp_kqv": ((None, 0.0), ()),
    "attention.scale": ((None, 0.0), ("granite",)),
    "attn_logit_softcapping": ((None, 0.0), ("gemma2",)),
    "embedding_scale": ((None, 0.0, 1.0), ("granite",)),
    "expert_gating_func": ((None, 0, 1), ()),  # softmax
    "expert_group_count": ((None, 0, 1), ()),
    "expert_weights_norm": ((None, True), ("qwen2moe", "qwen3moe")),
    "expert_weights_scale": ((None, 0.0, 1.0), ()),
    "final_logit_softcapping": ((None, 0.0), ("gemma2", "gemma3")),
    "leading_dense_block_count": ((None, 0), ()),
    "logit_scale": ((None, 0.0, 1.0), ("granite",)),
    "residual_scale": ((None, 0.0, 1.0), ("granite",)),
    "rope.scaling.yarn_ext_factor": ((None, 1.0), ()),
    "rope.scaling.yarn_log_multiplier": ((None, 0.0), ()),
}


class Header:
    """The fields of a file's architecture, and the shapes of its tensors."""

    def __init__(self, file: GgufFile):
        self.architecture = str(file.metadata.get("general.architecture"))
        self._fields = file.metadata
        self._tensors = {tensor.name: tensor for tensor in file.tensors}

    def raw(self, key: str, default: Any = None) -> Any:
        """Returns the value of a field of the architecture, unchecked."""
        return self._fields.get(f"{self.architecture}.{key}", default)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a field of the architecture; of a list with one value per layer, the common value.

        Raises:
            UnsupportedError: layers have different values.
        """
        value = self.raw(key, default)
        if not isinstance(value, list):
            return value
        if not value or any(one != value[0] for one in value):
            raise UnsupportedError(f"{self.architecture}.{key} differs from layer to layer")
        return value[0]

    def need(self, key: str) -> Any:
        """Returns the value of a field; raises ConfigError if it is missing."""
        if (value := self.get(key)) is None:
            raise ConfigError(f"no field {self.architecture}.{key}")
        return value

    def has(self, name: str) -> bool:
        """Whether a tensor exists."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, rows first; raises ConfigError if it is missing."""
        if name not in self._tensors:
            raise ConfigError(f"no tensor {name}")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def values(self, name: str) -> np.ndarray:
        """Reads a small float32 tensor; raises ConfigError if it is missing."""
        self.shape(name)
        return np.asarray(self._tensors[name].data, np.float32).ravel()


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture differ from a Hugging Face folder."""

    settings: Callable[[Header], dict[str, Any]] = lambda _: {}  # further settings of this architecture
    interleaves: bool = False  # rotated pairs of rows of the query and key projections are adjacent
    norm_offset: float = 0.0  # added to the weights of norms by the conversion to GGUF
    partial_rotary: bool = False  # True: heads may be rotated in part only
    # Tensors of a layer by the parameter that they make, where gguf's table of names has none; of two, rows alternate.
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_config(header: Header) -> dict[str, Any]:
    """Converts the file's settings to those of a `config.json`.

    Raises:
        UnsupportedError: the architecture, or one of its settings, is not implemented.
        ConfigError: a field or a tensor is missing.
    """
    if header.architecture not in ARCHITECTURES:
        raise UnsupportedError(f"architecture {header.architecture!r}, supported are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[header.architecture]
    _check_ignored(header, architecture)
    heads, width = header.need("attention.head_count"), header.get("feed_forward_length")
    width = width or header.get("expert_feed_forward_length")  # a file without dense layers may lack it
    return {
        "model_type": header.architecture,
        "vocab_size": header.shape("token_embd.weight")[0],
        "hidden_size": header.need("embedding_length"),
        "intermediate_size": width or header.need("feed_forward_length"),
        "num_hidden_layers": check_integer("block_count", header.need("block_count"), 1, MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "head_dim": _head_dim(header),
        "max_position_embeddings": header.need("context_length"),
        "rms_norm_eps": header.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": header.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header),
        "tie_word_embeddings": not header.has("output.weight"),
        "attention_bias": header.has("blk.0.attn_q.bias"),
        "mlp_bias": header.has("blk.0.ffn_down.bias"),
        "sliding_window": header.get("attention.sliding_window") or None,  # 0 means no window, too
        "num_experts": header.get("expert_count"),
    } | architecture.settings(header)


def _head_dim(header: Header) -> int:
    return header.get("attention.key_length") or header.need("embedding_length") // header.need("attention.head_count")


def _check_ignored(header: Header, architecture: Architecture) -> None:
    """Raises UnsupportedError for a setting that changes the arithmetic and that the architecture does not read."""
    heads = header.get("attention.head_count")
    width = header.get("attention.key_length") or header.get("embedding_length", 0) // (heads or 1)
    for key in ("attention.value_length", *([] if architecture.partial_rotary else ["rope.dimension_count"])):
        if (found := header.get(key, width)) != width:
            name = f"{header.architecture}.{key}"
            raise UnsupportedError(f"{name} is {found}, heads have {width}: other widths are not implemented")
    for key, (neutral, readers) in CHANGES_ARITHMETIC.items():
        if header.architecture not in readers and header.get(key) not in neutral:
            raise UnsupportedError(f"{header.architecture}.{key} = {header.get(key)} is not implemented")


def _rope_scaling(header: Header) -> dict[str, Any] | None:
    factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear") or 1.0
    kind = header.get("rope.scaling.type", "linear" if factor != 1.0 else "none")
    is_long, share = header.has("rope_factors_long.weight"), header.get("rope.scaling.attn_factor", 1.0)
    if kind != "yarn" and not is_long and share != 1.0:
        name = f"{header.architecture}.rope.scaling.attn_factor"
        raise UnsupportedError(f"{name} = {share} is not implemented for rope.scaling.type {kind}")
    for tensor in ("rope_freqs.weight", "rope_factors_long.weight"):
        if header.has(tensor) and kind in ("linear", "yarn") and factor != 1.0:
            name = f"{header.architecture}.rope.scaling.type"
            raise UnsupportedError(f"{name} {kind} with the factor {factor} is not implemented beside {tensor}")
    if header.has("rope_freqs.weight"):
        return _llama3_scaling(header, header.values("rope_freqs.weight"))
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if is_long:
        scaling = {
            f"{name}_factor": header.values(f"rope_factors_{name}.weight").tolist() for name in ("long", "short")
        }
        scaling |= {"rope_type": "longrope", "attention_factor": header.get("rope.scaling.attn_factor")}
    elif kind == "longrope":
        raise UnsupportedError("rope.scaling.type is longrope, and there are no tensors rope_factors_long and _short")
    elif kind == "none":
        return None
    elif kind == "yarn":
        scaling |= {name: header.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        if share != 1.0:  # multiplies YaRN's own factor
            scaling["attention_factor"] = share * (0.1 * math.log(factor) + 1)
    scaling["original_max_position_embeddings"] = header.get("rope.scaling.original_context_length")
    return {key: value for key, value in scaling.items() if value is not None}


def _llama3_scaling(header: Header, factors: np.ndarray) -> dict[str, Any]:
    """Returns the llama3 scaling with these divisors per pair; refuses other divisors, or another number of them."""
    if 2 * len(factors) != (width := _head_dim(header)):
        raise InvalidFormatError(f"rope_freqs.weight has {len(factors)} factors, heads have {width // 2} pairs")
    plain = rope.default_frequencies(width, float(header.get("rope.freq_base", 10000.0)))
    scaling = {"rope_type": "llama3", "factor": float(factors.max())} | LLAMA3_SCALING
    expected = plain / rope.llama3_frequencies(plain, scaling["factor"], 1.0, 4.0, 8192)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise UnsupportedError("rope_freqs.weight is not the llama3 scaling of Llama 3.1 and later")
    return scaling


def _llama(header: Header) -> dict[str, Any]:
    """Reads Llama, Mistral (which has a window) and Mixtral (which has experts); they share an architecture."""
    if header.has("blk.0.ffn_gate.0.weight"):
        raise UnsupportedError("experts are stored one by one, as in files of early 2024: convert the model again")
    if header.get("expert_count"):
        used = header.need("expert_used_count")
        return {"model_type": "mixtral", "num_local_experts": header.get("expert_count"), "num_experts_per_tok": used}
    return {"model_type": "mistral"} if header.get("attention.sliding_window") else {}


def _qwen(header: Header) -> dict[str, Any]:
    return {"use_sliding_window": bool(header.get("attention.sliding_window")), "max_window_layers": 0}


def _qwen3_moe(header: Header) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "norm_topk_prob": header.get("expert_weights_norm", True),
        "num_experts_per_tok": header.need("expert_used_count"),
        "moe_intermediate_size": header.shape("blk.0.ffn_gate_exps.weight")[1],
    }


def _qwen2_moe(header: Header) -> dict[str, Any]:
    return _qwen3_moe(header) | {
        "model_type": "qwen2_moe",
        "norm_topk_prob": header.get("expert_weights_norm", False),
        "shared_expert_intermediate_size": header.shape("blk.0.ffn_gate_shexp.weight")[0],
        "qkv_bias": header.has("blk.0.attn_q.bias"),
    }


def _gemma2(header: Header) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(header, largest=46),
        "sliding_window": header.get("attention.sliding_window", 4096) or None,
    }


def _gemma3(header: Header) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(header, largest=62),
        "rope_local_base_freq": header.get("rope.freq_base_swa", 10000.0),
    } | _slides(header)


def _slides(header: Header) -> dict[str, Any]:
    """Reads which layers have a window: by a flag for each layer, all but every n-th, or none."""
    window, pattern = header.get("attention.sliding_window"), header.raw("attention.sliding_window_pattern", 6)
    if not window:
        pattern = [False] * header.need("block_count")
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        return {"sliding_window": window or 4096, "layer_types": kinds}
    return {"sliding_window": window, "sliding_window_pattern": pattern}


def _query_scalar(header: Header, largest: int) -> float:
    """Returns the square of the divisor of scores: hidden_size / heads in the family's largest model, else head_dim."""
    is_largest = header.need("block_count") == largest
    return header.need("embedding_length") / header.need("attention.head_count") if is_largest else _head_dim(header)


def _granite(header: Header) -> dict[str, Any]:
    if not header.get("rope.scaling.finetuned", True):
        raise UnsupportedError("granite.rope.scaling.finetuned is false: a model without rotary embeddings")
    return {
        "attention_multiplier": header.get("attention.scale") or _head_dim(header) ** -0.5,
        "embedding_multiplier": header.get("embedding_scale") or 1.0,
        "residual_multiplier": header.get("residual_scale") or 1.0,
        "logits_scaling": header.get("logit_scale") or 1.0,
    }


def _olmo2(header: Header) -> dict[str, Any]:
    if header.get("attention.sliding_window"):
        raise UnsupportedError("olmo2.attention.sliding_window, which OLMo 3 has, is not implemented")
    return {}


def _phi3(header: Header) -> dict[str, Any]:
    width = _head_dim(header)
    rotated = header.get("rope.dimension_count", width)
    share = rotated / width
    return {
        "partial_rotary_factor": share if int(width * share) == rotated else math.nextafter(share, 1.0),
        "original_max_position_embeddings": header.get("rope.scaling.original_context_length"),
    }


def _gpt_oss(header: Header) -> dict[str, Any]:
    scaling = _rope_scaling(header) or {"rope_type": "default"}
    return {
        "model_type": "gpt_oss",
        "num_experts": None,
        "num_local_experts": header.need("expert_count"),
        "num_experts_per_tok": header.need("expert_used_count"),
        "intermediate_size": header.shape("blk.0.ffn_gate_exps.weight")[1],
        "rope_scaling": scaling | ({"truncate": False} if scaling["rope_type"] == "yarn" else {}),
    }


_GPT_OSS_PARTS = {
    "self_attn.sinks": ("attn_sinks.weight",),
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma2": Architecture(_gemma2, norm_offset=1.0),
    "gemma3": Architecture(_gemma3, norm_offset=1.0),
    "gpt-oss": Architecture(_gpt_oss, parts=_GPT_OSS_PARTS),
    "granite": Architecture(_granite, interleaves=True),
    "llama": Architecture(_llama, interleaves=True),
    "olmo2": Architecture(_olmo2),
    "phi3": Architecture(_phi3, partial_rotary=True),
    "qwen2": Architecture(_qwen),
    "qwen2moe": Architecture(_qwen2_moe),
    "qwen3": Architecture(_qwen),
    "qwen3moe": Architecture(_qwen3_moe),
    "smollm3": Architecture(interleaves=True),
}
