"""`from_params`: a runner for parameters that are on a device already."""

import dataclasses
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import ferrum_jax
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError, ResourceExhaustedError
from ferrum_jax.models.layout import SCANNED, lay_out
from ferrum_jax.models.specs import ParamTree, named_leaves
from ferrum_jax.ops.quantised import QuantisedWeight
from tests.executor.conftest import CFG, ENGINE, Oracle

TOKENS = [5, 30, 2, 2, 17]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["checkpoint", SCANNED])
def test_parameters_are_served_as_they_are(layout: str, params: ParamTree, oracle: Oracle):
    given = lay_out(params, CFG, layout)
    with ferrum_jax.from_params(given, CFG, engine=ENGINE, max_seqs=2, decode_rows=(2,), query_blocks=(1,)) as runner:
        assert runner.params is given
        assert runner.plan.max_seqs == 2
        np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', these parameters have 'float32'"),
        ({"layout": "fused"}, "layout is 'fused', these parameters have 'checkpoint'"),
        ({"quantize": "int8"}, "which belongs to `load`"),
        ({"max_seqs": 0}, "max_seqs"),
    ],
)
def test_settings_that_contradict_the_parameters_are_refused(settings: dict, message: str, params: ParamTree):
    with pytest.raises(ConfigError, match=message):
        ferrum_jax.from_params(params, CFG, engine=dataclasses.replace(ENGINE, dtype=None), **settings)


def test_activations_in_bfloat16_are_those_of_the_parameters(params: ParamTree):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    with ferrum_jax.from_params(half, CFG, max_seqs=1, kv_capacity=16) as runner:
        assert runner.plan.cache.dtype == "bfloat16"


def test_weights_that_cannot_be_moved_are_refused(params: ParamTree, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    with ferrum_jax.from_params(params, CFG, max_seqs=1, kv_capacity=16) as runner:
        monkeypatch.setattr("ferrum_jax.executor.device.brought_to", fail)
        with pytest.raises(ResourceExhaustedError, match=r"cannot be moved .*injected"):
            runner.set_params(params)
        assert runner.params is params
    monkeypatch.setattr("ferrum_jax.executor.from_params.brought_to", fail)
    with pytest.raises(ResourceExhaustedError, match=r"cannot be moved .*injected"):
        ferrum_jax.from_params(params, CFG, max_seqs=1, kv_capacity=16)


def test_a_head_of_another_dtype_does_not_say_how_a_model_computes(params: ParamTree):
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    mixed = half | {"lm_head": params["model"]["embed_tokens"]}
    cfg = dataclasses.replace(CFG, tie_word_embeddings=False)
    with ferrum_jax.from_params(mixed, cfg, max_seqs=1, kv_capacity=16) as runner:
        assert runner.describe()["dtype"] == "bfloat16"
        wanted = ferrum_jax.models.forward(mixed, jnp.array([[1, 2, 3]]), cfg)[0, -1]
        np.testing.assert_allclose(runner.prefill("a", [1, 2, 3]), wanted, rtol=0, atol=0.1)


def test_what_is_no_tree_of_parameters_is_refused(params: ParamTree):
    deleted = jax.tree.map(jnp.copy, params)
    deleted["model"]["norm"]["weight"].delete()
    wrong = {**params, "model": {**params["model"], "norm": {"weight": jnp.zeros(CFG.hidden_size, jnp.int32)}}}
    cases = {
        "a parameter was deleted": deleted,
        "there are no parameters": {},
        "not the parameters of this": {"model": {"norm": params["model"]["norm"]}},
        "model.norm.weight is int32, expected floating-point": wrong,
    }
    for message, tree in cases.items():
        with pytest.raises(InvalidParameterError, match=message):
            ferrum_jax.from_params(tree, CFG, engine=ENGINE)


def test_trees_of_other_forms_are_told_what_they_lack_and_what_converts_them(params: ParamTree):
    state: Any = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    cases = (
        (named_leaves(params), "not nested dicts and lists"),
        (state, "model.embed_tokens.weight is missing.*there are bias, kernel"),
    )
    for tree, missing in cases:
        with pytest.raises(InvalidParameterError, match=missing) as caught:
            ferrum_jax.from_params(tree, CFG, engine=ENGINE)
        assert "from_tree" in str(caught.value)
        assert "from_hf_names" in str(caught.value)


def test_a_configuration_of_hugging_face_is_refused_and_its_conversion_named(params: ParamTree):
    config: Any = {"model_type": "qwen3"}
    with pytest.raises(InvalidParameterError, match="cfg is a dict, expected a ModelConfig"):
        ferrum_jax.from_params(params, config, engine=ENGINE)


def test_an_engine_that_is_no_configuration_is_refused(params: ParamTree):
    with pytest.raises(ConfigError, match=r"engine is .* expected an EngineConfig"):
        ferrum_jax.from_params(params, CFG, engine={"max_seqs": 2})  # pyright: ignore[reportArgumentType]


def test_steps_are_compiled_so_jax_disable_jit_is_refused_by_name(params: ParamTree):
    says = "jax_disable_jit is True, expected False"
    with jax.disable_jit(), pytest.raises(ConfigError, match=says):
        ferrum_jax.from_params(params, CFG, engine=ENGINE)
    with ferrum_jax.from_params(params, CFG, engine=ENGINE) as runner:
        with jax.disable_jit(), pytest.raises(ConfigError, match=says):
            runner.prefill("a", TOKENS)
        assert runner.kv_len("a") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: {**tree, "model": {**tree["model"], "norm": {}}}, "model.norm.weight is missing"),
        (lambda tree: {**tree, "head": {"weight": tree["model"]["norm"]["weight"]}}, "head.weight is unknown"),
        (
            lambda tree: {**tree, "model": {**tree["model"], "norm": {"weight": jnp.zeros(3)}}},
            rf"model.norm.weight has shape \[3\], expected \[{CFG.hidden_size}\]",
        ),
    ],
)
def test_parameters_of_another_model_are_refused(change, message: str, params: ParamTree):
    with pytest.raises(InvalidParameterError, match=f"not the parameters of this {CFG.model_type}: {message}"):
        ferrum_jax.from_params(change(params), CFG, engine=ENGINE)


ROWS = (CFG.num_attention_heads * CFG.head_dim, CFG.hidden_size)  # of the weight that is changed


def quantised(
    values: str, scales: Any = None, offsets: Any = None, columns: int = ROWS[1], high: Any = None
) -> QuantisedWeight:
    """Draws nothing: `scales` and `offsets` are shapes, or arrays."""
    parts = (jnp.ones(part) if isinstance(part, tuple) else part for part in (scales, offsets))
    return QuantisedWeight(jnp.zeros((ROWS[0], columns), values), *parts, high=high)


def counted(**changed: Any) -> QuantisedWeight:
    """Scales that count two units a row."""
    whole = QuantisedWeight(jnp.ones((ROWS[0], 8), jnp.int8), jnp.ones((ROWS[0], 2), jnp.float16))
    return dataclasses.replace(whole, **changed)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (quantised("int8", (ROWS[0],)), rf"has {ROWS[0]} groups, into which {ROWS[1]} columns cannot be divided"),
        (quantised("int8", (ROWS[0] + 1, 1)), rf", 1\], expected float32\[{ROWS[0]}, 1\]"),
        (quantised("int8", (ROWS[0], 5)), rf"has 5 groups, into which {ROWS[1]} columns .* equal groups"),
        (quantised("int8", (ROWS[0], 0)), r"weight: groups are 0, expected"),
        (quantised("int8", jnp.float32(1)), r"weight\.scales is one number"),
        (quantised("uint8", (ROWS[0], ROWS[1] // 3), columns=ROWS[1] // 2), r"expected groups of an even size"),
        (quantised("int8", (ROWS[0], 1), (ROWS[0], 2)), r"offsets is float32.*, 2\], expected float32.*, 1\]"),
        (quantised("int8", jnp.ones((ROWS[0], 1), jnp.int8)), r"weight: scales are 'int8', expected float32 or"),
        (quantised("int8"), r"weight\.scales is missing"),
        (quantised("uint8", columns=ROWS[1] // 2), r"weight\.scales is missing"),
        (quantised("int8", jnp.ones((ROWS[0], 1), jnp.uint8)), r"weight: scales are 'uint8', expected float32 or"),
        (quantised("uint8", jnp.ones((ROWS[0], 2), jnp.uint8), (ROWS[0], 2), ROWS[1] // 2), r"offsets are 'float32'"),
        (quantised("bfloat16", (ROWS[0], 1)), r"weight\.scales is unknown"),
        (quantised("int32", (ROWS[0], 1)), r"weight: weights are kept in int8 or .*, not 'int32'"),
        (quantised("uint8", (ROWS[0], 1), columns=ROWS[1] // 2, high=jnp.ones(1)), r"weight\.high is float32\[1\], ex"),
        (quantised("int8", (ROWS[0], 1), high=jnp.ones((ROWS[0], ROWS[1] // 8), jnp.uint8)), r"high is unknown"),
        (quantised("bfloat16", high=jnp.ones(1, jnp.uint8)), r"weight\.high is unknown"),
        (quantised("int8", counted(high=jnp.ones(1, jnp.uint8))), r"weight\.scales\.high is unknown"),
        (quantised("float8_e4m3fn", counted()), r"weight: scales of values in float8_e4m3fn are quantised"),
        (quantised("int8", (ROWS[0], 8), counted(offsets=jnp.ones(1))), r"offsets of 8 groups are quantised as"),
        (quantised("int8", counted(values=jnp.ones((ROWS[0], 8)))), r"weight: weights are kept in .*, not 'float32'"),
        (quantised("int8", counted(scales=None)), r"weight\.scales\.scales is missing"),
        (quantised("int8", counted(scales=jnp.ones((ROWS[0], 3)))), r"weight: scales of 8 groups are quantised as"),
        (quantised("int8", counted(scales=jnp.float32(1))), r"weight\.scales\.scales is one number"),
        (quantised("int8", counted(values=jnp.int8(1))), r"weight\.scales\.values is one number"),
        (quantised("int8", jax.tree.map(lambda leaf: leaf[1:], counted())), r"\.scales\.values is int8.*, expected"),
        (QuantisedWeight(jnp.int8(1)), r"weight\.values is one number, expected the matrix"),
        (QuantisedWeight(cast(Any, None), jnp.ones((ROWS[0], 1))), r"weight\.values is missing, expected the matrix"),
    ],
)  # fmt: skip
def test_quantised_weights_whose_parts_do_not_belong_together_are_refused(
    weight: QuantisedWeight, message: str, params: ParamTree
):
    tree = jax.tree.map(lambda leaf: leaf, params)
    tree["model"]["layers"][0]["self_attn"]["q_proj"]["weight"] = weight
    with pytest.raises(InvalidParameterError, match=message):
        ferrum_jax.from_params(tree, CFG, engine=ENGINE)


def test_a_norm_that_is_quantised_is_refused(params: ParamTree):
    norm = QuantisedWeight(jnp.zeros(CFG.hidden_size, jnp.int8), jnp.ones(1))
    tree = {**params, "model": {**params["model"], "norm": {"weight": norm}}}
    for layout in ("checkpoint", SCANNED):
        with pytest.raises(
            InvalidParameterError, match=r"model\.norm\.weight is quantised, which only matrices can be"
        ):
            ferrum_jax.from_params(lay_out(tree, CFG, layout), CFG, engine=ENGINE)


def test_steps_are_kept_where_asked_and_serve_other_weights(
    tmp_path: Path, params: ParamTree, oracle: Oracle, compiles: list[str]
):
    few = dataclasses.replace(ENGINE, max_seqs=2, decode_rows=(2,), query_blocks=(1,))
    with ferrum_jax.from_params(params, CFG, engine=few, artifacts=tmp_path / "kept") as runner:
        expected = runner.prefill("a", TOKENS), runner.decode("a", 3, 5)
    assert list((tmp_path / "kept").rglob("*.step"))
    other = jax.tree.map(lambda leaf: leaf * 1.5, params)
    jax.block_until_ready(other)
    compiles.clear()
    for tree in (params, other):
        with ferrum_jax.from_params(tree, CFG, engine=few, artifacts=str(tmp_path / "kept"), strict=True) as runner:
            found = runner.prefill("a", TOKENS), runner.decode("a", 3, 5)
            assert runner.compile_stats()["compiled"] == 0
        assert compiles == []
        assert np.array_equal(found, expected) == (tree is params)
    with ferrum_jax.from_params(params, CFG, engine=few) as runner:
        assert runner.artifacts is None


def test_steps_kept_for_other_slots_are_not_taken(tmp_path: Path, params: ParamTree):
    blocks = dataclasses.replace(ENGINE, kv_blocks=16, decode_rows=(1,), query_blocks=(1,), artifacts=str(tmp_path))
    found = []
    for slots in (2, 3):
        engine = dataclasses.replace(blocks, max_seqs=slots)
        with ferrum_jax.from_params(params, CFG, engine=engine) as runner:
            found.append((runner.prefill("a", TOKENS), runner.decode("a", 3, 5)))
    np.testing.assert_array_equal(*found)


def turned(tree: Any) -> Any:
    """The same mappings, in another order."""
    if isinstance(tree, dict):
        return OrderedDict((name, turned(tree[name])) for name in sorted(tree, reverse=True))
    return [turned(one) for one in tree] if isinstance(tree, list) else tree


def test_parameters_go_by_their_names_in_whichever_order_or_box_they_come(
    params: ParamTree, oracle: Oracle, tmp_path: Path
):
    other = jax.tree.map(lambda leaf: leaf + 0, turned(params))
    boxed = jax.tree.map(lambda leaf: nn.Partitioned(leaf, (None,) * leaf.ndim), params)
    how: dict[str, Any] = {"engine": ENGINE, "max_seqs": 1, "decode_rows": (1,), "query_blocks": (1,)}
    for given in (params, other, boxed):
        with ferrum_jax.from_params(given, CFG, artifacts=tmp_path, **how) as runner:
            np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)
            runner.release("a")
            runner.set_params(turned(params))
            np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)


@pytest.mark.devices
def test_parameters_on_a_mesh_go_by_their_names_too(params: ParamTree, oracle: Oracle):
    how: dict[str, Any] = {"engine": ENGINE, "max_seqs": 1, "decode_rows": (1,), "query_blocks": (1,)}
    with ferrum_jax.from_params(turned(params), CFG, mesh={"model": 2}, **how) as runner:
        runner.set_params(turned(params))
        np.testing.assert_allclose(runner.prefill("a", TOKENS), oracle(TOKENS)[-1], rtol=0, atol=1e-4)
