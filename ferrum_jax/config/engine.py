"""How the engine should run a model, and the one reader of the environment."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from ferrum_jax.config.numbers import refuse_below, refuse_no_flag
from ferrum_jax.contract.errors import ConfigError, shown

LAYOUTS = ("checkpoint", "fused", "scanned")  # of parameters: models/layout.py
ATTENTIONS = ("xla", "triton", "cudnn", "tpu")
DTYPES = ("float32", "float16", "bfloat16")
QUANTISED = ("int8", "float8_e4m3fn", "keep", "none")
_NAMES = {"dtype": DTYPES, "kv_dtype": DTYPES, "attention": ATTENTIONS, "layout": LAYOUTS, "quantize": QUANTISED}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine should run a model; None means: chosen for the model and the device.

    Ladders are ascending bucket sizes; what exceeds the largest runs in several steps.
    """

    dtype: str | None = None  # of weights and activations
    kv_dtype: str | None = None
    attention: str | None = None  # which backend computes it: xla, triton, cudnn or tpu
    quantize: str | None = None  # of weights of products; "keep": as the checkpoint has them quantised, "none": not
    max_seqs: int | None = None  # live sequences
    kv_capacity: int | None = None  # positions one sequence can reach
    block_size: int | None = None  # positions
    kv_blocks: int | None = None  # blocks in the pool
    memory_fraction: float | None = None  # of free device memory, for the default pool
    max_step_tokens: int | None = None  # tokens of prompts in one step
    prefix_cache: bool | None = None
    window_kv: bool | None = None  # layers that see a window keep no more; None: where that halves them at least
    max_loras: int | None = None
    max_lora_rank: int | None = None
    spec_tokens: int | None = None  # drafted tokens per round
    loop_tokens: int | None = None  # tokens that one device call of `decode_n` chooses for each row; 0: none
    decode_rows: tuple[int, ...] | None = None  # ladder of D
    chunk_rows: tuple[int, ...] | None = None  # ladder of P
    chunk_tokens: tuple[int, ...] | None = None  # ladder of C, tokens
    verify_tokens: tuple[int, ...] | None = None  # ladder of C where every token wants logits
    verify_rows: tuple[int, ...] | None = None  # ladder of P where every token wants logits
    layout: str | None = None  # of the parameters: `checkpoint`, `fused` or `scanned`
    artifacts: str | bool | None = None  # folder of compiled steps; True: the user's cache, False: none

    def __post_init__(self):
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        for name in ("max_seqs", "kv_capacity", "block_size", "kv_blocks", "max_step_tokens"):
            refuse_below(name, getattr(self, name), 1)
        for name in ("max_loras", "max_lora_rank", "spec_tokens", "loop_tokens"):
            refuse_below(name, getattr(self, name), 0)
        for name in ("decode_rows", "chunk_rows", "chunk_tokens", "verify_tokens", "verify_rows"):
            if (ladder := getattr(self, name)) is None:
                continue
            if not isinstance(ladder, (tuple, list)):
                raise ConfigError(f"{name} is {shown(ladder)}, expected ascending sizes of at least 1")
            for size in ladder:
                refuse_below(f"a size in {name}", size, 1)
            if not ladder or list(ladder) != sorted(set(ladder)):
                raise ConfigError(f"{name} is {ladder!r}, expected ascending sizes of at least 1")
        fraction = self.memory_fraction
        is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
        if fraction is not None and not (is_number and 0 < fraction <= 1):
            raise ConfigError(f"memory_fraction is {shown(fraction)}, expected more than 0 and at most 1")
        for name in ("prefix_cache", "window_kv"):
            if (value := getattr(self, name)) is not None:
                refuse_no_flag(name, value)
        folder = self.artifacts
        if not (isinstance(folder, bool | None) or (isinstance(folder, str) and folder and folder.isprintable())):
            raise ConfigError(f"artifacts is {shown(self.artifacts)}, expected a folder, True or False")
        for name, known in _NAMES.items():
            if (value := getattr(self, name)) is not None and not (isinstance(value, str) and value in known):
                raise ConfigError(f"{name} is {shown(value)}, expected {', '.join(known[:-1])} or {known[-1]}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Reads the `FERRUM_…` variables; an unparsable value is a Config error that names its variable."""
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

    def over(self, other: Self) -> Self:
        """Fills what is None here from `other`."""
        mine = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(other, **mine)

    def joined(self, engine: Self | None) -> Self:
        """Fills what is None here, an argument that was not given, from `engine`; what both set alike is no error."""
        if engine is None:
            return self
        if not isinstance(engine, EngineConfig):
            raise ConfigError(f"engine is {shown(engine)}, expected an EngineConfig")
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(engine, field.name)
            if mine is not None and theirs is not None and mine != theirs:
                raise ConfigError(f"{field.name} is {mine!r} as an argument and {theirs!r} in `engine`: give it once")
        return self.over(engine)

    def over_environment(self) -> Self:
        """Fills what is None here from the environment, but no `kv_blocks` where the other two fix the pool."""
        there = self.from_environment()
        is_fixed = self.max_seqs is not None and self.kv_capacity is not None
        return self.over(replace(there, kv_blocks=None) if is_fixed else there)


def _plain(value: Any) -> Any:
    """Gives Python's number for one of NumPy, in a ladder, too."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, (np.integer, np.floating)) else value


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def dtype_name(text: str) -> str:
    """Gives the full name of a floating dtype: `bf16` is `bfloat16`."""
    if not isinstance(text, str):
        raise ConfigError(f"dtype is {shown(text)}, expected a name such as 'float32'")
    short = {"fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "half": "float16"}
    return (short | {"bf16": "bfloat16"}).get(text.lower(), text.lower())


_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "FERRUM_KV_CAPACITY": ("kv_capacity", int),
    "FERRUM_KV_MAX_BLOCKS": ("kv_blocks", int),
    "FERRUM_PAGED_MAX_SEQS": ("max_seqs", int),
    "FERRUM_PREFIX_CACHE": ("prefix_cache", _flag),
    "FERRUM_WINDOW_KV": ("window_kv", _flag),
    "FERRUM_KV_DTYPE": ("kv_dtype", dtype_name),
    "FERRUM_DTYPE": ("dtype", dtype_name),
    "FERRUM_ATTENTION": ("attention", str.lower),
    "FERRUM_QUANTIZE": ("quantize", str),
    "FERRUM_SPEC_N": ("spec_tokens", int),
    "FERRUM_LAYOUT": ("layout", str),
    "FERRUM_ARTIFACTS": ("artifacts", lambda text: text if text not in ("0", "1") else text == "1"),
}
ENVIRONMENT: Mapping[str, str] = os.environ  # of which the compilers below JAX read more than this package does
