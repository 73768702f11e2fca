"""Attention of prompt chunks: by cuDNN within the chunk, by the Triton kernel to the positions before it.

cuDNN's causal mask begins at the first key, so it takes no cached prefix. A chunk's own tokens and the positions before
them are disjoint sets, whose averages merge by their log-sums (`merge` of attention_triton.py). Rows of one token go to
the kernel alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops.attention_triton import attend_before, attend_triton, merge
from ferrum_jax.ops.batch import Rows, is_real, slot_mapping
from ferrum_jax.ops.linear import precision

Local = Callable[..., tuple[jax.Array, jax.Array]]


def local_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    counts: Int[Array, " B"],
    *,
    scale: float,
    window: int | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attends causally within each row's first `counts` tokens; outputs, and the natural logs of the sums in float32.

    The outputs are cuDNN's fused attention: bfloat16 or float16, heads up to 128 wide, 256 since Hopper; those of
    padding tokens are undefined. cuDNN has the log-sums too, but JAX rounds them to q's dtype, which would cost the
    merged average two digits: they are computed beside it, from T * T scores of each head.
    """
    near = None if window is None or window >= q.shape[1] else (window - 1, 0)
    out = jax.nn.dot_product_attention(
        q, k, v, query_seq_lengths=counts, key_value_seq_lengths=counts,
        scale=scale, is_causal=True, local_window_size=near, implementation="cudnn",
    )  # fmt: skip
    return out, local_log_sums(q, k, scale=scale, window=window)


def local_log_sums(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], *, scale: float, window: int | None
) -> Float[Array, "B T N"]:
    """Logs of the sums of exponentials of causal attention within a chunk, float32."""
    batch, tokens, heads, _ = q.shape
    grouped = q.reshape(batch, tokens, k.shape[2], -1, q.shape[3])  # [B, T, K, G, H]
    scores = jnp.einsum(
        "BTKGH,BSKH->BKGTS", grouped, k, precision=precision(q.dtype), preferred_element_type=jnp.float32
    )
    query, key = jnp.arange(tokens)[:, None], jnp.arange(tokens)
    visible = key <= query if window is None else (key <= query) & (key > query - window)
    sums = jax.nn.logsumexp(jnp.where(visible, scores * scale, -jnp.inf), axis=-1)  # [B, K, G, T]
    return sums.reshape(batch, heads, tokens).transpose(0, 2, 1)


def attend_cudnn(
    q: Float[Array, "B T N H"],
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    rows: Rows[jax.Array],
    *,
    scale: float,
    window: int | None,
    local: Local = local_cudnn,
) -> Float[Array, "B T N H"]:
    """Attends as `attend` says. `local` replaces `local_cudnn` where there is no cuDNN, as in tests."""
    if q.shape[1] == 1:
        return attend_triton(q, kv, layer, rows, scale=scale, window=window)
    real = is_real(rows)[..., None]
    block_ids, offsets = slot_mapping(rows, state.block_size(kv), state.num_blocks(kv))
    own = state.read_positions(kv, layer, block_ids, offsets)
    k, v = (jnp.where(real[..., None], side, 0).astype(q.dtype) for side in own)
    near, near_lse = local(q, k, v, rows.counts, scale=scale, window=window)
    far, far_lse = attend_before(q, kv, layer, rows, rows.lengths, scale=scale, window=window)
    outs = jnp.stack([near.astype(jnp.float32), far.astype(jnp.float32)])
    out, _ = merge(outs, jnp.stack([jnp.where(real, near_lse, -jnp.inf), far_lse]))
    return out.astype(q.dtype)
