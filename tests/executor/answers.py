"""What an answer must be, by the logits of the forward without a cache."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract import GreedyArgmax, LogitsReturnPolicy
from ferrum_jax.executor.batch import AllLogits, NoOutput, Output, SampledToken, TargetScores, TokenChoice
from ferrum_jax.ops import sampling
from ferrum_jax.ops.sampling import SampleInputs
from tests.executor.conftest import CFG

V = CFG.vocab_size
TOLERANCE = 1e-4  # float32 sums in another order; logits are of order 10


@dataclass(eq=False)
class Chosen:
    """A token that was chosen on the device, which the host may not know yet."""

    token: int | None = None


class Begun(NamedTuple):
    """A row of a batch that was begun, and what its answer depends on."""

    output: Output
    num_tokens: int
    text: list[int | Chosen]  # of its sequence, the row included
    adapter: str | None
    generated: list[int | Chosen]  # what the slot has counted, beside what its settings say
    chosen: Chosen


def known(tokens: list[int | Chosen]) -> list[int]:
    """The tokens themselves, all of which have been read."""
    found = [one.token if isinstance(one, Chosen) else one for one in tokens]
    assert None not in found
    return found  # pyright: ignore[reportReturnType]


def expect_output(answer: Any, row: Begun, logits: np.ndarray) -> None:
    """Fails unless an answer is what a row wants, by the logits of its sequence."""
    logits = logits[-row.num_tokens :]
    if isinstance(row.output, TargetScores):
        whole = logprobs_of(logits)
        np.testing.assert_allclose(answer.logprobs, whole[range(len(whole)), row.output.targets], atol=TOLERANCE)
        np.testing.assert_allclose(logits[range(len(logits)), answer.greedy_ids], logits.max(-1), atol=TOLERANCE)
        assert (answer.top_ids is not None) == row.output.with_alternatives
    elif isinstance(row.output, SampledToken):
        generated = known(row.generated)
        expect_choice(answer, logits[-1], row.output.settings, generated, len(row.text))
    elif isinstance(row.output, NoOutput):
        assert answer is None
    else:
        expected = logits if isinstance(row.output, AllLogits) else logits[-1]
        np.testing.assert_allclose(answer, expected, atol=TOLERANCE, rtol=0)


def expect_choice(
    answer: TokenChoice, logits: np.ndarray, settings: SlotSettings, generated: list[int], position: int
) -> None:
    """Fails unless a token is the one that settings choose at a position, or as good but for rounding."""
    scores = adjusted(logits, settings, generated, position)
    inputs = SampleInputs(
        temperature=jnp.float32([settings.temperature]),
        top_k=jnp.int32([settings.top_k]),
        top_p=jnp.float32([settings.top_p]),
        min_p=jnp.float32([settings.min_p]),
        seed=jnp.uint32([settings.seed]),
        position=jnp.int32([position]),
    )
    best = int(np.asarray(CHOOSE(jnp.asarray(scores[None]), inputs)[0])[0]) if settings.temperature else scores.argmax()
    if answer.token_id != best:
        two = [answer.token_id, best]
        scaled = (scores - scores.max()) / (settings.temperature or 1.0)
        near = 8 * TOLERANCE / (settings.temperature or 1.0)
        noise = threshold = np.zeros(V)
        if settings.temperature:
            noise = np.asarray(sampling.gumbel(inputs.seed, inputs.position, jnp.arange(V, dtype=jnp.int32)))
            kept = sampling.filter_threshold(jnp.asarray(scaled[None]), inputs.top_k, inputs.top_p, inputs.min_p)
            threshold = np.full(V, np.asarray(kept)[0])
        is_filtered = bool(settings.temperature) and bool((np.abs(scaled - threshold)[two] <= near).any())
        assert is_filtered or abs((scaled + noise)[two[0]] - (scaled + noise)[two[1]]) <= near
    if settings.num_logprobs < 0:
        assert answer[1:] == (0.0, 0.0, ())
        return
    whole = logprobs_of(logits)
    assert abs(answer.logprob - whole[answer.token_id]) <= 2 * TOLERANCE
    if not settings.temperature:
        assert abs(answer.processed_logprob - logprobs_of(scores)[answer.token_id]) <= 2 * TOLERANCE
    assert len(answer.alternatives) == settings.num_logprobs
    found = [logprob for _, logprob in answer.alternatives]
    np.testing.assert_allclose(found, np.sort(whole)[::-1][: settings.num_logprobs], atol=2 * TOLERANCE, rtol=0)


CHOOSE = jax.jit(sampling.choose)


def adjusted(logits: np.ndarray, settings: SlotSettings, generated: list[int], position: int) -> np.ndarray:
    """The scores after bias, masks and penalties."""
    scores = logits.copy()
    for token, value in settings.bias.items():
        scores[token] += np.float32(value)
    if position < settings.min_position:
        scores[list(settings.stop_ids)] = -np.inf
    if settings.allowed_ids is not None:
        scores[[token for token in range(V) if token not in settings.allowed_ids]] = -np.inf
    before = [] if settings.generated is None else settings.generated.tolist()
    counts = np.bincount([*before, *generated], minlength=V).astype(np.float32)
    seen = counts > 0
    seen[[] if settings.seen is None else settings.seen] = True
    penalty = np.float32(settings.repetition_penalty)
    scores = np.where(seen, np.where(scores > 0, scores / penalty, scores * penalty), scores)
    return (
        scores - (counts > 0) * np.float32(settings.presence_penalty) - counts * np.float32(settings.frequency_penalty)
    )


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def choose_score(logits: np.ndarray, policy: LogitsReturnPolicy, token: Any) -> float:
    """What a token is worth under a policy; one that is not allowed is worth nothing."""
    assert isinstance(policy, GreedyArgmax)
    mask, penalty = policy.token_mask, policy.repetition_penalty
    if mask is not None and (token >= len(mask.valid_token_mask) or not mask.valid_token_mask[token]):
        return -np.inf
    score = float(logits[token])
    if penalty is not None and token in penalty.token_ids:
        score = score / penalty.penalty if score > 0 else score * penalty.penalty
    return score
