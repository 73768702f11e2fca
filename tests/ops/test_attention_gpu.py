"""The real kernels on a GPU: `pytest -m gpu tests/ops`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.kvcache import state
from ferrum_jax.ops.attention import attend, rotate_and_write
from ferrum_jax.ops.rope import default_frequencies, rotations
from tests.ops.paged import LAYER, Case, expected, fill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}  # rounding of weights and outputs; exp2 of the GPU

DECODE = Case(lengths=(1999, 0, 130, 64, 7), counts=(1, 0, 1, 1, 1), tokens=1, block=128, columns=17)
CHUNK = Case(lengths=(700, 0, 0, 33), counts=(130, 0, 256, 1), tokens=256, block=128, columns=17)
CASES = [
    pytest.param(replace(case, kv_heads=kv_heads, group=group, head_dim=width, window=window), id=f"{name}-{width}")
    for name, case in (("decode", DECODE), ("chunk", CHUNK))
    for kv_heads, group, width, window in ((8, 4, 128, None), (2, 7, 64, None), (4, 2, 128, 100), (3, 1, 96, None))
]
attend_jitted = jax.jit(attend, static_argnames=("scale", "window", "softcap", "backend"))


def check(case: Case, sinks: np.ndarray | None = None) -> None:
    filled, plain = fill(case, "positions"), fill(case, "products")
    given = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
    given |= {"sinks": None if sinks is None else jnp.asarray(sinks)}
    found = attend_jitted(filled.q, filled.kv, LAYER, filled.rows, **given, backend="triton")
    xla = attend_jitted(plain.q, plain.kv, LAYER, plain.rows, **given)
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(xla, np.float32), rtol=0, atol=tolerance)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected(case, filled, sinks), rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_kernel_equals_xla_and_float64_on_a_gpu(case: Case, dtype: str):
    check(replace(case, dtype=dtype))


@pytest.mark.parametrize("case", [DECODE, CHUNK], ids=["decode", "chunk"])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_soft_caps_and_sinks_on_a_gpu(case: Case, softcap: float | None):
    sinks = np.linspace(-3, 3, 8, dtype=np.float32)
    check(replace(case, kv_heads=2, group=4, head_dim=64, dtype="bfloat16", softcap=softcap, window=200), sinks)


@pytest.mark.parametrize("case", [DECODE, CHUNK], ids=["decode", "chunk"])
@pytest.mark.parametrize(("width", "dtype"), [(576, "bfloat16"), (288, "float16"), (576, "float32")])
def test_latents_on_a_gpu(case: Case, width: int, dtype: str):
    case = replace(case, kv_heads=1, group=40, head_dim=width, dtype=dtype)
    filled = fill(case, "latent_rows")
    found = attend_jitted(filled.q, filled.kv, LAYER, filled.rows, scale=width**-0.5, window=None, backend="triton")
    wanted = expected(case, replace(filled, values=filled.keys))
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("turned", "width"), [(128, 128), (32, 80)])
def test_one_kernel_rotates_and_writes_on_a_gpu(dtype: str, turned: int, width: int):
    tokens, filled = 300, fill(replace(DECODE, kv_heads=4, head_dim=width, dtype=dtype), "positions")
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((tokens, heads, width)), dtype) for heads in (12, 4, 4))
    rope = rotations(jnp.arange(tokens) * 7, default_frequencies(turned, 1e4), 1.0)
    num_blocks, size = state.num_blocks(filled.kv), state.block_size(filled.kv)
    places = rng.permutation(num_blocks * size + size)[:tokens]  # some are one past the last block: padding
    where = jnp.asarray(places // size, jnp.int32), jnp.asarray(places % size, jnp.int32)
    call = jax.jit(rotate_and_write, static_argnames="backend")
    found = call(q, k, v, rope, filled.kv, LAYER, *where, backend="triton")
    wanted = call(q, k, v, rope, filled.kv, LAYER, *where)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        tolerance = {"float32": 1e-6, "bfloat16": 2**-6}[dtype]  # one rounding of numbers up to four
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0, atol=tolerance)


def test_no_copy_of_the_pool_is_made_on_a_gpu():
    filled = fill(replace(DECODE, dtype="bfloat16", kv_heads=8, head_dim=128), "positions")
    lowered = attend_jitted.lower(
        filled.q, filled.kv, jnp.int32(LAYER), filled.rows, scale=0.1, window=None, backend="triton"
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < filled.kv.k.nbytes / 2
