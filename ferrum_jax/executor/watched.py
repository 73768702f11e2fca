"""What was seen in several steps of one sequence, put together."""

from collections.abc import Sequence

import numpy as np

from ferrum_jax.contract.watching import Watched
from ferrum_jax.executor.device import Answer
from ferrum_jax.models.watching import Seen, Watch


def joined(logits: Sequence[Answer], pieces: Sequence[Seen], wanted: Watch, end: int) -> Watched:
    """Joins the chunks of one sequence, without their padding; attention is to the first `end` positions."""
    sizes = [len(np.asarray(piece)) for piece in logits]
    chunks = [*zip(pieces, sizes, strict=True)] if pieces else []  # nothing is shown where nothing is watched
    return Watched(
        logits=np.concatenate([np.asarray(piece) for piece in logits]),
        hidden={
            layer: np.concatenate([seen.hidden[layer][:n].astype(np.float32) for seen, n in chunks])
            for layer in wanted.hidden
        },
        attention_weights={
            layer: np.concatenate([seen.attention[layer][0][0, :, :n, :end] for seen, n in chunks], axis=1)
            for layer in wanted.attention
        },
    )
