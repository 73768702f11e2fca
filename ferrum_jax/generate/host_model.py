"""Any `DecoderOnlyLLM` as the scheduler wants it: its logits come to the host, and tokens are chosen here."""

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import sampler
from ferrum_jax.compile.buckets import bucket_sizes, choose_bucket
from ferrum_jax.compile.program_cache import ProgramCache
from ferrum_jax.compile.sampler import (
    ConfigureKey,
    DistributionKey,
    SampleKey,
    SamplerSpec,
    SlotSettings,
    VerifyKey,
)
from ferrum_jax.compile.step import ProgramContext
from ferrum_jax.contract.errors import DeviceError, FerrumError, ModelError, UnsupportedError
from ferrum_jax.contract.llm import DecoderOnlyLLM, Logits
from ferrum_jax.executor.batch import (
    AllLogits,
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


class HostSampler:
    """The sampler's programs over logits of the host, a slot for each cache id."""

    def __init__(self, vocab_size: int, num_slots: int, capacity: int, block_tokens: int):
        """Compiles nothing yet.

        Args:
            vocab_size: V.
            num_slots: cache ids that are sampled at a time.
            capacity: positions of a sequence.
            block_tokens: tokens that are verified at a time.
        """
        self._spec = SamplerSpec(num_slots=num_slots, vocab_size=vocab_size, capacity=capacity)
        self._device = jax.local_devices(backend="cpu")[0]
        placed = jax.sharding.SingleDeviceSharding(self._device)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), sampler.shapes(self._spec)
        )
        context = ProgramContext(cfg=None, params=None, kv=None, sampler=shapes)
        self._programs = ProgramCache(lambda key: key.lower(context))
        self._rows = bucket_sizes(num_slots)
        self._width = block_tokens
        self._state: Any = None
        self._slots: dict[str, int] = {}
        self._settings: dict[str, SlotSettings] = {}

    def warmup(self) -> None:
        """Compiles every program."""
        keys = [SampleKey(rows) for rows in self._rows]
        self._programs.warmup([*keys, ConfigureKey(self._spec.capacity), VerifyKey(1, self._width)])

    def sample(self, rows: Sequence[tuple[str, SlotSettings, int]], logits: Sequence[Logits]) -> list[TokenChoice]:
        """Chooses a token for each (cache id, settings, position).

        An id that comes back after as many others as there are slots needs settings anew: what it had generated
        meanwhile is no longer counted.
        """
        if all(_is_plain(settings) for _, settings, _ in rows):
            return [TokenChoice(int(np.argmax(row)), 0.0, 0.0) for row in logits]
        size, choices = choose_bucket(self._rows, len(rows)), []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            packed = np.full((size, 2), self._spec.num_slots, np.int32)
            count = len(rows[part])
            packed[:count, 0] = [self._configured(cache_id, settings) for cache_id, settings, _ in rows[part]]
            packed[:count, 1] = [position for _, _, position in rows[part]]
            padded = np.zeros((size, self._spec.vocab_size), np.float32)
            padded[:count] = logits[part]
            self._state, found = self._run(SampleKey(size), padded, packed)
            choices += _choices(found, [settings for _, settings, _ in rows[part]], range(count))
        return choices

    def verify(
        self, cache_id: str, settings: SlotSettings, start: int, tokens: NDArray[np.int32], logits: NDArray[np.float32]
    ) -> list[TokenChoice]:
        """Chooses a token after each of a row's tokens, as the sampler's `verify` does."""
        if _is_plain(settings):
            return [TokenChoice(int(token), 0.0, 0.0) for token in logits.argmax(axis=1)]
        padded, packed = self._padded(self._configured(cache_id, settings), start, tokens, logits)
        self._state, found = self._run(VerifyKey(1, self._width), padded, packed)
        return _choices(found, [settings] * len(tokens), range(len(tokens)))

    def distributions(
        self, cache_id: str, settings: SlotSettings, start: int, tokens: NDArray[np.int32], logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Returns what is drawn from after each of a row's tokens, `[n, V]`."""
        pieces = []
        for at in range(0, len(tokens), self._width):
            part = slice(at, at + self._width)
            slot = self._configured(cache_id, settings)
            padded, packed = self._padded(slot, start + at, tokens[part], logits[part])
            found = np.asarray(self._run(DistributionKey(1, self._width), padded, packed))
            pieces.append(found[: len(tokens[part])])
        return np.concatenate(pieces)

    def release(self, cache_id: str) -> None:
        """Frees the slot of an id."""
        self._slots.pop(cache_id, None)
        self._settings.pop(cache_id, None)

    def _padded(
        self, slot: int, start: int, tokens: NDArray[np.int32], logits: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        padded = np.zeros((self._width, self._spec.vocab_size), np.float32)
        padded[: len(tokens)] = logits
        packed = np.zeros((1, 3 + self._width), np.int32)
        packed[0, :3] = slot, start, len(tokens)
        packed[0, 3 : 3 + len(tokens)] = tokens
        return padded, packed

    def _configured(self, cache_id: str, settings: SlotSettings) -> int:
        if self._state is None:
            self._state = jax.device_put(sampler.initial(self._spec), self._device)
        slot = self._slots.pop(cache_id, None)
        if slot is None and len(self._slots) == self._spec.num_slots:  # who was sampled longest ago gives way
            oldest = next(iter(self._slots))
            slot = self._slots.pop(oldest)
            self._settings.pop(oldest, None)
        elif slot is None:
            slot = min(set(range(self._spec.num_slots)) - set(self._slots.values()))
        self._slots[cache_id] = slot
        if self._settings.get(cache_id) is not settings:
            key = ConfigureKey(self._spec.capacity)
            self._state = self._programs.get(key)(self._state, sampler.pack_settings(slot, settings, self._spec))
            self._settings[cache_id] = settings
        return slot

    def _run(self, key: Any, logits: NDArray[np.float32], rows: NDArray[np.int32]) -> Any:
        program = self._programs.get(key)
        try:
            inputs = jax.device_put((logits, rows), self._device)
            return jax.block_until_ready(program(self._state, *inputs))
        except jax.errors.JaxRuntimeError as problem:
            raise DeviceError(f"{key} failed on the device: {problem}") from problem


class Backend(Protocol):
    """What the scheduler runs batches on: a `ModelRunner`, or any other model through a `HostModel`."""

    can_run_ahead: bool

    def execute(self, batch: ScheduledBatch) -> Any:
        """Begins a batch."""
        ...

    def collect(self, pending: Any) -> list[Any]:
        """Waits for a batch that `execute` has begun; returns one answer per row."""
        ...

    def kv_len(self, cache_id: str) -> int | None:
        """Positions of a sequence; None for an unknown id."""
        ...

    def release(self, cache_id: str) -> None:
        """Frees a sequence."""
        ...

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        """Rolls a sequence back."""
        ...

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Makes a copy of a sequence."""
        ...

    def reset(self) -> None:
        """Drops every sequence."""
        ...


class _Ready:
    """A batch whose answers are there."""

    def __init__(self, answers: list[Any]):
        self._answers = answers

    def result(self) -> list[Any]:
        return self._answers


class HostModel:
    """Runs scheduled batches on a model's contract methods: `unified_forward` where it has one, else one by one.

    What fails leaves every sequence as it was, or drops it: `kv_len` says which.
    """

    can_run_ahead = False  # every token is read before the next step begins

    def __init__(self, model: DecoderOnlyLLM, max_rows: int, block_tokens: int):
        self.model = model
        self._vocab_size = model.config.vocab_size
        self.sampler = HostSampler(self._vocab_size, max_rows, model.kv_capacity(), block_tokens)
        self._lengths: dict[str, int] = {}
        self._is_unified = True
        self._has_run = False  # a unified forward has succeeded, so a later refusal is not about the method

    def execute(self, batch: ScheduledBatch) -> _Ready:
        """Runs a batch to its end."""
        answers: list[Any] = [None] * len(batch)
        advanced: list[ScheduledRow] = []
        try:
            groups: dict[Any, list[int]] = {self._scores: [], self._verify: [], self._forward: []}
            for at, row in enumerate(batch):
                if isinstance(row.output, TargetScores):
                    groups[self._scores].append(at)
                elif isinstance(row.output, (VerifiedTokens, Distributions, AllLogits)):
                    groups[self._verify].append(at)
                else:
                    groups[self._forward].append(at)
            for run, members in groups.items():
                if members:
                    rows = [batch[at] for at in members]
                    for at, answer in zip(members, run(rows, advanced), strict=True):
                        answers[at] = answer
        except BaseException:
            for row in advanced:  # their answers are lost with the others'
                with contextlib.suppress(FerrumError):  # of a model that is dead: its reset drops them
                    self.release(row.cache_id)
            raise
        return _Ready(answers)

    def collect(self, pending: _Ready) -> list[Any]:
        """Returns what a batch gave."""
        return pending.result()

    def kv_len(self, cache_id: str) -> int | None:
        """Positions of a sequence that this holds; None for an unknown id."""
        return self._lengths.get(cache_id)

    def release(self, cache_id: str) -> None:
        """Frees a sequence."""
        self._lengths.pop(cache_id, None)
        self.sampler.release(cache_id)
        self.model.release(cache_id)

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        """Rolls a sequence back."""
        self.model.truncate_kv(cache_id, new_len)
        self._lengths[cache_id] = min(new_len, self._lengths.get(cache_id, 0))

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Makes a copy of a sequence; raises as the model does."""
        self.model.fork(cache_id, new_cache_id)
        self._lengths[new_cache_id] = self._lengths.get(cache_id, 0)

    def reset(self) -> None:
        """Drops every sequence."""
        for cache_id in list(self._lengths):
            self.sampler.release(cache_id)
        self._lengths.clear()
        self.model.reset()

    def _advance(self, row: ScheduledRow, advanced: list[ScheduledRow]) -> None:
        self._lengths[row.cache_id] = row.start + row.num_tokens
        advanced.append(row)

    def _forward(self, rows: Sequence[ScheduledRow], advanced: list[ScheduledRow]) -> list[Any]:
        logits = self._logits(rows, advanced)
        answers: list[Any] = list(logits)
        sampled = [at for at, row in enumerate(rows) if isinstance(row.output, SampledToken)]
        if sampled:
            asked = [_asked(rows[at]) for at in sampled]
            found = self.sampler.sample(asked, [logits[at] for at in sampled])  # pyright: ignore[reportArgumentType]
            for at, choice in zip(sampled, found, strict=True):
                answers[at] = choice
        return answers

    def _logits(self, rows: Sequence[ScheduledRow], advanced: list[ScheduledRow]) -> list[Logits | None]:
        items = [(row.cache_id, _ids(row), row.start, not isinstance(row.output, NoOutput)) for row in rows]
        if self._is_unified:
            try:
                given = list(self.model.unified_forward(items))
            except UnsupportedError:
                if self._has_run:
                    raise
                self._is_unified = False
            else:
                self._has_run = True
                for row in rows:
                    self._advance(row, advanced)
                if len(given) != len(rows):
                    raise ModelError(f"{self._name}.unified_forward gave {len(given)} answers for {len(rows)} rows")
                return [self._checked(one, is_final) for one, (*_, is_final) in zip(given, items, strict=True)]
        singles = [(cache_id, tokens[0], at) for cache_id, tokens, at, _ in items if len(tokens) == 1 and at > 0]
        decoded: dict[str, Any] = {}
        if singles:
            before = [row for row in rows if row.num_tokens == 1 and row.start > 0]
            try:
                given = list(self.model.decode_batch(singles))
            except BaseException:
                advanced += before  # some may have advanced
                raise
            for row in before:
                self._advance(row, advanced)
            if len(given) != len(singles):
                raise ModelError(f"{self._name}.decode_batch gave {len(given)} answers for {len(singles)} rows")
            decoded = {cache_id: one for (cache_id, _, _), one in zip(singles, given, strict=True)}
        logits: list[Logits | None] = []
        for row, (cache_id, tokens, _, is_final) in zip(rows, items, strict=True):
            if cache_id in decoded:
                one = decoded[cache_id]
            else:
                one = self.model.prefill(cache_id, tokens)
                self._advance(row, advanced)
            logits.append(self._checked(one, True) if is_final else None)
        return logits

    def _scores(self, rows: Sequence[ScheduledRow], advanced: list[ScheduledRow]) -> list[Any]:
        items = [(row.cache_id, _ids(row), row.output.targets.tolist()) for row in rows]  # pyright: ignore[reportAttributeAccessIssue]
        try:
            found = list(self.model.score_batch(items))
        except BaseException:
            if type(self.model).score_batch is DecoderOnlyLLM.score_batch:
                advanced += rows  # they ran one by one: some may have advanced
            raise
        for row in rows:
            self._advance(row, advanced)
        if len(found) != len(rows):
            raise ModelError(f"{self._name}.score_batch gave {len(found)} answers for {len(rows)} rows")
        return [Scores(logprobs=one.logprobs, greedy_ids=one.greedy_ids) for one in found]

    def _verify(self, rows: Sequence[ScheduledRow], advanced: list[ScheduledRow]) -> list[Any]:
        try:
            given = list(self.model.forward_verify_batch([(row.cache_id, _ids(row)) for row in rows]))
        except BaseException:
            for row in rows:  # it may have come through some of them
                try:
                    self.model.truncate_kv(row.cache_id, row.start)
                except FerrumError:
                    advanced.append(row)
            raise
        for row in rows:
            self._advance(row, advanced)
        answers: list[Any] = []
        for row, logits in zip(rows, given, strict=True):
            logits = np.asarray(logits, np.float32)
            if logits.shape != (row.num_tokens, self._vocab_size):
                raise ModelError(f"{self._name}.forward_verify gave logits of shape {list(logits.shape)}")
            tokens = np.asarray(row.tokens)
            if isinstance(row.output, VerifiedTokens):
                answers.append(self.sampler.verify(row.cache_id, row.output.settings, row.start, tokens, logits))
            elif isinstance(row.output, Distributions):
                answers.append(self.sampler.distributions(row.cache_id, row.output.settings, row.start, tokens, logits))
            else:
                answers.append(logits)
        return answers

    def _checked(self, given: Any, is_final: bool) -> Logits | None:
        """Returns a model's answer, or raises ModelError where it is none that the row asked for."""
        if not is_final:
            return None
        try:
            logits = np.asarray(given, np.float32)
        except (TypeError, ValueError) as problem:
            raise ModelError(f"{self._name} gave {type(given).__name__} in the place of logits: {problem}") from None
        if logits.shape != (self._vocab_size,):
            raise ModelError(f"{self._name} gave logits of shape {list(logits.shape)}, expected [{self._vocab_size}]")
        if np.isnan(logits).any() or not np.isfinite(logits.max()):
            raise ModelError(f"{self._name} gave logits that are NaN, or have no finite best")
        return logits

    @property
    def _name(self) -> str:
        return type(self.model).__name__


def _ids(row: ScheduledRow) -> list[int]:
    assert row.tokens is not None
    return row.tokens.tolist()


def _asked(row: ScheduledRow) -> tuple[str, SlotSettings, int]:
    assert isinstance(row.output, SampledToken)
    return row.cache_id, row.output.settings, row.start + row.num_tokens


def _is_plain(settings: SlotSettings) -> bool:
    """True where the best token is chosen and nothing else is wanted."""
    return settings.temperature == 0 and not settings.is_adjusted and settings.num_logprobs < 0


def _choices(found: Any, settings: Sequence[SlotSettings], rows: range) -> list[TokenChoice]:
    packed, top_ids, top = np.asarray(found.packed), np.asarray(found.top_ids), np.asarray(found.top_logprobs)
    numbers = packed[:, 1:].copy().view(np.float32)
    choices = []
    for at, one in zip(rows, settings, strict=True):
        most = max(0, one.num_logprobs)
        pairs = tuple(zip(top_ids[at, :most].tolist(), top[at, :most].tolist(), strict=True))
        choices.append(TokenChoice(int(packed[at, 0]), float(numbers[at, 0]), float(numbers[at, 1]), pairs))
    return choices
