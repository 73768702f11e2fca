"""What a forward hands back for a row: all its logits, or the id of the best allowed token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ferrum_jax.contract.errors import RequestValidationError, shown

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSelectionMask:
    """Which token ids may be chosen.

    `valid_token_mask` is int8 `[<= vocab]`: nonzero is allowed, ids past its end are not. `fingerprint` names
    the mask's content, so that the same mask need not be uploaded twice.
    """

    fingerprint: int | str
    valid_token_mask: Any  # array-like int8 [<= V]


@dataclass(frozen=True, kw_only=True)
class GreedyRepetitionPenalty:
    """Divides positive and multiplies negative logits of `token_ids` by `penalty` before the arg-max.

    Keskar et al. 2019, "CTRL", section 4.1.
    """

    penalty: float
    token_ids: Sequence[int]

    def __post_init__(self):
        number = isinstance(self.penalty, (int, float, np.integer, np.floating)) and not isinstance(self.penalty, bool)
        if not number or not _LEAST <= self.penalty <= _MOST:
            raise RequestValidationError(
                f"repetition penalty is {shown(self.penalty)}, it must be a positive and finite number in float32"
            )


@dataclass(frozen=True)
class FullLogits:
    """All `vocab` logits cross to the host."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GreedyArgmax:
    """The arg-max is taken on the device and one token id crosses to the host."""

    token_mask: TokenSelectionMask | None = None
    repetition_penalty: GreedyRepetitionPenalty | None = None


LogitsReturnPolicy: TypeAlias = FullLogits | GreedyArgmax
