"""`generate_fn`, a pure function, gives what the engine gives, and can be jitted, vmapped and differentiated."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams, generate_fn, kv_spec, models
from ferrum_jax.contract import Sampling
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.kvcache import state
from ferrum_jax.models import adapters, specs
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CFG

TOLERANCE = 1e-5  # float32 sums in another order
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7], [8] * 5]
LENGTHS: Any = np.array([len(prompt) for prompt in PROMPTS], np.int32)
TOKENS: Any = np.array([prompt + [0] * (7 - len(prompt)) for prompt in PROMPTS], np.int32)
SEEDS: Any = np.array([5, 2**32 - 1, 0], np.uint32)
USED: Any = np.array([1, -1, 0], np.int32)  # adapters
HOWS = [
    Sampling(temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.2),
    pytest.param(Sampling(), marks=pytest.mark.slow),
    pytest.param(Sampling(temperature=1.3, min_p=0.01, repetition_penalty=1.4), marks=pytest.mark.slow),
    pytest.param(Sampling(repetition_penalty=1.5), marks=pytest.mark.slow),
]


def changed(array: Any, at: Any, value: int) -> Any:
    copy = array.copy()
    copy[at] = value
    return copy


@pytest.fixture
def llm(runner: ModelRunner) -> LLM:
    return LLM.from_model(runner, max_rows=3)


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_it_gives_what_the_engine_gives_with_the_same_seeds(how: Sampling, params: ParamTree, llm: LLM):
    asked = [
        SamplingParams(**vars(how), max_tokens=11, seed=seed, logprobs=True, stop_token_ids=(30, 36))
        for seed in SEEDS.tolist()
    ]
    padded = np.where(np.arange(7) < LENGTHS[:, None], TOKENS, -1)  # padding may be anything, and arrays lists
    lists: dict[str, Any] = {"tokens": padded.tolist(), "lengths": LENGTHS.tolist(), "seeds": SEEDS.tolist()}
    run = jax.jit(partial(generate_fn, kv=None, cfg=CFG, max_tokens=11, sampling=how, stop_ids=(30, 36), **lists))
    found, _ = run(params)
    for at, out in enumerate(llm.generate(PROMPTS, asked)):
        count = len(out.token_ids)
        assert found.token_ids[at, :count].tolist() == out.token_ids
        assert found.token_ids[at, count:].tolist() == [-1] * (11 - count)
        np.testing.assert_allclose(found.logprobs[at, :count], np.array(out.logprobs), rtol=0, atol=TOLERANCE)
        assert not found.logprobs[at, count:].any()


@pytest.mark.slow
def test_a_kv_that_held_anything_gives_the_same_and_is_written_in_place(params: ParamTree):
    spec = kv_spec(params, CFG, rows=3, positions=12)
    dirty = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), state.shapes(spec))
    run = jax.jit(partial(generate_fn, cfg=CFG, max_tokens=5), donate_argnums=1)
    compiled = run.lower(params, dirty, TOKENS, LENGTHS, SEEDS).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= spec.num_bytes
    expected, _ = compiled(params, state.empty(spec), TOKENS, LENGTHS, SEEDS)
    for _ in range(2):
        found, dirty = compiled(params, dirty, TOKENS, LENGTHS, SEEDS)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)


def test_one_token_needs_no_jit(params: ParamTree):
    generate = partial(generate_fn, params, None, TOKENS, LENGTHS, SEEDS, CFG, max_tokens=1)
    expected, _ = generate()
    with jax.disable_jit():
        found, _ = generate()
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)


@pytest.mark.parametrize("kind", [set, dict.fromkeys, iter, np.array, jnp.array])
def test_stop_ids_may_be_of_any_collection(kind: Any, params: ParamTree):
    generate = partial(generate_fn, params, None, TOKENS, LENGTHS, SEEDS, CFG, max_tokens=2)
    found = generate(stop_ids=kind(list(range(CFG.vocab_size))))[0].token_ids
    assert found[:, 1].tolist() == [-1] * len(TOKENS)


@pytest.mark.slow
def test_it_can_be_differentiated_and_mapped(params: ParamTree):
    def logprob(params: ParamTree, seed: jax.Array) -> jax.Array:
        return generate_fn(params, None, TOKENS, LENGTHS, SEEDS + seed, CFG, max_tokens=2)[0].logprobs.sum()

    seeds = jnp.arange(4, dtype=jnp.uint32)
    found = jax.eval_shape(jax.vmap(jax.grad(logprob), in_axes=(None, 0)), params, seeds)
    assert jax.tree.map(lambda leaf: leaf.shape[1:], found) == jax.tree.map(lambda leaf: leaf.shape, params)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(found)} == {4}


@pytest.mark.slow
def test_the_gradient_of_its_logprobs_is_that_of_the_forward(params: ParamTree):
    def through_the_rollout(params: ParamTree) -> tuple[jax.Array, jax.Array]:
        found, _ = generate_fn(params, None, TOKENS[:1], LENGTHS[:1], SEEDS[:1], CFG, max_tokens=3)
        return found.logprobs.sum(), found.token_ids

    def through_the_forward(params: ParamTree, whole: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(models.forward(params, whole, CFG)[:, 6:-1])
        return jnp.take_along_axis(logp, whole[:, 7:, None], axis=-1).sum()

    mine, token_ids = jax.jit(jax.grad(through_the_rollout, has_aux=True))(params)
    whole = np.concatenate([TOKENS[:1], token_ids], axis=1)
    theirs = jax.jit(jax.grad(through_the_forward))(params, whole)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


@pytest.fixture
def loras() -> ParamTree:
    """Three adapters without projections of the feed-forward block; the last, which no row uses, is not finite."""
    stacks = adapters.stack_specs(CFG, adapters.LoraSpec(max_loras=3, max_rank=3))
    layers = [{"self_attn": layer["self_attn"]} for layer in stacks["model"]["layers"]]

    def drawn(name: str, one: specs.ParamSpec) -> jax.Array:
        array = jax.random.normal(jax.random.key(8), one.shape) / 4
        return array.at[2].set(jnp.nan) if name.endswith(".down") else array.at[:, 2].set(jnp.nan)

    return specs.map_specs(drawn, {"model": {"layers": layers}})


def adapted_rollout(loras: ParamTree, params: ParamTree) -> tuple[jax.Array, Any]:
    how: Any = {"max_tokens": 3, "sampling": HOWS[0], "loras": loras, "adapters": USED}
    found, _ = generate_fn(params, None, TOKENS, LENGTHS, SEEDS, CFG, **how)
    return found.logprobs.sum(), found


def adapted_forward(loras: ParamTree, params: ParamTree, found: Any, used: jax.Array) -> tuple[jax.Array, jax.Array]:
    row, at = np.arange(3)[:, None], LENGTHS[:, None] + np.arange(3)
    whole = jnp.pad(jnp.asarray(TOKENS), ((0, 0), (0, 3))).at[row, at].set(found.token_ids)
    logp = jax.nn.log_softmax(models.forward(params, whole, CFG, loras=loras, adapters=used))
    logprobs = logp[row, at - 1, found.token_ids]
    return logprobs.sum(), logprobs


def test_each_row_has_its_own_adapter(params: ParamTree, loras: ParamTree):
    _, found = jax.jit(adapted_rollout)(loras, params)
    forward = jax.jit(adapted_forward)
    _, expected = forward(loras, params, found, USED)
    np.testing.assert_allclose(found.logprobs, expected, rtol=0, atol=TOLERANCE)
    _, plain = forward(loras, params, found, np.full_like(USED, -1))
    assert (np.abs(found.logprobs - plain).max(axis=1) > 1e-3).tolist() == [True, False, True]


@pytest.mark.slow
def test_gradients_reach_the_adapters(params: ParamTree, loras: ParamTree):
    mine, found = jax.jit(jax.grad(adapted_rollout, has_aux=True))(loras, params)
    theirs, _ = jax.jit(jax.grad(adapted_forward, has_aux=True))(loras, params, found, USED)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS[0]}, r"tokens have shape \[7\]"),
        ({"lengths": LENGTHS[:2]}, r"lengths \[2\]"),
        ({"seeds": SEEDS[:2]}, r"seeds \[2\]"),
        ({"tokens": changed(TOKENS, (1, 1), CFG.vocab_size)}, f"tokens have {CFG.vocab_size}, expected 0 to"),
        ({"tokens": TOKENS.astype(np.float32)}, "tokens are float32, expected integers"),
        ({"lengths": changed(LENGTHS, 0, 0)}, "lengths have 0, expected 1 to 7"),
        ({"lengths": changed(LENGTHS, 0, 8)}, "lengths have 8, expected 1 to 7"),
        (
            {"tokens": changed(TOKENS.astype(np.int64), (1, 1), 2**32)},
            "tokens have 4294967296, expected integers of 32",
        ),
        ({"lengths": changed(LENGTHS.astype(np.int64), 0, 2**32 + 3)}, "lengths have 4294967299, expected integers"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2**63}, f"max_tokens is {2**63}, expected an integer from 1 to {2**31 - 8}"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"seeds": jax.random.key(0)}, r"seeds are a PRNG key, expected uint32 \[B\]: jax.random.bits"),
        ({"seeds": np.array([1, 2**32, 3])}, r"seeds are .*4294967296.*, expected integers from 0 to 4294967295"),
        ({"seeds": np.ones(3)}, "seeds are float64, expected integers"),
        ({"stop_ids": (2, 3.5)}, "stop_ids are float64, expected integers"),
        ({"stop_ids": (2, 2**31)}, "stop_ids are .*2147483648.*, expected integers from 0 to 2147483647"),
        ({"stop_ids": (2, -1)}, "stop_ids are .*-1.*, expected integers from 0"),
        ({"params": {}}, r"these are not the parameters of this qwen3: .* missing"),
        ({"sampling": SamplingParams()}, "sampling is a SamplingParams, expected a Sampling: max_tokens, seeds"),
        ({"stop_ids": 5}, "stop_ids is 5, expected several token ids"),
        ({"adapters": SEEDS}, "give both `loras` and `adapters` or neither"),
        ({"adapters": SEEDS[:2].astype(int), "loras": {}}, "these are not stacks of adapters of this model"),
    ],
)
def test_what_cannot_be_is_refused(change: dict, message: str, params: ParamTree):
    given = {"params": params, "tokens": TOKENS, "lengths": LENGTHS, "seeds": SEEDS, "max_tokens": 3} | change
    with pytest.raises(InvalidParameterError, match=message):
        generate_fn(kv=None, cfg=CFG, **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"positions": 0}, "positions is 0"),
        ({"positions": 2.5}, "positions is 2.5"),
        ({"dtype": "float99"}, "dtype is 'float99', expected float32"),
        ({"attention": "flash"}, "attention is 'flash', expected xla"),
        ({"attention": None}, "attention is None, expected xla"),
    ],
)
def test_a_kv_that_cannot_be_is_refused(change: dict, message: str, params: ParamTree):
    asked: dict[str, Any] = {"rows": 1, "positions": 8} | change
    with pytest.raises(InvalidParameterError, match=message):
        kv_spec(params, CFG, **asked)


def test_a_kv_follows_parameters_in_float64(params: ParamTree):
    with jax.enable_x64(True):
        double = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        assert kv_spec(double, CFG, rows=1, positions=8).dtype == "float64"
        assert jax.eval_shape(partial(models.forward, cfg=CFG), double, TOKENS).dtype == jnp.float32


def test_a_kv_that_is_too_small_or_another_models_is_refused(params: ParamTree):
    small = state.empty(kv_spec(params, CFG, rows=2, positions=12))
    other = replace(kv_spec(params, CFG, rows=3, positions=12), num_kv_heads=CFG.num_key_value_heads + 1)
    with pytest.raises(InvalidParameterError, match=r"kv has arrays \[.*\], this model's are \[.*: make it by kv_spec"):
        generate_fn(params, state.empty(other), TOKENS, LENGTHS, SEEDS, CFG, max_tokens=5)
    latent = replace(kv_spec(params, CFG, rows=3, positions=12), layout="latent")
    with pytest.raises(InvalidParameterError, match="kv has the layout 'latent', this model's 'products'"):
        generate_fn(params, state.empty(latent), TOKENS, LENGTHS, SEEDS, CFG, max_tokens=5)
    with pytest.raises(InvalidParameterError, match="3 rows of 12 positions need 3 KV blocks, there are 2"):
        generate_fn(params, small, TOKENS, LENGTHS, SEEDS, CFG, max_tokens=5)
