"""Adapters in the pure forward: PEFT's logits, batches that mix adapters, and what stacks may and may not change."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from ferrum_jax import models
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError
from ferrum_jax.kvcache import state
from ferrum_jax.models import adapters, specs
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.layout import lay_out
from ferrum_jax.models.sequences import checked_adapters
from ferrum_jax.models.specs import ParamTree, named_leaves
from ferrum_jax.ops.batch import Batch, Rows
from tests import tiny
from tests.adapters import ADAPTERS, LENGTH, prompt, stacks_of

TOLERANCE = 1e-4  # float32 sums in another order, over three layers; logits are of the order of one
SAME = 2e-5  # as in test_pure.py: the same sums in another order
REFERENCES = Path(__file__).parents[1] / "references" / "adapters.npz"

MODEL = "llama3"
CFG = tiny.model_config(MODEL)
FIVE = ["every", "queries_and_values", "rank_stabilised", "patterns", "wide"]
SPEC = LoraSpec(max_loras=6, max_rank=64)
MIXED = [0, 1, 2, 3, 4, -1, 6, 5]  # -1 and 6 are none; nothing was installed in row 5

run = jax.jit(models.forward, static_argnums=2)
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def references() -> dict[str, Logits]:
    with np.load(REFERENCES) as file:
        return dict(file)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> ParamTree:
    return stacks_of(tmp_path_factory.mktemp("adapters"), [*FIVE, None], SPEC)


@pytest.fixture(scope="module")
def params() -> ParamTree:
    return tiny.tiny_params(tiny.CONFIGS[MODEL])


@pytest.fixture(scope="module")
def bare(params: ParamTree) -> Logits:
    return np.asarray(run(params, jnp.asarray([prompt("every")]), CFG)[0])


@pytest.fixture(scope="module")
def mixed(params: ParamTree, stacks: ParamTree) -> Logits:
    """Logits `[8, T, V]` of the same prompt under five adapters and under none, in one forward."""
    tokens = jnp.asarray([prompt("every")] * len(MIXED))
    return np.asarray(run(params, tokens, CFG, loras=stacks, adapters=jnp.asarray(MIXED)))


def test_every_tiny_adapter_has_a_reference(references: dict[str, Logits]):
    assert references.keys() == ADAPTERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_gives_the_logits_of_peft(name: str, references: dict[str, Logits], tmp_path: Path):
    model = ADAPTERS[name][0]
    stacks = stacks_of(tmp_path, [name], LoraSpec(max_loras=1, max_rank=64))
    logits = run(
        tiny.tiny_params(tiny.CONFIGS[model]),
        jnp.asarray([prompt(name)]),
        tiny.model_config(model),
        loras=stacks,
        adapters=jnp.asarray([0]),
    )
    np.testing.assert_allclose(logits[0], references[name], rtol=0, atol=TOLERANCE)


def test_a_batch_of_five_adapters_and_none_equals_peft_and_each_row_alone(
    params: ParamTree, stacks: ParamTree, bare: Logits, mixed: Logits, references: dict[str, Logits]
):
    tokens = jnp.asarray([prompt("every")])
    for index, logits in zip(MIXED, mixed, strict=True):
        expected = references[FIVE[index]] if 0 <= index < len(FIVE) else bare
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
        alone = run(params, tokens, CFG, loras=stacks, adapters=jnp.asarray([index]))
        np.testing.assert_allclose(logits, alone[0], rtol=0, atol=SAME)


def test_adapters_differ_far_more_than_any_tolerance(bare: Logits, references: dict[str, Logits]):
    several = [bare] + [references[name] for name in FIVE]
    distances = [np.abs(one - other).max() for i, one in enumerate(several) for other in several[:i]]
    assert min(distances) > 0.5


def test_rows_of_none_equal_the_forward_without_stacks(bare: Logits, mixed: Logits):
    for logits in mixed[5:]:
        np.testing.assert_allclose(logits, bare, rtol=0, atol=SAME)


@pytest.mark.slow
def test_a_larger_rank_and_more_rows_change_nothing(params: ParamTree, tmp_path: Path):
    tokens, row = jnp.asarray([prompt("every")]), jnp.asarray([0])
    small, large = (
        run(params, tokens, CFG, loras=stacks_of(tmp_path, ["every"], spec), adapters=row)
        for spec in (LoraSpec(max_loras=1, max_rank=4), LoraSpec(max_loras=3, max_rank=17))
    )
    np.testing.assert_allclose(large, small, rtol=0, atol=SAME)


@pytest.mark.slow
def test_what_another_adapter_makes_of_a_row_is_dropped_were_it_infinite(params: ParamTree, stacks: ParamTree):
    def poison(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf.at[1].set(jnp.inf) if specs.name_of(path[-1:]) == "down" else leaf

    poisoned = jax.tree_util.tree_map_with_path(poison, stacks)
    tokens, rows = jnp.asarray([prompt("every")] * 3), jnp.asarray([0, -1, 1])
    healthy = run(params, tokens, CFG, loras=stacks, adapters=rows)
    sick = run(params, tokens, CFG, loras=poisoned, adapters=rows)
    np.testing.assert_array_equal(sick[:2], healthy[:2])
    assert not bool(jnp.isfinite(sick[2]).any())


@pytest.mark.slow
@pytest.mark.parametrize("part", ["down", "up"])
def test_an_adapter_that_no_row_uses_spoils_nothing_were_it_nan(part: str, params: ParamTree, stacks: ParamTree):
    def poison(path: tuple, leaf: jax.Array) -> jax.Array:
        own = specs.name_of(path[-1:])
        return leaf if own != part else leaf.at[1].set(jnp.nan) if own == "down" else leaf.at[:, 1].set(jnp.nan)

    poisoned = jax.tree_util.tree_map_with_path(poison, stacks)
    tokens, rows = jnp.asarray([prompt("every")] * 2), jnp.asarray([0, -1])

    @jax.jit
    def total(params: ParamTree, stacks: ParamTree) -> jax.Array:
        return jnp.sum(models.forward(params, tokens, CFG, loras=stacks, adapters=rows) ** 2)

    healthy, sick = (jax.value_and_grad(total, argnums=(0, 1))(params, one) for one in (stacks, poisoned))
    for a, b in zip(jax.tree.leaves(healthy), jax.tree.leaves(sick), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", ["checkpoint", "fused", "scanned"])
def test_projections_may_be_left_out(layout: str, params: ParamTree, stacks: ParamTree):
    layers = stacks["model"]["layers"]
    some = [{"self_attn": {name: layer["self_attn"][name] for name in ("q_proj", "v_proj")}} for layer in layers[:2]]
    part = {"model": {"layers": [*some, {}]}}
    zeros = named_leaves(jax.tree.map(jnp.zeros_like, stacks))
    full = specs.from_names(adapters.stack_specs(CFG, SPEC), zeros | named_leaves(part))
    tokens, rows = jnp.asarray([prompt("every")] * 2), jnp.asarray([0, 1])
    forward = jax.jit(partial(models.forward, tokens=tokens, cfg=CFG, adapters=rows))
    expected = forward(params, loras=full)
    np.testing.assert_allclose(forward(lay_out(params, CFG, layout), loras=part), expected, rtol=0, atol=SAME)
    np.testing.assert_array_equal(forward(params, loras=named_leaves(full)), expected)  # by name, too
    assert np.abs(expected - forward(params, loras=jax.tree.map(jnp.zeros_like, stacks))).max() > 100 * SAME


@pytest.mark.parametrize("layout", ["checkpoint", "scanned"])
def test_layers_may_have_ranks_of_their_own_and_none(layout: str, params: ParamTree, stacks: ParamTree):
    def part(path: tuple, leaf: jax.Array) -> jax.Array:
        rank = int(specs.name_of(path).split(".")[2])  # that of the layer: 0, 1, 2
        return leaf[:, :rank] if path[-1].key == "down" else leaf[..., :rank]

    def padded(leaf: jax.Array, like: jax.Array) -> jax.Array:
        return jnp.pad(leaf, [(0, to - size) for size, to in zip(leaf.shape, like.shape, strict=True)])

    narrow = jax.tree_util.tree_map_with_path(part, stacks)
    tokens, rows = jnp.asarray([prompt("every")] * 2), jnp.asarray([0, 1])
    forward = jax.jit(partial(models.forward, tokens=tokens, cfg=CFG, adapters=rows))
    expected = forward(params, loras=jax.tree.map(padded, narrow, stacks))
    found = forward(lay_out(params, CFG, layout), loras=narrow)
    np.testing.assert_allclose(found, expected, rtol=0, atol=SAME)
    assert np.abs(found - forward(params, loras=jax.tree.map(jnp.zeros_like, stacks))).max() > 100 * SAME


def rows_of(tokens: NDArray[np.int32], at: int, tables: jax.Array, index: int | None) -> Rows[jax.Array]:
    """Rows whose next tokens start at position `at`, all of one adapter."""
    size, length = tokens.shape
    adapters = None if index is None else jnp.full(size, index, jnp.int32)
    full = jnp.full(size, at, jnp.int32), jnp.full(size, length, jnp.int32)
    return Rows(jnp.asarray(tokens), *full, tables, adapters)


def serve(params: ParamTree, stacks: ParamTree, tokens: NDArray[np.int32], first: int) -> tuple[Logits, Logits]:
    """Runs `first` tokens of a row under "patterns" and of one under none, then a token and a chunk in one step."""
    cache = state.CacheSpec(num_layers=3, num_blocks=6, block_size=8, num_kv_heads=2, head_dim=20, dtype="float32")
    tables = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    forward = jax.jit(models.family(CFG).forward, static_argnames="cfg")
    kv = state.empty(cache)
    for row, index in ((0, 3), (1, None)):
        begin = rows_of(tokens[:, :first], 0, tables[row : row + 1], index)
        _, kv, _ = forward(params, kv, Batch((begin,), jnp.zeros(1, jnp.int32)), cfg=CFG, loras=stacks)
    groups = (
        rows_of(tokens[:, first : first + 1], first, tables[:1], 3),
        rows_of(tokens[:, first:], first, tables[1:], None),
    )
    count = 1 + tokens.shape[1] - first
    logits, _, _ = forward(params, kv, Batch(groups, jnp.arange(count, dtype=jnp.int32)), cfg=CFG, loras=stacks)
    return np.asarray(logits[0]), np.asarray(logits[1:])


@pytest.mark.slow
def test_a_served_mix_of_a_decode_and_a_chunk_equals_the_forward_over_the_whole_prompt(
    params: ParamTree, stacks: ParamTree, bare: Logits, references: dict[str, Logits]
):
    tokens, first = np.array([prompt("every")], np.int32), 13
    decoded, chunk = serve(params, stacks, tokens, first)
    np.testing.assert_allclose(decoded, references["patterns"][first], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(chunk, bare[first:LENGTH], rtol=0, atol=TOLERANCE)


def test_installing_a_row_leaves_the_others_as_they_are(stacks: ParamTree):
    key = jax.random.key(0)
    own = jax.tree.map(lambda leaf: leaf + 1.0, specs.initialise(adapters.adapter_specs(CFG, SPEC), key, "float32"))
    put = jax.jit(adapters.install, donate_argnums=0)
    changed = put(jax.tree.map(jnp.copy, stacks), own, jnp.int32(2))
    for name, leaf in named_leaves(stacks).items():
        axis = 0 if name.endswith("down") else 1
        kept, found = (np.moveaxis(np.asarray(named_leaves(tree)[name]), axis, 0) for tree in (stacks, changed))
        np.testing.assert_array_equal(found[2], named_leaves(own)[name])
        for row in (0, 1, 3, 4, 5):
            np.testing.assert_array_equal(found[row], kept[row])
        assert leaf.shape == named_leaves(changed)[name].shape


def test_installing_copies_no_stack():
    shapes = specs.shapes(adapters.stack_specs(CFG, SPEC), "float32")
    own = specs.shapes(adapters.adapter_specs(CFG, SPEC), "float32")
    index = jax.ShapeDtypeStruct((), jnp.int32)
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes))
    memory = jax.jit(adapters.install, donate_argnums=0).lower(shapes, own, index).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 20


def test_stacks_that_no_row_uses_compute_nothing_more(params: ParamTree, stacks: ParamTree):
    kv = state.empty(
        state.CacheSpec(num_layers=3, num_blocks=1, block_size=8, num_kv_heads=2, head_dim=20, dtype="float32")
    )
    ones = jnp.ones(1, jnp.int32)
    batch = Batch((Rows(jnp.ones((1, 4), jnp.int32), ones, ones, jnp.zeros((1, 1), jnp.int32)),), ones)
    forward = models.family(CFG).forward
    without = jax.make_jaxpr(lambda: forward(params, kv, batch, CFG))()
    assert str(jax.make_jaxpr(lambda: forward(params, kv, batch, CFG, loras=stacks))()) == str(without)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_biases", "qwen3_tied"])
def test_the_gradient_of_tuning_predicts_a_small_step(name: str):
    cfg, spec = tiny.model_config(name), LoraSpec(max_loras=2, max_rank=3)
    model = tiny.tiny_params(tiny.CONFIGS[name])
    tokens = jnp.asarray(tiny.prompt(name)[:39]).reshape(3, 13)
    loras = specs.map_specs(
        lambda path, leaf: jnp.asarray(0.1 * tiny.seeded_tensor(1, path, leaf.shape)), adapters.stack_specs(cfg, spec)
    )

    def log_probability(loras: ParamTree) -> jax.Array:
        logits = models.forward(model, tokens, cfg, loras=loras, adapters=jnp.asarray([1, -1, 1]))[:, :-1]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).sum()

    loss = jax.jit(log_probability)
    gradient = jax.jit(jax.grad(log_probability))(loras)
    for path, leaf in named_leaves(gradient).items():
        rows = np.moveaxis(np.asarray(leaf), 0 if path.endswith("down") else 1, 0)
        assert np.isfinite(rows).all()
        assert np.abs(rows[1]).max() > 0, path
        assert not rows[0].any(), "an adapter that no row uses has an influence"
    length = 1e-3 / sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(gradient)) ** 0.5
    ahead, behind = (jax.tree.map(lambda p, g, s=s: p + s * length * g, loras, gradient) for s in (1.0, -1.0))
    # Central differences of float32 sums near 150: their rounding is about 3e-5 beside a step of about 1e-2.
    np.testing.assert_allclose(float(loss(ahead) - loss(behind)), 2 * 1e-3 * (1e-3 / length), rtol=2e-2)


@pytest.mark.slow
def test_a_bfloat16_model_takes_bfloat16_adapters(stacks: ParamTree, bare: Logits, references: dict[str, Logits]):
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (tiny.tiny_params(tiny.CONFIGS[MODEL]), stacks))
    tokens = jnp.asarray([prompt("every")])
    logits = run(narrow[0], tokens, CFG, loras=narrow[1], adapters=jnp.asarray([0]))
    assert logits.dtype == jnp.float32
    missed, moved = (np.sqrt(np.mean((other - references["every"]) ** 2)) for other in (np.asarray(logits[0]), bare))
    assert missed < moved / 10, "eight bits cost far less than the adapter changes"


def test_stacks_have_the_paths_of_the_parameters_and_their_axes():
    weights = named_leaves(models.family(CFG).param_specs(CFG))
    for name, stack in named_leaves(adapters.stack_specs(CFG, SPEC)).items():
        projection, half = name.rsplit(".", 1)
        weight = weights[f"{projection}.weight"]
        if half == "down":
            assert (stack.shape, stack.axes[2], stack.init) == ((6, 64, weight.shape[1]), weight.axes[1], "normal")
        else:
            assert (stack.shape, stack.axes[0], stack.init) == ((weight.shape[0], 6, 64), weight.axes[0], "zeros")


def test_stacks_and_adapters_go_together(params: ParamTree, stacks: ParamTree):
    tokens = jnp.asarray([prompt("every")])
    with pytest.raises(InvalidParameterError, match="only one of them"):
        models.forward(params, tokens, CFG, loras=stacks)
    with pytest.raises(InvalidParameterError, match="only one of them"):
        models.forward(params, tokens, CFG, adapters=jnp.asarray([0]))
    ones = jnp.ones(1, jnp.int32)
    rows = Rows(jnp.ones((1, 1), jnp.int32), ones, ones, jnp.zeros((1, 1), jnp.int32), adapters=ones)
    cache = state.CacheSpec(num_layers=3, num_blocks=1, block_size=8, num_kv_heads=2, head_dim=20, dtype="float32")
    with pytest.raises(InvalidParameterError, match="no stacks"):
        models.family(CFG).forward(params, state.empty(cache), Batch((rows,), ones), CFG)


def by_key(stacks: ParamTree) -> ParamTree:
    return {"model": {"layers": {str(at): layer for at, layer in enumerate(stacks["model"]["layers"])}}}


def test_layers_of_stacks_may_be_keyed_by_their_numbers(params: ParamTree, stacks: ParamTree):
    run = partial(models.forward, params, jnp.asarray([prompt("every")]), CFG, adapters=jnp.asarray([0]))
    np.testing.assert_array_equal(run(loras=by_key(stacks)), run(loras=stacks))


@pytest.mark.parametrize("index", [2**32, -(2**32), 2**63 - 1])
def test_an_index_beyond_32_bits_means_no_adapter(index: int, stacks: ParamTree):
    with jax.enable_x64(True):
        _, found = checked_adapters(stacks, jnp.asarray([index, 1]), CFG, 2)
    assert found is not None
    assert found.dtype == jnp.int32
    assert found.tolist() == [-1, 1]


def changed_up(stacks: ParamTree, change: Callable[[jax.Array], jax.Array]) -> ParamTree:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: change(leaf) if path[-1].key == "up" else leaf, stacks)


def without_a_half(stacks: ParamTree) -> ParamTree:
    copy = jax.tree.map(lambda leaf: leaf, stacks)
    del copy["model"]["layers"][0]["self_attn"]["q_proj"]["up"]
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stacks: changed_up(stacks, lambda up: up.transpose(1, 0, 2)), r"q_proj\.up has shape .*, expected"),
        (lambda stacks: changed_up(stacks, lambda up: up[:1]), r"q_proj\.up has shape \[1, "),
        (lambda stacks: changed_up(stacks, lambda up: up[..., 1:]), r"_proj\.up has shape .*, expected"),
        (lambda stacks: {"model": {"layers": stacks["model"]["layers"][1:]}}, r"layers\.2\.\S+ is missing"),
        (lambda stacks: {}, r"_proj\.down is missing"),
        (without_a_half, r"0\.self_attn\.q_proj\.up is missing"),
        (lambda stacks: {"model": {"layers": [{}] * 3}}, r"_proj\.down is missing"),
        (lambda stacks: {"foo": {"down": jnp.ones((1, 1, 1))}}, r"_proj\.down is missing"),
        (lambda stacks: {"model": [{"down": jnp.ones((1, 1, 1))}]}, r"_proj\.down is missing"),
        (lambda stacks: changed_up(stacks, lambda up: up.astype(int)), r"_proj\.up has shape .* of int32"),
        (lambda stacks: jax.tree.map(lambda leaf: leaf[0], stacks), r"_proj\.down has shape \[\d+, \d+\], expected"),
    ],
)  # fmt: skip
def test_stacks_that_are_not_the_models_are_refused(change: Any, message: str, params: ParamTree, stacks: ParamTree):
    with pytest.raises(InvalidParameterError, match=message):
        models.forward(params, jnp.asarray([prompt("every")]), CFG, loras=change(stacks), adapters=jnp.asarray([0]))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (jnp.zeros(2, int), r"adapters has shape \[2\], expected \[B\]: \[1\]"),
        (jnp.zeros((1, 1), int), r"adapters has shape \[1, 1\]"),
        (jnp.zeros((), int), r"adapters has shape \[\]"),
        (jnp.asarray([0.5]), "adapters are float32, expected integers"),
    ],
)
def test_adapters_are_one_integer_for_each_row(rows: jax.Array, message: str, params: ParamTree, stacks: ParamTree):
    tokens = jnp.asarray([prompt("every")])
    with pytest.raises(InvalidParameterError, match=message):
        models.forward(params, tokens, CFG, loras=stacks, adapters=rows)


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0), (-1, 8)])
def test_a_size_that_cannot_be_is_refused(sizes: tuple[int, int]):
    with pytest.raises(ConfigError, match="max_lora"):
        LoraSpec(max_loras=sizes[0], max_rank=sizes[1])
