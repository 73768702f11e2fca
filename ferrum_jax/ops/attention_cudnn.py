"""Attention of chunks by cuDNN within the chunk, merged with the kernel's attention to what lies before it.

cuDNN's causal mask begins at the first key, so it cannot be given a prefix; what a chunk sees is its own tokens and the
positions before them, two disjoint sets, whose averages merge by their log-sums (attention_merge.py). Rows of one token
have no chunk: the kernel serves them alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops.attention_merge import merge
from ferrum_jax.ops.attention_triton import attend_before, attend_triton
from ferrum_jax.ops.batch import Rows, addresses, is_real

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
    """Attends causally within each row's first `counts` tokens: outputs, and natural log-sums in float32.

    It is cuDNN's fused attention: bfloat16 or float16, heads up to 128 wide, 256 since Hopper. What padding tokens get
    means nothing.
    """
    # `jax.nn.dot_product_attention` rounds the log-sums to q's dtype, which costs the merged average two digits; the
    # function below it does not.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    near = window if window is not None and window < q.shape[1] else None
    found: Any = dot_product_attention(
        q, k, v, None, None, counts, counts,
        scale=scale, mask_type=MaskType.PADDING_CAUSAL, sliding_window_length=near, return_residual=True,
    )  # fmt: skip
    out, lse = found
    return out, lse.astype(jnp.float32).transpose(0, 2, 1)


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
    """Attends as `attend` says. `local` stands for `local_cudnn` where there is no cuDNN."""
    if q.shape[1] == 1:
        return attend_triton(q, kv, layer, rows, scale=scale, window=window)
    real = is_real(rows)[..., None]
    block_ids, offsets = addresses(rows, state.block_size(kv), state.num_blocks(kv))
    own = state.read_positions(kv, layer, block_ids, offsets)
    k, v = (jnp.where(real[..., None], side, 0).astype(q.dtype) for side in own)
    near, near_lse = local(q, k, v, rows.counts, scale=scale, window=window)
    far, far_lse = attend_before(q, kv, layer, rows, rows.lengths, scale=scale, window=window)
    outs = jnp.stack([near.astype(jnp.float32), far.astype(jnp.float32)])
    out, _ = merge(outs, jnp.stack([jnp.where(real, near_lse, -jnp.inf), far_lse]))
    return out.astype(q.dtype)
