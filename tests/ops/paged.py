"""Rows of sequences in a paged KV for tests of attention, and what attention over them is."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec, KvState, Layout
from ferrum_jax.ops.batch import Rows

LAYERS, LAYER = 3, 1  # of the KV, and the one that is written


_write = jax.jit(state.write, static_argnums=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one call: each sequence has `lengths` positions before its `counts` new tokens."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]  # 0: a padding row
    tokens: int  # T
    group: int = 3  # G
    kv_heads: int = 2
    head_dim: int = 16
    block: int = 16
    columns: int = 5
    window: int | None = None
    softcap: float | None = None
    dtype: str = "float32"


@dataclass(frozen=True, eq=False)
class Filled:
    """A case with random numbers: its new keys and values are in the KV, the rest of which is NaN."""

    q: jax.Array  # [B, T, N, H]
    kv: KvState[jax.Array]
    rows: Rows[jax.Array]
    keys: list[NDArray[np.float32]]  # a sequence each: [S, K, H]
    values: list[NDArray[np.float32]]


def fill(case: Case, layout: Layout, seed: int = 0) -> Filled:
    """Draws numbers for a case and writes them into a KV of the given layout, whose blocks lie in random order."""
    rng = np.random.default_rng(seed)
    batch, dtype = len(case.lengths), jnp.dtype(case.dtype)
    spec = CacheSpec(
        num_layers=LAYERS,
        num_blocks=batch * case.columns + 1,
        block_size=case.block,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        layout=layout,
    )
    tables = rng.permutation(spec.num_blocks)[: batch * case.columns].reshape(batch, case.columns).astype(np.int32)
    capacity = case.columns * case.block
    used = [length + count if count else 0 for length, count in zip(case.lengths, case.counts, strict=True)]
    shape = batch, capacity, case.kv_heads, case.head_dim
    k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in "kv")
    ids = np.repeat(tables, case.block, axis=1)
    ids[np.arange(capacity) >= np.array(used)[:, None]] = spec.num_blocks  # one past the end: not written
    offsets = np.tile(np.arange(case.block, dtype=np.int32), batch * case.columns)
    kv = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), state.shapes(spec))
    kv = _write(kv, LAYER, ids.ravel(), offsets, *(side.reshape(-1, *shape[2:]) for side in (k, v)))
    keys, values = ([side[:n] for side, n in zip(np.asarray(whole, np.float32), used, strict=True)] for whole in (k, v))
    rows = Rows(
        tokens=np.zeros((batch, case.tokens), np.int32),
        lengths=np.array(case.lengths, np.int32),
        counts=np.array(case.counts, np.int32),
        tables=tables,
    )
    heads = case.kv_heads * case.group
    q = rng.standard_normal((batch, case.tokens, heads, case.head_dim), np.float32).astype(dtype)
    q, kv, rows = jax.device_put((q, kv, rows))
    return Filled(q, kv, rows, keys, values)


def as_query_blocks(filled: Filled, size: int) -> Filled:
    """The one row of a case as rows of up to `size` tokens of the same sequence, and one row of padding."""
    _, tokens, *rest = filled.q.shape
    num = -(-tokens // size) + 1
    start = jnp.arange(num, dtype=jnp.int32) * size
    rows = Rows(
        tokens=jnp.zeros((num, size), jnp.int32),
        lengths=filled.rows.lengths + start,
        counts=jnp.clip(filled.rows.counts - start, 0, size),
        tables=jnp.repeat(filled.rows.tables, num, axis=0),
    )
    q = jnp.pad(filled.q[0], ((0, num * size - tokens), (0, 0), (0, 0))).reshape(num, size, *rest)
    return replace(filled, q=q, rows=rows)


def expected(case: Case, filled: Filled, sinks: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
    """Attention of every real token in float64, one at a time; padding tokens have zeros."""
    q = np.asarray(filled.q, np.float64)
    out = np.zeros_like(q)
    for row, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        for token in range(count):
            last = length + token + 1
            first = 0 if case.window is None else max(0, last - case.window)
            for head in range(q.shape[2]):
                k = filled.keys[row][first:last, head // case.group].astype(np.float64)
                v = filled.values[row][first:last, head // case.group].astype(np.float64)
                scores = k @ q[row, token, head] * case.head_dim**-0.5
                if case.softcap is not None:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                weights = np.exp(scores - scores.max())
                sink = 0.0 if sinks is None else np.exp(float(sinks[head]) - scores.max())
                out[row, token, head] = weights @ v / (weights.sum() + sink)
    return out
