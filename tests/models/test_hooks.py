"""Hook points: what is captured there, and what happens when something else takes its place."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError, UnsupportedError
from ferrum_jax.models import Edit, Point, replace_with
from ferrum_jax.models.hooks import NAMES, check_points, edited
from ferrum_jax.models.layout import SCANNED, lay_out
from tests.tiers import by_default
from tests.tiny import CONFIGS, model_config, prompt, tiny_params

TOLERANCE = 2e-5  # float32 sums in another order
DENSE = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z", "attn_scores", "pattern",
         "mlp_pre", "mlp_pre_linear", "mlp_post")  # fmt: skip
SPARSE = ("router_logits", "expert_indices", "expert_weights")
KINDS = ("gemma2", "phi3", "olmo2", "mixtral", "qwen3_moe", "deepseek3", "gpt_oss")
run = jax.jit(models.run, static_argnames=("cfg", "capture", "attention", "remat"))


def model(name: str):
    return tiny_params(CONFIGS[name]), model_config(name)


def tokens_of(name: str) -> jax.Array:
    return jnp.array(prompt(name)[:26]).reshape(2, -1)


def points_of(cfg: ModelConfig) -> tuple[Point, ...]:
    """Every point that a model has."""
    every = [(name, None) for name in NAMES if not (cfg.latent is not None and name in ("k", "v"))]
    return check_points(every, cfg)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_putting_back_what_was_captured_changes_nothing_and_zeros_change_everything(name: str):
    """At every point of every layer, in one forward and in forwards over a paged KV."""
    params, cfg = model(name)
    tokens, points = tokens_of(name), points_of(cfg)
    plain, captured = run(params, tokens, cfg, capture=points)
    assert set(captured) == set(points)
    paged, again = run(params, tokens, cfg, capture=points, attention="xla")
    close(paged, plain)
    for point in points:
        close(again[point], captured[point])

    @partial(jax.jit, static_argnames="point")
    def replaced(point: Point, value: jax.Array) -> jax.Array:
        return models.forward(params, tokens, cfg, interventions={point: replace_with(value)})

    for point in points:
        if point.layer != 1:
            continue
        close(replaced(point, captured[point]), plain)
        zeros = jnp.zeros_like(captured[point])
        if point.name != "attn_scores":  # zeros where nothing is seen are not -inf, but must stay unseen
            changed = float(jnp.abs(replaced(point, zeros) - plain).max())
            assert changed > 1e-4, point
        else:
            seen = jnp.isfinite(captured[point]).astype(jnp.float32)
            _, uniform = run(params, tokens, cfg, capture=(("pattern", 1),), interventions={point: replace_with(zeros)})
            if cfg.attention_sinks is False:
                close(uniform["pattern", 1], seen / jnp.maximum(seen.sum(-1, keepdims=True), 1.0))


@pytest.mark.parametrize("name", by_default(KINDS, "gemma2"))
def test_captured_arrays_are_what_the_names_say(name: str):
    params, cfg = model(name)
    tokens = tokens_of(name)
    logits, at = run(params, tokens, cfg, capture=points_of(cfg))
    last = cfg.num_hidden_layers - 1
    close(models.logits_of(params, at["resid_post", last], cfg), logits)
    for single in (("resid_post", last), f"blocks.{last}.hook_resid_post"):
        assert list(run(params, tokens, cfg, capture=single)[1]) == [("resid_post", last)]
    for layer in range(cfg.num_hidden_layers):
        close(at["resid_pre", layer] + at["attn_out", layer], at["resid_mid", layer])
        close(at["resid_mid", layer] + at["mlp_out", layer], at["resid_post", layer])
        assert at["z", layer].shape[:3] == at["q", layer].shape[:3] == (*tokens.shape, cfg.num_attention_heads)
        weights, scores = at["pattern", layer], at["attn_scores", layer]
        assert weights.shape == (2, cfg.num_attention_heads, tokens.shape[1], tokens.shape[1])
        assert np.isneginf(scores[:, :, 0, 1:]).all()
        if not cfg.attention_sinks:
            close(jax.nn.softmax(scores, axis=-1), weights)
        if cfg.latent is None:
            values = jnp.repeat(at["v", layer], cfg.num_attention_heads // cfg.num_key_value_heads, axis=2)
            close(jnp.einsum("BNTS,BSNH->BTNH", weights, values), at["z", layer])
    if cfg.experts is not None:
        sparse = [layer for layer, is_sparse in enumerate(cfg.experts.sparse_layers) if is_sparse]
        for layer in sparse:
            ids, logits = np.asarray(at["expert_indices", layer]), at["router_logits", layer]
            assert ids.dtype == np.int32
            assert ids.shape == (*tokens.shape, cfg.experts.num_experts_per_tok) == at["expert_weights", layer].shape
            assert logits.shape[-1] == cfg.experts.num_experts


@pytest.mark.parametrize("name", by_default(("qwen3_moe", "mixtral", "deepseek3", "gpt_oss"), "qwen3_moe"))
def test_replayed_routes_give_the_same_answer_and_other_routes_have_the_routers_own_shares(name: str):
    params, cfg = model(name)
    tokens = tokens_of(name)
    assert cfg.experts is not None
    layer = cfg.experts.sparse_layers.index(True)
    asked = (("expert_indices", layer), ("expert_weights", layer), ("router_logits", layer))
    plain, captured = run(params, tokens, cfg, capture=asked)
    replay = {("expert_indices", layer): replace_with(captured["expert_indices", layer])}
    logits, again = run(params, tokens, cfg, capture=asked, interventions=replay)
    np.testing.assert_array_equal(again["expert_indices", layer], captured["expert_indices", layer])
    close(again["expert_weights", layer], captured["expert_weights", layer])
    close(logits, plain)
    others = (captured["expert_indices", layer] + 1) % cfg.experts.num_experts
    _, found = run(params, tokens, cfg, capture=asked, interventions={asked[0]: replace_with(others)})
    np.testing.assert_array_equal(found["expert_indices", layer], others)
    if name == "mixtral":
        chosen = jnp.take_along_axis(found["router_logits", layer], others, axis=-1)
        close(found["expert_weights", layer], jax.nn.softmax(chosen, axis=-1))


@pytest.mark.parametrize("name", by_default(("mixtral", "qwen3_moe", "deepseek3", "gpt_oss"), "mixtral", "deepseek3"))
@pytest.mark.parametrize("wrong", [-1, -7, 1000])
def test_a_traced_id_that_no_expert_has_makes_its_token_nan_and_changes_no_other_row(name: str, wrong: int):
    params, cfg = model(name)
    tokens = tokens_of(name)
    assert cfg.experts is not None
    point = Point("expert_indices", cfg.experts.sparse_layers.index(True))
    own, captured = run(params, tokens, cfg, capture=(point,))
    ids = np.array(captured[point])
    ids[1, 5:] = wrong

    def replay(ids: jax.Array, change: Any) -> jax.Array:
        return models.forward(params, tokens, cfg, interventions={point: change(ids)})

    for change in (replace_with, lambda ids: lambda x, _: ids):
        logits = jax.jit(replay, static_argnums=1)(ids, change)
        close(logits[0], own[0])
        assert np.isnan(logits[1, 5:]).all()


@pytest.mark.parametrize("name", by_default(("mistral", "qwen3_window_biases"), "mistral"))
def test_stacked_layers_have_the_same_points(name: str):
    params, cfg = model(name)
    tokens = tokens_of(name)
    points = points_of(cfg)
    key = jax.random.key(0)
    changes = {
        ("z", 1): Edit(scale=jnp.ones((cfg.num_attention_heads, 1)).at[2].set(0)),
        ("resid_post", None): Edit(add=jax.random.normal(key, (cfg.num_hidden_layers, cfg.hidden_size))),
        ("mlp_post", 2): Edit(scale=jnp.float32(0.5)),
    }
    expected, plain = run(params, tokens, cfg, capture=points, interventions=changes)
    found, stacked = run(lay_out(params, cfg, SCANNED), tokens, cfg, capture=points, interventions=changes)
    close(found, expected)
    for point in points:
        close(stacked[point], plain[point])


@pytest.mark.parametrize("name", by_default(("mlp_out", "pattern"), "pattern"))
def test_a_function_in_stacked_layers_is_called_in_its_own_layer_alone(name: str):
    """Zeros in layer 0, of which the function of layer 2 has no finite slope, spoil no gradient."""
    params, cfg = model("mistral")
    tokens, stacked, called = tokens_of("mistral"), lay_out(params, cfg, SCANNED), []

    def normalised(x: jax.Array, positions: jax.Array) -> jax.Array:
        jax.debug.callback(lambda number: called.append(number), x.ravel()[0])
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    changes = {(name, 0): replace_with(0.0), (name, 2): normalised}

    @jax.jit
    def slopes(params: Any) -> Any:
        return jax.grad(lambda params: models.log_probs(params, tokens, cfg, interventions=changes).mean())(params)

    expected = lay_out(slopes(params), cfg, SCANNED)
    called.clear()
    found = slopes(stacked)
    jax.effects_barrier()
    assert len(called) == 1
    jax.tree.map(close, found, expected)


def test_functions_and_edits_of_a_head_a_position_and_a_row_do_the_same():
    params, cfg = model("mistral")
    tokens = tokens_of("mistral")
    batch, length = tokens.shape
    mask = np.zeros((batch, length, cfg.num_attention_heads, 1), bool)
    mask[1, 4:9, 3] = True
    value = jax.random.normal(jax.random.key(1), (cfg.head_dim,))
    logits = jax.jit(lambda edits: models.forward(params, tokens, cfg, interventions=edits))
    by_edit = logits({("z", 0): replace_with(value, mask)})

    def change(z: jax.Array, positions: jax.Array) -> jax.Array:
        assert (z.shape[:2], positions.shape) == ((batch, length), (batch, length))
        here = (positions >= 4) & (positions < 9) & (jnp.arange(batch)[:, None] == 1)
        return z.at[:, :, 3].set(jnp.where(here[..., None], value, z[:, :, 3]))

    by_function = jax.jit(lambda: models.forward(params, tokens, cfg, interventions={"blocks.0.attn.hook_z": change}))()
    np.testing.assert_array_equal(by_edit, by_function)
    plain = logits({})
    np.testing.assert_array_equal(by_edit[0], plain[0])
    np.testing.assert_array_equal(by_edit[1, :4], plain[1, :4])
    assert float(jnp.abs(by_edit[1, 4:] - plain[1, 4:]).max()) > 1e-3


def test_a_replaced_value_hides_nan_and_other_values_compile_nothing(compiles: list[str]):
    params, cfg = model("mistral")
    tokens = tokens_of("mistral")
    poison = {("resid_mid", 0): Edit(add=jnp.float32(jnp.nan)), ("resid_post", 0): replace_with(jnp.float32(1.0))}
    assert np.isfinite(models.forward(params, tokens, cfg, interventions=poison)).all()
    vectors = list(jax.random.normal(jax.random.key(0), (3, cfg.hidden_size)))
    steer = jax.jit(lambda add: models.forward(params, tokens, cfg, interventions={("resid_mid", 1): Edit(add=add)}))
    jax.block_until_ready(steer(vectors[0]))
    compiles.clear()
    found = [steer(vector) for vector in vectors]
    jax.block_until_ready(found)
    assert compiles == []
    assert float(jnp.abs(found[1] - found[2]).max()) > 1e-3


@pytest.mark.parametrize("point", ["attn_scores", "pattern"])
def test_gradients_of_attention_that_is_scaled_are_its_slope(point: str):
    """Also where tokens are not seen, whose scores are no numbers to multiply."""
    params, cfg = model("phi3")
    tokens = tokens_of("phi3")

    def loss(scale: jax.Array, is_edit: bool) -> jax.Array:
        change = Edit(scale=scale) if is_edit else lambda x, _: x * scale
        return models.log_probs(params, tokens, cfg, interventions={(point, 1): change}).sum()

    slopes = [jax.jit(jax.grad(partial(loss, is_edit=is_edit)))(jnp.float32(1.2)) for is_edit in (True, False)]
    value = jax.jit(partial(loss, is_edit=True))
    step = (value(jnp.float32(1.25)) - value(jnp.float32(1.15))) / 0.1
    np.testing.assert_allclose(slopes, step, rtol=1e-2)
    assert abs(step) > 1e-3


def test_the_slope_along_a_scale_of_zero_is_what_it_removes():
    """As of the same function; numbers that are not finite are removed, and so is their slope."""
    params, cfg = model("mistral")
    tokens = tokens_of("mistral")

    def loss(gates: jax.Array, is_edit: bool) -> jax.Array:
        change = Edit(scale=gates[:, None]) if is_edit else lambda z, _: z * gates[:, None]
        return models.log_probs(params, tokens, cfg, interventions={("z", 1): change}).sum()

    gates = jnp.ones(cfg.num_attention_heads).at[1].set(0).at[2].set(0.5)
    by_edit, by_function = (jax.jit(jax.grad(partial(loss, is_edit=is_edit)))(gates) for is_edit in (True, False))
    close(by_edit, by_function)
    assert abs(by_edit[1]) > 1e-3
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3.0])
    found, slopes = jax.jvp(lambda scale: edited(x, Edit(scale=scale, add=1.0)), (jnp.zeros(4),), (jnp.ones(4),))
    np.testing.assert_array_equal(found, np.ones(4))
    np.testing.assert_array_equal(slopes, [0, 0, 0, 3])


@pytest.mark.parametrize("remat", by_default([False, True], False))
def test_gradients_reach_interventions_embeddings_and_parameters(remat: bool):
    """Against differences of the loss, whichever layers are computed again; and as over a paged KV."""
    params, cfg = model("gemma2")
    tokens = tokens_of("gemma2")
    direction = jax.random.normal(jax.random.key(5), (cfg.num_attention_heads, cfg.head_dim))

    def loss(params: Any, size: jax.Array, attention: str | None = None) -> jax.Array:
        edits = {("z", 1): Edit(add=size * direction), ("pattern", 0): lambda x, _: x * (1 + size)}
        logits = models.forward(
            params, tokens, cfg, interventions=edits, remat=remat if attention is None else False, attention=attention
        )
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1).mean()

    both = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnames="attention")
    of_params, slope = both(params, jnp.float32(0.1))
    value = jax.jit(loss)
    numeric = (value(params, jnp.float32(0.11)) - value(params, jnp.float32(0.09))) / 0.02
    np.testing.assert_allclose(slope, numeric, rtol=0.02)
    if not remat:
        paged, paged_slope = both(params, jnp.float32(0.1), attention="xla")
        np.testing.assert_allclose(paged_slope, slope, rtol=1e-4)
        for one, other in zip(jax.tree.leaves(of_params), jax.tree.leaves(paged), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "name", by_default(("gemma2", "deepseek3", "gpt_oss", "qwen3_window_biases"), "gemma2", "deepseek3")
)
def test_long_rows_attend_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch):
    """With windows, soft caps, sinks and latents, blocks of five queries give what one block gives."""
    import ferrum_jax.ops.attention as module

    params, cfg = model(name)
    tokens = tokens_of(name)
    whole = jax.jit(lambda tokens: models.forward(params, tokens, cfg))(tokens)
    monkeypatch.setattr(module, "NEW_BLOCK", 5)
    cut = jax.jit(lambda tokens: models.forward(params, tokens, cfg))(tokens)
    close(cut, whole)


def test_generation_follows_the_interventions_of_each_row():
    params, cfg = model("mistral")
    tokens = tokens_of("mistral")[:, :7]
    add = jnp.zeros((2, 1, cfg.hidden_size)).at[1].set(jax.random.normal(jax.random.key(2), (cfg.hidden_size,)))

    def late(x: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.where(positions[..., None, None] >= 8, x * 0.5, x)

    edits = {("resid_post", 0): Edit(add=add), ("z", 2): late}
    seeds, lengths = jnp.zeros(2, jnp.uint32), jnp.array([7, 7])
    generate = partial(ferrum_jax.generate_fn, cfg=cfg, max_tokens=5, interventions=edits)
    rollout, _ = jax.jit(generate)(params, None, tokens, lengths, seeds)
    whole = jnp.concatenate([tokens, rollout.token_ids], axis=1)
    logits = jax.jit(lambda tokens: models.forward(params, tokens, cfg, interventions=edits))(whole)
    logps = jax.nn.log_softmax(logits[:, 6:-1])
    np.testing.assert_array_equal(logps.argmax(-1), rollout.token_ids)
    close(rollout.logprobs, logps.max(-1))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "asked", "error", "message"),
    [
        ("mistral", {"capture": [("zz", 0)]}, InvalidParameterError, "is no hook point, expected such as"),
        ("mistral", {"capture": ["blocks.0.hook_z"]}, InvalidParameterError, "is no hook point"),
        ("mistral", {"capture": [("z", 3)]}, InvalidParameterError, "the layer is 3, expected 0 to 2"),
        ("mistral", {"capture": [("z", True)]}, InvalidParameterError, "is no hook point"),
        ("mistral", {"capture": 5}, InvalidParameterError, "capture is 5, expected points"),
        ("mistral", {"capture": [("router_logits", 0)]}, UnsupportedError, "is no mixture of experts"),
        ("qwen3_moe", {"capture": [("mlp_post", 0)]}, UnsupportedError, "is a mixture of experts"),
        ("deepseek3", {"capture": [("k", 0)]}, UnsupportedError, "no keys and values of heads, but latents"),
        ("mistral", {"interventions": {("z", 0): 3}}, InvalidParameterError, "expected an Edit or a function"),
        (
            "mistral",
            {"interventions": {("z", 0): lambda x: x}},
            InvalidParameterError,
            r"the function at \('z', 0\) cannot be called with \(x, positions\)",
        ),
        ("mistral", {"interventions": [1]}, InvalidParameterError, "expected a mapping"),
        (
            "mistral",
            {"interventions": {("z", 0): Edit(), "blocks.0.attn.hook_z": Edit()}},
            InvalidParameterError,
            "'z' of layer 0 twice",
        ),
        (
            "mistral",
            {"interventions": {("z", 0): Edit(add=np.zeros(7))}},
            InvalidParameterError,
            r"add at 'z' has shape \[7\], which does not broadcast",
        ),
        (
            "mistral",
            {"interventions": {("resid_mid", 0): Edit(add=np.zeros((3, 13, 48)))}},
            InvalidParameterError,
            r"shape \[3, 13, 48\], which does not broadcast to \[2, 13, ...\]",
        ),
        (
            "mistral",
            {"interventions": {("resid_mid", None): Edit(add=np.zeros(48))}},
            InvalidParameterError,
            "expected a first axis of 3",
        ),
        (
            "mistral",
            {"interventions": {("z", 0): lambda z, _: z[:1]}},
            InvalidParameterError,
            "the function at 'z' returns",
        ),
        (
            "mistral",
            {"interventions": {("z", 0): lambda z, _: None}},
            InvalidParameterError,
            r"the function at 'z' returns None, expected an array \[2, 13, ",
        ),
        (
            "qwen3_moe",
            {"interventions": {("expert_indices", 0): Edit(add=np.float32(1))}},
            InvalidParameterError,
            "is float32, expected integers",
        ),
        (
            "qwen3_moe",
            {"interventions": {("expert_indices", 0): lambda ids, _: ids.astype(jnp.float32)}},
            InvalidParameterError,
            "the function's result at 'expert_indices' is float32, expected integers",
        ),
        (
            "mistral",
            {"interventions": {("z", 0): lambda z, _: z.astype(jnp.complex64)}},
            InvalidParameterError,
            "the function's result at 'z' is complex64, expected real numbers",
        ),
        (
            "mistral",
            {"interventions": {("z", 0): Edit(scale=jnp.ones(1, jnp.complex64))}},
            InvalidParameterError,
            "scale at 'z' is complex64, expected real numbers",
        ),
        (
            "qwen3_moe",
            {"interventions": {("expert_indices", 0): replace_with(np.array([0, 99, 1], np.int32))}},
            InvalidParameterError,
            r"expert_indices are replaced by 99, experts go from 0 to \d+: replace_with\(..., where=\) leaves padding",
        ),
        (
            "qwen3_moe",
            {"interventions": {("expert_indices", None): Edit(scale=np.zeros(3, int), add=np.full((3, 2, 13, 3), -1))}},
            InvalidParameterError,
            "expert_indices are replaced by -1",
        ),
        (
            "mistral",
            {"interventions": {("router_logits", None): lambda x, _: x}},
            UnsupportedError,
            "every layer of this mistral is no mixture of experts: it has no 'router_logits'",
        ),
        (
            "mixtral",
            {"interventions": {("mlp_post", None): Edit(scale=np.zeros(3))}},
            UnsupportedError,
            "every layer of this mixtral is a mixture of experts: it has no 'mlp_post'",
        ),
        ("mistral", {"capture": [("expert_weights", 1)]}, UnsupportedError, "it has no 'expert_weights'"),
        (
            "mistral",
            {"interventions": {("z", 0): Edit()}, "first_layer": 1, "inputs_embeds": np.zeros((2, 13, 48))},
            InvalidParameterError,
            "layer 0 has no 'z': the first layer that runs is 1",
        ),
        (
            "mistral",
            {"interventions": {("resid_post", None): Edit()}, "steering": np.zeros((3, 48))},
            InvalidParameterError,
            "give one of them",
        ),
    ],
)
def test_points_and_interventions_that_cannot_be_are_refused(name: str, asked: dict, error: Any, message: str):
    params, cfg = model(name)
    with pytest.raises(error, match=message):
        models.run(params, tokens_of(name), cfg, **asked)


@pytest.mark.parametrize("value", [np.array([2**32, 1]), 2**31, -(2**70), [1, 2**40], [[2**70]]])
def test_integers_that_32_bits_do_not_hold_change_nothing(value: Any):
    params, cfg = model("mistral")
    with pytest.raises(InvalidParameterError, match=r"value has integers from .*, expected 32 bits"):
        replace_with(value)
    with pytest.raises(InvalidParameterError, match=r"add at 'z' has integers from .*, expected 32 bits"):
        models.forward(params, tokens_of("mistral"), cfg, interventions={("z", 0): Edit(add=value)})


def test_a_replacement_can_be_differentiated_as_a_whole():
    params, cfg = model("mistral")
    tokens, value = tokens_of("mistral"), jnp.ones(cfg.head_dim)

    def total(edit: Edit[jax.Array]) -> jax.Array:
        return models.forward(params, tokens, cfg, interventions={("z", 1): edit}).sum()

    slope = jax.grad(total)(replace_with(value))
    expected = jax.grad(lambda value: total(replace_with(value)))(value)
    close(slope.add, expected)


def test_a_function_of_every_layer_is_called_in_those_that_run():
    params, cfg = model("mistral")
    tokens, states = tokens_of("mistral"), jnp.zeros((2, 13, cfg.hidden_size))
    run = partial(models.forward, params, tokens, cfg, inputs_embeds=states)
    wanted = run(first_layer=1, interventions={("attn_out", layer): lambda x, _: x + 1 for layer in (1, 2)})
    for first in (1, jnp.int32(1)):
        close(run(first_layer=first, interventions={("attn_out", None): lambda x, _: x + 1}), wanted)
    assert np.abs(run(first_layer=1) - wanted).max() > 1e-3


@pytest.mark.parametrize("attention", [None, "xla"])
def test_scores_to_be_changed_are_those_that_are_captured(attention: str | None):
    """Also where blocks of 128 positions would hold more than the tokens."""
    params, cfg = model("mistral")
    tokens, shapes = jnp.arange(300)[None] % cfg.vocab_size, []

    def seen(x: jax.Array, _: jax.Array) -> jax.Array:
        shapes.append(x.shape)
        return x

    run = partial(models.run, params, tokens, cfg, attention=attention, capture=[("pattern", 1)])
    logits, found = run(interventions={("pattern", 1): seen})
    assert shapes == [found[Point("pattern", 1)].shape] == [(1, cfg.num_attention_heads, 300, 300)]
    again, _ = run(interventions={("pattern", 1): replace_with(found[Point("pattern", 1)])})
    close(again, logits)


def test_only_a_mask_says_where_to_replace():
    with pytest.raises(InvalidParameterError, match="where is float32, expected True and False"):
        replace_with(1.0, where=0.3)
    with pytest.raises(InvalidParameterError, match="where is no array"):
        replace_with(1.0, where="abc")


@pytest.mark.parametrize("layout", ["checkpoint", "scanned"])
@pytest.mark.parametrize("point", ["pattern", "attn_scores", "z", "resid_mid"])
def test_an_edit_of_all_layers_may_be_of_numpy_or_a_list(point: str, layout: str):
    params, cfg = model("llama31")
    params, tokens = lay_out(params, cfg, layout), tokens_of("llama31")
    scale = np.linspace(0.5, 0.9, cfg.num_hidden_layers, dtype=np.float32)
    given = [jnp.asarray(scale), scale, scale.tolist()]
    if point in ("pattern", "attn_scores"):
        given = [one.reshape(-1, 1, 1, 1) for one in given[:2]] + [scale.reshape(-1, 1, 1, 1).tolist()]
    edits = [{(point, None): Edit(scale=one)} for one in given]
    expected, *found = (jax.jit(partial(models.forward, cfg=cfg, interventions=one))(params, tokens) for one in edits)
    for one in found:
        np.testing.assert_array_equal(one, expected)


def test_a_list_with_traced_numbers_replaces():
    found = jax.jit(lambda x: replace_with([x * 2, 1.0], where=[True, False]).add)(3.0)
    np.testing.assert_array_equal(found, [6, 0])


def test_one_point_is_as_a_list_of_it_and_one_number_as_an_array_of_it():
    params, cfg = model("mistral")
    asked: Any = {"capture": ("z", 1), "interventions": {("z", 1): lambda z, _: 0.5}}
    _, seen = models.run(params, tokens_of("mistral"), cfg, **asked)
    ((point, found),) = seen.items()
    assert point == ("z", 1)
    assert (found == 0.5).all()
