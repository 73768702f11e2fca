"""Checks of numbers in settings."""

import sys
from typing import Any

from ferrum_jax.contract.errors import ConfigError, shown


def refuse_no_count(name: str, value: Any, least: int) -> None:
    """Raises ConfigError unless a value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {shown(value)}, expected an integer of at least {least}")


def refuse_below(name: str, value: Any, least: int) -> None:
    """As `refuse_no_count`, with None for what was not set."""
    if value is not None:
        refuse_no_count(name, value, least)


def refuse_no_flag(name: str, value: Any) -> None:
    """Raises ConfigError unless a value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}, expected True or False")


def refuse_not_positive(name: str, value: Any) -> None:
    """Raises ConfigError unless a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} is {shown(value)}, expected more than 0")
