"""Any `DecoderOnlyLLM` with the interface that the scheduler needs: logits come to the host, which chooses tokens."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import sampler
from ferrum_jax.compile.buckets import choose_bucket
from ferrum_jax.compile.sampler import SamplerSpec, SamplerState, SlotSettings
from ferrum_jax.contract.answers import check_answer_count, check_logit_rows, check_logits, check_scores, kept
from ferrum_jax.contract.errors import FerrumError, UnsupportedError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.batch import (
    Distributions,
    NoOutput,
    SampledToken,
    ScheduledBatch,
    ScheduledRow,
    Scores,
    TargetScores,
    TokenChoice,
    VerifiedTokens,
)
from ferrum_jax.executor.rows import check_settings
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.sharding.devices import host_device

SettledRow: TypeAlias = tuple[ScheduledRow, SlotSettings]
HostState: TypeAlias = SamplerState[NDArray[np.int32]]  # of one slot
ROWS = (1, 8)  # buckets of rows for which tokens are chosen at a time


class HostSampler:
    """Chooses tokens from logits on the host with the functions of the device's sampler, so choices are the same."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._spec = SamplerSpec(num_slots=1, vocab_size=vocab_size, capacity=0)
        self._nobody = sampler.initial(self._spec)
        self._states: dict[str, tuple[SlotSettings, HostState]] = {}  # by cache id; `counts` are kept up to date

    def warmup(self) -> None:
        """Compiles every program."""
        for size in ROWS:
            for function in (_choose, _distributions):
                self._run(function, [(self._nobody, 0)] * size, np.zeros((size, self.vocab_size), np.float32))

    def release(self, cache_id: str) -> None:
        """Forgets a sequence."""
        self._states.pop(cache_id, None)

    def choose(self, rows: Sequence[SettledRow], logits: Sequence[Any]) -> list[Any]:
        """Chooses from each row's logits `[n, V]` the token after its last, or a list of one after each of its tokens.

        Penalties count the choices up to the first one that was not drafted, with this one.
        """
        if all(_is_plain(settings) for _, settings in rows):
            best = [[TokenChoice(token, 0.0, 0.0) for token in one.argmax(axis=1).tolist()] for one in logits]
            return [_as_wanted(row, mine) for (row, _), mine in zip(rows, best, strict=True)]
        found = self._run(_choose, self._places(rows), np.concatenate(logits))
        figures = found.packed[:, 1:].copy().view(np.float32).tolist()
        choices, at = [], 0
        for (row, settings), one in zip(rows, logits, strict=True):
            mine, most = [], max(0, settings.num_logprobs)
            for place in range(at, at + len(one)):
                top = zip(found.top_ids[place, :most].tolist(), found.top_logprobs[place, :most].tolist(), strict=True)
                raw, processed = figures[place]
                mine.append(TokenChoice(int(found.packed[place, 0]), raw, processed, tuple(top)))
            at += len(one)
            choices.append(_as_wanted(row, mine))
            _, state = self._states[row.cache_id]
            for choice, drafted in zip(mine, [*_ids(row)[1:], None][-len(mine) :], strict=True):
                state.counts[0, choice.token_id] += 1
                if choice.token_id != drafted:
                    break
        return choices

    def distributions(self, rows: Sequence[SettledRow], logits: Sequence[Any]) -> list[Any]:
        """Returns the distributions to sample from after each token of each row, `[n, V]`."""
        found = self._run(_distributions, self._places(rows), np.concatenate(logits))
        return np.split(found, np.cumsum([len(one) for one in logits])[:-1])

    def _places(self, rows: Sequence[SettledRow]) -> list[tuple[HostState, int]]:
        """Returns sampler state and position of each choice; the state counts the drafted tokens before it."""
        places = []
        for row, settings in rows:
            state = self._state(row.cache_id, settings)
            if isinstance(row.output, SampledToken):
                if row.output.mask is not None:
                    state.sets[0, 0] = row.output.mask()
                places.append((state, row.start + row.num_tokens))
                continue
            for at, token in enumerate(_ids(row)):
                if at > 0 and settings.is_adjusted:
                    state = replace(state, counts=state.counts.copy())
                    state.counts[0, token] += 1
                if isinstance(row.output, VerifiedTokens) and row.output.masks is not None:
                    state = replace(state, sets=state.sets.copy())
                    state.sets[0, 0] = row.output.masks[at]
                places.append((state, row.start + at + 1))
        return places

    def _state(self, cache_id: str, settings: SlotSettings) -> HostState:
        """Returns what `sampler.configure` would write to a slot, and the counts of tokens chosen since."""
        known, state = self._states.get(cache_id, (None, None))
        if state is None or known is not settings:
            state = jax.tree.map(np.copy, self._nobody)
            packed = sampler.pack_settings(0, replace(settings, generated=None), self._spec)[1:]
            state.settings[0] = packed[: state.settings.size]
            state.sets[0] = packed[state.settings.size :].reshape(2, -1)
            if settings.generated is not None:
                state.counts[0] = np.bincount(settings.generated, minlength=self.vocab_size)
            self._states[cache_id] = settings, state
        return state

    def _run(
        self, function: Callable[..., Any], places: Sequence[tuple[HostState, int]], logits: NDArray[np.float32]
    ) -> Any:
        """Calls a function of (state, logits, rows) in batches of a compiled size."""
        answers = []
        size = choose_bucket(ROWS, len(places))
        for start in range(0, len(places), size):
            part = places[start : start + size]
            missing = size - len(part)
            states = [state for state, _ in part] + [self._nobody] * missing
            rows = np.array([(at, position) for at, (_, position) in enumerate(part)] + [(size, 0)] * missing, np.int32)
            padded = np.pad(logits[start : start + size], ((0, missing), (0, 0)))
            with jax.default_device(host_device()), jax.transfer_guard_host_to_device("allow"):
                answers.append(function(jax.tree.map(lambda *leaves: np.concatenate(leaves), *states), padded, rows))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(places)], *answers)


@jax.jit
def _choose(state: SamplerState[jax.Array], logits: jax.Array, rows: jax.Array) -> sampler.Sampled[jax.Array]:
    return sampler.choose_rows(state, logits, rows[:, 0], rows[:, 1])


_distributions = jax.jit(sampler.distributions)


class FinishedStep(Future[list[Any]]):
    """Answers of a batch that has run."""

    reused: Sequence[int] = ()  # as of `PendingStep`; the contract's methods do not tell it


class HostModel:
    """Runs scheduled batches by a model's contract methods: `unified_forward` if it has one, else row by row.

    A batch that fails leaves each of its sequences unchanged, or drops it: `kv_len` tells which.
    """

    can_run_ahead = False  # the host reads every token before the next step begins
    params_version = 0  # constant: weights of such a model are never updated here

    def __init__(self, model: DecoderOnlyLLM):
        self.model = model
        self.sampler = HostSampler(model.config.vocab_size)
        self._lengths: dict[str, int] = {}
        self._checked: dict[str, SlotSettings] = {}  # by cache id
        self._is_unified: bool | None = None  # None before the first call, which may find the method unsupported

    def warmup(self, *, progress: bool = True, **_: bool) -> None:
        """Compiles the model's programs and the sampler's; other options are only for a `ModelRunner`."""
        self.model.warmup(progress=progress)
        self.sampler.warmup()

    def execute(self, batch: ScheduledBatch) -> FinishedStep:
        """Runs a batch to its end; the future's `result()` is one answer per row."""
        done = FinishedStep()
        answers: list[Any] = [None] * len(batch)
        advanced: list[ScheduledRow] = []
        verified = (VerifiedTokens, Distributions)
        groups: dict[Callable[..., list[Any]], list[int]] = {self._score: [], self._verify: [], self._forward: []}
        for at, row in enumerate(batch):
            if isinstance(row.output, (SampledToken, *verified)):
                settings = row.output.settings
                if self._checked.get(row.cache_id) is not settings or row.start < settings.min_position:
                    position = row.start + (row.num_tokens if isinstance(row.output, SampledToken) else 1)
                    check_settings(row.cache_id, settings, position, self.sampler.vocab_size)
                    self._checked[row.cache_id] = settings
            is_scored, is_verified = isinstance(row.output, TargetScores), isinstance(row.output, verified)
            groups[self._score if is_scored else self._verify if is_verified else self._forward].append(at)
        try:
            for run, members in groups.items():
                if members:
                    for at, answer in zip(members, run([batch[at] for at in members], advanced), strict=True):
                        answers[at] = answer
        except BaseException:
            for row in advanced:  # their answers are lost with the others'
                with contextlib.suppress(FerrumError):  # the model has failed: its reset drops them
                    self.release(row.cache_id)
            raise
        done.set_result(answers)
        return done

    def kv_len(self, cache_id: str) -> int | None:
        """Returns how many positions a sequence has; None for an unknown id."""
        return self._lengths.get(cache_id)

    def release(self, cache_id: str) -> None:
        """Frees a sequence."""
        self._lengths.pop(cache_id, None)
        self._checked.pop(cache_id, None)
        self.sampler.release(cache_id)
        self.model.release(cache_id)

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        """Rolls a sequence back."""
        self.model.truncate_kv(cache_id, new_len)
        self._lengths[cache_id] = min(new_len, self._lengths.get(cache_id, 0))

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Copies a sequence; raises as the model does."""
        self.model.fork(cache_id, new_cache_id)
        self._lengths[new_cache_id] = self._lengths.get(cache_id, 0)

    def reset(self) -> None:
        """Drops every sequence."""
        for cache_id in self._lengths:
            self.sampler.release(cache_id)
            with contextlib.suppress(Exception):  # a model need not implement `reset`; one that does may have failed
                self.model.release(cache_id)
        self._lengths.clear()
        self._checked.clear()
        self.model.reset()

    def _forward(self, rows: Sequence[ScheduledRow], advanced: list[ScheduledRow]) -> list[Any]:
        given: list[Any] | None = None
        if self._is_unified is not False and self.model.unified_forward_can_return_full_logits():
            items = [(row.cache_id, _ids(row), row.start, not isinstance(row.output, NoOutput)) for row in rows]
            try:
                given = self._call("unified_forward", items, rows, advanced)
            except UnsupportedError:
                if self._is_unified:
                    raise
                self._is_unified = False
            else:
                self._is_unified = True
        if given is None:
            given = self._run_singly(rows, advanced)
        has_logits = [isinstance(row.output, SampledToken) for row in rows]
        pairs = zip(has_logits, given, strict=True)
        return self._choose(rows, [check_logits(self.model, one)[None] if wanted else None for wanted, one in pairs])

    def _run_singly(self, rows: Sequence[ScheduledRow], advanced: list[ScheduledRow]) -> list[Any]:
        decoding = [row for row in rows if _decodes(row)]
        found: dict[str, Any] = {}
        # The contract's default decodes one by one, too; done here, a row can be refused alone.
        is_default = getattr(self.model.decode_batch, "__func__", None) is DecoderOnlyLLM.decode_batch
        if decoding and not is_default:
            items = [(row.cache_id, _ids(row)[0], row.start) for row in decoding]
            given = self._call("decode_batch", items, decoding, advanced, may_stop_half_way=True)
            found = {row.cache_id: one for row, one in zip(decoding, given, strict=True)}
        for row in rows:
            if row.cache_id not in found:
                ids, key = _ids(row), row.cache_id
                given = self.model.decode(key, ids[0], row.start) if _decodes(row) else self.model.prefill(key, ids)
                found[key] = kept(given)
                self._advance([row], advanced)
        return [found[row.cache_id] for row in rows]

    def _score(self, rows: Sequence[ScheduledRow], advanced: list[ScheduledRow]) -> list[Any]:
        items = [(row.cache_id, _ids(row), row.output.targets.tolist()) for row in rows]  # pyright: ignore[reportAttributeAccessIssue]
        found = self._call("score_batch", items, rows, advanced, may_stop_half_way=True)
        checked = [check_scores(self.model, one, row.num_tokens) for one, row in zip(found, rows, strict=True)]
        return [Scores(logprobs=one.logprobs, greedy_ids=one.greedy_ids) for one in checked]

    def _verify(self, rows: Sequence[ScheduledRow], advanced: list[ScheduledRow]) -> list[Any]:
        items = [(row.cache_id, _ids(row)) for row in rows]
        given = self._call("forward_verify_batch", items, rows, advanced, may_stop_half_way=True)
        pairs = zip(given, rows, strict=True)
        return self._choose(rows, [check_logit_rows(self.model, one, row.num_tokens) for one, row in pairs])

    def _call(
        self,
        method: str,
        items: list[Any],
        rows: Sequence[ScheduledRow],
        advanced: list[ScheduledRow],
        *,
        may_stop_half_way: bool = False,
    ) -> list[Any]:
        """Calls a method of the model, advances the rows, and returns its answers, one for each row."""
        try:
            given = getattr(self.model, method)(items)
        except BaseException:
            for row in rows if may_stop_half_way else ():
                try:
                    self.model.truncate_kv(row.cache_id, row.start)
                except FerrumError:
                    advanced.append(row)
            raise
        self._advance(rows, advanced)
        check_answer_count(self.model, given, len(rows))
        return given

    def _advance(self, rows: Sequence[ScheduledRow], advanced: list[ScheduledRow]) -> None:
        for row in rows:
            self._lengths[row.cache_id] = row.start + row.num_tokens
        advanced += rows

    def _choose(self, rows: Sequence[ScheduledRow], logits: Sequence[NDArray[np.float32] | None]) -> list[Any]:
        """Returns the tokens or distributions that rows ask for, given each row's logits."""
        answers: list[Any] = [None] * len(rows)
        kinds = (SampledToken, VerifiedTokens), (Distributions,)
        for kind, answer in zip(kinds, (self.sampler.choose, self.sampler.distributions), strict=True):
            asked = {at: row.output.settings for at, row in enumerate(rows) if isinstance(row.output, kind)}
            if asked:
                found = answer([(rows[at], settings) for at, settings in asked.items()], [logits[at] for at in asked])
                for at, one in zip(asked, found, strict=True):
                    answers[at] = one
        return answers


Backend: TypeAlias = ModelRunner | HostModel  # what the scheduler runs batches on


def _decodes(row: ScheduledRow) -> bool:
    """True if a row appends one token to a sequence."""
    return row.num_tokens == 1 and row.start > 0


def _ids(row: ScheduledRow) -> list[int]:
    assert row.tokens is not None
    return row.tokens.tolist()


def _as_wanted(row: ScheduledRow, choices: list[TokenChoice]) -> Any:
    return choices[0] if isinstance(row.output, SampledToken) else choices


def _is_plain(settings: SlotSettings) -> bool:
    """True for greedy settings without adjustments and log-probabilities."""
    return settings.temperature == 0 and not settings.is_adjusted and settings.num_logprobs < 0
