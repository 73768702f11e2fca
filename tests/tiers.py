"""Which parameters of a test run by default, and which in the tier `slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of which only those in `quick` run by default, the others with `-m slow`."""
    values = list(values)
    assert all(one in values for one in quick), f"{quick} are not all among {values}"
    slow = pytest.mark.slow
    return [
        one if one in quick else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=slow)
        for one in values
    ]
