"""The live sequences of one model: new tokens in, answers out, whatever steps that takes."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import buckets
from ferrum_jax.compile.buckets import AnyKey, CopyKey, ScoreKey, SelectKey, StepKey, StepPlan, choose_bucket
from ferrum_jax.compile.steps import StepCache
from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.contract.llm import DecodeRow
from ferrum_jax.contract.policy import LogitsReturnPolicy
from ferrum_jax.contract.scoring import TokenScores
from ferrum_jax.contract.slots import ActiveLoraAdapter, KvSlotAllocation, KvSlotRequest, KvSlotReservation
from ferrum_jax.contract.watching import Watched
from ferrum_jax.executor.adapters import NONE, Adapters, with_adapters
from ferrum_jax.executor.counters import PrefixCounters
from ferrum_jax.executor.device import Answer, DeviceKv, Row
from ferrum_jax.executor.replaying import Replay, plan_replay
from ferrum_jax.executor.sizing import MOST_IN_FLIGHT, EnginePlan
from ferrum_jax.executor.steady import Steady, steady_rows
from ferrum_jax.executor.watched import joined
from ferrum_jax.executor.work import Work, checked_requests, decode_rows
from ferrum_jax.kvcache.growth import Growth, Want
from ferrum_jax.kvcache.prefix import PrefixIndex
from ferrum_jax.kvcache.slots import SlotTable
from ferrum_jax.models.watching import Watch
from ferrum_jax.weights.peft import PeftAdapter

NOTHING = np.zeros(0, np.int32)


@dataclass(eq=False)
class Sequences:
    """Slots and blocks on the host, keys and values on the device, kept in step.

    Whatever can refuse, a compilation included, does so before anything changes; a call that fails later takes its
    bookkeeping back.
    """

    device: DeviceKv
    steps: StepCache[AnyKey]
    plan: EnginePlan
    adapters: Adapters
    prefixes: PrefixCounters = field(default_factory=PrefixCounters)

    def __post_init__(self):
        self.slots = self._empty_slots()

    def clear(self) -> None:
        """Forgets every sequence, prefix and binding; counters go on."""
        self.adapters.clear_bindings()
        self.prefixes.evictions += self.slots.pool.evictions
        self.slots = self._empty_slots()

    def forget_prefixes(self, why: str) -> None:
        """Forgets what every block holds; raises RequestValidation, saying what for, while a sequence is live."""
        if live := self.slots.cache_ids:
            raise RequestValidationError(
                f"{len(live)} sequences are live, {live[0]!r} among them: release them before {why}, or reset()"
            )
        self.prefixes.evictions += self.slots.pool.evictions
        self.slots = self._empty_slots()

    def _empty_slots(self) -> SlotTable:
        return SlotTable(
            max_seqs=self.plan.max_seqs,
            kv_capacity=self.plan.kv_capacity,
            block_size=self.plan.cache.block_size,
            num_blocks=self.plan.cache.num_blocks,
            prefixes=PrefixIndex() if self.plan.prefix_cache else None,
            ring_blocks=self.plan.cache.ring_blocks,
            window=self.plan.window,
        )

    def advance(self, work: Sequence[Work]) -> list[Answer | None]:
        """Appends each row's tokens; gives logits `[V]` or a token id per row, None where none is wanted.

        Tokens that a known prefix covers are not computed; the last token of a row that answers always is.
        """
        if not work:
            return []
        growth = Growth(
            self.slots, [self._want(row.cache_id, row.tokens, len(row.tokens) - row.wanted) for row in work]
        )
        reused = growth.reused()
        left = [index for index, row in enumerate(work) if len(row.tokens) > reused[index]]
        plans = buckets.plan([len(work[index].tokens) - reused[index] for index in left], self.plan.ladders)
        answers: list[Answer | None] = [None] * len(work)
        for index, pieces in zip(left, self._run(growth, work, left, reused, plans), strict=True):
            answers[index] = pieces[-1] if pieces else None
        if self.slots.prefixes is not None:
            for row, count in zip(work, reused, strict=True):
                self.prefixes.count(len(row.tokens), count)
        return answers

    def decode(
        self, batch: Sequence[DecodeRow], policies: Sequence[LogitsReturnPolicy] | None, vocab_size: int
    ) -> Sequence[Answer | None]:
        """Appends one token of each (cache id, token, position) row; answers as `advance`, quickly where it can."""
        if policies is None and not self.adapters.are_used():
            steady = steady_rows(batch, self.slots, vocab_size)
            if steady is not None and len(steady.tokens) <= self.plan.ladders.decode_rows[-1]:
                return self._step(steady)
        return self.advance(decode_rows(batch, policies, vocab_size, self.slots.length))

    def _step(self, steady: Steady) -> list[NDArray[np.float32]]:
        ladders = self.plan.ladders
        key = StepKey(choose_bucket(ladders.decode_rows, len(steady.tokens)), 0, 0, ladders.table_columns)
        self.make_ready([key])
        try:
            fetch = self.device.run_steady(key, steady, self.slots.table, self.steps.get)
            self.slots.append(steady.lives, steady.tokens)
            return fetch()
        except BaseException:  # an interrupt, too: the books say what nobody was told, or half of it
            self.device.give_up()
            raise

    def verify(self, work: Sequence[Work]) -> list[NDArray[np.float32]]:
        """Appends each row's tokens; gives the logits of every one of them, `[n, V]`."""
        return [np.concatenate([np.asarray(piece) for piece in found]) for found in self._run_all(work)]

    def score(self, work: Sequence[Work]) -> list[TokenScores]:
        """Appends each row's tokens; gives the log-probability of the target after every one, and the best token."""
        scores = []
        for found in self._run_all(work):
            bits, logprobs = np.concatenate([np.asarray(piece) for piece in found], axis=1)
            scores.append(TokenScores(logprobs=logprobs, greedy_ids=bits.view(np.int32)))
        return scores

    def watch(self, row: Work, wanted: Watch) -> Watched:
        """Appends one row's tokens; gives logits, hidden states and attention weights of every one of them."""
        self.device.take_seen()
        start, (found,) = self.slots.length(row.cache_id), self._run_all([row], wanted)
        return joined(found, self.device.take_seen(), wanted, start + len(row.tokens))

    def prepare(self, cache_id: str, count: int) -> None:
        """Takes a slot for an id, if it has none, and compiles the steps for a prompt and for decoding after it."""
        self.slots.refuse_past_capacity(cache_id, self.slots.length(cache_id) + count)
        growth = Growth(self.slots, [self._want(cache_id)])
        adapters = self.adapters.of(cache_id) is not None
        plans = [*buckets.plan([count], self.plan.ladders), *buckets.plan([1], self.plan.ladders)]
        keys: list[AnyKey] = [replace(plan.key, adapters=adapters) for plan in plans]
        keys += [SelectKey(plan.key.num_logit_rows) for plan in plans]
        self.steps.ensure(dict.fromkeys([*keys, CopyKey(self.plan.ladders.max_copies)]))
        self.perform(growth, lambda: None)

    def reserve(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        """Makes positions writable: all that are asked for, or none and an error."""
        slots, pool = self.slots, self.slots.pool
        targets: dict[str, int] = {}
        admissions: dict[str, int] = {}
        for request in checked_requests(requests):
            key, admission = request.cache_id, request.admission_target_len or 0
            targets[key] = max(targets.get(key, 0), request.target_len)
            admissions[key] = max(admissions.get(key, 0), admission, targets[key])
        for cache_id, target in admissions.items():
            slots.refuse_past_capacity(cache_id, target)
        slots.refuse_newcomers(list(targets))
        # An id that is unknown and wants no position yet is admitted, but gets no slot.
        wants = [key for key, target in targets.items() if target or slots.get(key) is not None]
        lengths = [max(targets[key], slots.length(key)) for key in wants]
        growth = Growth(slots, [self._want(key) for key in wants], lengths)
        before = {key: self._num_blocks(key) for key in targets}
        later = sum(max(0, slots.num_blocks(admissions[key]) - held) for key, held in before.items())
        pool.refuse_more_than_free(max(growth.num_new_blocks, later + growth.num_copies), len(targets))
        self.make_ready(self.extra_keys(growth))
        free, copied = pool.num_free, set(growth.copied_ids)
        self._run(growth, [], [], [], [])
        after = {key: self._num_blocks(key) for key in targets}
        return KvSlotReservation(
            block_size=self.plan.cache.block_size,
            total_blocks=pool.num_blocks,
            free_blocks_before=free,
            free_blocks_after=pool.num_free,
            allocations=tuple(
                KvSlotAllocation(
                    cache_id=key,
                    blocks_before=before[key],
                    blocks_after=after[key],
                    new_blocks=after[key] - before[key] + (key in copied),
                )
                for key in targets
            ),
        )

    def gather(self, cache_id: str, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies one layer's keys and values of a live sequence: `[length, K, H]` each."""
        live, seat = self.slots.get(cache_id), self.plan.seat_of(layer)
        if live is None:
            raise RequestValidationError(f"{cache_id!r} is unknown, it has no keys and values")
        return self.device.gather(seat, self.slots.table[live.slot], live.length, self.steps.get)

    def release(self, cache_id: str) -> None:
        """Frees a sequence and its binding; an unknown id is no error."""
        with self.device.changing():
            self.slots.release(cache_id)
            self.adapters.bind(cache_id, None)

    def truncate(self, cache_id: str, new_len: int) -> None:
        """Rolls a sequence back, as `SlotTable.truncate` does."""
        with self.device.changing():
            self.slots.truncate(cache_id, new_len)

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Makes a sequence that shares another's blocks and adapter; raises as `SlotTable.fork` does."""
        if self.adapters.of(new_cache_id) not in (None, self.adapters.of(cache_id)):
            raise RequestValidationError(f"{new_cache_id!r} is bound to another adapter than {cache_id!r}")
        with self.device.changing():
            self.slots.fork(cache_id, new_cache_id)
            self.adapters.bind(new_cache_id, self.adapters.of(cache_id))

    def bind(self, cache_id: str, adapter: ActiveLoraAdapter | None) -> None:
        """Binds an id to an adapter, loaded from its path if need be, or to none."""
        if adapter is not None:
            self.adapters.refuse_without_room(adapter.name)
        self.adapters.refuse_rebinding(cache_id, adapter, self.slots.length(cache_id))
        if adapter is None:
            self.adapters.bind(cache_id, None)
            return
        if self.adapters.find(adapter) is None:
            self.install(adapter.name, self.adapters.read(adapter.path), adapter.path, is_pinned=False)
        self.adapters.bind(cache_id, self.adapters.find(adapter))

    def install(self, name: str, read: PeftAdapter, path: str | os.PathLike[str], *, is_pinned: bool) -> None:
        """Loads an adapter; raises as `Adapters.load` does."""
        for gone in self.adapters.load(name, read, path, is_pinned=is_pinned):
            self.slots.forget_adapter(gone)

    def unload(self, name: str) -> None:
        """Forgets an adapter and its prefixes; raises as `Adapters.unload` does."""
        self.slots.forget_adapter(self.adapters.unload(name))

    def _want(self, cache_id: str, tokens: NDArray[np.int32] = NOTHING, reusable: int = 0) -> Want:
        return Want(cache_id, tokens, reusable, self.adapters.of(cache_id))

    def _num_blocks(self, cache_id: str) -> int:
        live = self.slots.get(cache_id)
        return 0 if live is None else len(live.blocks)

    def extra_keys(self, growth: Growth) -> list[AnyKey]:
        """The calls beside the steps that a growth needs."""
        return [CopyKey(self.plan.ladders.max_copies)] if growth.num_copies else []

    def make_ready(self, keys: Sequence[AnyKey]) -> None:
        """Compiles what is not there yet, before anything changes."""
        for key in keys:
            self.steps.get(key)

    def _run_all(self, work: Sequence[Work], watch: Watch = Watch()) -> list[list[Answer]]:
        """Appends each row's tokens, computing all of them whatever prefix is known."""
        growth = Growth(self.slots, [self._want(row.cache_id, row.tokens) for row in work])
        plans = buckets.plan_verify([len(row.tokens) for row in work], self.plan.ladders)
        if watch != Watch():
            shown = {"hidden": watch.hidden, "attention": watch.attention}
            plans = [replace(plan, key=replace(plan.key, **shown)) for plan in plans]
        return self._run(growth, work, range(len(work)), [0] * len(work), plans)

    def _run(
        self,
        growth: Growth,
        work: Sequence[Work],
        left: Sequence[int],
        reused: Sequence[int],
        plans: Sequence[StepPlan],
    ) -> list[list[Answer]]:
        """Takes what was planned, runs the steps over the rows that are `left`, and commits; or takes all back."""
        uses = [NONE] * len(work)
        if self.adapters.are_used():
            uses = [self.adapters.row_of(row.cache_id) for row in work]
            plans = [with_adapters(plan, [uses[index] for index in left]) for plan in plans]
        chosen = any(row.policy is not None and row.wanted for row in work)
        selects = [SelectKey(plan.key.num_logit_rows) for plan in plans] if chosen else []
        scored = any(row.targets is not None for row in work)
        scores = [ScoreKey(plan.key.num_logit_rows) for plan in plans] if scored else []
        replay = self.plan_replay((work[index].cache_id, uses[index]) for index in left)
        steps = [plan.key for plan in (*replay.plans, *plans)]
        self.make_ready([*steps, *selects, *scores, *self.extra_keys(growth)])
        pending: list[Callable[[], dict[int, Answer]]] = []
        answers: list[list[Answer]] = [[] for _ in left]

        def collect() -> None:
            for at, piece in pending.pop(0)().items():
                answers[at].append(piece)

        def forward() -> None:
            self.replay(replay)
            rows = []
            for index in left:
                live, row, skip = growth.live(index), work[index], reused[index]
                tokens = row.tokens[skip:] if skip else row.tokens
                at = len(live.tokens) + skip
                rows.append(Row(tokens, at, live.slot, row.wanted, row.policy, uses[index], row.targets))
            for plan in plans:
                if len(pending) == MOST_IN_FLIGHT:
                    collect()
                pending.append(self.device.run(plan, rows, self.slots.table, self.steps.get, self.adapters.stacks))

        self.perform(growth, forward)  # the books are written while the device works
        try:
            while pending:
                collect()
        except BaseException:  # an interrupt, too: the books say what nobody was told
            self.device.give_up()
            raise
        if self.adapters.are_used():
            self.adapters.count(row.cache_id for row in work)
        return answers

    def plan_replay(self, rows: Iterable[tuple[str, int]]) -> Replay:
        """Plans what of (cache id, row of the stacks) must be read again before it can go on."""
        return plan_replay(self.slots, ((self.slots.get(key), use) for key, use in rows), self.plan.ladders)

    def replay(self, replay: Replay) -> None:
        """Reads sequences again, as it was planned."""
        for plan in replay.plans:
            self.device.run(plan, replay.rows, self.slots.table, self.steps.get, self.adapters.stacks)()
        for live in replay.lives:
            self.slots.refill_ring(live)

    def perform(self, growth: Growth, work: Callable[[], Sequence[NDArray[np.int32]] | None]) -> None:
        """Takes what was planned, does the work, and commits what it says was written; or takes all back."""
        try:
            copies = growth.apply()
        except BaseException:  # an interrupt: nothing else can fail there, and nobody knows how far it came
            self.device.give_up()
            raise
        try:
            self._copy(copies)
            written = work()
        except BaseException:  # an interrupt, too
            growth.undo()
            raise
        try:
            growth.commit(written)
        except BaseException:  # half of the books are written, half are not
            self.device.give_up()
            raise

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        key = CopyKey(self.plan.ladders.max_copies)
        for start in range(0, len(pairs), key.blocks):
            self.device.copy_blocks(pairs[start : start + key.blocks], key, self.steps.get)
