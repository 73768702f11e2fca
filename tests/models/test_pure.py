"""The pure forward under JAX's transformations, with no engine around it."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from ferrum_jax import from_params, generate_fn, kv_spec, models
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract import Sampling
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.models.hooks import Point
from ferrum_jax.models.specs import ParamTree, named_leaves
from ferrum_jax.ops.linear import linear
from ferrum_jax.ops.norm import rms_norm
from ferrum_jax.weights.foreign import from_hf_names, from_tree
from tests import tiny
from tests.tiers import by_default

TOLERANCE = 2e-5  # the same sums in another order; logits are of the order of one
FAMILIES = ("one_layer", "llama31", "mistral", "qwen2_window", "qwen3_tied")

DRAWN = Sampling(temperature=1.0, top_p=0.9)
run = jax.jit(models.forward, static_argnums=2)
every_family = pytest.mark.parametrize("name", by_default(FAMILIES, "one_layer"))


def config_of(name: str) -> dict[str, Any]:
    return tiny.CONFIGS["mistral"] | {"num_hidden_layers": 1} if name == "one_layer" else tiny.CONFIGS[name]


def model_of(name: str) -> tuple[ParamTree, ModelConfig]:
    return tiny.tiny_params(config_of(name)), ModelConfig.from_hf(config_of(name))


def tokens_of(name: str, rows: int = 3, length: int = 13) -> jax.Array:
    return jnp.asarray(tiny.prompt("mistral" if name == "one_layer" else name)[: rows * length], jnp.int32).reshape(
        rows, length
    )


def log_probability(params: ParamTree, tokens: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Sums the log-probabilities of every next token."""
    logits = models.forward(params, tokens, cfg)[:, :-1]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).sum()


@pytest.mark.slow
def test_a_jitted_forward_equals_the_plain_one():
    name = "one_layer"
    (params, cfg), tokens = model_of(name), tokens_of(name)
    plain = models.forward(params, tokens, cfg)
    np.testing.assert_allclose(run(params, tokens, cfg), plain, rtol=0, atol=TOLERANCE)


@every_family
def test_vmap_and_scan_over_prompts_equal_a_batch_and_each_prompt_alone(name: str):
    (params, cfg), tokens = model_of(name), tokens_of(name)

    def one(row: jax.Array) -> jax.Array:
        return models.forward(params, row[None], cfg)[0]

    batch = run(params, tokens, cfg)
    alone = jnp.concatenate([run(params, row[None], cfg) for row in tokens])
    mapped = jax.jit(jax.vmap(one))(tokens)
    _, scanned = jax.lax.scan(lambda _, row: (None, one(row)), None, tokens)
    for other in (alone, mapped, scanned):
        np.testing.assert_allclose(other, batch, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_a_vmap_over_parameters_equals_each_model_alone():
    cfg, tokens = tiny.model_config("llama31"), tokens_of("llama31")
    several = [tiny.tiny_params(tiny.CONFIGS["llama31"], seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    mapped = jax.jit(jax.vmap(lambda params: models.forward(params, tokens, cfg)))(stacked)
    alone = jnp.stack([run(params, tokens, cfg) for params in several])
    np.testing.assert_allclose(mapped, alone, rtol=0, atol=TOLERANCE)


@every_family
def test_the_gradient_predicts_a_small_step(name: str):
    (params, cfg), tokens = model_of(name), tokens_of(name, rows=1)
    loss = jax.jit(lambda params: log_probability(params, tokens, cfg))
    gradient = jax.jit(jax.grad(loss))(params)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient)), "a parameter has no influence"
    length = 1e-3 / sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(gradient)) ** 0.5
    ahead, behind = (jax.tree.map(lambda p, g, s=s: p + s * length * g, params, gradient) for s in (1.0, -1.0))
    predicted = 2 * 1e-3 * (1e-3 / length)
    # Central differences of float32 sums near 50: their rounding is about 1e-5 beside a step of about 1e-2.
    np.testing.assert_allclose(float(loss(ahead) - loss(behind)), predicted, rtol=2e-2)


@pytest.mark.slow
def test_gradients_per_example_by_vmap_sum_to_the_gradient_of_the_batch():
    params, cfg, tokens = (
        tiny.tiny_params(tiny.CONFIGS["qwen3_tied"]),
        tiny.model_config("qwen3_tied"),
        tokens_of("qwen3"),
    )
    gradient: Callable[[ParamTree, jax.Array], ParamTree] = jax.grad(lambda p, t: log_probability(p, t, cfg))
    each = jax.jit(jax.vmap(lambda row: gradient(params, row[None])))(tokens)
    whole = named_leaves(jax.jit(gradient)(params, tokens))
    for name, leaf in named_leaves(each).items():
        scale = float(jnp.abs(whole[name]).max())
        np.testing.assert_allclose(leaf.sum(axis=0), whole[name], rtol=0, atol=1e-4 * scale, err_msg=name)


@pytest.mark.usefixtures("unchecked")  # whose annotations name JAX's arrays
@pytest.mark.parametrize("quantised", [False, True])
def test_parameters_in_numpys_arrays_may_be_closed_over(quantised: bool):
    params, cfg = model_of("one_layer")
    if quantised:
        params = models.quantise(params, cfg, "int8")
    expected = run(params, tokens := tokens_of("one_layer"), cfg)
    of_numpy: Any = jax.tree.map(np.asarray, params)
    found = jax.jit(lambda tokens: models.forward(of_numpy, tokens, cfg))(tokens)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_given_embeddings_take_the_place_of_the_tokens_own():
    name = "one_layer"
    (params, cfg), tokens = model_of(name), tokens_of(name)
    embeddings = params["model"]["embed_tokens"]["weight"][tokens]
    other = run(params, jnp.zeros_like(tokens), cfg, inputs_embeds=embeddings)
    np.testing.assert_allclose(other, run(params, tokens, cfg), rtol=0, atol=TOLERANCE)


def test_given_embeddings_are_rounded_to_the_dtype_of_the_models_own():
    (params, cfg), tokens = model_of("one_layer"), tokens_of("one_layer")
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    embeddings = narrow["model"]["embed_tokens"]["weight"][tokens]
    capture = [("resid_post", 0)]
    expected, _ = models.run(narrow, tokens, cfg, capture=capture)
    found, captured = models.run(narrow, tokens, cfg, capture=capture, inputs_embeds=embeddings.astype(jnp.float32))
    assert captured[Point("resid_post", 0)].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, expected)


def test_parameters_of_another_shape_are_refused_by_name():
    (params, cfg), tokens = model_of("one_layer"), tokens_of("one_layer")
    wrong = params | {"model": params["model"] | {"norm": {"weight": jnp.ones(5)}}}
    with pytest.raises(InvalidParameterError, match=r"model\.norm\.weight has shape \[5\], expected \[\d+\]"):
        models.forward(wrong, tokens, cfg)
    wrong = jax.tree.map(lambda leaf: leaf.astype(jnp.complex64 if leaf.ndim > 1 else leaf.dtype), params)
    with pytest.raises(
        InvalidParameterError,
        match=r"_proj\.weight has shape .* of complex64 \(not float",
    ):
        models.forward(wrong, tokens, cfg)


def test_a_later_token_does_not_influence_an_earlier_one():
    name = "one_layer"
    (params, cfg), tokens = model_of(name), tokens_of(name)
    embeddings = params["model"]["embed_tokens"]["weight"][tokens]

    def logit(embeddings: jax.Array) -> jax.Array:
        return models.forward(params, tokens, cfg, inputs_embeds=embeddings)[1, 5].sum()

    influence = jnp.abs(jax.jit(jax.grad(logit))(embeddings)).max(axis=-1) > 0
    assert influence.tolist() == [[row == 1 and position <= 5 for position in range(13)] for row in range(3)]


@pytest.mark.slow
def test_a_window_bounds_what_a_token_can_see():
    config = tiny.CONFIGS["mistral"] | {"sliding_window": 3, "num_hidden_layers": 2}
    cfg, tokens = ModelConfig.from_hf(config), tokens_of("mistral", rows=1)
    params = tiny.tiny_params(config)
    embeddings = params["model"]["embed_tokens"]["weight"][tokens]

    def logit(embeddings: jax.Array) -> jax.Array:
        return models.forward(params, tokens, cfg, inputs_embeds=embeddings)[0, 10].sum()

    influence = jnp.abs(jax.jit(jax.grad(logit))(embeddings)[0]).max(axis=-1) > 0
    reach = cfg.num_hidden_layers * (3 - 1)  # every layer looks back over two more positions
    assert influence.tolist() == [10 - reach <= position <= 10 for position in range(13)]


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("dtype", by_default(["float32", "bfloat16"], "bfloat16"))
def test_drawn_parameters_have_the_shapes_of_a_checkpoint_and_run(name: str, dtype: str):
    cfg = ModelConfig.from_hf(config_of(name))
    params = models.init_params(cfg, jax.random.key(0), dtype)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params).items()}
    assert shapes == {name: tensor.shape for name, tensor in tiny.tensors(config_of(name)).items()}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    logits = run(params, tokens_of(name), cfg)
    assert logits.dtype == jnp.float32
    assert bool(jnp.isfinite(logits).all())


def test_drawn_parameters_depend_on_the_key_alone():
    cfg = tiny.model_config("llama31")
    for dtype in ("int8", "nothing"):
        with pytest.raises(InvalidParameterError, match=f"dtype is '{dtype}', expected float32"):
            models.init_params(cfg, jax.random.key(0), dtype)
    first, again, other = (models.init_params(cfg, jax.random.key(seed)) for seed in (0, 0, 1))
    tiny.assert_same_tree(first, again)
    assert not np.array_equal(first["lm_head"]["weight"], other["lm_head"]["weight"])


def test_a_call_against_the_shapes_of_a_signature_is_refused_while_testing():
    with pytest.raises(jaxtyping.TypeCheckError):
        linear(jnp.ones((3, 4)), jnp.ones((5, 6)))
    with pytest.raises(jaxtyping.TypeCheckError):
        rms_norm(jnp.ones((3, 4)), jnp.ones(5), 1e-5)


def test_tokens_of_no_row_or_no_column_are_refused():
    params, cfg = tiny.tiny_params(tiny.CONFIGS["llama3"]), tiny.model_config("llama3")
    for shape in ((1, 0), (0, 4)):
        with pytest.raises(InvalidParameterError, match=re.escape(f"shape {list(shape)}")):
            models.forward(params, jnp.zeros(shape, jnp.int32), cfg)


def test_a_configuration_is_static_wherever_it_is_an_argument():
    (params, cfg), tokens = model_of("one_layer"), tokens_of("one_layer")
    expected = run(params, tokens, cfg)
    np.testing.assert_array_equal(jax.jit(models.forward)(params, tokens, cfg), expected)
    np.testing.assert_array_equal(jax.jit(models.forward, static_argnames="cfg")(params, tokens, cfg=cfg), expected)
    gradient = jax.jit(jax.grad(log_probability))(params, tokens, cfg)
    for a, b in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(jax.grad(log_probability)(params, tokens, cfg)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)
    assert jax.tree.leaves(cfg) == []


def test_what_is_no_configuration_is_refused_with_what_to_give(unchecked: None):
    params, cfg = model_of("one_layer")
    given: Any = config_of("one_layer")
    tokens, key = jnp.array([[1, 2, 3]]), jax.random.key(0)
    calls: list[Callable[[], object]] = [
        lambda: models.forward(params, tokens, given),
        lambda: models.run(params, tokens, given),
        lambda: models.capture(params, tokens, given, hidden=[0]),
        lambda: models.log_probs(params, tokens, given),
        lambda: models.logits_of(params, jnp.zeros((1, cfg.hidden_size)), given),
        lambda: models.init_params(given, key),
        lambda: kv_spec(params, given, rows=1, positions=4),
        lambda: generate_fn(params, None, tokens, jnp.array([3]), jnp.array([0]), given, max_tokens=2),
        lambda: from_hf_names({}, given),
        lambda: from_tree({}, given, []),
        lambda: from_params(params, given),
    ]
    for call in calls:
        with pytest.raises(InvalidParameterError, match=r"cfg is a dict, expected a ModelConfig: models\.config_from"):
            call()


def test_calls_of_dense_models_outside_jit_compile_nothing_for_other_values(compiles: list[str]):
    params, cfg = model_of("one_layer")
    for seed in range(3):
        tokens = jax.random.randint(jax.random.key(seed), (2, 7), 0, cfg.vocab_size)
        if seed == 2:
            compiles.clear()
        models.forward(params, tokens, cfg)
        models.log_probs(params, tokens, cfg)
        models.log_probs(params, tokens, cfg, temperature=0.5 + seed)
    assert compiles == []


def test_arrays_of_fewer_axes_may_be_broadcast_where_the_callers_code_forbids_it():
    params, cfg = model_of("one_layer")
    tokens, seeds = tokens_of("one_layer"), jnp.arange(3, dtype=jnp.uint32)

    def everything() -> list[Any]:
        gradient = jax.jit(jax.grad(lambda own: models.log_probs(own, tokens, cfg, remat=True).sum()))(params)
        generate = partial(generate_fn, cfg=cfg, max_tokens=2, sampling=DRAWN)
        drawn, _ = jax.jit(generate)(params, None, tokens, jnp.full(3, 13), seeds)
        with from_params(params, cfg, max_seqs=1, kv_capacity=16) as runner:
            logits = models.logits_of(params, jnp.ones((2, cfg.hidden_size)), cfg)
            return [models.forward(params, tokens, cfg), logits, gradient, drawn, runner.prefill("a", [1, 2, 3])]

    expected = everything()
    with jax.numpy_rank_promotion("raise"):
        found = everything()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
