"""Causal attention of new tokens over a paged KV: one signature, several backends.

| backend | module | runs on | dtypes |
|---|---|---|---|
| `xla` | attention_xla | everything; gradients | all |
| `cpu` | attention_cpu | CPUs with kernels (ops/native); products then use kernels, too | float32 |
| `triton` | attention_triton | NVIDIA GPUs; interpreted on CPU | all |
| `tpu` | attention_tpu | TPUs | bfloat16 |

models/backends.py chooses the backend that an engine runs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ferrum_jax.config import ATTENTIONS
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops.attention_cpu import attend_cpu, write_cpu
from ferrum_jax.ops.attention_xla import attend_xla
from ferrum_jax.ops.batch import Rows, is_real, positions
from ferrum_jax.ops.linear import precision
from ferrum_jax.ops.rope import rotate

NEW_BLOCK = 128  # queries in a block of a row without a cache
UNSEEN = -1e30  # a masked score: its weight after the softmax is 0
MOST_BLOCKS = 16  # blocks in a row without a cache: longer rows have larger blocks, so that the program stays small

Change = Callable[[jax.Array, jax.Array], jax.Array]  # changes an array [B, N, T, S], given positions [B, T]


def attend(
    q: Float[Array, "B T N H"],
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    rows: Rows[jax.Array],
    *,
    scale: float,
    window: int | Int[Array, ""] | None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    backend: str = "xla",
) -> Float[Array, "B T N H"]:
    """Attends from every token to the positions up to its own; the KV must hold the keys and values of all new tokens.

    Several rows may belong to one sequence: consecutive query blocks of a long prompt, with the same block table and
    lengths that grow by T.

    With a `window`, a token at position p sees positions p-window+1 to p. With a `softcap`, scaled scores s become
    `softcap * tanh(s / softcap)`, as in Gemma 2 (Gemma Team 2024, section 2). Sinks are one extra score per
    query head whose value is zero, as in GPT-OSS (Xiao et al. 2023, "Efficient Streaming Language Models with Attention
    Sinks", section 3.3). Outputs of padding tokens and rows are zero. Positions that no sequence has written may hold
    anything, NaN included.

    Raises:
        UnsupportedError: the backend does not exist, cannot read the KV's layout, or has no soft cap or sinks.
    """
    if backend == "xla":
        return attend_xla(q, kv, layer, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
    if backend == "cpu":
        return attend_cpu(q, kv, layer, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
    if not isinstance(window, int | None):
        raise UnsupportedError(f"attention {backend!r} needs a window that is known when the step is traced")
    if backend == "triton":  # imported here: other devices do not need it
        from ferrum_jax.ops.attention_triton import attend_triton

        return attend_triton(q, kv, layer, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
    if sinks is not None:
        raise UnsupportedError(f"attention {backend!r} has no sinks, 'xla' has")
    if softcap is not None:
        raise UnsupportedError(f"attention {backend!r} has no soft cap of scores, 'xla' has")
    if backend == "tpu":
        from ferrum_jax.ops.attention_tpu import attend_tpu

        return attend_tpu(q, kv, layer, rows, scale=scale, window=window)
    raise UnsupportedError(f"attention {backend!r}: supported are {', '.join(ATTENTIONS)}")


def write(
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    block_ids: Int[Array, " X"],
    offsets: Int[Array, " X"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"] | None = None,
    *,
    backend: str = "xla",
) -> KvState[jax.Array]:
    """Writes one layer's keys and values of each token, as `state.write` does."""
    return (write_cpu if backend == "cpu" else state.write)(kv, layer, block_ids, offsets, k, v)


def rotate_and_write(
    q: Float[Array, "X N H"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"],
    rope: tuple[Float[Array, "X 1 R2"], Float[Array, "X 1 R2"]],
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    block_ids: Int[Array, " X"],
    offsets: Int[Array, " X"],
    *,
    backend: str = "xla",
) -> tuple[Float[Array, "X N H"], KvState[jax.Array]]:
    """Rotates queries and keys by `rope`, the result of `rotations`, and writes keys and values as `write`."""
    if backend == "triton":
        from ferrum_jax.ops.rotate_triton import rotate_and_write_triton

        return rotate_and_write_triton(q, k, v, rope, kv, layer, block_ids, offsets)
    q, k = rotate(q, *rope), rotate(k, *rope)
    return q, write(kv, layer, block_ids, offsets, k, v, backend=backend)


def cached_keys(
    kv: KvState[jax.Array], layer: int | Int[Array, ""], rows: Rows[jax.Array]
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Copies a layer's keys and values at the S = M * C positions of each row's block table; 0 past its tokens."""
    k, v = state.gather_sequence(kv, layer, rows.tables.reshape(-1))  # [B * S, K, H] each
    k, v = (side.reshape(len(rows.tables), -1, *side.shape[1:]) for side in (k, v))
    written = jnp.arange(k.shape[1], dtype=jnp.int32) < (rows.lengths + rows.counts)[:, None]
    k, v = (jnp.where(written[..., None, None], side, jnp.zeros((), side.dtype)) for side in (k, v))
    return k, v


def attend_dense(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K J"],
    rows: Rows[jax.Array],
    *,
    scale: float,
    window: int | Int[Array, ""] | None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    on_scores: Change | None = None,
    on_weights: Change | None = None,
) -> tuple[Float[Array, "B T N J"], Float[Array, "B N T S"], Float[Array, "B N T S"]]:
    """Attends as `attend`, with all scores at once; returns outputs, scores, and weights, the last two in float32.

    Keys and values are those of positions 0 to S - 1 of each row. Scores are those after scale and soft cap; at masked
    positions they are -inf and weights are 0. Padding tokens see no position. Weights do not include those of sinks.
    `on_scores` and `on_weights` change scores and weights, given the positions of the tokens, `[B, T]`; masked
    positions stay masked. `on_scores` gets `UNSEEN` there, as the gradient of -inf times a factor is NaN.
    """
    batch, tokens, heads, _ = q.shape
    high, groups = precision(q.dtype), heads // k.shape[2]
    grouped = q.reshape(batch, tokens, k.shape[2], groups, q.shape[3])  # [B, T, K, G, H]
    scores = jnp.einsum(
        "BTKGH,BSKH->BKGTS", grouped, k.astype(q.dtype), precision=high, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(batch, heads, tokens, -1) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    at = positions(rows)
    key_at = jnp.arange(k.shape[1], dtype=jnp.int32)
    seen = (key_at <= at[..., None]) & is_real(rows)[..., None]  # [B, T, S]
    if window is not None:
        seen &= key_at > at[..., None] - window
    seen = seen[:, None]
    if on_scores is not None:
        scores = on_scores(jnp.where(seen, scores, UNSEEN), at)
    scores, finite = (jnp.where(seen, scores, unseen) for unseen in (-jnp.inf, UNSEEN))
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None, None], (*scores.shape[:3], 1))
        finite = jnp.concatenate([finite, column], axis=-1)
    weights = jnp.where(seen, jax.nn.softmax(finite, axis=-1)[..., : k.shape[1]], 0.0)
    if on_weights is not None:
        weights = jnp.where(seen, on_weights(weights, at), 0.0)
    grouped = weights.reshape(batch, k.shape[2], groups, tokens, -1).astype(q.dtype)
    out = jnp.einsum(
        "BKGTS,BSKJ->BTKGJ", grouped, v.astype(q.dtype), precision=high, preferred_element_type=jnp.float32
    )
    return out.reshape(batch, tokens, heads, -1).astype(q.dtype), scores, weights


def attend_new(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K J"],
    *,
    scale: float,
    window: int | Int[Array, ""] | None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N J"]:
    """Attends without a cache, in rows that begin here: token t attends to tokens 0 to t of its row.

    Queries are computed in blocks, each over the keys that its last query sees. Gradients recompute a block's scores
    (Dao 2023, "FlashAttention-2", section 3.1), so that the scores of only one block are in memory.
    """
    batch, tokens = q.shape[:2]
    size = max(NEW_BLOCK, -(-tokens // MOST_BLOCKS))
    outs = []
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        first = max(0, start - window + 1) if isinstance(window, int) else 0
        rows = Rows(
            tokens=jnp.zeros((batch, stop - start), jnp.int32),
            lengths=jnp.full(batch, start - first, jnp.int32),
            counts=jnp.full(batch, stop - start, jnp.int32),
            tables=jnp.zeros((batch, 0), jnp.int32),
        )

        @jax.checkpoint
        def attend_block(q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, rows: Any = rows) -> jax.Array:
            return attend_dense(q, k, v, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)[0]

        outs.append(attend_block(q[:, start:stop], k[:, first:stop], v[:, first:stop], sinks))
    return jnp.concatenate(outs, axis=1)
