"""Hidden states and attention weights of decoded tokens."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import LlmExecutor, models
from ferrum_jax.contract import Captured, GreedyArgmax
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.asking import batch, item, prompt, run, token
from tests.executor.conftest import CFG
from tests.fake import SummingLLM

ASKED = {"ferrum_hidden_layers": [1], "ferrum_attention_layers": [1, 0]}


class Capturing(SummingLLM):
    """The hidden state of a token is its id plus the layer; its attention is spread evenly over what it sees."""

    def capture(
        self, cache_id: str, tokens: Sequence[int], *, hidden: Sequence[int] = (), attention_weights: Sequence[int] = ()
    ) -> Captured:
        (logits,) = self._forward("capture", [(cache_id, tokens)])
        end = len(self.tokens[cache_id])
        seen = np.tri(len(tokens), end, end - len(tokens), dtype=np.float32)
        weights = np.stack([seen / seen.sum(axis=1, keepdims=True)] * 3)
        return Captured(
            logits=logits,
            hidden={layer: np.array(tokens, np.float32)[:, None] + layer for layer in hidden},
            attention_weights=dict.fromkeys(attention_weights, weights),
        )


def test_a_decode_returns_the_layers_that_its_metadata_names():
    model = Capturing()
    executor = LlmExecutor(model)
    one, two = (out.kv_cache for out in run(executor.batch_prefill([prompt([1, 2]), prompt([3])])))
    asked = token(5, one, metadata=ASKED, logits_policy=GreedyArgmax())
    outs: list[Any] = run(executor.batch_decode([asked, token(4, two)]))
    captured, plain = outs
    assert captured.logits.tolist() == [[8]]
    np.testing.assert_array_equal(captured.hidden_state, [[6.0]])
    assert [weights.shape for weights in captured.attention_weights] == [(1, 3, 3), (1, 3, 3)]
    np.testing.assert_allclose(captured.attention_weights[0], np.full((1, 3, 3), 1 / 3))
    assert int(np.argmax(plain.logits)) == 7
    assert (plain.hidden_state, plain.attention_weights) == (None, None)
    assert model.calls == ["unified_forward", "capture", "decode_batch"]
    assert model.tokens == {"llm-cache-0": [1, 2, 5], "llm-cache-1": [3, 4]}
    assert captured.kv_cache.is_valid()


def test_a_verified_token_returns_what_it_saw_itself():
    model = Capturing()
    executor = LlmExecutor(model)
    handle = run(executor.prefill(prompt([1, 2]))).kv_cache
    outs: list[Any] = run(executor.forward_verify([token(5, handle, metadata=ASKED), token(6, handle, metadata=ASKED)]))
    assert [int(np.argmax(out.logits)) for out in outs] == [8, 14]
    assert [out.hidden_state.tolist() for out in outs] == [[[6.0]], [[7.0]]]
    for out, length in zip(outs, (3, 4), strict=True):
        np.testing.assert_allclose(out.attention_weights[1], np.full((1, 3, length), 1 / length))


@pytest.mark.slow  # tests/executor/test_capture.py compares the model's captures with the forward's
def test_captures_of_a_decode_are_those_of_the_forward(runner: ModelRunner, params: ParamTree):
    tokens = [3, 1, 4, 1, 5, 9]
    run_ = jax.jit(lambda ids: models.capture(params, ids, CFG, hidden=(1,), attention_weights=(0, 1)))
    logits, hidden, weights = run_(jnp.array([tokens]))
    executor = LlmExecutor(runner)
    handle = run(executor.prefill(prompt(tokens[:-1]))).kv_cache
    out: Any = run(executor.decode(token(tokens[-1], handle, metadata=ASKED)))
    np.testing.assert_allclose(out.logits, logits[:, -1], atol=1e-4)
    np.testing.assert_allclose(out.hidden_state, hidden[1][:, -1], atol=1e-4)
    for found, layer in zip(out.attention_weights, (1, 0), strict=True):
        np.testing.assert_allclose(found, weights[layer][:, :, -1], atol=1e-4)


def test_what_an_output_has_no_field_for_is_refused():
    model = Capturing()
    executor = LlmExecutor(model)
    handle = run(executor.prefill(prompt([1, 2]))).kv_cache
    with pytest.raises(RequestValidationError, match=r"ferrum_hidden_layers is \[0, 1\].* hidden state of one layer"):
        run(executor.decode(token(1, handle, metadata={"ferrum_hidden_layers": [0, 1]})))
    with pytest.raises(UnsupportedError, match="have no place in unified_decode's output"):
        run(executor.unified_decode(batch(item("a", [1], 0, metadata=ASKED))))
    with pytest.raises(UnsupportedError, match="have no place in speculative_decode's output"):
        run(executor.speculative_decode(token(1, handle, metadata=ASKED), [2], 1.0))
    with pytest.raises(UnsupportedError, match="does not show its layers"):
        run(LlmExecutor(SummingLLM()).prefill(prompt([1], metadata=ASKED)))
    assert model.tokens == {"llm-cache-0": [1, 2]}
