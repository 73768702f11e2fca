"""Attention over a paged KV by JAX's ragged kernel for TPUs.

`jax.experimental.pallas.ops.tpu.ragged_paged_attention`: one call for rows of any lengths, whose tokens are
concatenated. Keys and values are interleaved by head in one array; a block's index counts the blocks of all layers, so
the pool itself is the operand. Products take bfloat16; scores and softmax are float32. Keys and values that no sequence
has written are masked before they are used.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops.batch import Rows, is_real

POSITIONS = 512  # read by a program at a time: 4 MiB of its fast memory for 8 kv heads of width 128, double-buffered
QUERIES = 32  # tokens that share these reads


def attend_tpu(
    q: Float[Array, "B T N H"],
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    rows: Rows[jax.Array],
    *,
    scale: float,
    window: int | None,
    kernel: Callable[..., jax.Array] | None = None,
) -> Float[Array, "B T N H"]:
    """Attends as `attend`. `kernel` replaces JAX's ragged one where there is no TPU, as in tests."""
    if kernel is None:
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as kernel
    batch, tokens, heads, width = q.shape
    columns = rows.tables.shape[1]
    order = jnp.argsort(rows.counts == 0, stable=True)  # the kernel refuses rows without tokens: they go last
    ends = jnp.where(rows.counts > 0, rows.lengths + rows.counts, 1)
    starts = jnp.cumsum(rows.counts, dtype=jnp.int32) - rows.counts
    to = jnp.where(is_real(rows), starts[:, None] + jnp.arange(tokens, dtype=jnp.int32), batch * tokens)
    packed = jnp.zeros((batch * tokens, heads, width), q.dtype)
    packed = packed.at[to.ravel()].set(q.reshape(-1, heads, width), mode="drop")
    first = jnp.asarray(layer, jnp.int32) * state.num_blocks(kv)
    out = kernel(
        packed,
        state.pages(kv),
        ends[order],
        rows.tables[order] + first,
        jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(rows.counts[order], dtype=jnp.int32)]),
        jnp.maximum((rows.counts > 0).sum(dtype=jnp.int32), 1).reshape(1),
        sm_scale=scale,
        sliding_window=window,
        num_kv_pages_per_block=min(columns, max(1, POSITIONS // state.block_size(kv))),
        num_queries_per_block=min(batch * tokens, QUERIES),
    )
    out = out.at[to].get(mode="fill", fill_value=0)  # [B, T, N, H]
    return out.astype(q.dtype)
