"""Speculative decoding: drafts, their verification in one forward, and the rollback of rejected tokens."""

import contextlib
import logging
import math
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from ferrum_jax.contract.errors import BackendError, FerrumError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.batch import Distributions, ScheduledRow, TokenChoice, VerifiedTokens
from ferrum_jax.generate.drafts import Draft, DraftSource, DraftWant
from ferrum_jax.generate.rejection import accept
from ferrum_jax.generate.request import Request

_log = logging.getLogger(__name__)


class Speculator:
    """Advances requests by the drafted tokens that the target model accepts, and one more.

    A drafted token is accepted if the target chooses the same token at its position, with the noise of the request's
    seed and that position if it samples. So a token is accepted with its probability under the target, and a token in
    its place has the target's distribution without it: speculative sampling (Leviathan et al. 2023; Chen et al. 2023)
    with a draft distribution that is a single token. Answers are those of plain generation, whatever was drafted. Only
    a draft with probabilities of its own is judged by these: the answer then has the target's distribution, but differs
    from the plain answer of the same seed.
    """

    def __init__(self, model: DecoderOnlyLLM, backend: Any, source: DraftSource):
        """Checks that model and source go together.

        Raises:
            UnsupportedError: the model cannot roll its KV back.
            ConfigError: the source cannot draft for this model.
        """
        source.check_target(model)
        model.truncate_kv("", 0)  # an unknown id is no error, unless the method is Unsupported
        self.source = source
        self.drafted = 0
        self.accepted = 0
        self._model = model
        self._backend = backend
        self._has_warned = False

    def advance(self, batch: Sequence[Request]) -> list[Request]:
        """Hands accepted tokens to the requests of a batch that have a draft, and returns these requests.

        If the KV is too full for the drafts, or the model refuses them, nothing changes and the list is empty: the
        requests are left to the ordinary step. After any error the KV is rolled back.
        """
        # A first token is never drafted: how much of its prompt was read before depends on other requests.
        ready = [one for one in batch if one.num_read == len(one.tokens) - 1 >= len(one.prompt)]
        ready = [one for one in ready if not one.capture and not one.has_changing_settings]
        drafted = self._draft(ready)
        if not drafted:
            return []
        try:
            rows = [_row(request, draft) for request, draft in drafted]
            answers = self._backend.execute(rows).result()
            verdicts = [
                _judge(request, draft, answer) for (request, draft), answer in zip(drafted, answers, strict=True)
            ]
            # A drafted token whose numbers are not finite spoils those before it: then the ordinary step decides.
            verdicts = [[] if any(math.isnan(one.logprob) for one in verdict) else verdict for verdict in verdicts]
            for (request, draft), verdict in zip(drafted, verdicts, strict=True):
                if len(verdict) <= len(draft.tokens):
                    self._backend.truncate_kv(request.cache_id, request.num_read + len(verdict))
        except BaseException as problem:
            for request, _ in drafted:
                with contextlib.suppress(FerrumError):
                    self._backend.truncate_kv(request.cache_id, request.num_read)
            if isinstance(problem, UnsupportedError):
                raise
            if isinstance(problem, ResourceExhaustedError) or is_refusal(problem):
                return []
            raise
        ahead = []
        for (request, draft), verdict in zip(drafted, verdicts, strict=True):
            if verdict:
                self._hand_out(request, draft, verdict)
                ahead.append(request)
            else:
                request.forget_settings()  # the device has counted tokens that are not part of the answer
        return ahead

    def forget(self, cache_id: str) -> None:
        """Frees what the source holds for a request; an error of the source is logged, not raised."""
        try:
            self.source.release(cache_id)
        except Exception as problem:  # noqa: BLE001  of any kind: answers do not depend on the source
            self._warn("release", problem)

    def _warn(self, method: str, problem: Exception) -> None:
        """Logs an error of the source unless it is a FerrumError: at WARNING once, as every step may repeat it."""
        if not isinstance(problem, FerrumError):
            level = logging.DEBUG if self._has_warned else logging.WARNING
            _log.log(level, "%s of %s failed: %r", method, type(self.source).__name__, problem)
            self._has_warned = True

    def _draft(self, requests: Sequence[Request]) -> list[tuple[Request, Draft]]:
        wants, owners = [], []
        for request in requests:
            # A step yields one token more than was drafted, which takes no position of the KV yet.
            room = min(request.num_left - 1, self._model.kv_capacity() - len(request.tokens))
            if room > 0:
                count = min(room, self.source.num_tokens)
                settings, prompt = request.settings(), len(request.prompt)
                wants.append(DraftWant(request.cache_id, list(request.tokens), settings, count, prompt))
                owners.append(request)
        if not wants:
            return []
        vocab_size, fitting = self._model.config.vocab_size, []
        try:
            proposed = list(zip(owners, self.source.propose(wants), wants, strict=True))
        except Exception as problem:  # noqa: BLE001  of any kind: a draft that fails costs nobody an answer
            self._warn("propose", problem)
            return []
        for owner, draft, want in proposed:
            try:
                draft = _fit(owner, draft, want, vocab_size)
            except Exception as problem:  # noqa: BLE001  of any kind: it is no draft
                self._warn("a draft", problem)
                continue
            if draft.tokens:
                fitting.append((owner, draft))
        return fitting

    def _hand_out(self, request: Request, draft: Draft, verdict: Sequence[TokenChoice]) -> None:
        request.num_read += len(verdict)
        request.drafted += len(draft.tokens)
        self.drafted += len(draft.tokens)
        if draft.probabilities is not None and request.settings().is_adjusted:
            request.forget_settings()  # the device has not counted these tokens
        for at, choice in enumerate(verdict):
            request.append(choice, self._backend.params_version)
            if at < len(verdict) - 1:
                request.accepted += 1
                self.accepted += 1
            if request.is_done:
                break


def is_refusal(problem: BaseException) -> bool:
    """True if a batch was refused with nothing changed, perhaps for one of its rows: a step may not compile."""
    return isinstance(problem, FerrumError) and (problem.is_client_error or isinstance(problem, BackendError))


def _fit(request: Request, draft: Draft, want: DraftWant, vocab_size: int) -> Draft:
    """Returns the part of a draft that can be verified; raises an exception of any type if it is malformed.

    Probabilities are dropped if nothing is drawn, if the request wants log-probabilities, which would be those of the
    draws, and if the answer has a form, which they ignore.
    """
    proposed = [index(token) for token in draft.tokens][: want.count]
    count = next((at for at, token in enumerate(proposed) if not 0 <= token < vocab_size), len(proposed))
    tokens = proposed[:count]
    if request.form is not None:
        tokens, masks = request.fit_draft(request.form, tokens, want.count)
        return Draft(tokens, masks=np.stack(masks) if tokens else None)
    if draft.probabilities is None or want.settings.temperature == 0 or want.settings.num_logprobs >= 0:
        return Draft(tokens)
    probabilities = np.asarray(draft.probabilities, np.float64)
    if probabilities.shape != (expected := (len(draft.tokens), vocab_size)):
        raise ValueError(f"probabilities have shape {list(probabilities.shape)}, expected {list(expected)}")
    if not (probabilities >= 0).all() or not np.allclose(probabilities.sum(axis=-1), 1, atol=1e-3):
        raise ValueError("a row of the probabilities is no distribution")
    return Draft(tokens, probabilities[:count])


def _row(request: Request, draft: Draft) -> ScheduledRow:
    tokens = np.array([request.tokens[-1], *draft.tokens], np.int32)
    settings = request.settings()
    output = VerifiedTokens(settings, draft.masks) if draft.probabilities is None else Distributions(settings)
    return ScheduledRow(request.cache_id, tokens, request.num_read, output)


def _judge(request: Request, draft: Draft, answer: Any) -> list[TokenChoice]:
    """Returns a request's new tokens: the accepted ones, and the one after them."""
    if draft.probabilities is not None:
        target = np.asarray(answer, np.float64)
        target /= target.sum(axis=-1, keepdims=True)
        tokens = accept(draft.tokens, draft.probabilities, target, seed=request.seed, position=len(request.tokens))
        # Only the distribution drawn from is known, so it stands for both log-probabilities.
        figures = np.log(target[np.arange(len(tokens)), tokens]).tolist()
        return [TokenChoice(token, figure, figure) for token, figure in zip(tokens, figures, strict=True)]
    pairs = enumerate(zip(draft.tokens, answer, strict=False))
    wrong = (at for at, (token, choice) in pairs if token != choice.token_id)
    return list(answer[: next(wrong, len(draft.tokens)) + 1])
