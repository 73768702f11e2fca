"""The CPU kernels against float64 NumPy: every kind of weight, every option of attention, odd sizes, poisoned pools."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import Layout
from ferrum_jax.ops import native, sampling
from ferrum_jax.ops.attention_cpu import attend_cpu, write_cpu
from ferrum_jax.ops.kernel_use import are_used, kernels
from ferrum_jax.ops.linear import StackedWeight
from ferrum_jax.ops.moe import swiglu, weigh_experts
from ferrum_jax.ops.quantised import UINTS, QuantisedWeight, pack, pack_high, quantise_weight
from tests.ops.paged import LAYER, Case, Filled, fill
from tests.tiers import by_default

pytestmark = pytest.mark.skipif(native.instruction_set() is None, reason=f"no kernels: {native.library()}")

product = jax.jit(native.product)
expert_product = jax.jit(native.expert_product)
logsumexp = jax.jit(native.logsumexp)


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def make_weight(kind: str, seed: int, *shape: int, size: int = 32) -> Any:
    """A weight of `shape`, whose last axis is divisible by `size` if it has groups."""
    rng, groups = np.random.default_rng(seed), max(1, shape[-1] // size)
    if kind in native.FLOATS:
        return jax.device_put(normal(seed, *shape).astype(kind))
    if kind == "int8 a channel":
        return jax.device_put(quantise_weight(normal(seed, *shape), "int8"))
    if kind == "float4":
        values = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
        return jax.device_put(QuantisedWeight(values, rng.integers(120, 131, (*shape[:-1], groups)).astype(np.uint8)))
    high, scales = None, (rng.random((*shape[:-1], groups), np.float32) + 0.5).astype(np.float16)
    offsets = rng.standard_normal(scales.shape).astype(np.float16) if kind.endswith("offsets") else None
    if "int8" in kind:
        values = rng.integers(-127, 128, shape).astype(np.int8)
    elif kind.startswith("float8"):
        values = normal(seed, *shape).astype(ml_dtypes.float8_e4m3fn)
    else:
        numbers = rng.integers(0, 2 ** (bits := bits_of(kind)), shape).astype(np.uint8)
        values, high = pack(numbers, groups), pack_high(numbers, groups, bits) if bits > 4 else None
    if kind.startswith("counted"):  # scales and offsets are integers, eight or sixteen of which count one number
        run = 16 if "16" in kind else 8
        counts = rng.integers(-32, 64, (2, *scales.shape)).astype(np.int8)
        units = (normal(seed, 2, *scales.shape[:-1], groups // run) / 32).astype(np.float16)
        parts = [QuantisedWeight(*both) for both in zip(counts, units, strict=True)]
        return jax.device_put(QuantisedWeight(values, parts[0], None if offsets is None else parts[1], high))
    dtype = np.float32 if kind.startswith("wide") else np.float16
    beside = np.float32 if "wide" in kind else np.float16
    offsets = None if offsets is None else offsets.astype(beside)
    return jax.device_put(QuantisedWeight(values, scales.astype(dtype), offsets, high))


def bits_of(kind: str) -> int:
    return next((bits for name, bits in UINTS.items() if name in kind), 8)


MANY = 64  # rows of a product above which panels sum in another order
KINDS = [*native.FLOATS, "int8 a channel", "int8", "int8 with offsets", "uint4", "uint4 with offsets"]
UPPER = ["uint5", "uint5 with offsets", "uint6", "uint6 with offsets"]  # in groups of multiples of eight
KINDS += [*UPPER, "wide uint4 with offsets", "uint4 with wide offsets", "int8 with wide offsets", "float4", "float8"]
COUNTED = ["counted by 16 int8", "counted by 8 int8 with offsets", "counted by 8 uint4 with offsets"]
COUNTED += ["counted by 16 uint4", "counted by 16 uint4 with offsets"]
COUNTED += ["counted by 8 uint5 with offsets", "counted by 16 uint6", "counted by 16 uint5 with offsets"]
MOST = by_default(
    [*KINDS, *COUNTED], "float32", "bfloat16", "int8", "uint4 with offsets", "uint5", "float4", COUNTED[1], COUNTED[6]
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def wide(weight: Any) -> NDArray[np.float64]:
    """The numbers of a weight, those of a quantised one computed in float32."""
    if getattr(weight, "scales", None) is None:
        return np.asarray(getattr(weight, "values", weight), np.float64)
    is_counted = isinstance(weight.scales, QuantisedWeight)
    values, scales = np.asarray(weight.values), np.asarray(wide(weight.scales), np.float32)[..., None]
    groups = values.reshape(*scales.shape[:-1], -1)
    if not is_counted and weight.scales.dtype == np.uint8:
        groups, scales = E2M1[np.concatenate([groups & 15, groups >> 4], axis=-1)], np.exp2(scales - 127)
    elif values.dtype == np.uint8:
        groups = np.concatenate([groups & 15, groups >> 4], axis=-1).astype(np.int8)
        more = 0 if weight.high is None else 8 * weight.high.shape[-1] // weight.shape[-1]
        if more:  # number by number: of a 32-bit word the j-th has its bits there
            words = np.asarray(weight.high).view(f"<u{more}").reshape(*groups.shape[:-1], -1)
            half = groups.shape[-1] // 2
            for at in range(groups.shape[-1]):
                nth = 2 * (at % half % 4) + at // half
                groups[..., at] |= (words[..., at % half // 4] >> more * nth & (2**more - 1)).astype(np.int8) << 4
        groups -= np.int8(8 << more if weight.offsets is None else 0)
    found = groups.astype(np.float32) * scales
    if weight.offsets is not None:
        found += np.asarray(wide(weight.offsets), np.float32)[..., None]
    return found.reshape(*weight.shape).astype(np.float64)


def check_product(found: Any, x: NDArray[Any], weight: NDArray[Any]) -> None:
    expected = x.astype(np.float64) @ weight.T
    bound = np.abs(x).astype(np.float64) @ np.abs(weight).T  # of a sum's terms, to which its rounding belongs
    assert np.all(np.abs(found - expected) <= 1e-6 * bound + 1e-30)


@pytest.mark.parametrize("kind", by_default(KINDS, *(kind for kind in KINDS if kind not in UPPER[1:3])))
@pytest.mark.parametrize("rows", by_default([1, 2, 3, 4, 5, 8, 13, 64, 65, 128, 131, 300], 1, 3, 13, 131))
def test_products_are_numpys(kind: str, rows: int):
    for outputs, inputs in ((37, 96), (128, 576), (3, 32), (19, 2080)):
        x, weight = normal(rows, rows, inputs), make_weight(kind, outputs, outputs, inputs)
        check_product(product(x, weight), x, wide(weight))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(native.FLOATS), st.integers(1, 140), st.integers(1, 70), st.integers(1, 70), st.integers(0, 99))
@example("float16", 1, 1, 1, 0)
@example("bfloat16", 135, 13, 1030, 0)
@example("float32", 66, 13, 1025, 0)
def test_products_of_odd_sizes_are_numpys(kind: str, rows: int, outputs: int, inputs: int, seed: int):
    x, weight = normal(seed, rows, inputs), make_weight(kind, seed, outputs, inputs)
    check_product(product(x, weight), x, wide(weight))


@pytest.mark.parametrize("kind", MOST)
def test_a_product_with_a_layer_of_a_stack_is_that_with_its_weight_alone(kind: str):
    width = 512 if kind in COUNTED else 96
    stack = make_weight(kind, 1, 3, 37, width)
    for rows in (1, 5, MANY + 6):
        x = normal(rows, rows, width)
        for layer in range(3):
            alone = jax.tree.map(lambda leaf, at=layer: leaf[at], stack)
            np.testing.assert_array_equal(product(x, stack, layer), product(x, alone))


@pytest.mark.parametrize("first", [None, 2], ids=["all experts", "experts of other devices"])
def test_experts_in_a_stack_of_layers_are_those_of_their_layer(first: int | None):
    stacks = [jnp.asarray(normal(seed, 3, 4, *shape)) for seed, shape in enumerate([(37, 32), (37, 32), (32, 37)])]
    x, drawn = jnp.asarray(normal(3, 9, 32)), np.random.default_rng(4).permuted(np.tile(np.arange(8), (9, 1)), axis=1)
    chosen = jnp.asarray((drawn if first else drawn % 4)[:, :3], jnp.int32)  # two of a token may be the same
    start = None if first is None else jnp.int32(first)

    @jax.jit
    def mix(gate: Any, up: Any, down: Any) -> jax.Array:
        with kernels("cpu"):
            return weigh_experts(x, chosen, jnp.ones(chosen.shape), (gate, up, down), swiglu, start)

    for layer in range(3):
        found = mix(*(StackedWeight(stack, jnp.int32(layer)) for stack in stacks))
        np.testing.assert_array_equal(found, mix(*(stack[layer] for stack in stacks)))


def test_a_stack_that_contradicts_itself_is_refused():
    x, stack = normal(1, 2, 32), make_weight("int8", 2, 3, 8, 32)
    alone = jax.tree.map(lambda leaf: leaf[0], stack)
    offset = jnp.zeros((3, 8, 1), jnp.float16)
    wrong = {
        "has a scale": stack.replace(scales=alone.scales),
        "has an offset": stack.replace(offsets=offset[0]),
        "has two axes": normal(3, 3, 2, 8, 32),
    }
    for message, weight in wrong.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(product(x, weight, 0))
    np.testing.assert_array_equal(product(x, stack.replace(offsets=offset), 0), product(x, stack, 0))
    counted = make_weight("counted by 8 int8 with offsets", 2, 8, 512)
    wrong = {
        "share a unit": counted.replace(scales=counted.scales.replace(scales=jnp.zeros((8, 4), jnp.float16))),
        "count units in float16": counted.replace(scales=counted.scales.replace(scales=jnp.zeros((8, 2)))),
        "are not as the scales": counted.replace(offsets=jnp.zeros((8, 16))),
        "scales have another type": counted.replace(values=counted.values.astype(jnp.float8_e4m3fn)),
        "share one or two bytes": make_weight("uint5", 2, 8, 512).replace(high=jnp.zeros((8, 72), jnp.uint8)),
        "scales have another": make_weight("uint5", 2, 8, 512).replace(scales=jnp.zeros((8, 16))),
        "offsets are not as": make_weight("uint5 with offsets", 2, 8, 512).replace(offsets=jnp.zeros((8, 16))),
        "have other units": counted.replace(offsets=counted.offsets.replace(scales=jnp.zeros((8, 1), jnp.float16))),
    }
    for message, weight in wrong.items():
        assert not native.has_kernel(weight) or "bytes" in message
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(product(normal(1, 2, 512), weight))


@pytest.mark.parametrize("layer", [-1, 3, 2**30])
def test_a_layer_that_a_stack_has_not_is_refused(layer: int):
    with pytest.raises(jax.errors.JaxRuntimeError, match="the stack has no weight of this layer"):
        jax.block_until_ready(product(normal(1, 2, 32), normal(2, 3, 8, 32), layer))


@pytest.mark.parametrize("rows", [1, 8, MANY + 1])
@pytest.mark.parametrize("inputs", [1024, 8192])
def test_long_sums_of_one_sign_are_numpys(rows: int, inputs: int):
    x, weight = np.abs(normal(1, rows, inputs)), np.abs(normal(2, 16, inputs))
    found, expected = product(x, weight), x.astype(np.float64) @ weight.T
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_is_not_finite_stays_in_its_row():
    x, weight = normal(1, MANY + 6, 96), normal(2, 40, 96)
    clean = np.asarray(product(x, weight))
    x[3, 5], x[4, 95], x[MANY + 5, 0] = np.inf, np.nan, -np.inf
    found, odd = np.asarray(product(x, weight)), [3, 4, MANY + 5]
    assert not np.isfinite(found[odd]).any()
    np.testing.assert_array_equal(np.delete(found, odd, axis=0), np.delete(clean, odd, axis=0))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["int8", "uint4"]),
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(0, 99),
)
def test_groups_of_odd_sizes_are_numpys(kind: str, rows: int, outputs: int, groups: int, half: int, seed: int):
    inputs, rng = groups * 2 * half, np.random.default_rng(seed)
    values = rng.integers(-127 if kind == "int8" else 0, 128 if kind == "int8" else 16, (outputs, inputs))
    values = values.astype(np.int8) if kind == "int8" else pack(values.astype(np.uint8), groups)
    weight = jax.device_put(QuantisedWeight(values, normal(seed, outputs, groups)))
    x = normal(seed + 1, rows, inputs)
    check_product(product(x, weight), x, wide(weight))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(COUNTED),
    st.sampled_from([8, 16, 32, 48, 64]),
    st.integers(1, 5),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(0, 99),
)
@example("counted by 8 uint4 with offsets", 32, 3, 26, 1, 0)  # Q4_K, whose last rows do not fill a tile
@example("counted by 16 uint6", 16, 7, 14, 8, 0)  # Q6_K
@example("counted by 16 uint6", 16, 7, 14, 90, 0)
@example("counted by 8 uint5 with offsets", 32, 5, 14, 1, 0)  # Q5_K
@example("counted by 8 int8 with offsets", 32, 5, 14, 90, 0)
@example("counted by 16 uint4 with offsets", 16, 4, 30, 130, 0)
@example("counted by 16 uint4", 16, 1, 30, 2, 0)  # Q3_K
def test_scales_that_count_units_are_numpys(kind: str, size: int, units: int, outputs: int, rows: int, seed: int):
    """And a product has the bits of that with the same scales in float32."""
    inputs = units * size * (16 if "16" in kind else 8)
    x, weight = normal(seed, rows, inputs), make_weight(kind, seed, outputs, inputs, size=size)
    found = product(x, weight)
    check_product(found, x, wide(weight))
    plain = {part: jnp.float32(wide(leaf)) for part in ("scales", "offsets") if (leaf := getattr(weight, part))}
    if kind.split()[3] in UPPER:
        return  # whose scales have kernels for 16 bits alone
    np.testing.assert_array_equal(found, product(x, weight.replace(**plain)))
    np.testing.assert_array_equal(
        jax.jit(native.widen)(weight, jnp.zeros(1)), jax.jit(native.widen)(weight.replace(**plain), jnp.zeros(1))
    )


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(KINDS[4:]),
    st.sampled_from([2, 4, 6, 8, 16, 32, 64, 96, 128, 256]),
    st.integers(1, 5),
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(0, 99),
)
@example("int8", 4, 3, 14, 1, 0)
@example("uint4 with offsets", 32, 3, 14, 1, 0)
@example("uint4 with wide offsets", 64, 5, 14, 3, 0)
@example("wide uint4 with offsets", 96, 2, 14, 2, 0)
@example("uint4", 128, 3, 14, 4, 0)
@example("int8 with wide offsets", 256, 1, 14, 4, 0)
@example("uint4 with offsets", 2048, 2, 14, 70, 0)  # a group that no part holds
@example("uint4", 2048, 2, 14, 300, 0)  # and rows of several blocks
@example("uint4", 96, 13, 14, 70, 0)
@example("int8 with offsets", 750, 2, 14, 7, 0)
@example("uint4", 192, 16, 14, 130, 0)  # parts of whole groups, the longest that there is room for
@example("uint4", 768, 4, 14, 130, 0)
@example("uint4", 32, 448, 14, 8, 0)  # rows for which there is no room at once
@example("uint5", 24, 13, 14, 1, 0)
@example("uint6 with offsets", 8, 13, 14, 70, 0)
@example("uint6", 16, 9, 14, 2, 0)
@example("uint5 with offsets", 96, 13, 14, 3, 0)
@example("float4", 32, 90, 14, 1, 0)  # the width of GPT-OSS, which does not fill the last step
@example("float4", 32, 3, 14, 70, 0)
def test_groups_of_every_size_are_numpys(kind: str, size: int, groups: int, outputs: int, rows: int, seed: int):
    size = -(-size // 8) * 8 if kind in UPPER else size
    x, weight = normal(seed, rows, groups * size), make_weight(kind, seed, outputs, groups * size, size=size)
    check_product(product(x, weight), x, wide(weight))


@pytest.mark.parametrize(
    "kind", by_default([*KINDS, *COUNTED], "float32", "uint4 with offsets", "float4", COUNTED[1], COUNTED[6])
)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str):
    dense = kind in native.FLOATS
    sizes = (512, 1536) if kind in COUNTED else (192, *((203, 1061, 2083) if dense else (224, 1248)))
    for inputs in sizes:  # some do not fill a vector; of groups: their sums do not
        x, weight = normal(1, 140, inputs), make_weight(kind, 2, 51, inputs)
        together, up_to_many = np.asarray(product(x, weight)), np.asarray(product(x[:MANY], weight))
        few = 4 if inputs < 1024 else 8  # rows for which quantised values meet x before their scales
        for count in (*range(1 if dense else few + 1, 13), 16, 28, 32, 33):
            np.testing.assert_array_equal(product(x[:count], weight), up_to_many[:count])
        for count in (MANY + 1, 67, 130):
            np.testing.assert_array_equal(product(x[:count], weight), together[:count])
        has_panels = native.instruction_set() != "neon"
        assert np.array_equal(up_to_many, together[:MANY]) != has_panels
        of_few = np.asarray(product(x[:few], weight))
        for count in range(1, few):
            np.testing.assert_array_equal(product(x[:count], weight), of_few[:count])


@pytest.mark.parametrize("kind", ["float32", "uint4 with offsets"])
def test_a_row_of_many_is_as_one_of_fewer(kind: str):
    """Blocks of rows and panels of outputs are as many as fit, and the last ones are not full."""
    x, weight = normal(1, 1100, 96), make_weight(kind, 2, 75, 96)
    together = np.asarray(product(x, weight))
    check_product(together, x, wide(weight))
    for start, count in ((0, MANY + 1), (400, 512), (500, 513), (77, 1023)):
        np.testing.assert_array_equal(product(x[start : start + count], weight), together[start : start + count])


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(native.FLOATS[1:]), st.integers(1, 20), st.integers(1, 20), st.integers(1, 150), st.integers(0, 9)
)
@example("float16", MANY + 3, 37, 150, 0)
@example("bfloat16", 1, 5, 24, 0)
@example("bfloat16", 4, 12, 27, 0)
def test_sixteen_bits_of_every_width_give_the_bits_of_float32(
    kind: str, rows: int, outputs: int, inputs: int, seed: int
):
    x, weight = normal(seed, rows, inputs), make_weight(kind, seed, outputs, inputs)
    np.testing.assert_array_equal(product(x, weight), product(x, weight.astype(jnp.float32)))


@pytest.mark.parametrize("kind", MOST[1:])
def test_weights_are_widened_to_the_last_bit_but_one(kind: str):
    weight = make_weight(kind, 3, 37, 512 if kind in COUNTED else 96)
    weight = QuantisedWeight(weight) if kind in native.FLOATS else weight
    wanted = wide(weight).astype(np.float32)
    np.testing.assert_allclose(
        jax.jit(native.widen)(weight, jnp.zeros(1)), wanted, rtol=2e-7, atol=1e-6 if "offsets" in kind else 0
    )


@pytest.mark.parametrize("kind", MOST)
def test_products_of_chosen_experts_are_numpys(kind: str):
    width = 512 if kind in COUNTED else 64
    x, stack = normal(3, 11, width), make_weight(kind, 5, 6, 30, width)
    ids = np.array([4, 0, 4, 2, 2, 2, 0, 4, 4, 4, 3], np.int32)
    found, weights = expert_product(x, ids, stack), wide(stack)
    for row, own in enumerate(ids):
        check_product(found[row], x[row], weights[own])


@pytest.mark.parametrize("kind", MOST)
def test_a_choice_does_not_depend_on_the_choices_beside_it(kind: str):
    width = 512 if kind in COUNTED else 64
    x, stack = normal(3, 40, width), make_weight(kind, 5, 4, 30, width)
    alike, apart = np.zeros(40, np.int32), np.arange(40, dtype=np.int32) % 4
    together, found = np.asarray(expert_product(x, alike, stack)), np.asarray(expert_product(x, apart, stack))
    np.testing.assert_array_equal(found[apart == 0], together[apart == 0])


def test_an_expert_of_another_device_gives_zeros():
    found = expert_product(normal(1, 4, 8), np.array([2, 0, -1, 1], np.int32), jnp.ones((2, 5, 8)))
    np.testing.assert_array_equal(np.asarray(found) == 0, np.repeat([[True], [False], [True], [False]], 5, axis=1))


def test_rounding_to_sixteen_bits_is_numpys():
    """Keys are rounded as they are written: every kind of number, also subnormal ones, ties, and beyond the largest."""
    numbers = np.concatenate([normal(1, 500) * np.float32(2.0**at) for at in range(-30, 20, 3)])
    ties = np.arange(2048, 4096, dtype=np.float32) + np.float32(0.5)
    numbers = np.concatenate([numbers, ties, [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65520.0, 2.0**-25]])
    numbers = np.resize(numbers.astype(np.float32), (11, 1, 1024))
    for dtype in ("bfloat16", "float16", "float32"):
        filled = fill(Case(lengths=(0,), counts=(11,), tokens=11, kv_heads=1, head_dim=1024, dtype=dtype), "products")
        at = np.arange(11, dtype=np.int32)
        kv = jax.jit(write_cpu)(filled.kv, LAYER, np.full(11, 3, np.int32), at, numbers, numbers)
        for pool in (kv.k[LAYER, 3, 0, :, :11].T, kv.v[LAYER, 3, 0, :11]):
            with np.errstate(over="ignore"):
                expected = np.float32(numbers[:, 0].astype(dtype))
            np.testing.assert_array_equal(np.float32(pool), expected)


def test_rounding_to_eight_bits_is_that_of_ml_dtypes_up_to_the_largest():
    numbers = np.concatenate([normal(1, 500) * np.float32(2.0**at) for at in range(-16, 14, 2)])
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    halves = (every[:-1] + every[1:]) / 2  # ties
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 447.9, 464.0, 2.0**-10, 2.0**-11]
    numbers = np.concatenate([numbers, every, halves, odd])
    numbers = np.resize(numbers.astype(np.float32), (8, 1, 1024))
    case = Case(lengths=(0,), counts=(8,), tokens=8, kv_heads=1, head_dim=1024, dtype="float8_e4m3fn")
    at, kv = np.arange(8, dtype=np.int32), fill(case, "products").kv
    expected = np.clip(numbers[:, 0], -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for write in (write_cpu, state.write):
        found = jax.jit(write)(kv, LAYER, np.full(8, 3, np.int32), at, numbers, numbers)
        for pool in (found.k[LAYER, 3, 0, :, :8].T, found.v[LAYER, 3, 0, :8]):
            np.testing.assert_array_equal(np.float32(pool), expected)


@pytest.mark.parametrize("layout", ["positions", "interleaved", "latent_rows"])
def test_a_kv_of_another_layout_is_refused(layout: str):
    filled, numbers = fill(Case(lengths=(3,), counts=(1,), tokens=1), "products"), jnp.zeros((1, 2, 16))
    kv, place = replace(filled.kv, layout=layout), jnp.zeros(1, jnp.int32)
    with pytest.raises(UnsupportedError, match=f"layout products or latent, this one's is {layout}"):
        attend_cpu(filled.q, kv, LAYER, filled.rows, scale=1.0, window=None)
    with pytest.raises(UnsupportedError, match=f"layout products or latent, this one's is {layout}"):
        write_cpu(kv, LAYER, place, place, numbers, numbers)


@pytest.mark.usefixtures("unchecked")
def test_keys_of_another_shape_and_places_outside_a_block_write_nothing():
    kv = fill(Case(lengths=(3,), counts=(1,), tokens=1, kv_heads=2, head_dim=16), "products").kv
    numbers = jnp.ones((4, 2, 16))
    ids, block = jnp.full(4, 3, jnp.int32), state.block_size(kv)
    found = write_cpu(kv, LAYER, ids, jnp.array([-1, block, -block, 2**30], jnp.int32), numbers, numbers)
    jax.tree.map(np.testing.assert_array_equal, found, kv)
    for wrong in (jnp.ones((4, 16, 2)), jnp.ones((4, 1, 16)), jnp.ones((4, 2, 17))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="do not have the KV's shape"):
            jax.block_until_ready(write_cpu(kv, LAYER, ids, jnp.zeros(4, jnp.int32), wrong, wrong))
    with pytest.raises(jax.errors.JaxRuntimeError, match="not as many places as tokens"):
        jax.block_until_ready(write_cpu(kv, LAYER, ids[:3], jnp.zeros(3, jnp.int32), numbers, numbers))


@pytest.mark.parametrize("count", [8, 16, 13])
def test_every_number_of_eight_bits_is_read_as_it_is(count: int):
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    every = every[~np.isnan(every.astype(np.float32))]
    for start in range(0, len(every), count):
        own = np.resize(every[start : start + count], count).astype(np.float32)
        case = Case(lengths=(0,), counts=(1,), tokens=1, kv_heads=1, group=1, head_dim=count, dtype="float8_e4m3fn")
        filled = fill(case, "products")
        ids, at = np.asarray(filled.rows.tables)[0, :1], np.zeros(1, np.int32)
        kv = write_cpu(
            filled.kv, LAYER, jnp.asarray(ids), jnp.asarray(at), jnp.zeros((1, 1, count)), jnp.asarray(own)[None, None]
        )
        out = attend_cpu(jnp.zeros((1, 1, 1, count)), kv, LAYER, filled.rows, scale=1.0, window=None)
        np.testing.assert_array_equal(np.asarray(out)[0, 0, 0], own)  # one position has the whole weight


def expected(filled: Filled, case: Case, sinks: NDArray[Any] | None) -> NDArray[np.float64]:
    """Attention by its definition, in float64."""
    q = np.asarray(filled.q, np.float64)
    out = np.zeros(q.shape)
    for b, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        for t, n in np.ndindex(count, q.shape[2]):
            last, own = length + t + 1, n // case.group
            first = 0 if case.window is None else max(0, last - case.window)
            scores = filled.keys[b][first:last, own].astype(np.float64) @ q[b, t, n] * 0.3
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            sink = -np.inf if sinks is None else sinks[n]
            weights = np.exp(scores - max(scores.max(), sink))
            total = weights.sum() + np.exp(sink - max(scores.max(), sink))
            out[b, t, n] = weights / total @ filled.values[b][first:last, own]
    return out


def check_attention(case: Case, layout: Layout = "products", sinks: NDArray[Any] | None = None, seed: int = 0) -> None:
    filled = fill(case, layout, seed)
    if layout == "latent":
        filled = Filled(filled.q, filled.kv, filled.rows, filled.keys, filled.keys)
    given = None if sinks is None else jnp.asarray(sinks)
    settings = {"scale": 0.3, "window": case.window, "softcap": case.softcap, "sinks": given}
    q = filled.q.astype(jnp.float32)
    found = jax.jit(lambda q, kv: attend_cpu(q, kv, LAYER, filled.rows, **settings))(q, filled.kv)
    real = np.arange(case.tokens) < np.asarray(case.counts)[:, None]
    assert np.all(np.asarray(found)[~real] == 0)
    np.testing.assert_allclose(found, expected(filled, case, sinks), atol=3e-6, rtol=3e-6)


SIZES = [(0, 5, 3), (1, 0, 0), (63, 64, 70), (300, 7, 0)]


@pytest.mark.parametrize("dtype", [*native.FLOATS, "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["products", "latent"])
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_attention_is_numpys(dtype: str, layout: Layout, tokens: int):
    for lengths in SIZES:
        counts = tuple(0 if length == 0 and tokens == 1 else min(tokens, 1 + length) for length in lengths)
        case = Case(lengths=lengths, counts=counts, tokens=tokens, block=64, columns=6, head_dim=40, dtype=dtype)
        check_attention(case, layout)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    tokens=st.sampled_from([1, 1, 3, 18, 50]),
    group=st.integers(1, 7),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    block=st.integers(1, 40),
    window=st.one_of(st.none(), st.integers(1, 60)),
    softcap=st.one_of(st.none(), st.sampled_from([0.5, 5.0, 50.0])),
    layout=st.sampled_from(["products", "latent"]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_with_every_option_is_numpys(
    lengths: list[int], tokens: int, layout: Layout, has_sinks: bool, seed: int, **options: Any
):
    rng = np.random.default_rng(seed)
    counts = tuple(int(count) for count in rng.integers(0, tokens + 1, len(lengths)))
    columns = -(-(max(lengths) + tokens) // options["block"]) + 1
    case = Case(lengths=tuple(lengths), counts=counts, tokens=tokens, columns=columns, **options)
    sinks = normal(seed, case.group * case.kv_heads) if has_sinks else None
    check_attention(case, layout, sinks, seed)


@pytest.mark.parametrize("group", [47, 48, 49, 100])
def test_many_heads_of_one_kv_head_are_numpys(group: int):
    for tokens in (1, 5):
        case = Case(lengths=(20, 0), counts=(tokens, 1), tokens=tokens, group=group, kv_heads=1, head_dim=24)
        check_attention(case, "latent", normal(1, group))


def test_a_long_row_is_computed_in_parts():
    case = Case(lengths=(1500, 700, 255, 256), counts=(1,) * 4, tokens=1, block=128, columns=13, head_dim=64)
    check_attention(case)
    check_attention(replace(case, window=300), sinks=normal(1, 6))


@pytest.mark.parametrize("block", [5, 10, 12, 50, 100, 300])
def test_parts_that_begin_within_a_vector_count_no_position_twice(block: int):
    case = Case(lengths=(900, 611, 256), counts=(1,) * 3, tokens=1, block=block, columns=1000 // block + 1)
    check_attention(case)
    check_attention(replace(case, window=301))


def test_what_is_no_number_stays_so_and_in_its_row():
    case = Case(lengths=(700, 20, 5), counts=(1,) * 3, tokens=1, block=64, columns=12)
    filled = fill(case, "products")
    attend = jax.jit(lambda q, kv: attend_cpu(q, kv, LAYER, filled.rows, scale=0.3, window=None))
    alone = np.asarray(attend(filled.q, filled.kv))
    for bad in (np.nan, np.inf):
        found = np.array(attend(filled.q.at[1, 0, 2, 3].set(bad), filled.kv))
        assert np.isnan(found[1, 0, 2]).all()
        found[1, 0, 2] = alone[1, 0, 2]
        np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("layout", ["products", "latent"])
def test_attention_of_a_row_does_not_depend_on_the_rows_beside_it(layout: Layout):
    case = Case(lengths=(700, 20, 301), counts=(1, 1, 1), tokens=1, block=64, columns=12)
    filled = fill(case, layout)
    attend = jax.jit(lambda q, kv, rows: attend_cpu(q, kv, LAYER, rows, scale=0.3, window=None))
    together = np.asarray(attend(filled.q, filled.kv, filled.rows))
    for at in range(3):
        own = jax.tree.map(lambda leaf, at=at: leaf[at : at + 1], filled.rows)
        np.testing.assert_array_equal(attend(filled.q[at : at + 1], filled.kv, own)[0], together[at])


@pytest.mark.parametrize("layout", ["products", "latent"])
def test_writes_are_in_place_and_leave_the_rest_alone(layout: Layout):
    case = Case(lengths=(0,), counts=(0,), tokens=1, kv_heads=2, head_dim=12, block=5)
    kv = jax.tree.map(jnp.asarray, fill(case, layout).kv)
    blocks = kv.k.shape[1]
    ids, at = np.array([2, 0, blocks, 2, -1], np.int32), np.array([4, 0, 1, 3, 0], np.int32)
    k, v = normal(1, 5, 2, 12), normal(2, 5, 2, 12)
    expected = [None if pool is None else np.array(pool) for pool in (kv.k, kv.v)]
    keys, values = expected
    assert keys is not None
    for x in (0, 1, 3):
        keys[LAYER, ids[x], :, :, at[x]] = k[x]
        if values is not None:
            values[LAYER, ids[x], :, at[x]] = v[x]
    write = jax.jit(lambda kv, k, v: write_cpu(kv, LAYER, jnp.asarray(ids), jnp.asarray(at), k, v), donate_argnums=0)
    compiled = write.lower(kv, k, None if kv.v is None else v).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(pool.nbytes for pool in expected if pool is not None)
    found = compiled(kv, k, None if layout == "latent" else v)
    for pool, wanted in zip((found.k, found.v), expected, strict=True):
        if wanted is not None:
            np.testing.assert_array_equal(pool, wanted)


def check_logsumexp(x: NDArray[np.float32]) -> None:
    exact = x.astype(np.float64)
    best = exact.max(axis=1)
    expected = best + np.log(np.exp(exact - best[:, None]).sum(axis=1))
    np.testing.assert_allclose(logsumexp(x), expected, rtol=2e-7, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3 * native.PART), st.floats(0.01, 60), st.floats(-300, 300), st.integers(0, 9))
@example(1, 1, 1.0, 0.0, 0)
@example(2, native.PART, 1.0, 0.0, 0)
@example(2, native.PART + 1, 1.0, 0.0, 0)
def test_sums_of_exponentials_are_numpys(rows: int, size: int, spread: float, centre: float, seed: int):
    x = normal(seed, rows, size) * np.float32(spread) + np.float32(centre)
    check_logsumexp(x)
    x[:, : size // 2] = -np.inf  # what may not be chosen
    check_logsumexp(x)
    together = np.asarray(logsumexp(x))
    for at in range(rows):
        np.testing.assert_array_equal(logsumexp(x[at : at + 1])[0], together[at])


def test_sums_of_exponentials_at_the_ends_of_what_there_is():
    most = np.finfo(np.float32).max
    for size in (1, 40, native.PART + 5):
        for value, others, expected in (
            (np.inf, 0.0, np.inf),
            (np.nan, 0.0, np.nan),
            (np.nan, np.inf, np.nan),
            (-np.inf, -np.inf, -np.inf),
            (most, -most, most),
            (-most, -np.inf, -most),
        ):
            for at in {0, size // 2, size - 1}:
                x = np.full((2, size), others, np.float32)
                x[1, at] = value
                np.testing.assert_array_equal(logsumexp(x)[1], np.float32(expected))


def test_many_threads_at_once_get_each_their_own_numbers():
    weight = jnp.asarray(normal(1, 512, 512))
    inputs = [normal(at, 1 + at % 9, 512) for at in range(24)]
    alone = [np.asarray(product(x, weight)) for x in inputs]

    def run(at: int) -> None:
        for _ in range(20):
            np.testing.assert_array_equal(product(inputs[at], weight), alone[at])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(24)))


def test_what_has_no_kernel_is_left_to_xla():
    x, weight = jnp.ones((2, 8)), jnp.ones((4, 8))
    assert not native.can_multiply(x, weight)  # not in a serving step
    with kernels("cpu"):
        assert native.can_multiply(x, weight)
        assert not native.can_multiply(x.astype(jnp.bfloat16), weight)
        assert native.can_multiply(jnp.ones((65, 8)), weight) == (native.instruction_set() != "neon")
        assert not native.can_multiply(jnp.ones((native.MOST_ROWS + 1, 8)), weight)
        assert not native.can_multiply(x, weight.astype(jnp.int32))
        assert native.can_multiply(x, quantise_weight(weight, "float8_e4m3fn"))
        assert not native.can_multiply(x, QuantisedWeight(weight.astype(jnp.float8_e5m2), jnp.ones((4, 1))))
        for dtype in (jnp.bfloat16, jnp.float32):
            scores = jax.jit(sampling.logsumexp).lower(x.astype(dtype)).as_text()
            assert ("ferrum_logsumexp" in scores) == (dtype == jnp.float32)
        with kernels("xla"):
            assert not native.can_multiply(x, weight)
    assert not are_used("cpu")
