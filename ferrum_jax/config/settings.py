"""Reading of the fields of a `config.json`; all families read names, sizes and rotary embeddings in the same way."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from ferrum_jax.config.checks import check_integer, check_number
from ferrum_jax.config.components import ROPE_FACTORS, ROPE_TYPES, RopeScaling
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, safe_repr

_log = logging.getLogger(__name__)
MOST_LAYERS = 1000  # each costs time, even if the checkpoint has no tensor of it
_NEEDED = object()


@dataclass(frozen=True)
class Settings:
    """The fields of a `config.json`; a method reads one field, and raises ConfigError if it has a wrong type."""

    fields: Mapping[str, Any]

    def defaulting(self, **defaults: Any) -> Self:
        """Returns the same settings with values for missing fields."""
        return type(self)({**defaults, **self.fields})

    def replacing(self, **values: Any) -> Self:
        """Returns the same settings with other values."""
        return type(self)({**self.fields, **values})

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of a field, unchecked."""
        if (value := self.fields.get(name, default)) is _NEEDED:
            raise ConfigError(f"no field {name!r}")
        return value

    def integer(self, name: str, default: Any = _NEEDED, least: int = 1) -> int:
        """Reads an integer of at least `least`."""
        return check_integer(name, self.get(name, default), least)

    def number(self, name: str, default: Any = _NEEDED) -> float:
        """Reads a number of any sign."""
        return check_number(name, self.get(name, default), above=None)

    def flag(self, name: str, default: bool = False) -> bool:
        """Reads a boolean; null is false."""
        if (value := self.get(name, default)) is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} is {safe_repr(value)}, expected true or false")
        return bool(value)

    def section(self, name: str) -> "Settings":
        """Reads an object; null is an empty one."""
        if not isinstance(value := self.get(name), Mapping | None):
            raise ConfigError(f"{name} is {safe_repr(value)}, expected an object")
        return Settings(value or {})

    def entries(self, name: str) -> list[Any]:
        """Reads a list; null is an empty one."""
        if not isinstance(value := self.get(name), list | tuple | None):
            raise ConfigError(f"{name} is {safe_repr(value)}, expected a list")
        return list(value or ())

    def activation(self, name: str, default: str, supported: Collection[str]) -> None:
        """Raises UnsupportedError unless the feed-forward block's activation is among those `supported`."""
        if (found := self.get(name, default)) not in supported:
            raise UnsupportedError(f"{name} {found!r} is not implemented, only {' and '.join(supported)}")

    def windows(self, slides: Callable[[int], bool], window: int | None) -> tuple[int | None, ...]:
        """Returns each layer's window or None: layers slide as `layer_types` says, or else where `slides` is true."""
        if kinds := self.entries("layer_types"):
            if unknown := [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]:
                raise UnsupportedError(f"layer_types {safe_repr(unknown)} are not implemented")
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        return tuple(window if slides(layer) else None for layer in range(self.integer("num_hidden_layers")))


def read_sizes(s: Settings, *, head_dim: int | None = None) -> dict[str, Any]:
    """Reads names, sizes and the dtype; a missing head width is `head_dim` or, if None, the model width over heads."""
    size, heads = s.integer("hidden_size"), s.integer("num_attention_heads")
    kv_heads, width = s.get("num_key_value_heads"), s.get("head_dim")
    if width is None:
        width = size // heads if head_dim is None else head_dim
    return {
        "model_type": s.get("model_type"),
        "vocab_size": s.integer("vocab_size"),
        "hidden_size": size,
        "intermediate_size": s.integer("intermediate_size"),
        "num_hidden_layers": check_integer("num_hidden_layers", s.get("num_hidden_layers", _NEEDED), 1, MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": width,
        "max_position_embeddings": s.integer("max_position_embeddings"),
        "rms_norm_eps": s.number("rms_norm_eps", 1e-6),
        "dtype": str(s.get("dtype") or s.get("torch_dtype") or "float32"),
    }


def read_rope(s: Settings) -> dict[str, Any]:
    """Reads base, scaling and the rotated share of a head, from the older or the newer spelling.

    If a configuration has both, the older (`rope_scaling`) counts, as in transformers.

    Raises:
        UnsupportedError: kinds of layers have different settings, or the type is not implemented.
    """
    rope = s.section("rope_scaling" if s.section("rope_scaling").fields else "rope_parameters")
    if any(isinstance(value, Mapping) for value in rope.fields.values()):
        raise UnsupportedError(f"RoPE settings {rope.fields!r} are not implemented, only one set for all layers is")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "longrope" and "short_factor" not in rope.fields:
        raise UnsupportedError("RoPE settings of the type longrope (Phi-3's su and yarn) without a short_factor")
    if kind not in ROPE_TYPES or (kind != "longrope" and "short_factor" in rope.fields):
        raise UnsupportedError(f"rope_type {kind!r} is not implemented, supported are {', '.join(ROPE_TYPES)}")
    name = "partial_rotary_factor"
    return {
        "rope_theta": rope.number("rope_theta", s.get("rope_theta", 10000.0)),
        "rope_scaling": None if kind == "default" else _scaling(s, rope, kind),
        "partial_rotary_factor": next((one.number(name) for one in (rope, s) if one.get(name) is not None), 1.0),
    }


def _scaling(s: Settings, rope: Settings, kind: str) -> RopeScaling:
    limit, original = s.integer("max_position_embeddings"), rope.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope"):  # the outer field wins, as in `standardize_rope_params` of transformers
        outer = s.get("original_max_position_embeddings")
        original = next((length for length in (outer, original) if length is not None), limit)
        check_number("original_max_position_embeddings of the RoPE scaling", original)
    if kind == "yarn" and (other := rope.get("attn_factor")) is not None:
        _log.warning("attn_factor %s is not read, as in transformers: YaRN's is attention_factor", safe_repr(other))
    derived = kind in ("yarn", "longrope") and rope.get("factor") is None
    read_otherwise = {"rope_type", "factor", "original_max_position_embeddings", "truncate", *ROPE_FACTORS, "is_long"}
    names = [field.name for field in fields(RopeScaling) if field.name not in read_otherwise]
    needed = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    options: dict[str, Any] = {n: rope.number(n, _NEEDED) for n in names if n in needed or rope.get(n) is not None}
    if kind == "longrope":
        options |= {name: tuple(check_number(name, one) for one in rope.get(name, _NEEDED)) for name in ROPE_FACTORS}
    return RopeScaling(
        rope_type=kind,
        factor=limit / original if derived else rope.number("factor"),
        original_max_position_embeddings=original,
        truncate=rope.flag("truncate", True),
        **options,
    )
