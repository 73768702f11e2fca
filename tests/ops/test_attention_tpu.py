"""What the ragged kernel for TPUs is given, with JAX's plain statement of it in the kernel's place.

The kernel itself can neither run nor be interpreted on a CPU; that it compiles is tests/models/test_lowering.py's.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.ops.attention import attend
from ferrum_jax.ops.attention_tpu import attend_tpu
from tests.ops.paged import LAYER, Case, expected, fill
from tests.tiers import by_default

TOLERANCE = 2e-6  # float32 sums in another order
DECODE = Case(lengths=(37, 0, 5, 79), counts=(1, 0, 1, 1), tokens=1, head_dim=128)
CHUNK = Case(lengths=(0, 30, 0, 9), counts=(0, 7, 11, 1), tokens=11, head_dim=128)


def stated(q: jax.Array, pages: jax.Array, *rest: Any, sm_scale: float, sliding_window: int | None, **_: Any) -> Any:
    """The kernel's definition; it leaves out the tokens behind the last sequence, and works on numbers only."""
    found = ref_ragged_paged_attention(
        q, jnp.nan_to_num(pages), *rest, sm_scale=sm_scale, sliding_window=sliding_window
    )
    return jnp.pad(found, ((0, len(q) - len(found)), (0, 0), (0, 0)))


@pytest.mark.parametrize("case", by_default([DECODE, CHUNK], CHUNK), ids=["decode", "chunk"])
@pytest.mark.parametrize("window", by_default([None, 8], 8))
def test_rows_packed_one_after_another_equal_float64(case: Case, window: int | None):
    case = replace(case, window=window)
    filled = fill(case, "interleaved")
    found = attend_tpu(filled.q, filled.kv, LAYER, filled.rows, scale=case.head_dim**-0.5, window=window, kernel=stated)
    np.testing.assert_allclose(found, expected(case, filled), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", by_default([DECODE, CHUNK], CHUNK), ids=["decode", "chunk"])
def test_xla_reads_the_interleaved_layout_as_any_other(case: Case):
    filled = fill(case, "interleaved")
    found = attend(filled.q, filled.kv, LAYER, filled.rows, scale=case.head_dim**-0.5, window=None)
    np.testing.assert_allclose(found, expected(case, filled), rtol=0, atol=TOLERANCE)


def test_a_step_of_padding_alone_asks_for_one_sequence_of_one_position():
    case = replace(DECODE, counts=(0, 0, 0, 0))
    filled, asked = fill(case, "interleaved"), []

    def record(q: jax.Array, _: jax.Array, *rest: jax.Array, **__: Any) -> jax.Array:
        asked.extend(rest)
        return jnp.full_like(q, jnp.nan)

    found = attend_tpu(filled.q, filled.kv, LAYER, filled.rows, scale=1.0, window=None, kernel=record)
    np.testing.assert_array_equal(found, np.zeros_like(found))
    ends, _, edges, count = asked
    assert (ends.tolist(), edges.tolist(), count.tolist()) == ([1] * 4, [0] * 5, [1])


def test_a_kv_of_another_layout_is_refused():
    filled = fill(DECODE, "positions")
    with pytest.raises(UnsupportedError, match="positions"):
        attend(filled.q, filled.kv, LAYER, filled.rows, scale=1.0, window=None, backend="tpu")
