"""Forwards that do less: logits of some tokens, layers from one on, and log-probabilities without the logits."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ferrum_jax import models
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.models import Edit, Point, replace_with
from ferrum_jax.models.layout import SCANNED, lay_out
from tests.meshes import agree, by_data, collectives, mesh_of, model_on
from tests.tiers import by_default
from tests.tiny import CONFIGS, model_config, prompt, tiny_params

FAMILIES = ("gemma2", "qwen3", "mixtral", "qwen2_moe", "deepseek3", "gpt_oss")
run = jax.jit(models.run, static_argnames=("cfg", "capture", "logits", "attention", "remat"))


LAID_OUT = [
    pytest.param(name, layout, marks=() if (name, layout) == ("gemma2", SCANNED) else pytest.mark.slow)
    for name in FAMILIES
    for layout in ("checkpoint", SCANNED)
    if layout != SCANNED or name not in ("qwen2_moe", "deepseek3")  # whose layers are of two kinds: not stacked
]


def model(name: str, layout: str = "checkpoint"):
    cfg = model_config(name)
    return lay_out(tiny_params(CONFIGS[name]), cfg, layout), cfg


def tokens_of(name: str) -> jax.Array:
    return jnp.array(prompt(name)[:36], jnp.int32).reshape(4, 9)


@pytest.mark.parametrize("name", by_default(FAMILIES, "qwen3"))
def test_logits_of_some_tokens_are_those_among_all(name: str):
    params, cfg = model(name)
    tokens, at = tokens_of(name), jnp.array([[0, 8, 3], [5, 5, 5], [8, 1, 2], [7, 6, 0]])
    whole, seen = run(params, tokens, cfg, capture=(("z", 1),))
    last, captured = run(params, tokens, cfg, capture=(("z", 1),), logits="last")
    none, _ = run(params, tokens, cfg, logits="none")
    some, _ = jax.jit(lambda at: models.run(params, tokens, cfg, logits=at))(at)
    agree(last, whole[:, -1:])
    agree(captured["z", 1], seen["z", 1])
    assert none.shape == (4, 0, cfg.vocab_size)
    agree(some, jnp.take_along_axis(whole, at[..., None], axis=1))


def test_positions_of_logits_may_be_closed_over():
    params, cfg = model("qwen3")
    tokens, at = tokens_of("qwen3"), jnp.array([[0], [5], [8], [7]])
    plain = models.forward(params, tokens, cfg, logits=at)
    agree(jax.jit(lambda tokens: models.forward(params, tokens, cfg, logits=at))(tokens), plain)


def test_the_head_runs_for_the_tokens_that_are_asked_for():
    params, cfg = model("qwen3")
    tokens, size = tokens_of("qwen3"), cfg.vocab_size
    for wanted, rows in (("all", 36), ("last", 4), ("none", 0)):
        text = jax.jit(partial(models.forward, cfg=cfg, logits=wanted)).lower(params, tokens).as_text()
        assert any(f"tensor<{shape}xf32>" in text for shape in (f"{rows}x{size}", f"{size}x{rows}"))
        assert rows == 36 or not any(shape in text for shape in (f"36x{size}x", f"{size}x36x"))


@pytest.mark.devices
@pytest.mark.parametrize("kind", by_default(("explicit", "auto"), "explicit"))
def test_logits_of_some_tokens_move_no_states_between_devices(kind: str):
    mesh, name = mesh_of(kind), "llama31"
    params, divided, cfg = model_on(mesh, name)
    tokens, at = tokens_of(name), jnp.array([[0, 8, 3], [5, 5, 5], [8, 1, 2], [7, 6, 0]])
    forward = lambda params, tokens, at: models.forward(params, tokens, cfg, logits=at)  # noqa: E731
    given = divided, by_data(mesh, tokens), by_data(mesh, at)
    agree(jax.jit(forward)(*given), jax.jit(forward)(params, tokens, at))
    assert len(collectives(forward, *given)) == 2 * cfg.num_hidden_layers


@pytest.mark.parametrize(("name", "layout"), LAID_OUT)
def test_a_patched_forward_from_a_layer_on_is_the_whole_one_with_that_patch(name: str, layout: str):
    """With the first layer known when it is traced, and as an argument, in one program for all."""
    params, cfg = model(name, layout)
    tokens = tokens_of(name)
    _, seen = run(params, tokens, cfg, capture=(("resid_pre", None),))
    other = run(params, tokens[:, ::-1], cfg, capture=(("resid_pre", None),))[1]
    here, at = (jnp.arange(9) == 4)[:, None], Point("resid_mid", 2)
    add = {("mlp_out", 2): Edit(scale=jnp.float32(0.5))}
    asked: dict[str, Any] = {"capture": (at,), "interventions": add}
    traced = jax.jit(partial(models.run, cfg=cfg, **asked))
    for layer in range(cfg.num_hidden_layers):
        edit = replace_with(other["resid_pre", layer], where=here)
        both = {**add, ("resid_pre", layer): edit}
        whole, expected = run(params, tokens, cfg, capture=(at,), interventions=both)
        patched = jnp.where(here, other["resid_pre", layer], seen["resid_pre", layer])
        for first, forward in ((layer, partial(models.run, cfg=cfg, **asked)), (jnp.int32(layer), traced)):
            found, captured = forward(params, tokens, first_layer=first, inputs_embeds=patched)
            agree(found, whole)
            agree(captured[at], expected[at])


def test_layers_before_the_first_are_skipped_when_it_runs_and_have_no_gradient():
    params, cfg = model("qwen3")
    tokens = tokens_of("qwen3")
    _, seen = run(params, tokens, cfg, capture=(("resid_pre", None),))

    @jax.jit
    def slopes(params: Any, x: jax.Array, first: jax.Array) -> Any:
        def value(params: Any) -> Any:
            logits, captured = models.run(
                params, tokens, cfg, first_layer=first, inputs_embeds=x, capture=[("z", 0), ("z", 2)]
            )
            return logits.sum(), captured

        return jax.grad(value, has_aux=True)(params)

    gradient, captured = slopes(params, seen["resid_pre", 1], jnp.int32(1))
    sizes = [
        max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(layer)) for layer in gradient["model"]["layers"]
    ]
    assert sizes[0] == 0 < min(sizes[1:])
    assert not captured["z", 0].any()
    assert captured["z", 2].any()
    whole = jax.grad(lambda p: models.forward(p, tokens, cfg, first_layer=1, inputs_embeds=seen["resid_pre", 1]).sum())
    agree(gradient, jax.jit(whole)(params))


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_refused():
    params, cfg = model("qwen3")
    tokens, embeds = tokens_of("qwen3"), jnp.zeros((4, 9, cfg.hidden_size))
    cases: dict[str, dict[str, Any]] = {
        "logits is 'first', expected 'all', 'last', 'none'": {"logits": "first"},
        r"logits are int32\[3, 1\], expected integers \[B, R\] of 4 rows": {"logits": jnp.zeros((3, 1), jnp.int32)},
        "remat is 'all', expected True, False or 'products'": {"remat": "all"},
        "logits are float32, expected integers": {"logits": jnp.zeros((4, 1))},
        "positions of logits have 9, expected 0 to 8": {"logits": jnp.full((4, 1), 9)},
        "first_layer is 3, expected a layer from 0 to 2": {"first_layer": 3, "inputs_embeds": embeds},
        "first_layer is True": {"first_layer": True, "inputs_embeds": embeds},
        "first_layer is -1, expected a layer from 0 to 2": {"first_layer": jnp.int32(-1), "inputs_embeds": embeds},
        "values of first_layer are float32, expected integers": {
            "first_layer": jnp.float32(1), "inputs_embeds": embeds},
        r"first_layer is int32\[1\], expected one integer": {
            "first_layer": jnp.ones(1, jnp.int32), "inputs_embeds": embeds},
        "first_layer needs inputs_embeds": {"first_layer": 1},
        "layer 1 has no 'z': the first layer that runs is 2": {
            "first_layer": 2, "inputs_embeds": embeds, "capture": [("z", 1)]},
        "layer 0 has no 'q': the first layer that runs is 2": {
            "first_layer": 2, "inputs_embeds": embeds, "interventions": {("q", 0): Edit(scale=jnp.float32(0))}},
    }  # fmt: skip
    for message, options in cases.items():
        with pytest.raises(InvalidParameterError, match=message):
            models.run(params, tokens, cfg, **options)


def likelihood(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize(("name", "layout"), LAID_OUT)
def test_log_probabilities_and_their_gradients_are_those_of_all_logits(name: str, layout: str):
    """In blocks that divide the tokens, that do not, and that have all of them."""
    params, cfg = model(name, layout)
    tokens = tokens_of(name)

    def of_logits(params: Any) -> Any:
        found = likelihood(models.forward(params, tokens, cfg)[:, :-1], tokens[:, 1:])
        return (found * jnp.arange(8.0)).sum(), found

    both = jax.jit(jax.grad(of_logits, has_aux=True))(params)
    for size in by_block(layout):

        def blocked(params: Any, size: int = size) -> Any:
            found = models.log_probs(params, tokens, cfg, block=size)
            return (found * jnp.arange(8.0)).sum(), found

        agree(jax.jit(jax.grad(blocked, has_aux=True))(params), both)
    others = (tokens * 5 + 1) % cfg.vocab_size
    steering = jnp.ones((cfg.num_hidden_layers, cfg.hidden_size))
    scores = jax.jit(partial(models.log_probs, cfg=cfg, targets=others), static_argnames=("block", "temperature"))
    logits = jax.jit(partial(models.forward, cfg=cfg))
    found = scores(params, tokens, block=8, steering=steering)
    agree(found, likelihood(logits(params, tokens, steering=steering), others))
    agree(scores(params, tokens, temperature=0.7), likelihood(logits(params, tokens) / 0.7, others))
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidParameterError, match="temperature is"):
            models.log_probs(params, tokens, cfg, temperature=temperature)


def by_block(layout: str) -> tuple[int, ...]:
    return (12, 999) if layout == "checkpoint" else (16,)


def test_no_array_of_all_logits_is_ever_in_memory():
    params, cfg = model("qwen3")
    tokens = jnp.tile(tokens_of("qwen3"), (1, 8))  # 4 rows of 72

    def loss(params: Any) -> jax.Array:
        return models.log_probs(params, tokens, cfg, block=32).mean()

    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    sizes = {int(np.prod([int(one) for one in shape.split("x")])) for shape in
             re.findall(rf"tensor<((?:\d+x)*{cfg.vocab_size}(?:x\d+)*)xf32>", text)}  # fmt: skip
    assert max(sizes) == max(32, cfg.hidden_size) * cfg.vocab_size


@pytest.mark.devices
@pytest.mark.parametrize("kind", by_default(("explicit", "auto"), "explicit"))
def test_log_probabilities_are_divided_as_the_rows(kind: str):
    mesh, name = mesh_of(kind), "llama31"
    params, divided, cfg = model_on(mesh, name)
    tokens = tokens_of(name)
    both = jax.jit(jax.value_and_grad(lambda p, t: models.log_probs(p, t, cfg, block=16).mean()))
    agree(both(divided, by_data(mesh, tokens)), both(params, tokens))
    each = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        partial(models.log_probs, cfg=cfg, block=4), mesh=each, in_specs=(P(), P("data")), out_specs=P("data")
    )
    agree(jax.jit(mapped)(params, tokens), models.log_probs(params, tokens, cfg))


@pytest.mark.parametrize("remat", by_default([True, "products"], True))
@pytest.mark.parametrize("layout", by_default(("checkpoint", SCANNED), SCANNED))
def test_what_gradients_recompute_changes_no_gradient_and_takes_less_memory(layout: str, remat: Any):
    params, cfg = model("qwen3", layout)
    tokens = jnp.tile(tokens_of("qwen3"), (1, 8))

    def step(remat: Any) -> Any:
        gradient = jax.grad(lambda params: models.log_probs(params, tokens, cfg, remat=remat).sum())
        return jax.jit(gradient).lower(params).compile()

    keeping, computing = step(False), step(remat)
    agree(computing(params), keeping(params))
    if layout == SCANNED:  # XLA's CPU may compute again too early in layers that are not in a loop
        kept, less = keeping.memory_analysis(), computing.memory_analysis()
        assert kept is not None
        assert less is not None
        assert less.temp_size_in_bytes < 0.8 * kept.temp_size_in_bytes


@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_temperature_may_be_an_argument_of_a_program(shape: tuple[int, ...], compiles: list[str]):
    params, cfg = model("qwen3")
    tokens = tokens_of("qwen3")
    given = jax.jit(lambda t: models.log_probs(params, tokens, cfg, temperature=t))
    found = given(jnp.full(shape, 0.7, jnp.float32))
    fixed = jax.jit(models.log_probs, static_argnames=("cfg", "temperature"))
    agree(found, fixed(params, tokens, cfg, temperature=0.7))
    warm = jnp.asarray(np.linspace(0.5, 2.0, 4, dtype=np.float32) if shape else np.float32(2.0))
    compiles.clear()
    found = given(warm)
    assert not compiles
    for at, temperature in enumerate(np.broadcast_to(warm, 4)):
        agree(found[at : at + 1], fixed(params, tokens, cfg, temperature=float(temperature))[at : at + 1])
    slope = jax.grad(lambda t: given(t).sum())(jnp.float32(0.7))
    assert np.isfinite(slope)
    assert slope


def test_a_tiny_temperature_takes_nothing_from_the_likeliest_token():
    """Logits that are divided first overflow; optimised, XLA rounds them in two ways at 1e-4 already."""
    params, cfg = model("qwen3")
    tokens = tokens_of("qwen3")[:1, :6]
    likeliest = jax.jit(models.forward)(params, tokens, cfg).argmax(axis=-1)
    for temperature in (1e-4, 1e-40, jnp.full(1, 1e-37, jnp.float32)):
        scored = jax.jit(partial(models.log_probs, cfg=cfg, targets=likeliest, temperature=temperature))
        found = scored(params, tokens)
        np.testing.assert_array_equal(found, np.zeros_like(found))


@pytest.mark.usefixtures("unchecked")
def test_ids_and_temperatures_out_of_range_are_refused_where_they_are_known():
    params, cfg = model("qwen3")
    tokens, most = tokens_of("qwen3"), cfg.vocab_size - 1
    with pytest.raises(InvalidParameterError, match=f"tokens have 99, expected 0 to {most}"):
        models.forward(params, tokens.at[1, 2].set(99), cfg)
    with pytest.raises(InvalidParameterError, match=f"targets have -100, expected 0 to {most}: mask padding"):
        models.log_probs(params, tokens, cfg, targets=tokens.at[0, 0].set(-100))
    wrongs: list[Any] = [0, -1.0, np.inf, "hot", jnp.zeros(4), jnp.array([1.0, 1.0, 1.0, -1.0]), jnp.ones(3)]
    for wrong in wrongs:
        with pytest.raises(InvalidParameterError, match=r"temperature is .*, expected"):
            models.log_probs(params, tokens, cfg, temperature=wrong)
