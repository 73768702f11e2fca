"""Causal attention of new tokens over a paged KV: one signature, several backends.

| backend | module | runs on | dtypes |
|---|---|---|---|
| `xla` | attention_xla | everything; gradients | all |
| `triton` | attention_triton | NVIDIA GPUs; interpreted on CPU | all |
| `cudnn` | attention_cudnn | NVIDIA GPUs, chunks of prompts; tokens of decoding as `triton` | bfloat16, float16 |
| `tpu` | attention_tpu | TPUs | bfloat16 |

Which one an engine runs is decided in models/backends.py.
"""

import jax
from jaxtyping import Array, Float, Int

from ferrum_jax.config import ATTENTIONS
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops.attention_xla import attend_xla
from ferrum_jax.ops.batch import Rows


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
    """Attends every token to the positions up to its own, the new keys and values being in the KV already.

    With a `window`, a token at position p sees positions p-window+1 to p. With a `softcap`, scaled scores s become
    `softcap * tanh(s / softcap)`, as in Gemma 2 (Gemma Team 2024, section 2). Sinks are scores of a position beside the
    sequence, whose value is zero, as in GPT-OSS (Xiao et al. 2023, "Efficient Streaming Language Models with Attention
    Sinks", section 3.3). Padding tokens and rows give zeros. KV that no sequence has written may hold anything, NaN
    included.

    Raises:
        UnsupportedError: there is no such backend, it cannot read the KV's layout, or has no soft cap or sinks.
    """
    if backend == "xla":
        return attend_xla(q, kv, layer, rows, scale=scale, window=window, softcap=softcap, sinks=sinks)
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
