"""The GPU kernel, interpreted on the CPU, gives what attention is: by tokens, prefixes, windows, widths and blocks."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.ops import attention_triton
from ferrum_jax.ops.attention import attend, rotate_and_write
from ferrum_jax.ops.rope import default_frequencies, rotations
from tests.ops.paged import LAYER, Case, expected, fill
from tests.tiers import by_default

TOLERANCE = 2e-6  # float32 sums in another order; outputs are of the order of one
HALF_TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3}  # two roundings: of the softmax weights and of the output

DECODE = Case(lengths=(37, 0, 5, 79), counts=(1, 0, 1, 1), tokens=1)
CHUNK = Case(lengths=(0, 30, 0, 9), counts=(11, 7, 0, 1), tokens=11)


every_case = pytest.mark.parametrize("case", [DECODE, CHUNK], ids=["decode", "chunk"])
one_case = pytest.mark.parametrize("case", by_default([DECODE, CHUNK], CHUNK), ids=["decode", "chunk"])
attend_jitted = jax.jit(attend, static_argnames=("scale", "window", "softcap", "backend"))


def run(case: Case, backend: str, sinks: np.ndarray | None = None) -> np.ndarray:
    filled = fill(case, "products" if backend == "xla" else "positions")
    call = functools.partial(attend_jitted, scale=case.head_dim**-0.5, window=case.window, backend=backend)
    given = None if sinks is None else jnp.asarray(sinks)
    return np.asarray(call(filled.q, filled.kv, LAYER, filled.rows, softcap=case.softcap, sinks=given), np.float32)


def check(case: Case, sinks: np.ndarray | None = None) -> None:
    found = run(case, "triton", sinks)
    tolerance = HALF_TOLERANCE.get(case.dtype, TOLERANCE)
    np.testing.assert_allclose(found, run(case, "xla", sinks), rtol=0, atol=tolerance)
    np.testing.assert_allclose(found, expected(case, fill(case, "positions"), sinks), rtol=0, atol=tolerance)


@every_case
@pytest.mark.parametrize("dtype", by_default(["float32", "bfloat16", "float16"], "bfloat16"))
def test_the_kernel_equals_xla_and_float64(case: Case, dtype: str):
    check(replace(case, dtype=dtype))


@one_case
@pytest.mark.parametrize("window", by_default([1, 8, 33], 8))
def test_a_window_hides_what_lies_behind_it(case: Case, window: int):
    check(replace(case, window=window))


@pytest.mark.parametrize("case", [replace(DECODE, block=256, columns=9), CHUNK], ids=["shares", "chunk"])
@pytest.mark.parametrize(("softcap", "has_sinks"), by_default([(0.7, False), (None, True), (0.7, True)], (0.7, True)))
def test_soft_caps_and_sinks_are_those_of_xla_and_float64(case: Case, softcap: float | None, has_sinks: bool):
    sinks = np.array([0.5, -3.0, 40.0, 0.0, 1.0, -40.0], np.float32) if has_sinks else None
    check(replace(case, softcap=softcap, window=33), sinks)


@pytest.mark.parametrize("case", [replace(DECODE, block=256, columns=9), CHUNK], ids=["shares", "chunk"])
@pytest.mark.parametrize(
    ("width", "dtype"), by_default([(80, "float32"), (576, "bfloat16"), (576, "float32")], (576, "float32"))
)
def test_the_values_of_latents_are_their_keys(case: Case, width: int, dtype: str):
    case = replace(case, kv_heads=1, group=5, head_dim=width, dtype=dtype)
    rows, plain = fill(case, "latent_rows"), fill(case, "latent")
    call = functools.partial(attend_jitted, scale=case.head_dim**-0.5, window=None)
    found = np.asarray(call(rows.q, rows.kv, LAYER, rows.rows, backend="triton"), np.float32)
    xla = np.asarray(call(plain.q, plain.kv, LAYER, plain.rows), np.float32)
    tolerance = HALF_TOLERANCE.get(dtype, TOLERANCE)
    np.testing.assert_allclose(found, xla, rtol=0, atol=tolerance)
    np.testing.assert_allclose(found, expected(case, replace(rows, values=rows.keys)), rtol=0, atol=tolerance)


@one_case
@pytest.mark.parametrize("head_dim", by_default([64, 80, 96, 128, 256], 80))
def test_any_width_of_sixteens_is_cut_into_powers_of_two(case: Case, head_dim: int):
    check(replace(case, head_dim=head_dim, kv_heads=3, group=2))


@one_case
@pytest.mark.parametrize("block", by_default([16, 24, 64, 128], 24))
def test_tiles_of_positions_need_not_be_blocks(case: Case, block: int):
    check(replace(case, block=block, columns=-(-80 // block)))


@pytest.mark.parametrize(("kv_heads", "group"), by_default([(5, 1), (2, 4), (1, 7), (1, 20)], (1, 7)))
@one_case
def test_any_number_of_query_heads_shares_a_kv_head(case: Case, kv_heads: int, group: int):
    check(replace(case, kv_heads=kv_heads, group=group))


@pytest.mark.slow
def test_a_chunk_of_several_query_tiles_sees_its_whole_past():
    check(Case(lengths=(3, 50), counts=(70, 41), tokens=70, group=4, kv_heads=1, window=None, block=32))
    check(Case(lengths=(3, 50), counts=(70, 41), tokens=70, group=4, kv_heads=1, window=20, block=32))


@pytest.mark.parametrize("window", by_default([None, 300], 300))
def test_a_long_context_is_divided_among_programs_and_merged(window: int | None):
    case = Case(lengths=(1000, 3, 511), counts=(1, 1, 0), tokens=1, block=128, columns=9, window=window)
    filled = fill(case, "positions")
    tiles = attention_triton.choose_tiles(filled.q, case.kv_heads, case.block, case.columns)
    assert tiles.shares > 3
    check(case)


def test_layers_are_told_apart_by_a_traced_index():
    filled = fill(CHUNK, "positions")

    @jax.jit
    def at(layer: jax.Array) -> jax.Array:
        return attend(filled.q, filled.kv, layer, filled.rows, scale=0.25, window=None, backend="triton")

    np.testing.assert_array_equal(at(jnp.int32(LAYER)), run(CHUNK, "triton"))
    assert np.isnan(at(jnp.int32(LAYER + 1))).any()  # nothing is written there


@pytest.mark.parametrize("tokens", by_default([1, 17], 17))
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_rows_of_any_lengths_equal_float64(tokens: int, data: st.DataObject):
    counts = data.draw(st.tuples(*[st.integers(0, tokens)] * 3))
    lengths = data.draw(st.tuples(*[st.integers(0, 80 - tokens)] * 3))
    window = data.draw(st.sampled_from([None, 1, 5, 40] if tokens == 1 else [None, 5]))
    seed = data.draw(st.integers(0, 99))
    case = Case(lengths=lengths, counts=counts, tokens=tokens, window=window)
    filled = fill(case, "positions", seed)
    found = attend_jitted(filled.q, filled.kv, LAYER, filled.rows, scale=0.25, window=window, backend="triton")
    np.testing.assert_allclose(found, expected(case, filled), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "width", "turned", "dtype", "kv_dtype"),
    by_default(
        [
            ((6, 2), 96, 96, "bfloat16", "bfloat16"),
            ((7, 1), 64, 32, "float32", "float16"),
            ((4, 4), 80, 80, "float32", "float32"),
            ((8, 2), 128, 128, "float16", "float16"),
        ],
        ((7, 1), 64, 32, "float32", "float16"),
    ),
)
def test_one_kernel_rotates_and_writes_as_the_functions_do(
    heads: tuple[int, int], width: int, turned: int, dtype: str, kv_dtype: str
):
    tokens, (queries, kv_heads) = 6, heads
    spec = CacheSpec(
        num_layers=3, num_blocks=5, block_size=8, num_kv_heads=kv_heads, head_dim=width, dtype=kv_dtype,
        layout="positions",
    )  # fmt: skip
    kv = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype), state.shapes(spec))
    sizes = queries, kv_heads, kv_heads
    q, k, v = (jax.random.normal(jax.random.key(at), (tokens, size, width), dtype) for at, size in enumerate(sizes))
    rope = rotations(jnp.arange(tokens) + 3, default_frequencies(turned, 1e4), 1.1)
    # Two tokens are padding: their block is one past the end.
    where = jnp.array([0, 4, 5, 2, 2, 5], jnp.int32), jnp.array([1, 7, 0, 3, 4, 0], jnp.int32)
    call = jax.jit(rotate_and_write, static_argnames="backend")
    found, written = call(q, k, v, rope, kv, LAYER, *where, backend="triton")
    wanted, expected_kv = call(q, k, v, rope, kv, LAYER, *where)
    assert found.dtype == wanted.dtype
    tolerance = 1e-6 if dtype == "float32" else 4 * float(jnp.finfo(dtype).eps)  # one rounding of numbers up to four
    for one, other in zip(jax.tree.leaves((found, written)), jax.tree.leaves((wanted, expected_kv)), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0, atol=tolerance)


def test_keys_are_not_written_to_a_kv_of_another_layout():
    filled = fill(DECODE, "products")
    q, where = jnp.zeros((1, 2, 16)), jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(UnsupportedError, match="products"):
        rotate_and_write(q, q, q, (q[:, :1, :8], q[:, :1, :8]), filled.kv, 0, *where, backend="triton")


def test_a_kv_of_another_layout_is_refused():
    filled = fill(DECODE, "products")
    with pytest.raises(UnsupportedError, match="products"):
        attend(filled.q, filled.kv, LAYER, filled.rows, scale=1.0, window=None, backend="triton")


def test_what_nobody_has_written_may_change_without_a_trace():
    filled = fill(CHUNK, "positions")
    other = jax.tree.map(lambda leaf: jnp.where(jnp.isnan(leaf), 1e6, leaf), filled.kv)
    call = functools.partial(attend, scale=0.25, window=None, backend="triton")
    np.testing.assert_array_equal(
        call(filled.q, filled.kv, LAYER, filled.rows), call(filled.q, other, LAYER, filled.rows)
    )
