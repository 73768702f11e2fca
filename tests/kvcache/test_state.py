"""What is written is what is read, and padding is written nowhere."""

import functools
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec, KvState, Layout

LAYERS, BLOCKS, BLOCK, HEADS, WIDTH = 2, 5, 3, 4, 6
SPEC = CacheSpec(
    num_layers=LAYERS, num_blocks=BLOCKS, block_size=BLOCK, num_kv_heads=HEADS, head_dim=WIDTH, dtype="float32"
)


layouts = st.sampled_from([one for one in get_args(Layout) if one not in state.LATENTS])  # whose values are its keys
read_layer = jax.jit(state.read)
write_layer = jax.jit(state.write)
COUNT = 5  # tokens of a write


@functools.cache
def full(spec: CacheSpec, seed: int = 0) -> KvState[jax.Array]:
    """A KV whose every number differs."""
    leaves = state.shapes(spec)
    return jax.tree.map(
        lambda leaf: (seed + jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape).astype(leaf.dtype), leaves
    )


def logical(kv: KvState[jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values as `[L, P, C, K, H]`, whatever their physical order."""
    layers, blocks = kv.k.shape[:2]
    everything = jnp.asarray(np.arange(blocks, dtype=np.int32))
    read = [read_layer(kv, np.int32(layer), everything) for layer in range(layers)]
    k = np.stack([np.asarray(one).transpose(0, 3, 1, 2) for one, _ in read])
    v = np.stack([np.asarray(one).transpose(0, 2, 1, 3) for _, one in read])
    return k, v


@settings(max_examples=30, deadline=None)
@given(data=st.data(), layout=layouts, layer=st.integers(0, LAYERS - 1))
def test_a_write_lands_where_it_says_and_nowhere_else(data: st.DataObject, layout: Layout, layer: int):
    places = st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCK - 1))
    at = data.draw(st.lists(places, min_size=COUNT, max_size=COUNT, unique=True))
    padding = data.draw(st.lists(st.booleans(), min_size=COUNT, max_size=COUNT))
    ids = np.array([BLOCKS if skipped else block for (block, _), skipped in zip(at, padding, strict=True)], np.int32)
    offsets = np.array([offset for _, offset in at], np.int32)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((COUNT, HEADS, WIDTH), np.float32) for _ in "kv")
    before = full(replace(SPEC, layout=layout))
    expected = [side.copy() for side in logical(before)]
    for token, ((block, offset), skipped) in enumerate(zip(at, padding, strict=True)):
        if not skipped:
            expected[0][layer, block, offset] = k[token]
            expected[1][layer, block, offset] = v[token]
    after = write_layer(before, np.int32(layer), ids, offsets, k, v)
    for found, wanted in zip(logical(after), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@settings(max_examples=3, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 5),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    layout=layouts,
)
def test_what_is_written_is_read_for_any_shape(sizes: tuple[int, int, int, int, int], dtype: str, layout: Layout):
    layers, blocks, block, heads, width = sizes
    spec = CacheSpec(
        num_layers=layers,
        num_blocks=blocks,
        block_size=block,
        num_kv_heads=heads,
        head_dim=width,
        dtype=dtype,
        layout=layout,
    )
    count = blocks * block
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((count, heads, width), np.float32)) for _ in "kv")
    ids, offsets = (jnp.asarray(part) for part in np.divmod(np.arange(count, dtype=np.int32), block))
    kv = write_layer(state.empty(spec), np.int32(layers - 1), ids, offsets, k, v)
    found = logical(kv)
    for side, given_ in zip(found, (k, v), strict=True):
        np.testing.assert_array_equal(side[layers - 1].reshape(count, heads, width), given_.astype(dtype))
        assert not side[: layers - 1].any()


@pytest.mark.parametrize("layout", get_args(Layout))
def test_what_exceeds_an_eight_bit_number_becomes_the_largest_one(layout: Layout):
    kv = state.empty(replace(SPEC, layout=layout, dtype="float8_e4m3fn"))
    values = np.array([448.0, 1000.0, np.inf, -1000.0, -np.inf], np.float32)
    rows = np.broadcast_to(values[:, None, None], (COUNT, HEADS, WIDTH))
    ids, offsets = np.divmod(np.arange(COUNT, dtype=np.int32), BLOCK)
    kv = write_layer(kv, np.int32(1), ids, offsets, rows, None if layout in state.LATENTS else rows)
    expected = np.broadcast_to(np.array([448.0, 448.0, 448.0, -448.0, -448.0])[:, None, None], rows.shape)
    for side in state.gather_sequence(kv, 1, jnp.arange(2, dtype=jnp.int32)):
        np.testing.assert_array_equal(np.asarray(side[:COUNT], np.float32), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", get_args(Layout))
def test_a_spec_counts_the_bytes_of_the_arrays(dtype: str, layout: Layout):
    spec = CacheSpec(num_layers=2, num_blocks=5, block_size=3, num_kv_heads=4, head_dim=6, dtype=dtype, layout=layout)
    kv = state.empty(spec)
    assert (state.num_blocks(kv), state.block_size(kv), state.num_kv_heads(kv)) == (5, 3, 4)
    arrays = jax.tree.leaves(state.empty(spec))
    assert spec.num_bytes == sum(array.nbytes for array in arrays)
    assert spec.bytes_per_position * 3 * 5 == spec.num_bytes
    assert [(a.shape, a.dtype) for a in arrays] == [(s.shape, s.dtype) for s in jax.tree.leaves(state.shapes(spec))]
    assert not any(array.any() for array in arrays)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_a_sequence_is_gathered_in_the_order_of_its_positions(layout: Layout):
    kv, table = full(replace(SPEC, layout=layout)), jnp.array([3, 0, 4], jnp.int32)
    for found, whole in zip(state.gather_sequence(kv, jnp.int32(1), table), logical(kv), strict=True):
        np.testing.assert_array_equal(found, whole[1][[3, 0, 4]].reshape(-1, HEADS, WIDTH))


def test_rows_of_heads_and_pages_are_what_is_read():
    kv = full(replace(SPEC, layout="positions"))
    k, v = logical(kv)
    for found, whole in zip(state.rows_of_heads(kv), (k, v), strict=True):
        np.testing.assert_array_equal(found, whole.reshape(-1, HEADS, WIDTH))
    kv = full(replace(SPEC, layout="interleaved"))
    both = np.stack(logical(kv), axis=4).reshape(LAYERS * BLOCKS, BLOCK, 2 * HEADS, WIDTH)
    np.testing.assert_array_equal(state.pages(kv), both)


def test_what_a_layout_cannot_show_is_unsupported():
    for layout in ("products", "interleaved"):
        with pytest.raises(UnsupportedError, match=layout):
            state.rows_of_heads(full(replace(SPEC, layout=layout)))
    with pytest.raises(UnsupportedError, match="positions"):
        state.pages(full(replace(SPEC, layout="positions")))


def test_an_id_outside_the_pool_reads_some_block_rather_than_nothing():
    k, v = state.read(full(SPEC), 0, jnp.array([BLOCKS, 10**6], jnp.int32))
    assert np.isfinite(k).all()
    assert np.isfinite(v).all()
