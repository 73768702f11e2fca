"""What the reference of attention has and other backends have not: soft caps and sinks, against float64."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.ops import attention_xla
from ferrum_jax.ops.attention import attend
from tests.ops.paged import LAYER, Case, expected, fill

TOLERANCE = 2e-6  # float32 sums in another order; outputs are of the order of one
CASE = Case(lengths=(37, 0, 5, 0), counts=(3, 0, 1, 7), tokens=7, softcap=0.7, window=33)
SINKS = np.array([-3.0, -1.0, 0.0, 1.0, 2.5, 30.0], np.float32)  # some nothing, some almost all

attend_jitted = jax.jit(attend, static_argnames=("scale", "window", "softcap", "backend"))


@pytest.mark.parametrize("softcap", [0.7, None])
@pytest.mark.parametrize("sinks", [SINKS, None], ids=["sinks", "none"])
def test_soft_caps_and_sinks_are_those_of_the_papers(softcap: float | None, sinks: np.ndarray | None):
    case = replace(CASE, softcap=softcap)
    filled = fill(case, "products")
    call = functools.partial(attend_jitted, scale=case.head_dim**-0.5, window=case.window, softcap=softcap)
    found = call(filled.q, filled.kv, LAYER, filled.rows, sinks=None if sinks is None else jnp.asarray(sinks))
    np.testing.assert_allclose(found, expected(case, filled, sinks), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_blocks_of_queries_of_any_size_give_the_same(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_xla, "QUERY_BLOCK", size)
    filled = fill(CASE, "products")
    call = functools.partial(attend, scale=CASE.head_dim**-0.5, window=CASE.window, softcap=CASE.softcap)
    found = jax.jit(functools.partial(call, layer=LAYER))(filled.q, filled.kv, rows=filled.rows)
    np.testing.assert_allclose(found, expected(CASE, filled), rtol=0, atol=TOLERANCE)


def test_another_backend_refuses_them():
    filled = fill(CASE, "positions")
    refused = functools.partial(attend, filled.q, filled.kv, LAYER, filled.rows, scale=1.0, window=None)
    with pytest.raises(UnsupportedError, match="'triton' has no soft cap of scores, 'xla' has"):
        refused(softcap=1.0, backend="triton")
    with pytest.raises(UnsupportedError, match="'triton' has no sinks, 'xla' has"):
        refused(sinks=jnp.asarray(SINKS), backend="triton")
