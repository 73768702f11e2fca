"""Products with weights: every form gives the same numbers, and is what the platform and the tokens call for."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from ferrum_jax.ops.linear import FEW_TOKENS, StackedWeight, linear, vocabulary_logits
from ferrum_jax.ops.quantised import QuantisedWeight, pack, quantise_weight
from tests.tiers import by_default

TOKENS = (1, 2, 3, FEW_TOKENS, FEW_TOKENS + 1)
ROWS = (128, 100)  # whole registers in every part, and not
COLUMNS = 48
FORMS = list(itertools.product(ROWS, TOKENS))
QUICK = (128, 1), (100, 1), (100, 3), (128, FEW_TOKENS + 1)  # one of each form


def operands(tokens: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.RandomState(tokens * 1000 + rows)
    return draw.randn(tokens, COLUMNS).astype(np.float32), draw.randn(rows, COLUMNS).astype(np.float32)


@pytest.mark.parametrize(("rows", "tokens"), by_default(FORMS, *QUICK))
def test_every_form_is_the_product(rows: int, tokens: int):
    x, weight = operands(tokens, rows)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(jax.jit(linear)(x, weight), expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(jax.jit(vocabulary_logits)(x, weight), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("rows", "tokens"), by_default(FORMS, *QUICK))
def test_every_form_has_the_gradients_of_the_product(rows: int, tokens: int):
    x, weight = operands(tokens, rows)
    back = np.random.RandomState(7).randn(tokens, rows).astype(np.float32)
    found = jax.jit(jax.grad(lambda *operands: jnp.vdot(linear(*operands), back), (0, 1)))(x, weight)
    np.testing.assert_allclose(found[0], back @ weight, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found[1], back.T @ x, rtol=0, atol=1e-4)


def test_a_logit_is_a_float32_whatever_the_weight_is():
    x, weight = (jnp.asarray(operand, jnp.bfloat16) for operand in operands(1, 128))
    logits = vocabulary_logits(x, weight)
    assert logits.dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rows", "is_split"), [(128, True), (100, False)])
def test_a_single_token_meets_the_weight_in_parts_on_a_cpu(rows: int, is_split: bool):
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(linear).lower(*operands(1, rows)).compile().as_text() or ""
    assert ("lhs_batch_dims={0}" in compiled) == is_split


def test_a_weight_whose_rows_lie_on_several_devices_stays_whole():
    mesh = AbstractMesh((2,), ("rows",), (AxisType.Explicit,))
    x, weight = (jax.ShapeDtypeStruct(operand.shape, jnp.float32) for operand in operands(1, 128))
    with use_abstract_mesh(mesh):
        spread = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=NamedSharding(mesh, PartitionSpec("rows")))
        out = jax.eval_shape(vocabulary_logits, x, spread)
    assert out.shape == (1, 128)
    assert out.sharding is not None
    assert out.sharding.spec == PartitionSpec(None, "rows")


@pytest.mark.parametrize("tokens", [1, 2])
def test_other_platforms_have_the_plain_product(tokens: int):
    call, shapes = jax.jit(linear), operands(tokens, 128)
    text = {platform: export.export(call, platforms=[platform])(*shapes).mlir_module() for platform in ("cpu", "cuda")}
    plain = (
        f"contracting_dims = [1] x [1], precision = [HIGHEST, HIGHEST] : (tensor<{tokens}x48xf32>, tensor<128x48xf32>)"
    )
    assert plain in text["cuda"]
    assert plain not in text["cpu"]


def test_no_tokens_give_no_rows():
    numbers = np.random.RandomState(0).randint(0, 16, (16, 64)).astype(np.uint8)
    packed = QuantisedWeight(values=pack(numbers, 2), scales=np.ones((16, 2), np.float32))
    wide = numbers.astype(np.float32)
    for weight in (packed, quantise_weight(wide, "int8", 2), wide):
        found = jax.jit(linear)(jnp.zeros((0, 64), jnp.float32), jax.tree.map(jnp.asarray, weight))
        assert found.shape == (0, 16)


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1])
def test_a_layer_of_a_stack_is_the_weight_it_would_be_alone(tokens: int, is_quantised: bool):
    rng = np.random.default_rng(tokens)
    x, stack = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((tokens, 32), (3, 24, 32)))
    weights = quantise_weight(stack, "int8") if is_quantised else stack
    for layer in range(3):
        own = jax.tree.map(lambda leaf, at=layer: leaf[at], weights)
        found = jax.jit(lambda at: linear(x, StackedWeight(weights, at)))(jnp.int32(layer))
        np.testing.assert_array_equal(found, jax.jit(linear)(x, own))
    assert StackedWeight(weights, jnp.int32(0)).shape == (24, 32)
