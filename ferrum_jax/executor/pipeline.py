"""The one way to run a step: check, allocate, pack, dispatch, commit; and later, copy what was asked for."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import planner, step
from ferrum_jax.compile.block_programs import CopyKey
from ferrum_jax.compile.buckets import ProgramKey
from ferrum_jax.compile.planner import Piece, StepPlan
from ferrum_jax.compile.program_cache import ProgramCache
from ferrum_jax.compile.sampler import ConfigureKey, DistributionKey, SampleKey, ScoreKey, SlotSettings, VerifyKey
from ferrum_jax.compile.step import StepKey, StepOutputs
from ferrum_jax.contract.checks import check_position
from ferrum_jax.contract.errors import DeviceError, RequestValidationError
from ferrum_jax.executor.adapters import NONE, Adapters
from ferrum_jax.executor.answers import ActiveRow, Answer, StepPart, Wanted, join_answer, read_part
from ferrum_jax.executor.batch import (
    Capture,
    Distributions,
    LastLogits,
    NoOutput,
    SampledToken,
    ScheduledBatch,
    ScheduledRow,
    TargetScores,
    VerifiedTokens,
)
from ferrum_jax.executor.counters import PrefixCounters
from ferrum_jax.executor.device import DeviceState
from ferrum_jax.executor.lifecycle import Lifecycle
from ferrum_jax.executor.rows import check_settings
from ferrum_jax.executor.sizing import MOST_IN_FLIGHT, EnginePlan
from ferrum_jax.kvcache.prefix import PrefixIndex
from ferrum_jax.kvcache.sequences import UNKNOWN, CachedSequence, SequenceTable
from ferrum_jax.kvcache.transaction import AllocationRequest, KvTransaction
from ferrum_jax.ops.batch import Rows

_ONE_OUTPUT = (LastLogits, SampledToken, NoOutput)  # of outputs, those that need the last token's logits at most
_WITH_SETTINGS = (SampledToken, VerifiedTokens, Distributions)
_UNREAD = np.array([UNKNOWN], np.int32)


@dataclass(eq=False)
class PendingStep:
    """A batch that was begun. `result` waits for it; the device works meanwhile."""

    pipeline: "Pipeline"
    answers: list[Answer]
    losses: int  # those of the device when it was begun
    parts: deque[StepPart] = field(default_factory=deque)

    def result(self) -> list[Answer]:
        """Waits, and returns one answer per row, in order; only what was asked for is copied to the host.

        Raises:
            DeviceError: the device failed, then or since; the KV is lost until `reset`.
        """
        life = self.pipeline.life
        with life.lock, life:
            self.pipeline.collect(self)
        return self.answers


class PlannedBatch(NamedTuple):
    """A batch that nothing refuses any more."""

    batch: ScheduledBatch
    requests: list[AllocationRequest]
    transaction: KvTransaction
    reused: list[int]  # tokens of each row that are known already
    uses: list[int]  # rows of the adapters' stacks
    plans: list[tuple[list[int], StepPlan]]  # steps, and which rows each has
    recompute: list[tuple[list[ActiveRow], StepPlan]]


@dataclass(eq=False)
class Pipeline:
    """The sequences of one model, on the host and on the device, kept in step.

    Whatever can refuse, a compilation included, does so before anything changes. What fails or is interrupted later
    counts the KV as lost.
    """

    device: DeviceState
    programs: ProgramCache
    plan: EnginePlan
    adapters: Adapters
    life: Lifecycle  # of every call
    prefixes: PrefixCounters = field(default_factory=PrefixCounters)

    def __post_init__(self):
        self.table: SequenceTable = cast(SequenceTable, None)
        self.clear()

    def clear(self) -> None:
        """Forgets every sequence, prefix and binding; counters go on."""
        self.adapters.clear_bindings()
        self._reset_table()

    def forget_prefixes(self, why: str) -> None:
        """Forgets what every block holds; raises RequestValidationError, saying what for, while a sequence is live."""
        if live := self.table.cache_ids:
            raise RequestValidationError(
                f"{len(live)} sequences are live, {live[0]!r} among them: release them before {why}, or reset()"
            )
        self._reset_table()

    def _reset_table(self) -> None:
        if self.table is not None:
            self.prefixes.evictions += self.table.pool.evictions
            self.table.abandon()
        self.table = SequenceTable(
            max_seqs=self.plan.max_seqs,
            kv_capacity=self.plan.kv_capacity,
            block_size=self.plan.cache.block_size,
            num_blocks=self.plan.cache.num_blocks,
            prefixes=PrefixIndex() if self.plan.prefix_cache else None,
            window_blocks=self.plan.cache.window_blocks,
            window=self.plan.window,
        )
        # Whose settings the sampler has in each slot, and of which sequence.
        self._settings: list[tuple[SlotSettings | None, CachedSequence | None]] = [(None, None)] * self.plan.max_seqs
        self._pending: deque[PendingStep] = deque()  # not read yet, and with tokens that only the device knows

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Begins everything that a batch takes, in as few steps as its shapes need.

        Raises:
            RequestValidationError, ResourceExhaustedError, BackendError: nothing has changed.
            DeviceError: the device failed; the KV is lost.
        """
        return self.run(self.plan_batch(batch))

    def plan_batch(self, batch: ScheduledBatch) -> "PlannedBatch | None":
        """Checks and plans a batch, and has its programs ready; raises as `execute`, and nothing has changed."""
        if not batch:
            return None
        while len(self._pending) >= MOST_IN_FLIGHT:
            self.collect(self._pending[0])
        table, used = self.table, self.adapters.are_used()
        lives = self._check(batch)
        if self._needs_known_tokens(batch, lives):
            self.settle()
        requests = [self._request(row, live, used) for row, live in zip(batch, lives, strict=True)]
        transaction = KvTransaction(table, requests)
        reused = transaction.reused()
        counts = [len(request.tokens) - skip for request, skip in zip(requests, reused, strict=True)]
        last, every = [], []
        for at, row in enumerate(batch):
            if not isinstance(row.output, _ONE_OUTPUT):
                every.append(at)
            elif counts[at]:
                last.append(at)
        buckets = self.plan.buckets
        plans = [(last, one) for one in planner.plan_steps([counts[at] for at in last], buckets)]
        if every:
            found = planner.plan_all_logits([counts[at] for at in every], buckets)
            plans += [(every, _captured(one, [batch[at] for at in every])) for one in found]
        uses = [NONE] * len(batch)
        if used:
            uses = [self.adapters.row_of(row.cache_id) for row in batch]
            plans = [(rows, _adapted(one, [uses[at] for at in rows])) for rows, one in plans]
        recompute = self.plan_recompute((row.cache_id, use) for row, use in zip(batch, uses, strict=True))
        copy = [CopyKey(buckets.max_copies)] if transaction.num_copies else []
        chained = _chained(batch, plans, self.plan.kv_capacity)
        for key in [*copy, *(one.key for _, one in (*recompute, *plans)), *chained]:
            self.programs.get(key)
        return PlannedBatch(batch, requests, transaction, reused, uses, plans, recompute)

    def run(self, planned: "PlannedBatch | None") -> PendingStep:
        """Begins a batch that was planned, before anything else changed; raises DeviceError."""
        batch = [] if planned is None else planned.batch
        pending = PendingStep(self, [None] * len(batch), self.device.losses)
        if planned is None:
            return pending
        _, requests, transaction, reused, uses, plans, recompute = planned
        used = self.adapters.are_used()
        try:
            self.begin(transaction, recompute)
            rows = []
            for at, (row, skip, use) in enumerate(zip(batch, reused, uses, strict=True)):
                tokens, live = requests[at].tokens, transaction.lives[at]
                assert live is not None
                rows.append(ActiveRow(at, row.output, tokens[skip:] if skip else tokens, row.start + skip, live, use))
                if isinstance(row.output, _WITH_SETTINGS):
                    self.install_settings(live, row.output.settings)
            for members, one in plans:
                if len(pending.parts) == MOST_IN_FLIGHT:
                    read_part(pending.parts.popleft(), pending.answers, self.device, self.table)
                key, buffer, wanted = self._pack_step(one, [rows[at] for at in members])
                pending.parts.append(self._chain(key, self.device.step(key, buffer), wanted))
            transaction.commit()
            self._count(batch, requests, reused, used)
            if any(isinstance(row.output, SampledToken) for row in batch):
                self._pending.append(pending)
        except BaseException:  # an interrupt, too: nobody knows how far it came
            self.device.lose()
            raise
        return pending

    def collect(self, pending: PendingStep) -> None:
        """Reads a batch, and the ones begun before it, whose tokens it may have taken."""
        if pending.parts and pending.losses != self.device.losses:
            raise DeviceError("this step was begun before a failure of the device, which has lost what it gives")
        try:
            while self._pending and pending in self._pending:
                self._read_all(self._pending.popleft())
            self._read_all(pending)
        except BaseException:
            self.device.lose()
            raise

    def settle(self) -> None:
        """Reads every batch that is on its way, so that the host knows all tokens."""
        while self._pending:
            self.collect(self._pending[-1])

    def _check(self, batch: ScheduledBatch) -> list[CachedSequence | None]:
        """Returns the sequence of each row; raises RequestValidationError for rows that cannot be served."""
        table, seen, lives = self.table, set(), []
        for row in batch:
            live = table.get(row.cache_id)
            length = 0 if live is None else len(live.tokens)
            if row.start != length:
                check_position(row.cache_id, "start", row.start, length)
            if row.cache_id in seen:
                raise RequestValidationError(f"{row.cache_id!r} occurs twice in one batch, a sequence can have one row")
            seen.add(row.cache_id)
            lives.append(live)
            if isinstance(row.output, _ONE_OUTPUT):
                pass
            elif isinstance(row.output, VerifiedTokens) and row.num_tokens > self.plan.buckets.verify_tokens:
                most = self.plan.buckets.verify_tokens
                raise RequestValidationError(f"{row.cache_id!r}: {row.num_tokens} tokens to verify, at most {most} go")
            elif isinstance(row.output, TargetScores) and len(row.output.targets) != row.num_tokens:
                num_targets = len(row.output.targets)
                raise RequestValidationError(f"{row.cache_id!r}: {row.num_tokens} tokens, but {num_targets} targets")
            if isinstance(row.output, _WITH_SETTINGS):
                self._check_settings(row, live, row.output.settings)
            if row.tokens is None and (live is None or live.sampled_at != row.start):
                raise RequestValidationError(
                    f"{row.cache_id!r}: no token was sampled for it that the device could take"
                )
        return lives

    def _check_settings(self, row: ScheduledRow, live: CachedSequence | None, settings: SlotSettings) -> None:
        """Raises RequestValidationError for settings that the slot cannot hold; those that it holds were checked."""
        known = None if live is None else self._settings[live.slot][0]
        if known is settings and row.start >= settings.min_position:
            return
        position = row.start + (row.num_tokens if isinstance(row.output, SampledToken) else 1)
        check_settings(row.cache_id, settings, position, self.plan.vocab_size)
        capacity = self.plan.kv_capacity
        if settings.generated is not None and len(settings.generated) > capacity:
            count = len(settings.generated)
            raise RequestValidationError(f"{row.cache_id!r}: generated has {count} tokens, the capacity is {capacity}")

    def begin(self, transaction: KvTransaction, recompute: Sequence[tuple[list[ActiveRow], StepPlan]]) -> None:
        """Takes slots and blocks, copies what is shared, and computes anew what sliding windows have lost."""
        if pairs := transaction.apply():
            self.device.copy_blocks(CopyKey(self.plan.buckets.max_copies), pairs)
        for rows, plan in recompute:
            key, buffer, _ = self._pack_step(plan, rows)
            self.device.wait(self.device.step(key, buffer).rows)
        for live in {id(row.live): row.live for rows, _ in recompute for row in rows}.values():
            self.table.recomputed(live)

    def _needs_known_tokens(self, batch: ScheduledBatch, lives: Sequence[CachedSequence | None]) -> bool:
        """True where the host must read what was sampled: a row is computed by more than a decode row."""
        if any(row.tokens is None and not isinstance(row.output, _ONE_OUTPUT) for row in batch):
            return True
        known = [live for live in lives if live is not None] if self.table.window_size else []
        return any(self.table.needs_recompute(live) for live in known)

    def _request(self, row: ScheduledRow, live: CachedSequence | None, used: bool) -> AllocationRequest:
        """Returns what a row needs of the KV; of the token sampled last for its sequence what is known, or UNKNOWN."""
        tokens, reusable = row.tokens, 0
        if tokens is None:
            assert live is not None
            tokens = _UNREAD if live.sampled == UNKNOWN else np.array([live.sampled], np.int32)
        if isinstance(row.output, _ONE_OUTPUT):
            reusable = len(tokens) - (not isinstance(row.output, NoOutput))
        return AllocationRequest(row.cache_id, tokens, reusable, self.adapters.of(row.cache_id) if used else None)

    def install_settings(self, live: CachedSequence, settings: SlotSettings) -> None:
        """Writes how a sequence is sampled, unless its slot holds that already."""
        known, owner = self._settings[live.slot]
        if known is not settings or (owner is not live and settings.is_adjusted):
            self.device.configure(live.slot, settings)
            self._settings[live.slot] = settings, live

    def _pack_step(self, plan: StepPlan, rows: Sequence[ActiveRow]) -> tuple[StepKey, NDArray[np.int32], Wanted]:
        """Returns a step's key and buffer, and what is wanted of its outputs, by row of logits."""
        key, num_slots = plan.key, self.plan.max_seqs
        buffer, packed = step.blank(key, num_slots)
        if packed.decode is not None:
            members = [rows[piece.row] for piece in plan.decodes]
            packed.decode.tokens[: len(members), 0] = [row.tokens[0] for row in members]
            packed.decode_slots[: len(members)] = [row.live.slot for row in members]
            self._pack(packed.decode, plan.decodes, members)
        if packed.blocks is not None:
            members = [rows[piece.row] for piece in plan.blocks]
            for at, piece in enumerate(plan.blocks):
                tokens = members[at].tokens[piece.start : piece.start + piece.size]
                packed.blocks.tokens[at, : piece.size] = tokens
            self._pack(packed.blocks, plan.blocks, members)
        if key.outputs == "all":
            wanted = [(at, rows[piece.row], piece) for at, piece in enumerate(plan.blocks)]
            for at, row, _ in wanted:
                if isinstance(row.output, _WITH_SETTINGS):
                    packed.block_slots[at] = row.live.slot
        else:
            wanted = self._pack_outputs(key, plan, rows, packed)
        return key, buffer, wanted

    def _pack(self, group: Rows[NDArray[np.int32]], pieces: Sequence[Piece], members: Sequence[ActiveRow]) -> None:
        """Writes where the pieces of one group lie; `members` are their rows."""
        count = len(members)
        group.lengths[:count] = [row.start + piece.start for row, piece in zip(members, pieces, strict=True)]
        group.counts[:count] = [piece.size for piece in pieces]
        group.tables[:count] = self.table.table[[row.live.slot for row in members]]
        if group.adapters is not None:
            group.adapters[:count] = [row.adapter for row in members]

    def _pack_outputs(
        self, key: StepKey, plan: StepPlan, rows: Sequence[ActiveRow], packed: step.PackedStep[NDArray[np.int32]]
    ) -> Wanted:
        """Writes which tokens' logits are wanted, and how their rows are sampled; returns them by row of logits."""
        index, wanted = [], []
        for at, piece in enumerate(plan.decodes):
            row = rows[piece.row]
            if not isinstance(row.output, NoOutput):
                wanted.append((len(index), row, piece))
                index.append(at)
        for at, piece in enumerate(plan.blocks):
            row = rows[piece.row]
            if piece.start + piece.size == len(row.tokens) and not isinstance(row.output, NoOutput):
                wanted.append((len(index), row, piece))
                index.append(key.decode_rows + at * key.block_tokens + piece.size - 1)
        packed.logit_index[: len(index)] = index
        nobody = self.plan.max_seqs
        settled = [isinstance(row.output, (SampledToken, Distributions)) for _, row, _ in wanted]
        packed.sample_slots[: len(index)] = [
            row.live.slot if one else nobody for one, (_, row, _) in zip(settled, wanted, strict=True)
        ]
        packed.sample_positions[: len(index)] = [row.start + len(row.tokens) for _, row, _ in wanted]
        return wanted

    def _chain(self, key: StepKey, outputs: StepOutputs, wanted: Wanted) -> StepPart:
        """Begins what follows on a step's logits: sampling, verification, scores."""
        kinds = {type(row.output) for _, row, _ in wanted}
        sampled = probabilities = scores = None
        if SampledToken in kinds:
            sampled = self.device.sample(SampleKey(key.logit_rows), outputs)
            for _, row, _ in wanted:
                if isinstance(row.output, SampledToken):
                    self.table.expect(row.live, row.start + len(row.tokens))
        if VerifiedTokens in kinds:
            sampled = self.device.sample(VerifyKey(key.blocks, key.block_tokens), outputs)
        if Distributions in kinds:
            probabilities = self.device.distributions(_distribution_key(key), outputs)
        if TargetScores in kinds:
            buffer = np.zeros(1 + key.logit_rows, np.int32)
            for at, row, piece in wanted:
                if isinstance(row.output, TargetScores):
                    buffer[0] |= row.output.with_alternatives
                    start = 1 + at * key.block_tokens
                    targets = row.output.targets[piece.start : piece.start + piece.size]
                    buffer[start : start + piece.size] = targets
            scores = self.device.score(ScoreKey(key.logit_rows), outputs, buffer)
        return StepPart(key, outputs, wanted, sampled, probabilities, scores)

    def _read_all(self, pending: PendingStep) -> None:
        if not pending.parts:
            return
        self.device.last_fetched_bytes = 0
        while pending.parts:
            read_part(pending.parts.popleft(), pending.answers, self.device, self.table)
        pending.answers = [join_answer(answer) for answer in pending.answers]

    def _count(
        self, batch: ScheduledBatch, requests: Sequence[AllocationRequest], reused: Sequence[int], used: bool
    ) -> None:
        if self.table.prefixes is not None:
            for row, request, count in zip(batch, requests, reused, strict=True):
                if len(request.tokens) > 1 and isinstance(row.output, _ONE_OUTPUT):
                    self.prefixes.count(count)
        if used:
            self.adapters.count(row.cache_id for row in batch)

    def plan_recompute(self, rows: Iterable[tuple[str, int]]) -> list[tuple[list[ActiveRow], StepPlan]]:
        """Plans to compute sequences anew whose sliding-window caches lost what their next token sees.

        From their beginning: what a layer keeps depends on what the layer below made of a window, and so on. All their
        tokens must be known.
        """
        if not self.table.window_size:
            return []
        live = [(self.table.get(cache_id), use) for cache_id, use in rows]
        again = [(one, use) for one, use in live if one is not None and self.table.needs_recompute(one)]
        if not again:
            return []
        members = [ActiveRow(0, NoOutput(), np.array(one.tokens, np.int32), 0, one, use) for one, use in again]
        plans = planner.plan_steps([len(row.tokens) for row in members], self.plan.buckets)
        return [(members, _adapted(one, [use for _, use in again])) for one in plans]


def _chained(batch: ScheduledBatch, plans: Sequence[tuple[list[int], StepPlan]], capacity: int) -> list[ProgramKey]:
    """The programs that follow on the steps' logits, and the one that tells the sampler how."""
    keys: list[ProgramKey] = []
    for rows, plan in plans:
        kinds = {type(batch[at].output) for at in rows}
        if kinds & {SampledToken, VerifiedTokens, Distributions}:
            keys.append(ConfigureKey(capacity))
        if SampledToken in kinds and plan.key.outputs == "last":
            keys.append(SampleKey(plan.key.logit_rows))
        if VerifiedTokens in kinds:
            keys.append(VerifyKey(plan.key.blocks, plan.key.block_tokens))
        if TargetScores in kinds:
            keys.append(ScoreKey(plan.key.logit_rows))
        if Distributions in kinds:
            keys.append(_distribution_key(plan.key))
    return keys


def _distribution_key(key: StepKey) -> DistributionKey:
    return DistributionKey(key.blocks, key.block_tokens) if key.outputs == "all" else DistributionKey(key.logit_rows)


def _captured(plan: StepPlan, rows: Sequence[ScheduledRow]) -> StepPlan:
    """Returns the plan for a step that captures what its rows ask for, all of them together."""
    outputs = [rows[piece.row].output for piece in plan.blocks]
    layers = [one.layers for one in outputs if isinstance(one, Capture)]
    if not any(one.hidden or one.attention for one in layers):
        return plan
    hidden = tuple(sorted({layer for one in layers for layer in one.hidden}))
    attention = tuple(sorted({layer for one in layers for layer in one.attention}))
    return replace(plan, key=replace(plan.key, hidden=hidden, attention=attention))


def _adapted(plan: StepPlan, uses: Sequence[int]) -> StepPlan:
    """Returns the plan for a step with adapters if any of its rows uses one; `uses` are rows of the stacks."""
    if all(uses[piece.row] == NONE for piece in (*plan.decodes, *plan.blocks)):
        return plan
    return replace(plan, key=replace(plan.key, adapters=True))
