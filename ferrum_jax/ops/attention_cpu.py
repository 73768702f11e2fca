"""Attention over a paged KV by the kernels of ops/native, for rows of one token and query blocks, with every option.

It reads the layouts `products` and `latent`, and writes new keys and values in place.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops import native
from ferrum_jax.ops.batch import Rows
from ferrum_jax.sharding.types import vary_like


def attend_cpu(
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
    """Attends as `attend`, with float32 queries and outputs.

    Raises:
        UnsupportedError: there are no kernels for this machine, or the KV has another layout.
    """
    check()
    _check_layout(kv)
    batch, tokens, heads, width = q.shape
    block, columns = state.block_size(kv), rows.tables.shape[1]
    span = block * max(1, native.SPAN // block)
    parts = batch * heads * -(-columns * block // span) * (width + 2) if tokens == 1 else 1
    nothing = jnp.zeros(0, jnp.float32)
    place = jnp.stack([jnp.int32(layer), jnp.int32(0 if window is None else window)])
    out, _ = jax.ffi.ffi_call(
        "ferrum_attend",
        (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((parts,), jnp.float32)),
    )(
        q,
        kv.k,
        nothing if kv.v is None else kv.v,
        nothing if sinks is None else sinks.astype(jnp.float32),
        rows.lengths,
        rows.counts,
        rows.tables,
        place,
        scale=np.float32(scale),
        softcap=np.float32(softcap or 0.0),
        span=np.int64(span),
    )
    return vary_like(out, q, kv, sinks, rows)


def write_cpu(
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    block_ids: Int[Array, " X"],
    offsets: Int[Array, " X"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"] | None = None,
) -> KvState[jax.Array]:
    """Writes as `state.write`, in place; raises as `attend_cpu`."""
    check()
    _check_layout(kv)
    nothing = jnp.zeros(0, jnp.float32)
    values = nothing if kv.v is None else kv.v
    shapes = tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (kv.k, values))
    new_k, new_v = jax.ffi.ffi_call("ferrum_write", shapes, input_output_aliases={2: 0, 3: 1})(
        k, nothing if v is None else v, kv.k, values, block_ids, offsets, jnp.int32(layer)[None]
    )
    new_k, new_v = vary_like((new_k, new_v), k, v, kv, block_ids, offsets)
    return replace(kv, k=new_k, v=None if kv.v is None else new_v)


def check() -> None:
    """Raises UnsupportedError if there are no kernels for this machine."""
    if isinstance(missing := native.library(), str):
        raise UnsupportedError(f"attention 'cpu' has no kernels: {missing}")


def _check_layout(kv: KvState[jax.Array]) -> None:
    if kv.layout not in ("products", "latent"):
        raise UnsupportedError(f"attention 'cpu' reads a KV of layout products or latent, this one's is {kv.layout}")
