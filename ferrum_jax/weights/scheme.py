"""The `quantization_config` of a Hugging Face folder, which says how its quantised weights are packed.

Supported are GPTQ (Frantar et al. 2022, as AutoGPTQ and GPTQModel write it), AWQ (Lin et al. 2023, AutoAWQ's `gemm`),
the integers and fp8 of compressed-tensors (vLLM project), fp8 in blocks (DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", section 3.3.2) or with a scale for each channel or tensor (FBGEMM), and MXFP4 of experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrum_jax.config.checks import check_integer
from ferrum_jax.contract.checks import check_flag
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, safe_repr

GPTQ, AWQ, WORDS, PLAIN, MXFP4 = "gptq", "awq", "words", "plain", "mxfp4"
SUPPORTED = (
    "gptq of 4 or 8 bits, awq of 4 bits (gemm), compressed-tensors (pack-quantized, int-quantized, float-quantized), "
    "fp8, fbgemm_fp8 and mxfp4"
)
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the quantised weights of a checkpoint are packed; which weights these are follows from their tensors."""

    method: str  # the configuration's name of it
    packing: str  # GPTQ, AWQ: words along inputs or outputs; WORDS: of compressed-tensors; PLAIN: unpacked; MXFP4
    bits: int  # of a value
    is_float: bool = False  # values are floats (fp8 or MXFP4), not integers
    group_size: int | None = None  # adjacent inputs that share a scale; None: all inputs of a channel
    block_rows: int | None = None  # outputs of a block with one scale; the last block may be smaller; None: no blocks
    is_symmetric: bool = True  # values are signed, or their zero point is half of their range
    is_ordered: bool = False  # columns were quantised in order of activations, so that any columns may share a scale
    zero_shift: int = 0  # added to stored zero points


def split_packing(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Splits a `config.json` into the model's fields and the configuration of quantised weights, None if there is none.

    Earlier versions of compressed-tensors call the latter `compression_config`.
    """
    names = ("quantization_config", "compression_config")
    model = {name: value for name, value in fields.items() if name not in names}
    return model, next((fields[name] for name in names if fields.get(name)), None)


def read_scheme(config: Any) -> Scheme:
    """Reads a `quantization_config`.

    Raises:
        UnsupportedError: a method or setting is not implemented.
        ConfigError: a field is missing or has the wrong type.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"quantization_config is {safe_repr(config)}, expected an object")
    method = config.get("quant_method")
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "fbgemm_fp8": lambda _: Scheme(method="fbgemm_fp8", packing=PLAIN, bits=8, is_float=True),
        "mxfp4": lambda _: Scheme(method="mxfp4", packing=MXFP4, bits=4, is_float=True, group_size=32),
    }
    if method == "bitsandbytes":
        raise UnsupportedError(
            "quantization_config of bitsandbytes is not supported, as its formats are its library's own; supported are "
            f"{SUPPORTED}; or load the unquantised model with quantize='int8'"
        )
    if not isinstance(method, str) or method not in readers:
        raise UnsupportedError(f"quantization_config has quant_method {safe_repr(method)}, supported are {SUPPORTED}")
    try:
        return readers[method](config)
    except (UnsupportedError, ConfigError) as problem:
        raise type(problem)(f"quantization_config of {method}: {problem}") from None


def _gptq(config: Mapping[str, Any]) -> Scheme:
    stored = config.get("checkpoint_format") or config.get("format") or "gptq"
    if stored not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"checkpoint_format {safe_repr(stored)} is not implemented, only gptq and gptq_v2 are")
    _check_unset(config, "is_marlin_format", "adapter")
    if config.get("pack_dtype", "int32") not in ("int32", None):
        raise UnsupportedError(f"pack_dtype {safe_repr(config['pack_dtype'])} is not implemented, only int32 is")
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or any(not str(pattern).startswith("-:") for pattern in dynamic):
        raise UnsupportedError(
            "dynamic settings of single modules are not implemented, only leaving them out ('-:') is"
        )
    return Scheme(
        method="gptq",
        packing=GPTQ,
        bits=_bits(config, "bits", (4, 8)),
        group_size=_group_size(config),
        is_symmetric=check_flag("sym", config.get("sym", True), ConfigError),
        is_ordered=check_flag("desc_act", config.get("desc_act", False), ConfigError),
        zero_shift=1 if stored == "gptq" else 0,
    )


def _awq(config: Mapping[str, Any]) -> Scheme:
    stored = config.get("version") or config.get("format") or "gemm"
    if str(stored).lower() != "gemm":
        raise UnsupportedError(f"version {safe_repr(stored)} is not implemented, only gemm is")
    bits, groups = _bits(config, "bits", (4,)), _group_size(config)
    return Scheme(method="awq", packing=AWQ, bits=bits, group_size=groups, is_symmetric=False)


def _compressed(config: Mapping[str, Any]) -> Scheme:
    stored = config.get("format")
    if stored not in _FORMATS:
        raise UnsupportedError(f"format {safe_repr(stored)} is not implemented, only {', '.join(_FORMATS)} are")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise UnsupportedError(f"sparsity_config {safe_repr(sparsity)} is not implemented, only dense weights are")
    _check_unset(config, "transform_config")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"config_groups is {safe_repr(groups)}, expected at least one group")
    found = {_compressed_weights(stored, name, group) for name, group in groups.items()}
    if len(found) > 1:
        raise UnsupportedError("config_groups whose weights are packed in different ways are not implemented")
    return found.pop()


def _compressed_weights(stored: str, name: str, group: Any) -> Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{name} of config_groups has no settings of weights")
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    strategy = strategy or ("group" if weights.get("group_size") else "tensor")
    if kind not in ("int", "float") or (stored, kind) in (("pack-quantized", "float"), ("int-quantized", "float")):
        raise UnsupportedError(f"weights of type {safe_repr(kind)} in {stored} are not implemented")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise UnsupportedError(f"strategy {safe_repr(strategy)} is none of tensor, channel, group, block")
    packed, rows, columns = stored == "pack-quantized", None, None
    if strategy == "group":
        columns = _group_size(weights)
    elif strategy == "block":
        rows, columns = _block(weights.get("block_structure"), "block_structure")
    return Scheme(
        method="compressed-tensors",
        packing=WORDS if packed else PLAIN,
        bits=_bits(weights, "num_bits", (4, 8) if packed else (8,)),
        is_float=kind == "float",
        group_size=columns,
        block_rows=rows,
        is_symmetric=check_flag("symmetric", weights.get("symmetric", True), ConfigError),
    )


def _fp8(config: Mapping[str, Any]) -> Scheme:
    given = config.get("weight_block_size")
    rows, columns = (None, None) if given is None else _block(given, "weight_block_size")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedError(f"fmt {safe_repr(config['fmt'])} is not implemented, only e4m3 is")
    if config.get("expert_dtype", "fp8") != "fp8":
        raise UnsupportedError(f"expert_dtype {safe_repr(config['expert_dtype'])} is not implemented, only fp8 is")
    return Scheme(method="fp8", packing=PLAIN, bits=8, is_float=True, group_size=columns, block_rows=rows)


def _bits(config: Mapping[str, Any], name: str, known: Sequence[int]) -> int:
    if (value := check_integer(name, config.get(name), 1)) not in known:
        raise UnsupportedError(f"{name} is {value}, supported are {' and '.join(map(str, known))}")
    return value


def _group_size(config: Mapping[str, Any]) -> int | None:
    """Reads the number of inputs that share a scale; -1 means all, returned as None."""
    value = config.get("group_size")
    if value == -1 and not isinstance(value, bool):
        return None
    return check_integer("group_size, where not -1 for all,", value, 1)


def _block(value: Any, name: str) -> tuple[int, int]:
    sizes = value if isinstance(value, (list, tuple)) else ()
    if len(sizes) != 2:
        raise ConfigError(f"{name} is {safe_repr(value)}, expected outputs and inputs of a block")
    return check_integer(f"outputs of {name}", sizes[0], 1), check_integer(f"inputs of {name}", sizes[1], 1)


def _check_unset(config: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if config.get(name):
            raise UnsupportedError(f"{name} = {safe_repr(config[name])} is not implemented")
