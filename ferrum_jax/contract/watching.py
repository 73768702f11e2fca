"""What a model shows of its inside."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Watched:
    """Logits of a chunk of n tokens, and what was asked for of chosen layers; S is the sequence's length then."""

    logits: NDArray[np.float32]  # [n, vocab]
    hidden: Mapping[int, NDArray[np.float32]]  # [n, hidden], by the number of layers before
    attention_weights: Mapping[int, NDArray[np.float32]]  # [heads, n, S], by layer
