"""Rotary position embeddings as `config.json` says them: a base, a scaling, and the share of a head that turns."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ferrum_jax.config.numbers import refuse_not_positive
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, shown

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")

LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A scaling of rotary frequencies; fields are Hugging Face's, those a type does not use are None."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None  # positions
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None  # of longrope: a divisor of each pair's frequency
    long_factor: tuple[float, ...] | None = None  # the same, for sequences longer than the original
    is_long: bool = False  # of longrope: whether all sequences turn by the long factors

    def __post_init__(self):
        if not isinstance(self.rope_type, str) or self.rope_type not in ROPE_TYPES:
            raise UnsupportedError(f"rope_type {shown(self.rope_type)}: supported are {', '.join(ROPE_TYPES)}")
        refuse_not_positive("factor of the RoPE scaling", self.factor)
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "low_freq_factor",
                     "high_freq_factor"):  # fmt: skip
            if getattr(self, name) is not None:
                refuse_not_positive(f"{name} of the RoPE scaling", getattr(self, name))
        if self.rope_type == "llama3" and not (self.low_freq_factor or 0) < (self.high_freq_factor or 0):
            raise ConfigError(
                f"high_freq_factor of the RoPE scaling is {self.high_freq_factor}, expected more than "
                f"low_freq_factor, {self.low_freq_factor}"
            )
        if self.rope_type == "longrope":
            for name in LISTS:
                if not isinstance(divisors := getattr(self, name), tuple):
                    raise ConfigError(f"{name} of the RoPE scaling is {shown(divisors)}, expected a tuple")
                for divisor in divisors:
                    refuse_not_positive(f"{name} of the RoPE scaling", divisor)


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads base and scaling, which are one set for all layers and turn whole heads.

    Raises:
        UnsupportedError: a share of each head turns, or as `read_partial_rope`.
    """
    theta, scaling, partial = read_partial_rope(config)
    if partial != 1.0:
        raise UnsupportedError(f"partial_rotary_factor {partial} is not implemented, only 1.0 is")
    return {"rope_theta": theta, "rope_scaling": scaling}


def read_partial_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float]:
    """Reads base, scaling and the share of a head that turns, from both the older and the newer way of writing them.

    Where both are there, the older (`rope_scaling`) counts, as in transformers.

    Raises:
        UnsupportedError: kinds of layers have settings of their own, or the type is not implemented.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedError(f"RoPE settings {given!r} are not implemented, only one set for all layers is")
    theta = float(given.get("rope_theta", config.get("rope_theta", 10000.0)))
    partial = float(given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES or (kind == "longrope") != ("short_factor" in given):
        raise UnsupportedError(f"rope_type {kind!r} is not implemented, supported are {', '.join(ROPE_TYPES)}")
    return theta, None if kind == "default" else _scaling(config, given, kind), partial


def _scaling(config: Mapping[str, Any], given: Mapping[str, Any], kind: str) -> RopeScaling:
    limit = config["max_position_embeddings"]
    original = given.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope"):  # the outer one wins, as in `standardize_rope_params` of transformers
        outer = config.get("original_max_position_embeddings")
        original = next((length for length in (outer, original) if length is not None), limit)
        if not original > 0:
            raise ConfigError(
                f"original_max_position_embeddings of the RoPE scaling is {original}, expected more than 0"
            )
    derived = kind in ("yarn", "longrope") and given.get("factor") is None
    factor = limit / original if derived else given["factor"]
    named = {"rope_type", "factor", "original_max_position_embeddings", "truncate", *LISTS, "is_long"}
    names = {field.name for field in fields(RopeScaling)} - named
    options: dict[str, Any] = {name: float(given[name]) for name in names if given.get(name) is not None}
    if kind == "llama3":
        options |= {name: float(given[name]) for name in ("low_freq_factor", "high_freq_factor")}
    options |= {"truncate": bool(given.get("truncate", True)), "original_max_position_embeddings": original}
    if kind == "longrope":
        options |= {name: tuple(float(divisor) for divisor in given[name]) for name in LISTS}
    return RopeScaling(rope_type=kind, factor=float(factor), **options)
