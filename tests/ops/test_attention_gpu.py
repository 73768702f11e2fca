"""The real kernels on a GPU: `pytest -m gpu tests/ops`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.ops.attention import attend
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
attend_jitted = jax.jit(attend, static_argnames=("scale", "window", "backend"))


def check(case: Case, backend: str) -> None:
    filled, plain = fill(case, "positions"), fill(case, "products")
    scale = case.head_dim**-0.5
    found = attend_jitted(filled.q, filled.kv, LAYER, filled.rows, scale=scale, window=case.window, backend=backend)
    xla = attend_jitted(plain.q, plain.kv, LAYER, plain.rows, scale=scale, window=case.window)
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(xla, np.float32), rtol=0, atol=tolerance)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected(case, filled), rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_kernel_equals_xla_and_float64_on_a_gpu(case: Case, dtype: str):
    check(replace(case, dtype=dtype), "triton")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cudnn_equals_xla_and_float64_on_a_gpu(case: Case, dtype: str):
    check(replace(case, dtype=dtype), "cudnn")


def test_no_copy_of_the_pool_is_made_on_a_gpu():
    filled = fill(replace(DECODE, dtype="bfloat16", kv_heads=8, head_dim=128), "positions")
    lowered = attend_jitted.lower(
        filled.q, filled.kv, jnp.int32(LAYER), filled.rows, scale=0.1, window=None, backend="triton"
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < filled.kv.k.nbytes / 2
