"""Settings of the engine, and their environment variables."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

import numpy as np

from ferrum_jax.config.checks import LARGEST_COUNT, check_integer, check_number
from ferrum_jax.contract.checks import check_flag
from ferrum_jax.contract.errors import ConfigError, safe_repr

LAYOUTS = ("checkpoint", "fused", "scanned")  # of parameters: models/layout.py
ATTENTIONS = ("xla", "cpu", "triton", "tpu")
DTYPES = ("float32", "float16", "bfloat16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn")
_DTYPE_OF = {
    **dict.fromkeys(("fp32", "f32"), "float32"), **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16", "fp8": "float8_e4m3fn",
}  # fmt: skip
CompilerOptions = Mapping[str, str | int | float | bool] | tuple[tuple[str, str | int | float | bool], ...] | None
MESH_AXES = ("data", "expert", "model")
MeshSizes = Mapping[str, int] | tuple[tuple[str, int], ...] | str | None
QUANTISED = ("auto", "int8", "float8_e4m3fn", "keep", "none")
_COUNTS = {  # least and most
    **dict.fromkeys(
        ("kv_capacity", "block_size", "kv_blocks", "max_step_tokens", "block_tokens", "verify_tokens"),
        (1, LARGEST_COUNT),
    ),
    "max_seqs": (1, 1 << 16),
    **dict.fromkeys(("max_loras", "max_lora_rank"), (0, 1 << 16)),
    **dict.fromkeys(("spec_tokens", "multi_step_tokens"), (0, 1 << 10)),
}
_NAMES = {"dtype": DTYPES, "kv_dtype": KV_DTYPES, "attention": ATTENTIONS, "layout": LAYOUTS, "quantize": QUANTISED}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model; None leaves the choice to the engine, by model and device.

    Buckets are ascending sizes; a batch larger than the largest runs in several steps.
    """

    dtype: str | None = None  # of weights and activations; also by a short name, such as bf16
    kv_dtype: str | None = None
    attention: str | None = None  # the backend: xla, cpu, triton or tpu
    quantize: str | None = None  # quantisation of matrices, as in `load`; if None, "auto" on CPUs with kernels
    max_seqs: int | None = None  # live sequences of each replica
    kv_capacity: int | None = None  # positions that one sequence can have; None: the model's maximum, up to 4096
    block_size: int | None = None  # positions
    kv_blocks: int | None = None  # blocks in the pool
    memory_fraction: float | None = None  # of free device memory, for the default pool
    max_step_tokens: int | None = None  # prompt tokens in one step
    prefix_cache: bool | None = None
    window_kv: bool | None = None  # sliding-window cache; None: if it at least halves the KV
    max_loras: int | None = None
    max_lora_rank: int | None = None
    spec_tokens: int | None = None  # tokens drafted at a time
    multi_step_tokens: int | None = None  # tokens per row in one device call of `decode_n`; 0: no multi-step decode
    decode_rows: tuple[int, ...] | None = None  # buckets of D, rows of one token
    query_blocks: tuple[int, ...] | None = None  # buckets of P, query blocks of prompts
    block_tokens: int | None = None  # C, tokens of a query block
    verify_blocks: tuple[int, ...] | None = None  # buckets of P for steps with logits of every token
    verify_tokens: int | None = None  # C of these steps
    layout: str | None = None  # of the parameters: `checkpoint`, `fused` or `scanned`
    artifacts: str | bool | None = None  # folder of compiled steps; True: the user's cache, False: none
    compiler_options: CompilerOptions = None  # XLA's options for every step, by name; stored as sorted pairs
    mesh: MeshSizes = None  # devices along the axes data, expert and model; also as text, `model=4,data=2`

    def __post_init__(self):
        for field in fields(self):
            value = _plain(getattr(self, field.name))
            object.__setattr__(self, field.name, None if value is None else _checked(field.name, value))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Reads the `FERRUM_…` variables; raises ConfigError, naming the variable, for a wrong value."""
        environment = os.environ if environment is None else environment
        values = {}
        for variable, (name, parse) in _VARIABLES.items():
            if (text := environment.get(variable)) is None:
                continue
            try:
                values[name] = parse(text.strip())
                cls(**{name: values[name]})
            except ValueError as problem:
                raise ConfigError(f"{variable}={text!r} cannot be used: {problem}") from None
        return cls(**values)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh that has more than one; empty without a mesh."""
        return dict(cast(tuple[tuple[str, int], ...], self.mesh or ()))

    def over(self, other: Self) -> Self:
        """Returns these settings, with None filled in from `other`."""
        mine = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(other, **mine)

    def joined(self, engine: Self | None) -> Self:
        """Returns these settings, with None filled in from `engine`; raises ConfigError if set values differ."""
        if engine is None:
            return self
        if not isinstance(engine, EngineConfig):
            raise ConfigError(f"engine is {safe_repr(engine)}, expected an EngineConfig")
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(engine, field.name)
            if mine is not None and theirs is not None and mine != theirs:
                raise ConfigError(f"{field.name} is {mine!r} as an argument and {theirs!r} in `engine`: give it once")
        return self.over(engine)

    def over_environment(self) -> Self:
        """Returns these settings, with None filled in from the environment.

        `kv_blocks` is left out if `max_seqs` and `kv_capacity` fix the pool.
        """
        there = self.from_environment()
        is_fixed = self.max_seqs is not None and self.kv_capacity is not None
        return self.over(replace(there, kv_blocks=None) if is_fixed else there)


def _plain(value: Any) -> Any:
    """Converts NumPy's numbers to Python's, also inside tuples and lists, and lists to tuples."""
    if isinstance(value, (tuple, list)):
        return tuple(one.item() if isinstance(one, (np.integer, np.floating)) else one for one in value)
    return value.item() if isinstance(value, (np.integer, np.floating)) else value


def _checked(name: str, value: Any) -> Any:
    """Returns the value of a setting, a dtype by its full name; raises ConfigError for a wrong one."""
    if name in ("dtype", "kv_dtype"):
        if not isinstance(value, str):
            raise ConfigError(f"{name} is {safe_repr(value)}, expected a name such as 'float32'")
        value = _DTYPE_OF.get(value.lower(), value.lower())
    if name in _COUNTS:
        check_integer(name, value, *_COUNTS[name])
    elif name in ("decode_rows", "query_blocks", "verify_blocks"):
        sizes = [check_integer(f"a size in {name}", size, 1) for size in value] if isinstance(value, tuple) else []
        if not sizes or sizes != sorted(set(sizes)):
            raise ConfigError(f"{name} is {safe_repr(value)}, expected ascending sizes of at least 1")
    elif name in ("prefix_cache", "window_kv"):
        return check_flag(name, value, ConfigError)
    elif name in _NAMES:
        if not isinstance(value, str) or value not in _NAMES[name]:
            known = _NAMES[name]
            raise ConfigError(f"{name} is {safe_repr(value)}, expected {', '.join(known[:-1])} or {known[-1]}")
    elif name == "memory_fraction":
        if check_number(name, value) > 1:
            raise ConfigError(f"{name} is {safe_repr(value)}, expected at most 1")
    elif name == "compiler_options":
        return _checked_options(value)
    elif name == "mesh":
        return _checked_mesh(value)
    elif not (isinstance(value, bool) or _is_path(value)):
        raise ConfigError(f"{name} is {safe_repr(value)}, expected a folder, True or False")
    return value


def _is_path(value: Any) -> bool:
    try:
        return isinstance(value, str) and value != "" and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _checked_options(value: Any) -> CompilerOptions:
    """Returns a mapping, or the pairs of one, as sorted pairs, which are hashable."""
    options: dict[str, Any] = {}
    for pair in value.items() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,):
        match pair:
            case (str(name), str() | int() | float() | np.integer() | np.floating() as one) if (
                name and name.isprintable() and name not in options
            ):
                options[name] = _plain(one)
            case _:
                raise ConfigError(f"compiler_options has {safe_repr(pair)}, expected a name and a str, bool or number")
    return tuple(sorted(options.items()))


def _checked_mesh(value: Any) -> MeshSizes:
    """Returns the sizes of a mesh's axes as pairs, in the order of `MESH_AXES`, without axes of one device."""
    pairs: Any = value
    if isinstance(value, str):
        pairs = [pair.partition("=")[::2] for pair in value.split(",")]
        pairs = [(name.strip(), int(size) if size.strip().isdecimal() else size) for name, size in pairs]
    elif isinstance(value, Mapping):
        pairs = value.items()
    sizes: dict[str, int] = {}
    for pair in pairs if isinstance(pairs, (list, tuple)) or isinstance(value, Mapping) else (pairs,):
        match pair:
            case (str(name), size) if name in MESH_AXES and name not in sizes:
                sizes[name] = check_integer(f"{name} of the mesh", _plain(size), 1, 1 << 16)
            case _:
                known = f"{', '.join(MESH_AXES[:-1])} or {MESH_AXES[-1]}"
                raise ConfigError(f"mesh is {safe_repr(value)}, expected sizes of the axes {known}, each once")
    return tuple((name, sizes[name]) for name in MESH_AXES if sizes.get(name, 1) > 1)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def _folder_or_flag(text: str) -> str | bool:
    if text.lower() in ("true", "false", "on", "off", "yes", "no"):
        raise ValueError("expected 0, 1 or a folder")
    return text == "1" if text in ("0", "1") else text


_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "FERRUM_KV_CAPACITY": ("kv_capacity", int),
    "FERRUM_KV_MAX_BLOCKS": ("kv_blocks", int),
    "FERRUM_PAGED_MAX_SEQS": ("max_seqs", int),
    "FERRUM_MEMORY_FRACTION": ("memory_fraction", float),
    "FERRUM_PREFIX_CACHE": ("prefix_cache", _flag),
    "FERRUM_WINDOW_KV": ("window_kv", _flag),
    "FERRUM_KV_DTYPE": ("kv_dtype", str),
    "FERRUM_DTYPE": ("dtype", str),
    "FERRUM_ATTENTION": ("attention", str.lower),
    "FERRUM_QUANTIZE": ("quantize", str),
    "FERRUM_SPEC_N": ("spec_tokens", int),
    "FERRUM_LAYOUT": ("layout", str),
    "FERRUM_MESH": ("mesh", str),
    "FERRUM_ARTIFACTS": ("artifacts", _folder_or_flag),
}
ENVIRONMENT: Mapping[str, str] = os.environ  # read by the compilers below JAX as well
