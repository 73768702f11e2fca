"""Causal attention of new tokens over a paged KV: one signature, several backends.

| backend | module | runs on | dtypes |
|---|---|---|---|
| `xla` | attention_xla | everything; gradients | all |
| `cpu` | attention_cpu | CPUs with kernels (ops/native), which products then use, too | float32 |
| `triton` | attention_triton | NVIDIA GPUs; interpreted on CPU | all |
| `cudnn` | attention_cudnn | NVIDIA GPUs: prompt chunks; rows of one token as `triton` | bfloat16, float16 |
| `tpu` | attention_tpu | TPUs | bfloat16 |

models/backends.py chooses the one an engine runs.
"""

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
    """Attends every token to the positions up to its own; the KV already holds the keys and values of all new tokens.

    Several rows may belong to one sequence: consecutive query blocks of a long prompt, with the same block table and
    lengths that grow by T.

    With a `window`, a token at position p sees positions p-window+1 to p. With a `softcap`, scaled scores s become
    `softcap * tanh(s / softcap)`, as in Gemma 2 (Gemma Team 2024, section 2). Sinks are one extra score per
    query head whose value is zero, as in GPT-OSS (Xiao et al. 2023, "Efficient Streaming Language Models with Attention
    Sinks", section 3.3). Outputs of padding tokens and rows are zero. KV that no sequence has written may hold
    anything, NaN included.

    Raises:
        UnsupportedError: there is no such backend, it cannot read the KV's layout, or has no soft cap or sinks.
    """
    if backend == "xla":
        return attend_xla(q, kv, layer, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
    if backend == "cpu":
        return attend_cpu(q, kv, layer, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
    if sinks is not None:
        raise UnsupportedError(f"attention {backend!r} has no sinks, 'xla' has")
    if softcap is not None:
        raise UnsupportedError(f"attention {backend!r} has no soft cap of scores, 'xla' has")
    if not isinstance(window, int | None):
        raise UnsupportedError(f"attention {backend!r} needs a window that is known when the step is traced")
    if backend == "triton":  # what only some devices need is imported where it is needed
        from ferrum_jax.ops.attention_triton import attend_triton

        return attend_triton(q, kv, layer, rows, scale=scale, window=window)
    if backend == "cudnn":
        from ferrum_jax.ops.attention_cudnn import attend_cudnn

        return attend_cudnn(q, kv, layer, rows, scale=scale, window=window)
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
    """Writes one layer's keys and values of each token, as `state.write` says."""
    return (write_cpu if backend == "cpu" else state.write)(kv, layer, block_ids, offsets, k, v)


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
    """Softmax weights of every token over the S = M * C positions of its block table, float32.

    Arguments are those of `attend`, which never has all weights at once. Positions that a token does not see have
    weight 0; padding tokens have 0 everywhere.
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
