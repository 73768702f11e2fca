"""Drafts from a smaller model."""

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract import llm
from ferrum_jax.contract.errors import (
    ConfigError,
    FerrumError,
    InvalidParameterError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.contract.llm import DecoderOnlyLLM, Logits, UnifiedRow
from ferrum_jax.contract.policy import FullLogits, GreedyArgmax, GreedyRepetitionPenalty, LogitsReturnPolicy
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.drafts import Draft, DraftSource, DraftWant, checked_count
from ferrum_jax.generate.rejection import Purpose, draw, uniform
from ferrum_jax.generate.sampler import Sampler, Turn, artifacts_of

Drawing = Literal["best", "shared", "own"]


@dataclass(eq=False)
class DraftRow:
    """A sequence on its way through the draft model."""

    want: DraftWant
    tokens: list[int] = field(default_factory=list)  # drafted so far
    probabilities: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def turn(self) -> Turn:
        """What the next drafted token depends on."""
        turn = self.want.turn
        return Turn(turn.params, turn.seed, [*turn.tokens, *self.tokens])


class ModelDraft(DraftSource):
    """Proposes what a draft model would say; several sequences are drafted in one batch.

    The draft keeps a cache per request. It is brought into step with the accepted tokens before each draft: what was
    not accepted is rolled back, or read anew where the model cannot do that. A draft model that fails or is full
    proposes nothing.
    """

    def __init__(
        self,
        model: DecoderOnlyLLM,
        num_tokens: int = 4,
        *,
        drawing: Drawing = "shared",
        max_rows: int = 8,
        is_owner: bool = False,
    ):
        """Drafts with a model.

        Args:
            model: the draft; its vocabulary must be the target's.
            num_tokens: drafted at a time.
            drawing: how tokens are drafted for requests that draw. `best`: the draft's best token. `shared`: drawn with
                the very noise that the target will use, so that both tend to agree (Daliri et al. 2024, "Coupling
                without Communication and Drafter-Invariant Speculative Decoding"). `own`: drawn with noise of its own
                and judged by the draft's probabilities (Leviathan et al. 2023), which accepts most.
            max_rows: sequences that the sampler takes at a time.
            is_owner: also close the model.
        """
        if drawing not in ("best", "shared", "own"):
            raise InvalidParameterError(f"drawing is {drawing!r}, expected 'best', 'shared' or 'own'")
        self.model = model
        self.num_tokens = checked_count("num_tokens", num_tokens)
        self.drawing = drawing
        self.has_probabilities = drawing == "own"
        self._sampler = Sampler(model.config.vocab_size, max_rows, artifacts_of(model))
        self._is_owner = is_owner
        self._held: dict[str, list[int]] = {}  # tokens in the draft's KV, by the request's cache id
        self._room: int | None = None  # sequences admitted after the KV ran short, until one is released
        self._is_unified = True
        self._has_run = False  # a unified forward has succeeded
        self._name = secrets.token_hex(4)

    def refuse_target(self, target: DecoderOnlyLLM) -> None:
        """Raises ConfigError if the target has another vocabulary, or is the draft itself."""
        mine, theirs = self.model.config.vocab_size, target.config.vocab_size
        if mine != theirs:
            raise ConfigError(f"the draft model has a vocabulary of {mine} tokens, the target one of {theirs}")
        if self.model is target:
            raise ConfigError("the draft model is the target itself: a draft needs a KV of its own")

    def warmup(self, *, progress: bool = True) -> None:
        """Compiles the draft model's steps and what drawing needs."""
        self.model.warmup(progress=progress)
        self._sampler.warmup(distributions=self.has_probabilities)

    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        """Drafts token by token, each for all sequences at once."""
        rows = [DraftRow(want) for want in wants]
        active = [row for row in rows if self._align(row)]
        while active:
            answered = self._feed(active)
            self._extend(answered)
            active = [row for row, _ in answered if len(row.tokens) < self._most(row)]
        return [Draft(row.tokens, np.stack(row.probabilities) if row.probabilities else None) for row in rows]

    def release(self, cache_id: str) -> None:
        """Frees the sequence of a request."""
        self._room = None
        if self._held.pop(cache_id, None) is not None:
            with contextlib.suppress(FerrumError):  # a model that failed refuses this too; its reset frees everything
                self.model.release(self._id(cache_id))

    def reset(self) -> None:
        """Resets the draft model; sequences are read anew when they are drafted for."""
        self._held.clear()
        self._room = None
        self.model.reset()

    def close(self) -> None:
        """Closes the draft model if it is owned."""
        if self._is_owner and isinstance(self.model, ModelRunner):
            self.model.close()

    def _id(self, cache_id: str) -> str:
        return f"draft-{self._name}-{cache_id}"

    def _most(self, row: DraftRow) -> int:
        """Tokens that can be drafted for a row; the last of them is never read."""
        return min(row.want.count, self.model.kv_capacity() - len(row.want.turn.tokens) + 1)

    def _align(self, row: DraftRow) -> bool:
        """Rolls the draft's sequence back to what it shares with the request; says whether there is room for it."""
        key, tokens = row.want.cache_id, row.want.turn.tokens
        if self._most(row) < 1:
            self.release(key)
            return False
        if key not in self._held:
            if self._room is not None and len(self._held) >= self._room:
                return False
            self._held[key] = []
        held = self._held[key]
        kept = next((at for at, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b), len(held))
        kept = min(kept, len(tokens) - 1)  # at least one token is read, for its logits
        if kept == len(held):
            return True
        try:
            self.model.truncate_kv(self._id(key), kept)
        except UnsupportedError:
            self.model.release(self._id(key))
            kept = 0
        except FerrumError:
            self.release(key)
            return False
        self._held[key] = held[:kept]
        return True

    def _feed(self, rows: Sequence[DraftRow]) -> list[tuple[DraftRow, Logits | int]]:
        """Reads what is new in each sequence; gives the answers of those that the model took."""
        items = [self._item(row) for row in rows]
        try:
            answers = self._run(items, [self._policy(row) for row in rows])
        except ResourceExhaustedError:
            # Who came last gives way. Rows that ran one by one may have advanced before the error.
            for row in rows[-1:] if self._is_unified else rows:
                self.release(row.want.cache_id)
            self._room = len(self._held)
            return self._feed(rows[:-1]) if self._is_unified and len(rows) > 1 else []
        except BaseException as problem:
            if self._is_unified and len(rows) > 1 and isinstance(problem, FerrumError) and problem.is_client_error:
                return [found for row in rows for found in self._feed([row])]
            for row in rows:
                self.release(row.want.cache_id)
            if isinstance(problem, FerrumError):
                return []
            raise
        for row, (_, tokens, _, _) in zip(rows, items, strict=True):
            self._held[row.want.cache_id] += tokens
        return list(zip(rows, answers, strict=True))

    def _item(self, row: DraftRow) -> UnifiedRow:
        held = len(self._held[row.want.cache_id])
        return self._id(row.want.cache_id), row.turn.tokens[held:], held, True

    def _policy(self, row: DraftRow) -> LogitsReturnPolicy:
        turn = row.turn
        if turn.params.temperature > 0 and self.drawing != "best":
            return FullLogits()
        penalty = turn.params.repetition_penalty
        return GreedyArgmax(
            repetition_penalty=None
            if penalty == 1.0
            else GreedyRepetitionPenalty(penalty=penalty, token_ids=turn.tokens)
        )

    def _run(self, items: Sequence[UnifiedRow], policies: Sequence[LogitsReturnPolicy]) -> list[Logits | int]:
        if self._is_unified:
            try:
                answers = self.model.unified_forward_with_logits_policy(items, policies)
            except UnsupportedError:
                if self._has_run:
                    raise
                self._is_unified = False
            else:
                self._has_run = True
                return [answer for answer in answers if answer is not None]
        singles = [(cache_id, tokens[0], at) for cache_id, tokens, at, _ in items if len(tokens) == 1 and at > 0]
        decoded = dict(zip([row[0] for row in singles], self.model.decode_batch(singles), strict=True))
        return [
            llm.choose(decoded[key] if key in decoded else self.model.prefill(key, tokens), policy)
            for (key, tokens, _, _), policy in zip(items, policies, strict=True)
        ]

    def _extend(self, answered: Sequence[tuple[DraftRow, Logits | int]]) -> None:
        """Turns the model's answers into one more token for each row."""
        drawn = []
        for row, answer in answered:
            if isinstance(answer, np.ndarray):
                drawn.append((row, answer))
            else:
                row.tokens.append(answer)
        if not drawn:
            return
        turns, logits = [row.turn for row, _ in drawn], [answer for _, answer in drawn]
        if self.drawing == "shared":
            for (row, _), (token, _) in zip(drawn, self._sampler.choose(turns, logits), strict=True):
                row.tokens.append(token)
            return
        for (row, _), turn, q in zip(drawn, turns, self._sampler.distributions(turns, logits), strict=True):
            row.tokens.append(draw(q, uniform(turn.seed, len(turn.tokens), Purpose.PROPOSE)))
            row.probabilities.append(q)
