"""Drafts from a smaller model."""

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract.checks import check_int
from ferrum_jax.contract.errors import (
    ConfigError,
    FerrumError,
    InvalidParameterError,
    ResourceExhaustedError,
    UnsupportedError,
    safe_repr,
)
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.batch import NO_OUTPUT, Distributions, SampledToken, ScheduledRow, TokenChoice
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.drafts import Draft, DraftSource, DraftWant
from ferrum_jax.generate.host_model import Backend, HostModel
from ferrum_jax.generate.rejection import Purpose, draw, uniform

Drawing = Literal["best", "shared", "own"]


def check_drawing(drawing: Drawing) -> Drawing:
    """Returns how to draft for requests that sample; raises InvalidParameterError if there is no such way."""
    if drawing not in ("best", "shared", "own"):
        raise InvalidParameterError(f"drawing is {safe_repr(drawing)}, expected 'best', 'shared' or 'own'")
    return drawing


@dataclass(eq=False)
class _Row:
    """A sequence that the draft model extends."""

    want: DraftWant
    settings: SlotSettings
    tokens: list[int] = field(default_factory=list)  # drafted so far
    probabilities: list[NDArray[np.float64]] = field(default_factory=list)

    def tokens_from(self, start: int) -> list[int]:
        """Returns the request's tokens from a position on, and those drafted after them."""
        return [*self.want.tokens[start:], *self.tokens[max(0, start - len(self.want.tokens)) :]]


class ModelDraft(DraftSource):
    """Proposes the tokens that a draft model chooses; several sequences are drafted in one batch.

    The draft model has its own sequence for each request. Before each draft, tokens that were not accepted are rolled
    back; a model that cannot roll back recomputes the sequence. A draft model that fails or is full proposes nothing.
    """

    def __init__(
        self,
        model: DecoderOnlyLLM,
        num_tokens: int = 4,
        *,
        drawing: Drawing = "shared",
        is_owner: bool = False,
    ):
        """Drafts with a model.

        Args:
            model: the draft model; it must have the target's vocabulary.
            num_tokens: tokens drafted at a time.
            drawing: how tokens are drafted for requests that sample. `best`: the draft's likeliest token. `shared`:
                sampled with the same noise as the target's choice, so that both tend to agree (Daliri et al. 2024,
                "Coupling without Communication and Drafter-Invariant Speculative Decoding"). `own`: sampled with
                separate noise and judged by the draft's probabilities (Leviathan et al. 2023), which accepts most.
            is_owner: `close` also closes the model.
        """
        self.model = model
        self.num_tokens = check_int("num_tokens", num_tokens, 1, InvalidParameterError)
        self.drawing = check_drawing(drawing)
        self._backend: Backend = model if isinstance(model, ModelRunner) else HostModel(model)
        self._is_owner = is_owner
        # Tokens in a row that asks for distributions: the last drafted token is not in the KV yet, and one may follow.
        self._most_at_once = min(2, model.plan.buckets.verify_tokens) if isinstance(model, ModelRunner) else 2
        self._held: dict[str, list[int]] = {}  # tokens in the draft's KV, by the request's cache id
        self._room: int | None = None  # sequences admitted after the KV ran short, until one is released
        self._name = secrets.token_hex(4)

    def check_target(self, target: DecoderOnlyLLM) -> None:
        """Raises ConfigError if the target has another vocabulary, or is the draft itself."""
        mine, theirs = self.model.config.vocab_size, target.config.vocab_size
        if mine != theirs:
            raise ConfigError(f"the draft model has a vocabulary of {mine} tokens, the target one of {theirs}")
        if self.model is target:
            raise ConfigError("the draft model is the target itself: a draft needs a KV of its own")

    def warmup(self, *, progress: bool = True) -> None:
        """Compiles the draft model's programs."""
        self._backend.warmup(progress=progress, distributions=self.drawing == "own")

    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        """Drafts token by token, one step for all sequences at a time."""
        rows = [_Row(want, self._settings(want)) for want in wants]
        active = [row for row in rows if self._align(row)]
        while active:
            answered = self._feed(active)
            for row, answer in answered:
                if answer is not None:
                    self._extend(row, answer)
            active = [row for row, _ in answered if len(row.tokens) < self._most(row)]
        return [Draft(row.tokens, np.stack(row.probabilities) if row.probabilities else None) for row in rows]

    def release(self, cache_id: str) -> None:
        """Frees the draft model's sequence of a request."""
        self._room = None
        if self._held.pop(cache_id, None) is not None:
            with contextlib.suppress(Exception):  # a failed model refuses this, too; its reset frees everything
                self._backend.release(self._id(cache_id))

    def reset(self) -> None:
        """Resets the draft model; the next draft of a sequence recomputes it."""
        self._held.clear()
        self._room = None
        self._backend.reset()

    def close(self) -> None:
        """Closes the draft model if it is owned."""
        if self._is_owner and isinstance(self.model, ModelRunner):
            self.model.close()

    def _id(self, cache_id: str) -> str:
        return f"draft-{self._name}-{cache_id}"

    def _settings(self, want: DraftWant) -> SlotSettings:
        """Returns the target's settings, greedy if `drawing` is `best`; penalties count the same answer."""
        settings = replace(want.settings, num_logprobs=-1)
        if settings.is_adjusted:
            settings = replace(settings, generated=np.array(want.tokens[want.num_prompt :], np.int64))
        return settings if self.drawing != "best" else replace(settings, temperature=0.0)

    def _most(self, row: _Row) -> int:
        """Returns how many tokens can be drafted for a row; the last one takes no position of the KV."""
        return min(row.want.count, self.model.kv_capacity() - len(row.want.tokens) + 1)

    def _align(self, row: _Row) -> bool:
        """Rolls the draft's sequence back to the prefix it shares with the request; returns whether there is room."""
        key, tokens = row.want.cache_id, row.want.tokens
        if self._most(row) < 1:
            self.release(key)
            return False
        if key not in self._held:
            if self._room is not None and len(self._held) >= self._room:
                return False
            self._held[key] = []
        held = self._held[key]
        # Tokens before the last draft nearly always agree, which one comparison of lists checks.
        start = max(0, len(held) - self.num_tokens)
        start = start if held[:start] == list(tokens[:start]) else 0
        pairs = zip(held[start:], tokens[start:], strict=False)
        kept = next((at for at, (a, b) in enumerate(pairs, start) if a != b), len(held))
        kept = min(kept, len(tokens) - 1)  # at least one token is computed, for its logits
        if kept == len(held):
            return True
        try:
            self._backend.truncate_kv(self._id(key), kept)
        except UnsupportedError:
            self._backend.release(self._id(key))
            kept = 0
        except FerrumError:
            self.release(key)
            return False
        self._held[key] = held[:kept]
        return True

    def _feed(self, rows: Sequence[_Row]) -> list[tuple[_Row, Any]]:
        """Runs the draft model over each sequence's new tokens; returns the rows that it accepted, with answers."""
        items = [self._item(row) for row in rows]
        try:
            answers = self._backend.execute(items).result()
        except ResourceExhaustedError:
            self.release(rows[-1].want.cache_id)  # the last row loses its sequence
            left = self._not_advanced(rows[:-1])
            self._room = len(self._held)
            return self._feed(left) if left else []
        except BaseException as problem:
            if isinstance(problem, FerrumError) and problem.is_client_error and len(rows) > 1:
                # One row is at fault: run them one by one.
                return [pair for row in self._not_advanced(rows) for pair in self._feed([row])]
            for row in rows:
                self.release(row.want.cache_id)
            if isinstance(problem, FerrumError):
                return []
            raise
        for row, item in zip(rows, items, strict=True):
            assert item.tokens is not None
            self._held[row.want.cache_id] += item.tokens.tolist()
        return list(zip(rows, answers, strict=True))

    def _not_advanced(self, rows: Sequence[_Row]) -> list[_Row]:
        """Returns the rows whose sequences a failed batch left unchanged; releases the other sequences."""
        for key in [row.want.cache_id for row in rows]:
            if (self._backend.kv_len(self._id(key)) or 0) != len(self._held[key]):
                self.release(key)
        return [row for row in rows if row.want.cache_id in self._held]

    def _item(self, row: _Row) -> ScheduledRow:
        """Returns a row of new tokens; if they are drawn on the host and are many, first those before the last."""
        want, key = row.want, self._id(row.want.cache_id)
        held = len(self._held[want.cache_id])
        tokens = np.array(row.tokens_from(held), np.int32)
        # Judging by the draft's probabilities does not yield the target's own log-probabilities.
        if self.drawing != "own" or row.settings.temperature == 0 or want.settings.num_logprobs >= 0:
            return ScheduledRow(key, tokens, held, SampledToken(row.settings))
        if len(tokens) > self._most_at_once or (len(tokens) > 1 and held < want.num_prompt - 1):
            return ScheduledRow(key, tokens[:-1], held, NO_OUTPUT)
        settings = row.settings
        if settings.is_adjusted:  # the device has not counted tokens drawn on the host: count up to the row's first
            generated = row.tokens_from(want.num_prompt)[: held + 1 - want.num_prompt]
            settings = replace(settings, generated=np.array(generated, np.int64))
        return ScheduledRow(key, tokens, held, Distributions(settings))

    def _extend(self, row: _Row, answer: Any) -> None:
        """Appends one drafted token."""
        if isinstance(answer, TokenChoice):
            row.tokens.append(answer.token_id)
            return
        q = np.asarray(answer[-1], np.float64)
        q /= q.sum()
        position = len(row.want.tokens) + len(row.tokens)
        row.tokens.append(draw(q, uniform(row.settings.seed, position, Purpose.PROPOSE)))
        row.probabilities.append(q)
