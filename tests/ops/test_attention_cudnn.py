"""A chunk's attention to itself and to its prefix, merged; XLA replaces cuDNN, which needs a GPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.ops.attention import attend
from ferrum_jax.ops.attention_cudnn import attend_cudnn, local_log_sums
from tests.ops.paged import LAYER, Case, expected, fill
from tests.tiers import by_default

TOLERANCE = 2e-6  # float32 sums in another order
HALF_TOLERANCE = 2e-2  # two roundings to bfloat16: of the softmax weights and of each part's output
CHUNK = Case(lengths=(0, 30, 0, 9), counts=(11, 7, 0, 1), tokens=11)


def local_xla(
    q: jax.Array, k: jax.Array, v: jax.Array, counts: jax.Array, *, scale: float, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """As `local_cudnn`; padding tokens get what a kernel may leave there."""
    tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(side.astype(jnp.float32), group, axis=2) for side in (k, v))
    at = jnp.arange(tokens)
    seen = at[None, :] <= at[:, None]
    if window is not None:
        seen &= at[None, :] > at[:, None] - window
    scores = jnp.einsum("BTNH,BSNH->BNTS", q.astype(jnp.float32), k, precision="highest") * scale
    scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("BNTS,BSNH->BTNH", jnp.exp(scores - lse[..., None]), v, precision="highest")
    real = (at < counts[:, None])[..., None]
    return jnp.where(real[..., None], out, jnp.nan).astype(q.dtype), jnp.where(real, lse.transpose(0, 2, 1), 3.0)


@pytest.mark.parametrize("window", by_default([None, 1, 8, 20], 8))
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    by_default([("float32", TOLERANCE), ("bfloat16", HALF_TOLERANCE)], ("float32", TOLERANCE)),
)
def test_a_chunk_and_its_prefix_merge_to_the_whole(window: int | None, dtype: str, tolerance: float):
    case = replace(CHUNK, window=window, dtype=dtype)
    filled = fill(case, "positions")
    found = attend_cudnn(
        filled.q, filled.kv, LAYER, filled.rows, scale=case.head_dim**-0.5, window=window, local=local_xla
    )
    np.testing.assert_allclose(np.asarray(found, np.float32), expected(case, filled), rtol=0, atol=tolerance)


@pytest.mark.parametrize("window", by_default([None, 1, 8, 20], 8))
def test_log_sums_of_a_chunk_are_those_of_its_scores(window: int | None):
    q, k = (jax.random.normal(jax.random.key(at), (2, 11, heads, 16)) for at, heads in enumerate((6, 2)))
    counts = jnp.array([11, 4])
    _, expected = local_xla(q, k, k, counts, scale=0.25, window=window)
    found = local_log_sums(q, k, scale=0.25, window=window)
    real = (jnp.arange(11) < counts[:, None])[..., None]
    np.testing.assert_allclose(jnp.where(real, found, 3.0), expected, rtol=0, atol=TOLERANCE)


def test_rows_of_one_token_go_to_the_kernel():
    case = Case(lengths=(37, 0, 5), counts=(1, 0, 1), tokens=1)
    filled = fill(case, "positions")
    found = attend(filled.q, filled.kv, LAYER, filled.rows, scale=case.head_dim**-0.5, window=None, backend="cudnn")
    np.testing.assert_allclose(found, expected(case, filled), rtol=0, atol=TOLERANCE)
