"""Checks of settings: each returns the value, or raises ConfigError."""

from typing import Any

import numpy as np

from ferrum_jax.contract.errors import ConfigError, safe_repr

LARGEST_COUNT = 2**31 - 1  # of int32, in which positions, ids and sizes are computed
LARGEST_FLOAT = float(np.finfo(np.float32).max)


def check_integer(name: str, value: Any, least: int = 0, most: int = LARGEST_COUNT) -> int:
    """Returns a setting that is an integer from `least` to `most`, or raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {safe_repr(value)}, expected an integer of at least {least}")
    if value > most:
        raise ConfigError(f"{name} is {safe_repr(value)}, expected at most {most}")
    return value


def check_number(name: str, value: Any, *, above: float | None = 0.0) -> float:
    """Returns a setting that is a number, more than `above` and finite in float32, or raises ConfigError."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= LARGEST_FLOAT or (above is not None and value <= above):
        least = "a number" if above is None else f"more than {above:g}"
        raise ConfigError(f"{name} is {safe_repr(value)}, expected {least}, finite in float32")
    return float(value)
