"""Hidden states and attention weights of live sequences, from the runner and through the executor."""

import asyncio
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import LlmExecutor, models
from ferrum_jax.contract import PrefillInput, RequestValidationError, UnsupportedError
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CFG
from tests.fake import SummingLLM

TOLERANCE = 1e-4  # float32 sums in another order; hidden states are of order 10
TOKENS = [5, 30, 2, 2, 17, 9, 36, 0, 1, 11, 4, 8, 15, 16, 23, 3, 7, 7]


@pytest.fixture
def runner(reusing: ModelRunner) -> ModelRunner:
    return reusing


@pytest.fixture(scope="module")
def expected(params: ParamTree) -> tuple:
    run = jax.jit(partial(models.capture, cfg=CFG, hidden=(0, 1, 2), attention_weights=(0, 1)))
    return run(params, jnp.array([TOKENS]))


@pytest.mark.parametrize("start", [2, *(pytest.param(start, marks=pytest.mark.slow) for start in (0, 1, 11))])
def test_a_chunk_shows_what_the_forward_shows(start: int, runner: ModelRunner, expected: tuple):
    logits, hidden, weights = expected
    if start:
        runner.prefill("a", TOKENS[:start])
    found = runner.capture("a", TOKENS[start:], hidden=(2, 0), attention_weights=(1,))
    np.testing.assert_allclose(found.logits, logits[0, start:], rtol=0, atol=TOLERANCE)
    assert sorted(found.hidden) == [0, 2]
    for layer, states in found.hidden.items():
        np.testing.assert_allclose(states, hidden[layer][0, start:], rtol=0, atol=TOLERANCE)
    (seen,) = found.attention_weights.values()
    np.testing.assert_allclose(seen, weights[1][0, :, start:], rtol=0, atol=TOLERANCE)
    assert runner.kv_len("a") == len(TOKENS)
    assert runner.decode("a", 3, len(TOKENS)).shape == (CFG.vocab_size,)


@pytest.mark.slow
def test_a_prefill_gives_the_layers_that_its_metadata_names(runner: ModelRunner, expected: tuple):
    logits, hidden, weights = expected
    executor = LlmExecutor(runner)

    async def run():
        first = await executor.prefill(PrefillInput(input_ids=[TOKENS[:7]]))
        shown = {"ferrum_hidden_layers": [2, 1], "ferrum_attention_layers": (0,)}
        asked = PrefillInput(input_ids=[TOKENS[7:]], kv_cache=first.kv_cache, metadata=shown)
        other = PrefillInput(
            input_ids=[TOKENS], metadata={"ferrum_hidden_layers": [0], "ferrum_require_full_logits": True}
        )
        plain = PrefillInput(input_ids=[TOKENS])
        return first, await executor.batch_prefill([asked, other, plain])

    first, (one, other, plain) = asyncio.run(run())
    assert first.hidden_states is first.attention_weights is plain.hidden_states is other.attention_weights is None
    assert one.logits.shape == (1, 1, CFG.vocab_size)
    np.testing.assert_allclose(one.logits[0, 0], logits[0, -1], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(plain.logits[0, 0], logits[0, -1], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(other.logits, logits, rtol=0, atol=TOLERANCE)
    assert one.hidden_states is not None
    assert one.attention_weights is not None
    for states, layer in zip(one.hidden_states, (2, 1), strict=True):
        np.testing.assert_allclose(states, hidden[layer][:, 7:], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(one.attention_weights[0], weights[0][:, :, 7:], rtol=0, atol=TOLERANCE)
    assert other.hidden_states is not None
    np.testing.assert_allclose(other.hidden_states[0], hidden[0], rtol=0, atol=TOLERANCE)
    assert one.kv_cache.num_tokens == len(TOKENS)


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"ferrum_hidden_layers": [3]}, InvalidParameterError, "hidden has the layer 3, expected 0 to 2"),
        (
            {"ferrum_attention_layers": [0, 2]},
            InvalidParameterError,
            "attention_weights has the layer 2, expected 0 to 1",
        ),
        ({"ferrum_attention_layers": 1}, RequestValidationError, "expected a list of layers"),
        ({"ferrum_hidden_layers": [True]}, RequestValidationError, "ferrum_hidden_layers is True"),
    ],
)
def test_a_layer_that_is_not_there_is_refused_and_nothing_is_left(
    metadata: dict, error: type, message: str, runner: ModelRunner
):
    executor = LlmExecutor(runner)
    with pytest.raises(error, match=message):
        asyncio.run(executor.prefill(PrefillInput(input_ids=[TOKENS], metadata=metadata)))
    assert runner.kv_slot_capacity_snapshot().free_blocks == 18


def test_what_shows_nothing_says_so():
    with pytest.raises(UnsupportedError, match="does not show its layers"):
        SummingLLM().capture("a", [1], hidden=[0])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"hidden": 1}, "hidden is 1, expected layers from 0 to 2"),
        ({"hidden": "0"}, "hidden is '0'"),
        ({"hidden": [0, 3]}, "hidden has the layer 3"),
        ({"attention_weights": [2]}, "attention_weights has the layer 2, expected 0 to 1"),
        ({"attention_weights": [True]}, "attention_weights has the layer True"),
    ],
)
def test_layers_that_are_not_there_are_refused_and_change_nothing(wanted: dict, message: str, runner: ModelRunner):
    runner.prefill("a", TOKENS)
    with pytest.raises(InvalidParameterError, match=message):
        runner.capture("a", [1], **wanted)
    assert runner.kv_len("a") == len(TOKENS)


def test_layers_may_come_from_anything_that_gives_them(runner: ModelRunner):
    found = runner.capture("a", TOKENS[:8], hidden=range(0, 3, 2), attention_weights=range(1, 2))
    assert (sorted(found.hidden), list(found.attention_weights)) == ([0, 2], [1])
