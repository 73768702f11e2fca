"""Several tokens in one forward: drafts, their verification, and the way back from what was wrong."""

import contextlib
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.errors import FerrumError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.contract.llm import DecoderOnlyLLM, Logits
from ferrum_jax.generate.drafts import Draft, DraftSource, DraftWant
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.rejection import accept
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.sampler import Sampler, Turn

Choice = tuple[int, float | None]  # token id, log-probability if it is wanted


class Speculator:
    """Advances requests by as many drafted tokens as the model agrees to, and one more.

    A drafted token is kept where the model, at that place, chooses the same, with the noise of the request's seed and
    of the position if it draws. So a token is accepted with the target's probability of it, and what stands in its
    place otherwise has the target's distribution without it: speculative sampling (Leviathan et al. 2023; Chen et al.
    2023) for a draft that is a single token. Answers are those of plain generation, whatever was drafted. Only a draft
    that comes with probabilities of its own is judged by them, and then an answer has the target's distribution but
    differs from the plain one of the same seed.
    """

    def __init__(self, model: DecoderOnlyLLM, source: DraftSource, sampler: Sampler):
        """Takes part in an engine.

        Raises:
            UnsupportedError: the model cannot roll its KV back.
            ConfigError: the source's proposals make no sense for this model.
        """
        source.refuse_target(model)
        model.truncate_kv("", 0)  # an unknown id is no error, unless the method is Unsupported
        self.source = source
        self.drafted = 0
        self.accepted = 0
        self._model = model
        self._sampler = sampler

    def advance(self, batch: Sequence[Request]) -> list[Request]:
        """Hands tokens to the requests of a batch for which something was drafted, and gives those requests.

        Nothing has changed where the KV is too full for the drafts, or where the model refuses them: those requests
        are left to the ordinary step. After any error the KV is rolled back.
        """
        drafted = self._draft([request for request in batch if request.num_read == len(request.tokens) - 1 > 0])
        if not drafted:
            return []
        try:
            rows = [(request.cache_id, [request.tokens[-1], *draft.tokens]) for request, draft in drafted]
            logits = self._model.forward_verify_batch(rows)
            verdicts = self._judge(drafted, logits)
            for (request, draft), verdict in zip(drafted, verdicts, strict=True):
                if len(verdict) <= len(draft.tokens):
                    self._model.truncate_kv(request.cache_id, request.num_read + len(verdict))
        except BaseException as problem:
            self._roll_back([request for request, _ in drafted])
            if isinstance(problem, UnsupportedError):
                raise
            if isinstance(problem, ResourceExhaustedError) or (
                isinstance(problem, FerrumError) and problem.is_client_error
            ):
                return []
            raise
        for (request, draft), verdict in zip(drafted, verdicts, strict=True):
            self._hand_out(request, draft, verdict)
        return [request for request, _ in drafted]

    def prepare(self, cache_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Compiles what verifying one request needs by doing so once, with tokens of its prompt, on an empty cache."""
        count = min(self.source.num_tokens + 1, self._model.kv_capacity())
        self._model.forward_verify(cache_id, [prompt[at % len(prompt)] for at in range(count)])
        for rows in (1, count):
            self._sampler.prepare(params, rows)

    def forget(self, cache_id: str) -> None:
        """Frees what the source holds for a request."""
        with contextlib.suppress(FerrumError):
            self.source.release(cache_id)

    def _draft(self, requests: Sequence[Request]) -> list[tuple[Request, Draft]]:
        wants, owners = [], []
        for request in requests:
            # One more token than was drafted comes out; all but that one are read.
            room = min(request.limit - len(request.answer) - 1, self._model.kv_capacity() - len(request.tokens))
            if room > 0:
                turn = Turn(request.params, request.seed, list(request.tokens))
                wants.append(DraftWant(request.cache_id, turn, min(room, self.source.num_tokens)))
                owners.append(request)
        if not wants:
            return []
        try:
            drafts = self.source.propose(wants)
        except FerrumError:  # a draft that fails costs nobody an answer
            return []
        return [(owner, draft) for owner, draft in zip(owners, drafts, strict=True) if draft.tokens]

    def _judge(
        self, drafted: Sequence[tuple[Request, Draft]], logits: Sequence[NDArray[np.float32]]
    ) -> list[list[Choice]]:
        """Gives the tokens that each request gets: accepted ones, and the one after them."""
        turns = [_turns(request, draft) for request, draft in drafted]
        owned = [draft.probabilities is not None for _, draft in drafted]
        chosen = iter(self._sampler.choose(*_joined(turns, logits, [not own for own in owned])))
        laws = iter(self._sampler.distributions(*_joined(turns, logits, owned)) if any(owned) else ())
        verdicts = []
        for (request, draft), rows in zip(drafted, logits, strict=True):
            if draft.probabilities is None:
                verdicts.append(_agreed(draft.tokens, list(itertools.islice(chosen, len(rows)))))
                continue
            target = np.stack(list(itertools.islice(laws, len(rows))))
            tokens = accept(draft.tokens, draft.probabilities, target, seed=request.seed, position=len(request.tokens))
            verdicts.append(
                [(token, _logprob(request, row, token)) for token, row in zip(tokens, rows[: len(tokens)], strict=True)]
            )
        return verdicts

    def _hand_out(self, request: Request, draft: Draft, verdict: Sequence[Choice]) -> None:
        request.num_read += len(verdict)
        request.drafted += len(draft.tokens)
        self.drafted += len(draft.tokens)
        for at, (token, logprob) in enumerate(verdict):
            request.append(token, logprob)
            if at < len(verdict) - 1:
                request.accepted += 1
                self.accepted += 1
            if request.is_done:
                break

    def _roll_back(self, requests: Sequence[Request]) -> None:
        for request in requests:
            with contextlib.suppress(FerrumError):
                self._model.truncate_kv(request.cache_id, request.num_read)


def _turns(request: Request, draft: Draft) -> list[Turn]:
    """Gives the choices that a draft stands for: after none of its tokens, after the first, …, after all."""
    return [
        Turn(request.params, request.seed, [*request.tokens, *draft.tokens[:count]])
        for count in range(len(draft.tokens) + 1)
    ]


def _joined(
    turns: Sequence[Sequence[Turn]], logits: Sequence[NDArray[np.float32]], wanted: Sequence[bool]
) -> tuple[list[Turn], list[Logits]]:
    """Gives the turns and rows of logits of the wanted drafts, one after the other."""
    return (
        [turn for each, want in zip(turns, wanted, strict=True) if want for turn in each],
        [row for each, want in zip(logits, wanted, strict=True) if want for row in each],
    )


def _agreed(tokens: Sequence[int], choices: Sequence[Choice]) -> list[Choice]:
    """Gives the choices up to the first that differs from the draft, that one included."""
    wrong = (at for at, (token, (chosen, _)) in enumerate(zip(tokens, choices, strict=False)) if token != chosen)
    return list(choices[: next(wrong, len(tokens)) + 1])


def _logprob(request: Request, logits: NDArray[np.float32], token: int) -> float | None:
    if not request.params.logprobs:
        return None
    return float(logits[token] - np.logaddexp.reduce(logits, dtype=np.float64))
