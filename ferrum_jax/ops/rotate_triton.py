"""Rotation of queries and keys, and the write of keys and values into a paged KV, as one GPU kernel.

XLA's code has three to five kernels per layer for this, each of which waits for the one before. The kernel is written
in Pallas and compiled by Triton, as attention_triton.py, and computes the same as ops/rope.py.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops.triton_launch import launch


def rotate_and_write_triton(
    q: Float[Array, "X N H"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"],
    rope: tuple[Float[Array, "X 1 R2"], Float[Array, "X 1 R2"]],
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    block_ids: Int[Array, " X"],
    offsets: Int[Array, " X"],
) -> tuple[Float[Array, "X N H"], KvState[jax.Array]]:
    """Rotates as `rotate` and writes as `state.write`, in place; keys are rotated before they are written.

    Raises:
        UnsupportedError: the KV's layout is not `positions`.
    """
    keys, values = state.rows_of_heads(kv)
    num_blocks, block_size = state.num_blocks(kv), state.block_size(kv)
    line = (jnp.asarray(layer, jnp.int32) * num_blocks + block_ids) * block_size + offsets
    line = jnp.where(block_ids < num_blocks, line, -1)
    qkv = jnp.concatenate([q, k, v], axis=1)  # no copy after a fused projection, which has this order
    call = functools.partial(_call, kv_heads=k.shape[1])
    q, keys, values = launch(call, qkv, *rope, line, keys, values)
    assert kv.v is not None
    return q, replace(kv, k=keys.reshape(kv.k.shape), v=values.reshape(kv.v.shape))


@functools.partial(jax.jit, static_argnames=("kv_heads", "interpret"))
def _call(
    qkv: Float[Array, "X heads H"],
    cos: Float[Array, "X 1 R2"],
    sin: Float[Array, "X 1 R2"],
    line: Int[Array, " X"],
    keys: Float[Array, "R K H"],
    values: Float[Array, "R K H"],
    *,
    kv_heads: int,
    interpret: bool,
) -> tuple[Float[Array, "X N H"], Float[Array, "R K H"], Float[Array, "R K H"]]:
    """Launches the kernel: a program has one token and one kv head with its query heads."""
    tokens, heads, width = qkv.shape
    queries = heads - 2 * kv_heads
    return pl.pallas_call(
        functools.partial(
            _kernel, kv_heads=kv_heads, group=queries // kv_heads, width=width, rotary_dim=2 * cos.shape[2]
        ),
        grid=(tokens, kv_heads),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, queries, width), qkv.dtype),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (keys, values)),
        ),
        input_output_aliases={4: 1, 5: 2},
        compiler_params=triton.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="rotate_and_write",
    )(qkv, cos, sin, line, keys, values)


def _kernel(
    qkv_ref: Any,  # [X, N + K + K, H]: queries, keys and values
    cos_ref: Any,  # [X, 1, R / 2]
    sin_ref: Any,  # [X, 1, R / 2]
    line_ref: Any,  # [X]: line of the pool; -1: the token is not written
    keys_in_ref: Any,  # [R, K, H]: the pool, aliased to `keys_ref`
    values_in_ref: Any,
    out_ref: Any,  # [X, N, H]
    keys_ref: Any,  # [R, K, H]
    values_ref: Any,
    *,
    kv_heads: int,
    group: int,
    width: int,
    rotary_dim: int,
):
    """Rotates the first `rotary_dim` numbers of a token's heads, and writes its key and value."""
    del keys_in_ref, values_in_ref
    token, head = pl.program_id(0), pl.program_id(1)
    line = line_ref[token]
    is_written = line >= 0
    own = jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32)
    heads, inside = head * group + own, own < group
    key_at = kv_heads * group + head

    def copy(source: Any, target: Any, start: int, size: int, mask: jax.Array) -> None:
        """Copies `size` columns from `start` on; `source` and `target` return references, given columns."""
        column = start + jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
        mask = mask & (column < start + size)
        value = triton.load(source(column), mask=mask, other=0)
        triton.store(target(column), value.astype(target(column).dtype), mask=mask)

    def rotate(source: Any, target: Any, mask: jax.Array) -> None:
        half = rotary_dim // 2
        column = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)
        there = column < half
        cos, sin = (triton.load(ref.at[token, 0, column], mask=there, other=0) for ref in (cos_ref, sin_ref))
        both = mask & there
        first, second = (
            triton.load(source(at), mask=both, other=0).astype(jnp.float32) for at in (column, half + column)
        )
        dtype = qkv_ref.dtype
        for at, rotated in ((column, first * cos - second * sin), (half + column, second * cos + first * sin)):
            into = target(at)
            triton.store(into, rotated.astype(dtype).astype(into.dtype), mask=both)
        if rotary_dim < width:
            copy(source, target, rotary_dim, width - rotary_dim, mask)

    rotate(
        lambda column: qkv_ref.at[token, heads[:, None], column[None, :]],
        lambda column: out_ref.at[token, heads[:, None], column[None, :]],
        inside[:, None],
    )
    rotate(lambda column: qkv_ref.at[token, key_at, column], lambda column: keys_ref.at[line, head, column], is_written)
    copy(
        lambda column: qkv_ref.at[token, key_at + kv_heads, column],
        lambda column: values_ref.at[line, head, column],
        0,
        width,
        is_written,
    )
