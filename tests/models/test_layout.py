"""Every layout of the parameters is the same model, and none loses a number."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from flax.serialization import to_state_dict

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.config import LAYOUTS
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError, UnsupportedError
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.layout import lay_out, layout_of, layout_specs
from ferrum_jax.models.quantisation import choose_formats, quantise, quantised_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree, named_leaves, shapes
from ferrum_jax.ops.quantised import quantise_weight
from ferrum_jax.weights import orbax
from tests import tiny
from tests.adapters import ADAPTERS, stacks_of
from tests.tiers import by_default

SAME = 2e-5  # the same sums in another order; logits are of the order of one
MODEL = "qwen2_window"  # biases on q, k and v, and layers with and without a window
CFG = tiny.model_config(MODEL)
TOKENS = jnp.asarray([tiny.prompt(MODEL)])

run = jax.jit(models.forward, static_argnums=2)
other_layouts = pytest.mark.parametrize("layout", LAYOUTS[1:])
either_layout = pytest.mark.parametrize("layout", by_default(LAYOUTS[1:], "scanned"))


@pytest.fixture(scope="module")
def params() -> ParamTree:
    return tiny.tiny_params(tiny.CONFIGS[MODEL])


def test_the_model_has_layers_of_different_windows():
    assert len(set(CFG.layer_windows)) == 2


@pytest.mark.parametrize(("layout", "other"), list(itertools.permutations(LAYOUTS, 2)))
def test_a_conversion_there_and_back_changes_nothing(layout: str, other: str, params: ParamTree):
    start = lay_out(params, CFG, layout)
    there = lay_out(start, CFG, other)
    assert layout_of(there) == other
    tiny.assert_same_tree(lay_out(there, CFG, layout), start)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_specs_of_a_layout_describe_its_leaves(layout: str, params: ParamTree):
    found = {name: leaf.shape for name, leaf in named_leaves(lay_out(params, CFG, layout)).items()}
    specs = named_leaves(layout_specs(family(CFG).param_specs(CFG), CFG, layout))
    assert {name: spec.shape for name, spec in specs.items()} == found
    assert all(len(spec.axes) == len(spec.shape) for spec in specs.values())


def test_a_conversion_is_jittable(params: ParamTree):
    converted = jax.jit(lambda tree: lay_out(tree, CFG, "scanned"))(params)
    tiny.assert_same_tree(converted, lay_out(params, CFG, "scanned"))


def boxed(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: nn.Partitioned(leaf, (None,) * leaf.ndim), tree)


def nnx_state(tree: Any) -> nnx.State:
    """Layers have the integer keys of a module's list."""

    def numbered(own: Any) -> Any:
        if not isinstance(own, dict):
            return nnx.Param(own)
        return {int(key) if key.isdigit() else key: numbered(value) for key, value in own.items()}

    return nnx.State(numbered(to_state_dict(tree)))


def with_tuples(tree: Any) -> Any:
    layers = tree["model"]["layers"]
    return tree | {"model": tree["model"] | {"layers": tuple(layers) if isinstance(layers, list) else layers}}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "layout"),
    by_default(
        itertools.product((freeze, to_state_dict, boxed, nnx_state, with_tuples), ("checkpoint", "scanned")),
        (freeze, "scanned"),
        (to_state_dict, "checkpoint"),
        (boxed, "scanned"),
        (nnx_state, "checkpoint"),
        (with_tuples, "checkpoint"),
    ),
)
def test_any_mappings_lists_and_boxes_are_taken_for_parameters(change: Any, layout: str, params: ParamTree):
    plain, tokens = lay_out(params, CFG, layout), TOKENS[:, :3]
    given: Any = change(plain)
    assert layout_of(given) == layout
    tiny.assert_same_tree(lay_out(given, CFG, "fused"), lay_out(params, CFG, "fused"))
    expected = models.log_probs(plain, tokens, CFG)
    np.testing.assert_array_equal(models.log_probs(given, tokens, CFG), expected)
    np.testing.assert_allclose(jax.jit(lambda p: models.log_probs(p, tokens, CFG))(given), expected, rtol=0, atol=SAME)
    states = jnp.ones((1, CFG.hidden_size))
    np.testing.assert_array_equal(models.logits_of(given, states, CFG), models.logits_of(plain, states, CFG))
    options: Any = {"lengths": jnp.array([3]), "seeds": jnp.zeros(1, jnp.uint32), "cfg": CFG, "max_tokens": 1}
    found, wanted = (ferrum_jax.generate_fn(p, None, tokens, **options)[0].token_ids for p in (given, plain))
    np.testing.assert_array_equal(found, wanted)


def test_an_unknown_layout_is_refused(params: ParamTree):
    with pytest.raises(InvalidParameterError, match="'stacked', expected checkpoint, fused or scanned"):
        lay_out(params, CFG, "stacked")
    with pytest.raises(ConfigError, match="'stacked', expected checkpoint, fused or scanned"):
        ferrum_jax.EngineConfig(layout="stacked")


@pytest.mark.parametrize("name", by_default(tiny.CONFIGS, MODEL))
def test_every_model_gives_the_same_logits_in_every_layout(name: str):
    params, cfg = tiny.tiny_params(tiny.CONFIGS[name]), tiny.model_config(name)
    tokens = jnp.asarray([tiny.prompt(name)])
    expected = run(params, tokens, cfg)
    layers = params["model"]["layers"]
    for layout in LAYOUTS[1:]:
        if layout == "scanned" and any(jax.tree.structure(layer) != jax.tree.structure(layers[0]) for layer in layers):
            with pytest.raises(UnsupportedError, match="have different parameters"):
                lay_out(params, cfg, layout)
            continue
        found = run(lay_out(params, cfg, layout), tokens, cfg)
        np.testing.assert_allclose(found, expected, rtol=0, atol=SAME, err_msg=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vectors_may_have_a_wider_dtype_than_matrices(layout: str, params: ParamTree):
    """Norms and biases in float32 beside bfloat16, as mixed precision keeps them: the stream stays bfloat16."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    mixed = jax.tree.map(lambda leaf: leaf if leaf.ndim > 1 else leaf.astype(jnp.float32), narrow)
    point = models.Point("resid_post", 1)
    found, states = models.run(lay_out(mixed, CFG, layout), TOKENS, CFG, capture=[point])
    expected = run(narrow, TOKENS, CFG)
    assert states[point].dtype == jnp.bfloat16
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * float(jnp.abs(expected).max()))


@pytest.mark.slow
@other_layouts
def test_rows_keep_their_adapters_in_every_layout(layout: str, tmp_path: Path):
    name = "llama3"
    params, cfg = tiny.tiny_params(tiny.CONFIGS[name]), tiny.model_config(name)
    stacks = stacks_of(tmp_path, ["every", None, "queries_and_values"], LoraSpec(max_loras=3, max_rank=64))
    tokens, rows = jnp.asarray([tiny.prompt(name)] * 3), jnp.asarray([2, -1, 0])
    assert set(ADAPTERS) >= {"every", "queries_and_values"}
    expected = run(params, tokens, cfg, loras=stacks, adapters=rows)
    found = run(lay_out(params, cfg, layout), tokens, cfg, loras=stacks, adapters=rows)
    np.testing.assert_allclose(found, expected, rtol=0, atol=SAME)
    assert np.abs(expected[0] - expected[1]).max() > 100 * SAME


@pytest.mark.slow
@other_layouts
def test_gradients_are_the_same_in_every_layout(layout: str, params: ParamTree):
    def loss(tree: ParamTree) -> jax.Array:
        return jax.nn.logsumexp(models.forward(lay_out(tree, CFG, layout), TOKENS[:, :12], CFG), axis=-1).mean()

    def plain(tree: ParamTree) -> jax.Array:
        return jax.nn.logsumexp(models.forward(tree, TOKENS[:, :12], CFG), axis=-1).mean()

    found, expected = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(plain))(params)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=SAME), found, expected)


@pytest.mark.slow
@other_layouts
def test_an_engine_serves_the_same_in_every_layout_and_writes_its_kv_in_place(layout: str, tmp_path: Path):
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS[MODEL], shards=2)
    engine = ferrum_jax.EngineConfig(
        max_seqs=3,
        kv_capacity=160,
        block_size=8,
        decode_rows=(3,),
        query_blocks=(1,),
        block_tokens=16,
        multi_step_tokens=3,
    )
    prompt = tiny.prompt(MODEL)
    answers = []
    for chosen in ("checkpoint", layout):
        with ferrum_jax.load(folder, engine=engine, layout=chosen, progress=False) as model:
            assert layout_of(model.params) == chosen
            rows = [model.prefill(name, prompt[:size]) for name, size in (("a", 40), ("b", 9), ("c", 21))]
            rows += model.decode_batch([("a", 3, 40), ("b", 5, 9), ("c", 1, 21)])
            rows += model.unified_forward([("a", [7], 41, True), ("b", prompt[:11], 10, True)])
            answers.append(np.asarray(rows, np.float32))
            for name, step in model.compile_stats()["steps"].items():
                if not name.startswith(("select", "gather")):
                    assert step["alias_bytes"] >= model.plan.cache.num_bytes, name
    np.testing.assert_allclose(answers[1], answers[0], rtol=0, atol=SAME)


@pytest.mark.slow
@either_layout
@pytest.mark.parametrize("dtype", by_default([None, "int8"], "int8"))
def test_an_orbax_checkpoint_is_laid_out_without_compiling(
    layout: str, dtype: str | None, params: ParamTree, tmp_path: Path, compiles: list[str]
):
    saved = params if dtype is None else quantise(params, CFG, dtype)
    orbax.save(tmp_path / "checkpoint", saved, CFG)
    expected = lay_out(saved, CFG, layout)
    compiles.clear()
    found, _ = ferrum_jax.load_params(tmp_path / "checkpoint", layout=layout)
    assert compiles == []
    tiny.assert_same_tree(found, expected)


@either_layout
def test_parts_of_different_kinds_are_not_joined(layout: str, params: ParamTree, tmp_path: Path):
    mixed = jax.tree.map(lambda leaf: leaf, params)
    attention = mixed["model"]["layers"][1]["self_attn"]
    attention["q_proj"]["weight"] = quantise_weight(attention["q_proj"]["weight"], "int8")
    with pytest.raises(UnsupportedError, match=r"self_attn\.q_proj\.weight is kept in another form"):
        lay_out(mixed, CFG, layout)
    orbax.save(tmp_path / "checkpoint", mixed, CFG)
    with pytest.raises(UnsupportedError, match=r"only the layout 'checkpoint'"):
        ferrum_jax.load(tmp_path / "checkpoint", layout=layout, max_seqs=1, kv_capacity=32, progress=False)
    found, _ = ferrum_jax.load_params(tmp_path / "checkpoint")
    tiny.assert_same_tree(found, mixed)


def test_scanned_temporaries_hold_no_copy_of_the_layers(params: ParamTree):
    """A loop that copied its stacked weights, or the KV, would take as much again."""
    scanned = lay_out(params, CFG, "scanned")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(scanned["model"]["layers"]))
    memory = run.lower(scanned, TOKENS[:, :4], CFG).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < weights


@pytest.mark.slow
@other_layouts
@pytest.mark.parametrize("group_size", [None, 6])
def test_quantised_weights_are_laid_out_like_others(layout: str, group_size: int | None, params: ParamTree):
    quantised = quantise(params, CFG, "int8", group_size=group_size)
    found = lay_out(quantised, CFG, layout)
    tiny.assert_same_tree(lay_out(found, CFG, "checkpoint"), quantised)
    tiny.assert_same_tree(quantise(lay_out(params, CFG, layout), CFG, "int8", group_size=group_size), found)
    np.testing.assert_allclose(run(found, TOKENS, CFG), run(quantised, TOKENS, CFG), rtol=0, atol=SAME)


@either_layout
def test_a_folder_is_quantised_and_laid_out_while_it_is_read(layout: str, params: ParamTree, tmp_path: Path):
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS[MODEL], shards=2)
    found, cfg = ferrum_jax.load_params(folder, layout=layout, quantize="int8")
    tiny.assert_same_tree(found, lay_out(quantise(params, CFG, "int8"), CFG, layout))
    specs = layout_specs(quantised_specs(family(cfg).param_specs(cfg), choose_formats(cfg, "int8")), cfg, layout)
    wanted = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes(specs, "float32"))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) == wanted
    with ferrum_jax.load(folder, layout=layout, quantize="int8", max_seqs=1, kv_capacity=32, progress=False) as model:
        expected = run(found, TOKENS[:, :16], cfg)[0, -1]
        np.testing.assert_allclose(model.prefill("a", tiny.prompt(MODEL)[:16]), expected, rtol=0, atol=SAME)
