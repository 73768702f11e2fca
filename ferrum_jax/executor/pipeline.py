"""The one path of every batch: check, allocate, pack, dispatch, commit; later, copy requested outputs to the host."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import planner, step
from ferrum_jax.compile.block_programs import CopyKey
from ferrum_jax.compile.edits import EditStacks
from ferrum_jax.compile.planner import StepPlan
from ferrum_jax.compile.program_cache import ProgramCache
from ferrum_jax.compile.sampler import ConfigureKey, MaskKey, SlotSettings, pack_settings, read_only_slots
from ferrum_jax.contract.checks import check_distinct, check_position, check_tokens
from ferrum_jax.contract.errors import DeviceError, RequestValidationError
from ferrum_jax.executor.adapters import NONE, Adapters, KeptSequences, not_kept
from ferrum_jax.executor.answers import (
    ActiveRows,
    Answer,
    CapturedPiece,
    StepPart,
    join_answer,
    join_captured,
    read_part,
)
from ferrum_jax.executor.batch import (
    NO_OUTPUT,
    Distributions,
    LastLogits,
    NoOutput,
    Output,
    SampledToken,
    ScheduledBatch,
    ScheduledRow,
    TargetScores,
    VerifiedTokens,
    WithCaptures,
)
from ferrum_jax.executor.chaining import WITH_SETTINGS, chain, chained_keys, has_masks
from ferrum_jax.executor.counters import PrefixCounters
from ferrum_jax.executor.device import DeviceState
from ferrum_jax.executor.interventions import BoundInterventions
from ferrum_jax.executor.lifecycle import Lifecycle
from ferrum_jax.executor.rows import check_settings
from ferrum_jax.executor.sizing import MOST_IN_FLIGHT, EnginePlan
from ferrum_jax.kvcache.prefix import PrefixIndex
from ferrum_jax.kvcache.sequences import PRIVATE, UNKNOWN, CachedSequence, SequenceTable
from ferrum_jax.kvcache.transaction import KvTransaction
from ferrum_jax.models.hooks import Point
from ferrum_jax.ops.batch import Rows

_ONE_OUTPUT = {LastLogits, SampledToken, NoOutput}  # outputs that need no logits but the last token's
_BY_SLOT = WITH_SETTINGS - {TargetScores}  # outputs whose rows of logits the sampler reads
_UNREAD = np.array([UNKNOWN], np.int32)


@dataclass(eq=False)
class PendingStep:
    """A batch that was begun. `result` waits for it; the device works meanwhile."""

    pipeline: "Pipeline"
    answers: list[Answer]
    losses: int  # `DeviceState.losses` when the batch was begun
    parts: deque[StepPart] = field(default_factory=deque)
    captured: dict[int, list[CapturedPiece]] = field(default_factory=dict)  # pieces read so far, by row
    reused: Sequence[int] = ()  # how many tokens of each row a known prefix held

    def result(self) -> list[Answer]:
        """Waits, and returns one answer per row, in order; only the requested outputs are copied to the host.

        Raises:
            DeviceError: the device failed after the batch was begun; the KV is lost until `reset`.
        """
        life = self.pipeline.life
        with life.lock, life:
            self.pipeline.collect(self)
        return self.answers


@dataclass(eq=False)
class Pipeline:
    """Runs the batches of one model, and keeps its sequence table in agreement with the device.

    Every check that can refuse a batch, compilation included, comes before anything changes. After a later failure or
    interrupt, the KV counts as lost.
    """

    device: DeviceState
    programs: ProgramCache
    plan: EnginePlan
    adapters: Adapters
    interventions: BoundInterventions
    life: Lifecycle  # the lock and state of the runner
    prefixes: PrefixCounters = field(default_factory=PrefixCounters)

    def __post_init__(self):
        self.table: SequenceTable = cast(SequenceTable, None)
        self.clear()

    def clear(self) -> None:
        """Forgets every sequence, prefix and binding; counters are kept."""
        self.reset_table()  # first: an interrupt must leave no sequence without its bindings
        self.adapters.bound.clear()
        self.interventions.clear()

    def check_live(self, why: str, kept: KeptSequences = False) -> None:
        """Raises RequestValidationError if a live sequence is not `kept`: it must be released before `why`."""
        if live := not_kept(self.table.live, kept):
            raise RequestValidationError(
                f"{len(live)} sequences are live, {live[0]!r} among them: release them before {why}, or reset()"
            )

    def reset_table(self) -> None:
        """Forgets every sequence and prefix."""
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
        # The settings that the sampler has in each slot, and the sequence that they were written for.
        self._settings: list[tuple[SlotSettings | None, CachedSequence | None]] = [(None, None)] * self.plan.max_seqs
        self._pending: deque[PendingStep] = deque()  # unread batches with sampled tokens, which only the device knows

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Begins a batch, in the steps that the planner finds cheapest.

        Raises:
            RequestValidationError, ResourceExhaustedError, BackendError: nothing has changed.
            DeviceError: the device failed; the KV is lost.
        """
        return self.plan_batch(batch)()

    def plan_batch(self, batch: ScheduledBatch) -> Callable[[], PendingStep]:
        """Checks and plans a batch, and compiles or loads its programs; raises as `execute`, with nothing changed.

        Returns a function that begins it, before which nothing may change.
        """
        if not batch:
            return lambda: PendingStep(self, [], self.device.losses)
        self.device.check_params_live()
        while len(self._pending) >= MOST_IN_FLIGHT:
            self.collect(self._pending[0])
        cache_ids, given, starts, outputs, captures = zip(*batch, strict=True)
        kinds, buckets, used = set(map(type, outputs)), self.plan.buckets, bool(self.adapters.bound)
        lives = self._check(batch, kinds)
        if self._needs_known_tokens(batch, lives, kinds):
            self.settle()
        tokens = [_newest(live) if one is None else one for one, live in zip(given, lives, strict=True)]
        counts = list(map(len, tokens))
        reusable = None
        if self.table.prefixes is not None:
            reusable = [
                count - (type(one) is not NoOutput) if type(one) in _ONE_OUTPUT and not points else 0
                for one, count, points in zip(outputs, counts, captures, strict=True)
            ]
        uses = list(map(self.adapters.row_of, cache_ids)) if used else [NONE] * len(batch)
        edit_rows = list(map(self.interventions.row_of, cache_ids)) if self.interventions.are_used else []
        bound = list(map(self.owner_of, cache_ids)) if used or edit_rows else None
        transaction = KvTransaction(self.table, cache_ids, tokens, reusable, bound)
        reused = transaction.reused()
        if any(reused):
            tokens = [one[skip:] for one, skip in zip(tokens, reused, strict=True)]
            starts = [start + skip for start, skip in zip(starts, reused, strict=True)]
        left = list(map(len, tokens))
        if kinds <= _ONE_OUTPUT:
            plans = planner.plan_steps(left, buckets)
        else:
            last, every, scored = zip(*map(_divided, outputs, left), strict=True)
            plans = planner.plan_steps(last, buckets) + planner.plan_all_logits(every, buckets)
            plans += planner.plan_scores(scored, buckets)
        if used or edit_rows or any(captures):
            plans = [self._completed(one, uses, edit_rows, captures) for one in plans]
        recompute = self.plan_recompute(zip(cache_ids, uses, strict=True))
        for one in (*plans, *(again for _, again in recompute)) if edit_rows else ():
            self._edit_stacks(one)  # uploads new interventions now, where a failure changes nothing
        copy = [CopyKey(buckets.max_copies)] if transaction.copied_ids else []
        masked = SampledToken in kinds and has_masks(outputs)
        chained = chained_keys(outputs, plans, buckets, masked=masked)
        for key in [*copy, *(one.key for _, one in recompute), *(one.key for one in plans), *chained]:
            self.programs.get(key)

        def begin_batch() -> PendingStep:
            pending = PendingStep(self, [None] * len(batch), self.device.losses, reused=reused)
            try:
                self.begin(transaction, recompute)
                rows = ActiveRows(outputs, tokens, starts, transaction.lives, uses, edit_rows, captures)
                for live, one in zip(rows.lives, outputs, strict=True) if kinds & WITH_SETTINGS else ():
                    if (settings := getattr(one, "settings", None)) is not None:
                        self.install_settings(live, settings)
                for at, plan in enumerate(plans):
                    if len(pending.parts) == MOST_IN_FLIGHT:
                        read_part(pending.parts.popleft(), pending.answers, pending.captured, self.device, self.table)
                    buffer, wanted = self._pack_step(plan, rows)
                    begun = self.device.step(plan.key, buffer, *self._edit_stacks(plan))
                    if masked and at == 0:  # masks are computed while the model runs: only the sampler needs them
                        self._write_masks(rows)
                    pending.parts.append(chain(self.device, self.table, plan, begun, rows, wanted, buckets))
                transaction.commit()
                if self.table.prefixes is not None:
                    for count, skip, one in zip(counts, reused, outputs, strict=True):
                        if count > 1 and type(one) in _ONE_OUTPUT:
                            self.prefixes.count(skip)
                if used:
                    self.adapters.count(cache_ids)
                if SampledToken in kinds:
                    self._pending.append(pending)
            except BaseException:  # an interrupt, too: any part of the batch may have run
                self.device.lose()
                raise
            return pending

        return begin_batch

    def collect(self, pending: PendingStep) -> None:
        """Reads a batch, and before it those begun earlier, whose sampled tokens may be its input."""
        if pending.parts and pending.losses != self.device.losses:
            raise DeviceError("this batch was begun before a failure of the device, and its outputs are lost")
        try:
            while self._pending and pending in self._pending:
                self._read_all(self._pending.popleft())
            self._read_all(pending)
        except BaseException:
            self.device.lose()
            raise

    def settle(self) -> None:
        """Reads every pending batch, so that the host knows all sampled tokens."""
        while self._pending:
            self.collect(self._pending[-1])

    def _check(self, batch: ScheduledBatch, kinds: set[type]) -> list[CachedSequence | None]:
        """Returns each row's live sequence, or None; raises RequestValidationError for rows that cannot be served."""
        cache_ids = [row.cache_id for row in batch]
        lives = [*map(self.table.live.get, cache_ids)]
        for (cache_id, tokens, start, _, _), live in zip(batch, lives, strict=True):
            length = 0 if live is None else len(live.tokens)
            if start != length:
                check_position(cache_id, "start", start, length)
            if tokens is None and (live is None or live.sampled_at != start):
                raise RequestValidationError(f"{cache_id!r}: tokens is None, but no token was sampled at {start}")
        check_distinct(cache_ids)
        if kinds <= {LastLogits, NoOutput}:
            return lives
        most = self.plan.buckets.verify_tokens
        for row, live in zip(batch, lives, strict=True):
            cache_id, output = row.cache_id, row.output
            if isinstance(output, (SampledToken, VerifiedTokens, Distributions)):
                in_one = isinstance(output, VerifiedTokens) or (
                    isinstance(output, Distributions) and output.settings.is_adjusted  # penalties count earlier tokens
                )
                if in_one and row.num_tokens > most:
                    raise RequestValidationError(f"{cache_id!r}: {row.num_tokens} tokens to verify, at most {most} go")
                self._check_settings(row, live, output.settings)
                masks = output.masks if isinstance(output, VerifiedTokens) else None
                if masks is not None and np.shape(masks) != (shape := (row.num_tokens, -(-self.plan.vocab_size // 32))):
                    raise RequestValidationError(f"{cache_id!r}: masks have shape {np.shape(masks)}, expected {shape}")
            elif isinstance(output, TargetScores):
                targets: Any = output.targets
                num_targets = len(check_tokens(f"{cache_id}: targets", targets, self.plan.vocab_size))
                if num_targets != row.num_tokens:
                    raise RequestValidationError(f"{cache_id!r}: {row.num_tokens} tokens, but {num_targets} targets")
                if output.settings is not None:
                    self._check_settings(row, live, output.settings)
        return lives

    def _check_settings(self, row: ScheduledRow, live: CachedSequence | None, settings: SlotSettings) -> None:
        """Raises RequestValidationError for invalid settings; those that the slot already holds were checked before."""
        if live is not None and self._settings[live.slot][0] is settings and row.start >= settings.min_position:
            return
        position = row.start + (row.num_tokens if isinstance(row.output, SampledToken) else 1)
        check_settings(row.cache_id, settings, position, self.plan.vocab_size)
        capacity = self.plan.kv_capacity
        if settings.generated is not None and len(settings.generated) > capacity:
            count = len(settings.generated)
            raise RequestValidationError(f"{row.cache_id!r}: generated has {count} tokens, the capacity is {capacity}")

    def begin(self, transaction: KvTransaction, recompute: Sequence[tuple[ActiveRows, StepPlan]]) -> None:
        """Takes slots and blocks, copies shared blocks that are to be written, and runs the planned `recompute`."""
        if pairs := transaction.apply():
            self.device.copy_blocks(CopyKey(self.plan.buckets.max_copies), pairs)
        for rows, plan in recompute:
            buffer, _ = self._pack_step(plan, rows)
            self.device.wait(self.device.step(plan.key, buffer, *self._edit_stacks(plan)).rows)
        for live in recompute[0][0].lives if recompute else ():
            self.table.recomputed(live)

    def _needs_known_tokens(
        self, batch: ScheduledBatch, lives: Sequence[CachedSequence | None], kinds: set[type]
    ) -> bool:
        """True if the host must know all tokens: a sampled one goes to a query block, or a sequence is recomputed."""
        others = [] if kinds <= _ONE_OUTPUT else [row for row in batch if type(row.output) not in _ONE_OUTPUT]
        if any(row.tokens is None for row in others):
            return True
        known = [live for live in lives if live is not None] if self.table.window_size else []
        return any(self.table.needs_recompute(live) for live in known)

    def install_settings(self, live: CachedSequence, settings: SlotSettings) -> None:
        """Writes a sequence's settings to its sampler slot, unless the slot holds them already."""
        known, owner = self._settings[live.slot]
        if known is not settings or (owner is not live and settings.is_adjusted):
            buffer = pack_settings(live.slot, settings, self.plan.sampler)
            self.device.write(ConfigureKey(self.plan.kv_capacity), buffer)
            self._settings[live.slot] = settings, live

    def _write_masks(self, rows: ActiveRows) -> None:
        """Writes the allowed tokens of the rows whose outputs have masks."""
        masks = [getattr(one, "mask", None) for one in rows.outputs]
        masked = [(slot, mask) for slot, mask in zip(rows.slots, masks, strict=True) if mask is not None]
        key = MaskKey(self.plan.buckets.decode_rows[-1])
        for start in range(0, len(masked), key.rows):
            part = masked[start : start + key.rows]
            table = np.zeros((key.rows, 1 + -(-self.plan.vocab_size // 32)), np.int32)
            table[:, 0] = self.plan.max_seqs
            for row, (slot, mask) in zip(table, part, strict=False):
                row[0], row[1:] = slot, mask()
            self.device.write(key, table.ravel())

    def owner_of(self, cache_id: str) -> Hashable:
        """Returns the key of a sequence's prefixes: its adapter, None without one, or PRIVATE with interventions."""
        return self.adapters.of(cache_id) if self.interventions.of(cache_id) is None else PRIVATE

    def _edit_stacks(self, plan: StepPlan) -> list[EditStacks[jax.Array]]:
        """Returns the stacks of edits that a step takes, if any."""
        return [self.interventions.stacks_of(plan.key.edits)] if plan.key.edits else []

    def _completed(
        self, plan: StepPlan, uses: Sequence[int], edit_rows: Sequence[int], captures: Sequence[tuple[Point, ...]] = ()
    ) -> StepPlan:
        """Returns the plan of a step that adapts, edits and captures what its rows ask for."""
        rows = [piece.row for piece in (*plan.decodes, *plan.blocks)]
        own: dict[str, Any] = {
            "adapters": any(uses[row] != NONE for row in rows),
            "edits": self.interventions.points_of([edit_rows[row] for row in rows]) if edit_rows else (),
            "capture": tuple(sorted({point for row in rows for point in captures[row]})) if captures else (),
        }
        return replace(plan, key=replace(plan.key, **own)) if any(own.values()) else plan

    def _pack_step(self, plan: StepPlan, rows: ActiveRows) -> tuple[NDArray[np.int32], list[int]]:
        """Returns a step's buffer, and the rows that want an output, in the order of `StepPart.wanted`."""
        key, tokens, outputs = plan.key, rows.tokens, rows.outputs
        buffer, packed = step.blank(key, self.plan.max_seqs)
        indices, wanted = [], []
        if packed.decode is not None:
            members = self._pack(packed.decode, plan.columns[0], rows)
            wanted, count = members.tolist(), len(members)
            indices = list(range(count))
            packed.decode.tokens[:count, 0] = np.concatenate([tokens[row] for row in wanted])
            packed.decode_slots[:count] = rows.slots[members]
            if key.edits:
                packed.decode_edit_rows[:count] = [rows.edit_rows[row] for row in wanted]
        if packed.blocks is not None:
            members = self._pack(packed.blocks, plan.columns[1], rows).tolist()
            if key.edits:
                packed.block_edit_rows[: len(members)] = [rows.edit_rows[row] for row in members]
            for at, (row, start, size) in enumerate(plan.blocks):
                packed.blocks.tokens[at, :size] = tokens[row][start : start + size]
                if key.outputs != "last" or start + size == len(tokens[row]):
                    wanted.append(row)
                    indices.append(key.decode_rows + at * key.block_tokens + size - 1)
        kinds = set(map(type, outputs))
        if NoOutput in kinds:
            asks = [type(outputs[row]) is not NoOutput for row in wanted]
            indices, wanted = list(compress(indices, asks)), list(compress(wanted, asks))
        lives, slots = rows.lives, (nobody := self.plan.max_seqs)
        if kinds & _BY_SLOT:
            slots = [lives[row].slot if type(outputs[row]) in _BY_SLOT else nobody for row in wanted]
        if key.outputs != "last":
            are_read = [type(outputs[row]) is Distributions for row in wanted]
            packed.block_slots[: len(wanted)] = np.where(are_read, read_only_slots(np.array(slots), nobody), slots)
            targets = packed.targets.reshape(key.blocks, key.block_tokens)
            for at, (row, start, size) in enumerate(plan.blocks):
                if isinstance(one := outputs[row], TargetScores):
                    targets[at, :size] = one.targets[start : start + size]
                    packed.scored[0] = max(packed.scored[0], 1 + one.with_alternatives)
        else:
            packed.logit_index[: len(wanted)] = indices
            packed.sample_slots[: len(wanted)] = slots
            packed.sample_positions[: len(wanted)] = [rows.ends[row] for row in wanted]
        return buffer, wanted

    def _pack(
        self, group: Rows[NDArray[np.int32]], columns: Sequence[NDArray[np.intp]], rows: ActiveRows
    ) -> NDArray[np.intp]:
        """Writes one group's lengths, counts, block tables and adapters; returns the rows of its pieces."""
        members, starts, sizes = columns
        count, slots = len(members), rows.slots[members]
        group.lengths[:count] = rows.starts[members] + starts
        group.counts[:count] = sizes
        group.tables[:count] = self.table.table[slots]
        if group.adapters is not None:
            group.adapters[:count] = [rows.adapters[row] for row in members]
        return members

    def _read_all(self, pending: PendingStep) -> None:
        if not pending.parts:
            return
        self.device.last_fetched_bytes = 0
        while pending.parts:  # a part that cannot be read stays: the next call must fail, too
            read_part(pending.parts[0], pending.answers, pending.captured, self.device, self.table)
            pending.parts.popleft()
        pending.answers = [join_answer(one) if isinstance(one, list) else one for one in pending.answers]
        for row, pieces in pending.captured.items():
            pending.answers[row] = WithCaptures(pending.answers[row], join_captured(pieces))
        pending.captured = {}

    def plan_recompute(self, rows: Iterable[tuple[str, int]]) -> list[tuple[ActiveRows, StepPlan]]:
        """Plans to recompute sequences whose sliding-window caches have evicted positions that their next token sees.

        Each is recomputed from its beginning: a layer's keys and values depend on a window of the layer below, those
        on a window of the next one below, and so on. The host must know all their tokens.
        """
        if not self.table.window_size:
            return []
        live = [(cache_id, self.table.live.get(cache_id), use) for cache_id, use in rows]
        again = [(name, one, use) for name, one, use in live if one is not None and self.table.needs_recompute(one)]
        if not again:
            return []
        if outdated := [name for name, one, _ in again if one.is_outdated]:
            raise RequestValidationError(
                f"{outdated[0]!r} was kept while weights changed, and its sliding-window cache has evicted positions "
                "that its next token sees: release it"
            )
        names, lives, uses = zip(*again, strict=True)
        edit_rows = list(map(self.interventions.row_of, names)) if self.interventions.are_used else []
        tokens = [np.array(one.tokens, np.int32) for one in lives]
        members = ActiveRows([NO_OUTPUT] * len(again), tokens, [0] * len(again), lives, uses, edit_rows)
        plans = planner.plan_steps(list(map(len, tokens)), self.plan.buckets)
        return [(members, self._completed(one, uses, edit_rows)) for one in plans]


def _divided(output: Output, count: int) -> tuple[int, int, int]:
    """Returns (n, 0, 0), (0, n, 0) or (0, 0, n): n tokens of steps for last logits, all logits, or scores alone."""
    if type(output) in _ONE_OUTPUT:
        return count, 0, 0
    return (0, 0, count) if isinstance(output, TargetScores) and output.settings is None else (0, count, 0)


def _newest(live: CachedSequence | None) -> NDArray[np.int32]:
    """Returns the token sampled last for a sequence, int32 `[1]`; UNKNOWN if the host has not read it."""
    assert live is not None
    return _UNREAD if live.sampled == UNKNOWN else np.array([live.sampled], np.int32)
