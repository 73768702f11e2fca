"""Attention over a paged KV in plain JAX, block by block with an online softmax: the reference, and the CPU backend.

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; the order of the loops is that of
Dao 2023, "FlashAttention-2", section 3.1. Scores and the softmax are float32. It reads every layout of the KV and is
differentiable.

Rows of a few tokens loop over the columns of their block tables together, up to the longest row. On a CPU, longer rows
are computed one at a time, each over its own columns: when a long prompt occupies several rows, its first rows skip the
blocks of the later ones.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops.batch import Rows
from ferrum_jax.ops.linear import precision
from ferrum_jax.sharding.types import vary_like

BATCHED_TOKENS = 16  # most tokens of rows that are computed together; from 32 on one by one is faster, on two cores
QUERY_BLOCK = 256  # tokens of a longer row that are computed together


def attend_xla(
    q: Float[Array, "B T N H"],
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    rows: Rows[jax.Array],
    *,
    scale: float,
    window: int | Int[Array, ""] | None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attends as `attend`."""
    batch, tokens, heads, head_dim = q.shape
    kv_heads = state.num_kv_heads(kv)
    sinks = None if sinks is None else sinks.reshape(kv_heads, -1)
    size = min(tokens, QUERY_BLOCK)
    pad = -tokens % size
    num = (tokens + pad) // size  # query blocks of a row
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    q = q.reshape(batch, num, size, kv_heads, heads // kv_heads, head_dim).transpose(0, 1, 3, 4, 2, 5)

    def walk_one(item: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        row, start, block = item
        own = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, row, 1), rows)
        return _walk(block[None], kv, layer, own, start, scale, window, softcap, sinks)[0]

    def one_by_one(q: jax.Array) -> jax.Array:
        row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), num)
        start = jnp.tile(jnp.arange(0, tokens + pad, size, dtype=jnp.int32), batch)
        return lax.map(walk_one, (row, start, q.reshape(batch * num, *q.shape[2:]))).reshape(q.shape)

    def together(q: jax.Array) -> jax.Array:
        return _walk(q[:, 0], kv, layer, rows, jnp.int32(0), scale, window, softcap, sinks)[:, None]

    if num > 1:
        out = one_by_one(q)
    elif batch == 1 or tokens <= BATCHED_TOKENS:
        out = together(q)
    else:  # other devices lose more time by small products than they save by skipping columns
        out = lax.platform_dependent(q, cpu=one_by_one, default=together)
    out = out.transpose(0, 1, 4, 2, 3, 5)  # [B, T / size, size, K, G, H]
    return out.reshape(batch, tokens + pad, heads, head_dim)[:, :tokens]


def _walk(
    q: Float[Array, "B K G T H"],
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    rows: Rows[jax.Array],
    start: Int[Array, ""],
    scale: float,
    window: int | Int[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "B K G T H"]:
    """Attends over the columns of the block tables in turn; columns that no row can see are skipped at run time.

    `start` is the index of the first query in its row.
    """
    block_size = state.block_size(kv)
    tokens = q.shape[3]
    token = start + jnp.arange(tokens, dtype=jnp.int32)
    query_at = rows.lengths[:, None] + token  # [B, T]
    last_seen = jnp.where(token < rows.counts[:, None], query_at, -1)  # [B, T]: padding sees nothing
    ends = rows.lengths + jnp.minimum(rows.counts, start + tokens)  # one past the last position this block sees
    ends = jnp.where(rows.counts > start, ends, 0)
    first_seen = query_at[:, 0] - (window - 1) if window is not None else jnp.zeros_like(ends)
    stop = jnp.max(ends)
    begin = jnp.min(jnp.where(ends > 0, first_seen, stop))
    high = precision(q.dtype)

    def visit(carry, column):
        best, total, out = carry
        k, v = state.read(kv, layer, rows.tables[:, column])
        key_at = column * block_size + jnp.arange(block_size, dtype=jnp.int32)
        seen = key_at <= last_seen[..., None]  # [B, T, C]
        if window is not None:
            seen &= key_at > query_at[..., None] - window
        seen = seen[:, None, None]
        scores = jnp.einsum(
            "BKGTH,BKHC->BKGTC", q, k.astype(q.dtype), precision=high, preferred_element_type=jnp.float32
        )
        scores = scores * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_best = jnp.maximum(best, scores.max(axis=-1))
        finite = jnp.where(jnp.isneginf(new_best), 0.0, new_best)
        weights = jnp.exp(scores - finite[..., None])  # 0 where nothing is seen
        keep = jnp.exp(best - finite)
        written = (key_at < ends[:, None])[:, None, :, None]
        v = jnp.where(written, v, 0).astype(q.dtype)
        add = jnp.einsum(
            "BKGTC,BKCH->BKGTH", weights.astype(q.dtype), v, precision=high, preferred_element_type=jnp.float32
        )
        return new_best, total * keep + weights.sum(axis=-1), out * keep[..., None] + add

    def step(carry, column):
        needed = (column * block_size < stop) & ((column + 1) * block_size > begin)
        column = vary_like(column, needed)  # batched, a branch is taken by a select, which makes it vary so
        return lax.cond(needed, visit, lambda carry, _: carry, carry, column), None

    shape = q.shape[:-1]
    start_carry = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if sinks is not None:  # as if a position with this score and the value 0 had been visited
        best = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None], shape)
        start_carry = best, jnp.ones(shape, jnp.float32), start_carry[2]
    start_carry = vary_like(start_carry, q, kv, rows)
    columns = jnp.arange(rows.tables.shape[1], dtype=jnp.int32)
    (_, total, out), _ = lax.scan(step, start_carry, columns)
    return (out / jnp.where(total == 0, 1.0, total)[..., None]).astype(q.dtype)
