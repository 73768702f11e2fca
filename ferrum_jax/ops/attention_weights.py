"""The softmax weights of attention as one array, for those who look at them; `attend` never has them all."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops.batch import Rows, is_real, positions
from ferrum_jax.ops.linear import precision


def attention_weights(
    q: Float[Array, "B T N H"],
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    rows: Rows[jax.Array],
    *,
    scale: float,
    window: int | Int[Array, ""] | None,
    softcap: float | None = None,
) -> Float[Array, "B N T S"]:
    """Gives every token's weights over the S = M * C positions of its block table, in float32.

    Arguments are those of `attend`. Positions that a token does not see have 0, and so has a padding token everywhere.
    """
    batch, tokens, heads, _ = q.shape
    columns, size = rows.tables.shape[1], state.block_size(kv)
    k, _ = state.read(kv, layer, rows.tables.reshape(-1))  # [B * M, K, H, C]
    k = k.reshape(batch, columns, *k.shape[1:]).transpose(0, 2, 3, 1, 4).reshape(batch, *k.shape[1:3], columns * size)
    grouped = q.reshape(batch, tokens, k.shape[1], -1, q.shape[3])  # [B, T, K, G, H]
    scores = jnp.einsum(
        "BTKGH,BKHS->BKGTS",
        grouped,
        k.astype(q.dtype),
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = scores.reshape(batch, heads, tokens, -1) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    at, key_at = positions(rows)[..., None], jnp.arange(columns * size, dtype=jnp.int32)
    seen = (key_at <= at) & is_real(rows)[..., None]  # [B, T, S]
    if window is not None:
        seen &= key_at > at - window
    seen = seen[:, None]
    return jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), 0.0)
