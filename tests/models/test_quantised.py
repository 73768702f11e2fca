"""Quantised weights: what they stand for, their products, and trees of them."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from ferrum_jax import models
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.models import quantisation, specs
from ferrum_jax.models.quantisation import Format
from ferrum_jax.models.registry import family
from ferrum_jax.ops import linear as products
from ferrum_jax.ops.linear import linear, vocabulary_logits
from ferrum_jax.ops.quantised import (
    LARGEST,
    QuantisedWeight,
    activation_dtype,
    dequantise_weight,
    pack,
    quantise_weight,
    rows_of,
)
from ferrum_jax.weights.gguf import to_leaf
from tests import tiny
from tests.tiers import by_default
from tests.weights.scalar_ggml import draw_blocks, read_blocks

SAME = 2e-6  # relative: float32 sums of up to 1200 products in another order, and a scale inside or outside of them
FORWARD = 1e-4  # tiny models: as `any chunking = the forward`, since only the order of sums differs

every_format = pytest.mark.parametrize("dtype", LARGEST)
one_format = pytest.mark.parametrize("dtype", by_default(LARGEST, "int8"))


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def relative(found: jax.Array, expected: jax.Array) -> float:
    wide = [np.asarray(values, np.float64) for values in (found, expected)]
    return float(np.abs(wide[0] - wide[1]).max() / np.abs(wide[1]).max())


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(sorted(LARGEST)),
    rows=st.sampled_from([1, 9]),
    groups=st.sampled_from([1, 4]),
    size=st.sampled_from([1, 7]),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**16),
)
def test_no_number_moves_by_more_than_half_a_step(
    dtype: str, rows: int, groups: int, size: int, exponent: int, seed: int
):
    check_steps(dtype, rows, groups, size, exponent, seed)


@every_format
def test_numbers_are_rounded_to_nearest(dtype: str):
    check_steps(dtype, rows=9, groups=4, size=7)


def check_steps(dtype: str, rows: int, groups: int, size: int, exponent: int = 0, seed: int = 0) -> None:
    """Demands that no number of a drawn weight moves by more than half a step."""
    weight = drawn(rows, groups * size, seed=seed) * np.float32(2.0**exponent)
    kept = quantise_weight(weight, dtype, groups)
    assert kept.scales is not None
    steps = weight.astype(np.float64) / np.repeat(kept.scales, size, axis=-1)
    found = np.asarray(jax.jit(dequantise_weight, static_argnums=1)(kept, "float32"), np.float64)
    if dtype == "int8":
        width = np.ones_like(steps)
    else:  # three bits after the leading one, and none below 2**-6
        width = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(steps), 1e-30))), -6) - 3)
    half = 0.5 * width * np.repeat(kept.scales, size, axis=-1)
    rounding = 1e-6 * np.abs(weight)  # of the scale, the quotient and the product, in float32
    assert (np.abs(found - weight) <= half + rounding).all()
    assert np.abs(kept.values.astype(np.float32)).max() == LARGEST[dtype]


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("groups", [1, 3])
def test_numpy_and_jax_quantise_to_the_same_numbers(dtype: str, groups: int):
    weight = drawn(211, 96).astype(ml_dtypes.bfloat16).astype(np.float32)  # so that some lie half-way between steps
    host = quantise_weight(weight, dtype, groups)
    assert isinstance(host.values, np.ndarray)
    for device in (quantise_weight, jax.jit(quantise_weight, static_argnums=(1, 2))):
        for mine, theirs in zip(
            jax.tree.leaves(host), jax.tree.leaves(device(jnp.asarray(weight), dtype, groups)), strict=True
        ):
            np.testing.assert_array_equal(mine.astype(np.float32), np.asarray(theirs, np.float32))


def test_weights_on_the_host_stay_there_and_have_the_same_numbers():
    config = tiny.CONFIGS["llama3"]
    cfg, params = tiny.model_config("llama3"), tiny.tiny_params(config)
    host = quantisation.quantise(jax.tree.map(np.asarray, params), cfg, "int8")
    plain = quantisation.dequantise(host)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((host, plain)))
    device = quantisation.quantise(params, cfg, "int8")
    tiny.assert_same_tree(host, device)
    tiny.assert_same_tree(plain, quantisation.dequantise(device))


def test_a_narrow_weight_is_quantised_as_the_numbers_it_holds():
    narrow = drawn(7, 12).astype(ml_dtypes.bfloat16)
    kept, wide = quantise_weight(narrow, "int8"), quantise_weight(narrow.astype(np.float32), "int8")
    np.testing.assert_array_equal(kept.values, wide.values)
    np.testing.assert_array_equal(kept.scales, wide.scales)


@pytest.mark.slow
@every_format
def test_channels_of_zeros_and_of_what_is_no_number(dtype: str):
    weight = drawn(5, 6)
    weight[1], weight[2, 3], weight[3, 0], weight[4] = 0, np.nan, np.inf, 1e-40
    kept = jax.tree.map(jnp.asarray, quantise_weight(weight, dtype))
    found = np.asarray(dequantise_weight(kept, "float32"))
    assert (found[[1, 4]] == 0).all()
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[2:4]).any()
    y = linear(jnp.ones((5, 6)), kept)
    assert (y[:, [1, 4]] == 0).all()
    assert not np.isfinite(y[:, 2:4]).any()


@every_format
@pytest.mark.parametrize("groups", by_default([1, 4], 1))
@pytest.mark.parametrize(
    ("tokens", "shape"),
    by_default([(1, (97, 48)), (5, (1, 12)), (70, (2, 12)), (5, (2003, 1200))], (5, (2003, 1200))),
)
def test_a_product_equals_that_of_what_the_weight_stands_for(
    tokens: int, shape: tuple[int, int], groups: int, dtype: str
):
    kept = quantise_weight(jnp.asarray(drawn(*shape)), dtype, groups)
    x, bias = jnp.asarray(drawn(tokens, shape[1], seed=1)), jnp.asarray(drawn(shape[0], seed=2))
    plain = dequantise_weight(kept, "float32")
    assert relative(jax.jit(linear)(x, kept, bias), linear(x, plain, bias)) < SAME
    assert relative(vocabulary_logits(x, kept), vocabulary_logits(x, plain)) < SAME


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_a_product_of_four_bit_floats_equals_that_of_what_they_stand_for(tokens: int):
    rng = np.random.default_rng(tokens)
    values = rng.integers(256, size=(2003, 48)).astype(np.uint8)
    kept = QuantisedWeight(jnp.asarray(values), jnp.asarray(rng.integers(120, 131, (2003, 3)).astype(np.uint8)))
    x, plain = jnp.asarray(drawn(tokens, 96)), dequantise_weight(kept, "float32")
    assert relative(jax.jit(linear)(x, kept), linear(x, plain)) < SAME
    assert relative(jax.grad(lambda x: linear(x, kept).sum())(x), jax.grad(lambda x: linear(x, plain).sum())(x)) < SAME
    assert rows_of(kept, jnp.array([3, 5]), "bfloat16").dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "shape"), by_default([(50, (97, 10)), (10, (7, 10)), (1, (23, 10)), (200, (64, 10))], (50, (97, 10)))
)
def test_blocks_of_a_product_cover_every_channel_once(
    block: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(products, "BLOCK", block)
    kept, x = quantise_weight(jnp.asarray(drawn(*shape)), "int8"), jnp.asarray(drawn(3, 10))
    assert relative(linear(x, kept), linear(x, dequantise_weight(kept, "float32"))) < SAME


@pytest.mark.slow
@one_format
@pytest.mark.parametrize("groups", by_default([1, 4], 4))
def test_a_narrow_product_is_rounded_once(dtype: str, groups: int):
    kept = quantise_weight(jnp.asarray(drawn(97, 48)), dtype, groups)
    x = jnp.asarray(drawn(5, 48, seed=1)).astype("bfloat16")
    y = linear(x, kept)
    assert y.dtype == jnp.bfloat16
    exact = linear(x.astype("float32"), dequantise_weight(kept, "float32"))
    if groups == 1:  # bfloat16 holds every value, so only the sum is rounded: by at most one part in 256 of itself
        np.testing.assert_allclose(y.astype("float32"), exact, rtol=2**-8, atol=1e-5)
    else:  # the weight is rounded to bfloat16 as well, so the sum moves by as much of the sum of magnitudes
        sums = np.abs(x.astype("float32")) @ np.abs(dequantise_weight(kept, "float32")).T
        assert (np.abs(y.astype("float32") - exact) <= 2**-8 * (sums + np.abs(exact))).all()
    assert vocabulary_logits(x, kept).dtype == jnp.float32


@pytest.mark.slow
@one_format
@pytest.mark.parametrize("groups", by_default([1, 4], 4))
def test_gradients_flow_to_the_activations(dtype: str, groups: int):
    kept = quantise_weight(jnp.asarray(drawn(97, 48)), dtype, groups)
    plain, x, turned = dequantise_weight(kept, "float32"), jnp.asarray(drawn(5, 48)), jnp.asarray(drawn(5, 48, seed=3))

    def loss(x: jax.Array, weight: jax.Array | QuantisedWeight) -> jax.Array:
        return (linear(x, weight) ** 2).sum()

    assert relative(jax.grad(loss)(x, kept), jax.grad(loss)(x, plain)) < SAME
    forward = [jax.jvp(lambda x, weight=weight: loss(x, weight), (x,), (turned,))[1] for weight in (kept, plain)]
    assert relative(*forward) < SAME


@pytest.mark.slow
def test_a_stack_of_weights_is_mapped_and_scanned_like_arrays():
    kept = quantise_weight(jnp.asarray(drawn(3, 12, 12)), "int8", 2)
    x = jnp.asarray(drawn(5, 12))
    each = [jax.tree.map(lambda leaf, at=at: leaf[at], kept) for at in range(3)]
    mapped = jax.vmap(linear, in_axes=(None, 0))(x, kept)
    for at, weight in enumerate(each):
        assert relative(mapped[at], linear(x, weight)) < SAME
    last, _ = jax.lax.scan(lambda x, weight: (linear(x, weight), None), x, kept)
    assert relative(last, linear(linear(linear(x, each[0]), each[1]), each[2])) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3])
def test_rows_are_looked_up_as_they_are_multiplied(groups: int):
    kept, ids = quantise_weight(jnp.asarray(drawn(97, 48)), "int8", groups), jnp.array([3, 96, 3, 0])
    expected = dequantise_weight(kept, "float32")[ids]
    np.testing.assert_array_equal(rows_of(kept, ids, "float32"), expected)
    np.testing.assert_array_equal(rows_of(kept, ids, "bfloat16"), expected.astype("bfloat16"))
    np.testing.assert_array_equal(rows_of(expected, jnp.array([1]), "float32"), expected[1:2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "group_size"),
    by_default(
        [
            ("llama31", "int8", None),
            ("llama32_tied", "float8_e4m3fn", None),
            ("qwen2_window", "int8", 4),
            ("qwen3_tied", "float8_e4m3fn", 8),
        ],
        ("qwen2_window", "int8", 4),
    ),
)
def test_a_quantised_forward_equals_that_of_the_dequantised_parameters(name: str, dtype: str, group_size: int | None):
    cfg, tokens = tiny.model_config(name), jnp.asarray(tiny.prompt(name)[:39]).reshape(3, 13)
    plain = tiny.tiny_params(tiny.CONFIGS[name])
    kept = models.quantise(plain, cfg, dtype, group_size=group_size)
    run = jax.jit(models.forward, static_argnums=2)
    found, expected = run(kept, tokens, cfg), run(models.dequantise(kept), tokens, cfg)
    np.testing.assert_allclose(found, expected, rtol=0, atol=FORWARD)
    assert np.abs(run(plain, tokens, cfg) - found).max() > 10 * FORWARD  # quantising does change the model
    scored = jax.jit(models.log_probs, static_argnums=2)
    np.testing.assert_allclose(
        scored(kept, tokens, cfg), scored(models.dequantise(kept), tokens, cfg), rtol=0, atol=FORWARD
    )


@pytest.mark.slow
def test_a_tree_says_what_is_quantised_and_computes_in_the_dtype_of_the_rest():
    name = "qwen3_tied"
    cfg, plain = tiny.model_config(name), tiny.tiny_params(tiny.CONFIGS[name])
    kept = models.quantise(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), plain), cfg, "int8")
    names = {name.removesuffix(".values") for name in specs.named_leaves(kept) if name.endswith(".values")}
    assert names == {name for name, leaf in specs.named_leaves(plain).items() if leaf.ndim == 2}
    assert activation_dtype(kept) == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(models.dequantise(kept))} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(models.dequantise(kept, "float32"))} == {"bfloat16", "float32"}
    inner = models.quantise(plain, cfg, "int8", vocabulary=False)
    assert isinstance(inner["model"]["embed_tokens"]["weight"], jax.Array)
    assert quantisation.formats_of(inner).keys() == names - {"model.embed_tokens.weight"}


@pytest.mark.usefixtures("unchecked")
def test_arguments_that_are_no_dtype_or_number_are_refused():
    cfg, plain = tiny.model_config("llama31"), tiny.tiny_params(tiny.CONFIGS["llama31"])
    kept: Any = {"weight": quantise_weight(drawn(7, 12), "int8"), "norm": jnp.ones(12)}
    dtypes: list[Any] = ["int8", "int3", "float8_e4m3fn", "complex64", ["float32"]]
    for dtype in dtypes:
        with pytest.raises(InvalidParameterError, match=r"dtype is .*, weights are dequantised to float32, float16"):
            models.dequantise(kept, dtype)
    assert models.dequantise(kept, "bfloat16")["weight"].dtype == jnp.bfloat16
    with jax.enable_x64(True):
        assert models.dequantise(kept, "float64")["weight"].dtype == jnp.float64
    sizes: list[Any] = ["4", True, 4.0, 0]
    for size in sizes:
        with pytest.raises(InvalidParameterError, match=f"group_size is {size!r}, expected an integer"):
            models.quantise(plain, cfg, "int8", group_size=size)
    several: Any = ["int8"]
    with pytest.raises(InvalidParameterError, match=r"not \['int8'\]"):
        models.quantise(plain, cfg, several)


@pytest.mark.slow
def test_what_cannot_be_quantised_is_refused():
    cfg, plain = tiny.model_config("llama31"), tiny.tiny_params(tiny.CONFIGS["llama31"])
    with pytest.raises(InvalidParameterError, match="int8 or float8_e4m3fn, not 'int4'"):
        models.quantise(plain, cfg, "int4")
    with pytest.raises(InvalidParameterError, match=r"lm_head\.weight has 48 columns, which groups of 5"):
        models.quantise(plain, cfg, "int8", group_size=5)
    with pytest.raises(InvalidParameterError, match="quantised already"):
        models.quantise(models.quantise(plain, cfg, "int8"), cfg, "int8")
    with pytest.raises(InvalidParameterError, match="12 columns cannot be divided into 5 groups"):
        quantise_weight(drawn(7, 12), "int8", 5)
    with pytest.raises(InvalidParameterError, match="not 'int4'"):
        quantise_weight(drawn(7, 12), "int4")


@pytest.mark.slow
@one_format
def test_the_specs_of_a_quantised_tree_are_its_shapes(dtype: str):
    name = "qwen2_window"
    cfg = tiny.model_config(name)
    kept = models.quantise(tiny.tiny_params(tiny.CONFIGS[name]), cfg, dtype, group_size=4)
    described = quantisation.quantised_specs(family(cfg).param_specs(cfg), quantisation.formats_of(kept))
    shapes = specs.shapes(described, "float32")
    assert jax.tree.structure(shapes) == jax.tree.structure(kept)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), kept
    )
    assert specs.num_bytes(described, "float32") == sum(leaf.nbytes for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize("group_size", [None, 4])
def test_scales_lie_where_their_channels_do(group_size: int | None):
    cfg = tiny.model_config("llama31")
    formats = quantisation.choose_formats(cfg, "int8", group_size=group_size)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",), axis_types=(AxisType.Auto,))
    placed = specs.shardings(quantisation.quantised_specs(family(cfg).param_specs(cfg), formats), mesh)
    block = placed["model"]["layers"][0]["self_attn"]
    assert block["q_proj"]["weight"].values.spec == PartitionSpec("model", None)
    assert block["q_proj"]["weight"].scales.spec == PartitionSpec("model", None)
    assert block["o_proj"]["weight"].values.spec == PartitionSpec(None, "model")
    assert block["o_proj"]["weight"].scales.spec == PartitionSpec(None, "model" if group_size else None)


@pytest.mark.parametrize("kind", ["Q3_K", "Q5_1", "Q5_K", "Q6_K", "IQ4_XS"])
def test_other_packed_weights_stand_for_their_numbers_wherever_they_are_used(kind: str):
    shape = (70, 512)
    data = draw_blocks(kind, shape, seed=3)
    kept, plain = jax.tree.map(jnp.asarray, to_leaf(kind, data, shape)), read_blocks(kind, data, shape)
    assert kept.shape == shape
    close = {"rtol": 1e-6, "atol": 1e-6 * np.abs(plain).max()}
    np.testing.assert_allclose(dequantise_weight(kept, "float32"), plain, **close)
    np.testing.assert_allclose(rows_of(kept, jnp.array([3, 69, 3]), "float32"), plain[[3, 69, 3]], **close)
    for tokens in (1, 70):
        x = jnp.asarray(drawn(tokens, 512, seed=1))
        assert relative(jax.jit(linear)(x, kept), linear(x, jnp.asarray(plain))) < SAME
        assert relative(products._rescaled(x, kept), linear(x, jnp.asarray(plain))) < SAME  # what other platforms run


def test_one_scale_that_is_quantised_is_multiplied_as_well():
    values, counts = jnp.asarray(drawn(5, 48, seed=1) * 20, jnp.int8), jnp.arange(1, 6, dtype=jnp.int8)[:, None]
    kept = QuantisedWeight(values, QuantisedWeight(counts, jnp.full((5, 1), 0.5, jnp.float16)))
    plain, x = values.astype(jnp.float32) * counts.astype(jnp.float32) * 0.5, jnp.asarray(drawn(3, 48, seed=2))
    assert relative(products._rescaled(x, kept), linear(x, plain)) < SAME


COUNTED = Format("int8", 2, "float16")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("int3",), "weights are kept in int8 or"),
        (("int8", True), "groups are True, expected an integer"),
        (("int8", 8, "int8"), "scales are 'int8', expected float32 or"),
        (("float4_e2m1fn", 8, "uint8", "float32"), "offsets are 'float32', expected None"),
        (("float8_e4m3fn", 8, COUNTED), "scales of values in float8_e4m3fn are quantised as"),
        (("uint4", 8, "float32", Format("uint4", 2)), "offsets of values in uint4 are quantised as"),
        (("uint4", 8, Format("int8", 2, COUNTED)), "scales of values in uint4 are quantised as"),
        (("uint4", 8, Format("int8", 2, "float16", "float16")), "scales of 8 groups are quantised as"),
        (("uint4", 9, COUNTED), "scales of 9 groups are quantised as"),
    ],
)
def test_a_format_that_contradicts_itself_is_refused(fields: tuple[Any, ...], message: str):
    with pytest.raises(InvalidParameterError, match=message):
        Format(*fields)


@pytest.mark.slow
@one_format
def test_drawn_parameters_are_quantised_one_by_one_to_the_same_numbers(dtype: str):
    cfg, key = tiny.model_config("qwen3"), jax.random.key(3)
    found = models.init_params(cfg, key, "bfloat16", quantize=dtype)
    assert activation_dtype(found) == jnp.bfloat16
    expected = models.quantise(models.init_params(cfg, key, "float32"), cfg, dtype)
    for name, form in quantisation.formats_of(expected).items():
        assert form.dtype == dtype
        for part in ("values", "scales"):
            mine, theirs = (specs.named_leaves(tree)[f"{name}.{part}"] for tree in (found, expected))
            np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(theirs, np.float32))


def four_bits(rows: int, columns: int, groups: int, *, offsets: bool) -> tuple[QuantisedWeight, np.ndarray]:
    """Draws a weight of four bits, and gives the numbers it stands for."""
    draw = np.random.default_rng([rows, columns, groups])
    numbers = draw.integers(0, 16, (rows, columns)).astype(np.uint8)
    scales, added = (draw.uniform(-1, 1, (rows, groups)).astype(np.float16) for _ in range(2))
    spread = [np.repeat(part.astype(np.float32), columns // groups, axis=1) for part in (scales, added)]
    plain = numbers * spread[0] + spread[1] if offsets else (numbers.astype(np.float32) - 8) * spread[0]
    kept = QuantisedWeight(values=pack(numbers, groups), scales=scales, offsets=added if offsets else None)
    return jax.tree.map(jnp.asarray, kept), plain


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("groups", by_default([1, 6], 6))
@pytest.mark.parametrize("tokens", by_default([1, 70], 1))
def test_four_bits_stand_for_their_numbers_wherever_they_are_used(tokens: int, groups: int, offsets: bool):
    kept, plain = four_bits(97, 48, groups, offsets=offsets)
    assert kept.shape == plain.shape
    np.testing.assert_array_equal(dequantise_weight(kept, "float32"), plain)
    np.testing.assert_array_equal(rows_of(kept, jnp.array([3, 96, 3]), "float32"), plain[[3, 96, 3]])
    x, turned = jnp.asarray(drawn(tokens, 48, seed=1)), jnp.asarray(drawn(tokens, 48, seed=2))
    assert relative(jax.jit(linear)(x, kept), linear(x, jnp.asarray(plain))) < SAME
    assert relative(products._rescaled(x, kept), linear(x, jnp.asarray(plain))) < SAME  # what other platforms run
    slopes = [jax.jvp(lambda x, w=w: linear(x, w) ** 2, (x,), (turned,))[1] for w in (kept, jnp.asarray(plain))]
    assert relative(*slopes) < SAME


def test_a_packed_block_of_gguf_is_packed_the_same_way():
    kept, _ = four_bits(5, 64, 2, offsets=False)
    low, high = np.asarray(kept.values) & 15, np.asarray(kept.values) >> 4
    numbers = np.random.default_rng([5, 64, 2]).integers(0, 16, (5, 64))
    np.testing.assert_array_equal(low[:, :16], numbers[:, :16])
    np.testing.assert_array_equal(high[:, 16:], numbers[:, 48:])


@pytest.mark.slow
def test_every_byte_of_fp8_is_widened_to_its_number():
    every = np.arange(256, dtype=np.uint8)
    expected = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = jax.jit(products._widen_fp8)(jnp.asarray(every))
    np.testing.assert_array_equal(found, expected)
    assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all()
