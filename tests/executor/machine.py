"""A state machine that calls every method of a runner in any order, and knows what each must answer."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract import (
    ActiveLoraAdapter,
    DecodeRun,
    FullLogits,
    GreedyArgmax,
    KvSlotRequest,
    LogitsReturnPolicy,
)
from ferrum_jax.contract.errors import (
    AlreadyExistsError,
    NotFoundError,
    RequestValidationError,
    ResourceExhaustedError,
)
from ferrum_jax.contract.llm import choose
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.batch import (
    ALL_LOGITS,
    LAST_LOGITS,
    NO_OUTPUT,
    AllLogits,
    Output,
    SampledToken,
    ScheduledRow,
    TargetScores,
    TokenChoice,
)
from ferrum_jax.executor.pipeline import PendingStep
from tests.executor.answers import TOLERANCE, Begun, Chosen, V, choose_score, expect_output, known
from tests.executor.conftest import ADAPTER_NAMES, CAPACITY, CFG, Oracle, emptied, poison
from tests.executor.drawn import IDS, NAMES, PICK, POLICIES, SETTINGS, TOKENS, WANTED


def everything(
    runner: ModelRunner,
    oracles: dict[str | None, Oracle],
    folders: dict[str, str],
    progress: Callable[[], Any] = lambda: None,
):
    """Makes the machine for a runner that reuses prefixes and has room for two adapters."""

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            emptied(runner)
            self.sequences: dict[str, list[int | Chosen]] = {}
            self.sampled: dict[str, tuple[int, int | Chosen]] = {}  # for which position, and which token
            self.using: dict[str, tuple[SlotSettings, list[int | Chosen]]] = {}  # and what was counted since
            self.waiting: list[tuple[PendingStep, list[Begun]]] = []  # not read yet
            self.bound: dict[str, str] = {}  # to adapters
            counts = runner.cache_metrics_snapshot()
            self.lookups = counts["hits"] + counts["misses"]
            self.late_compiles = runner._programs._compiled_late

        def expect(self, answer: Any, key: str, policy: LogitsReturnPolicy) -> None:
            expected = oracles[self.bound.get(key)](self.text(key))[-1]
            if isinstance(policy, GreedyArgmax):
                self.sampled[key] = self.at(key), answer
                self.using.pop(key, None)
            if isinstance(policy, FullLogits):
                np.testing.assert_allclose(answer, expected, atol=TOLERANCE, rtol=0)
                return
            best = choose(expected, policy)
            if answer != best:  # only where two are as good as equal
                scores = [choose_score(expected, policy, token) for token in (answer, best)]
                assert abs(scores[0] - scores[1]) <= 4 * TOLERANCE

        def text(self, key: str) -> list[int]:
            if any(isinstance(one, Chosen) and one.token is None for one in self.sequences[key]):
                self.read_late(False)
            return known(self.sequences[key])

        @rule(backwards=st.booleans())
        def read_late(self, backwards: bool):
            """Reads what was begun, in any order, and compares it in the order of beginning."""
            begun, self.waiting = self.waiting, []
            answers = [pending.result() for pending, _ in (reversed(begun) if backwards else begun)]
            for (_, rows), found in zip(begun, reversed(answers) if backwards else answers, strict=True):
                for row, answer in zip(rows, found, strict=True):
                    if isinstance(answer, TokenChoice):
                        row.chosen.token = answer.token_id
                for row, answer in zip(rows, found, strict=True):
                    expect_output(answer, row, oracles[row.adapter](known(row.text)))

        @rule(
            work=st.dictionaries(IDS, st.tuples(WANTED, TOKENS, SETTINGS, st.booleans(), st.booleans()), min_size=1),
            later=st.booleans(),
        )
        def execute(self, work: dict[str, tuple[str, list[int], SlotSettings, bool, bool]], later: bool):
            """Rows of any output in one batch; some take the token that was chosen for them on the device."""
            rows, grown, expected, using = [], {}, [], {}
            refused = False
            for key, (wanted, tokens, settings, takes, again) in work.items():
                new: list[Any] = list(tokens)
                if takes:
                    position, token = self.sampled.get(key, (-1, 0))
                    refused |= position != self.at(key)
                    new = [token]
                output: Output = {"nothing": NO_OUTPUT, "last": LAST_LOGITS, "all": ALL_LOGITS}.get(wanted, NO_OUTPUT)
                generated: list[int | Chosen] = []
                if wanted == "scores":
                    output = TargetScores(np.array([(7 * at + 2) % V for at in range(len(new))], np.int32), again)
                if wanted == "sampled":
                    if again and key in self.using:
                        settings, generated = self.using[key]
                    output = SampledToken(settings)
                given = None if takes else np.array(tokens, np.int32)
                rows.append(ScheduledRow(key, given, self.at(key), output))
                text = [*self.sequences.get(key, []), *new]
                row = Begun(output, len(new), text, self.bound.get(key), list(generated), Chosen())
                expected.append(row)
                grown[key] = new
                if wanted == "sampled":
                    using[key] = settings, [*generated, row.chosen]
            if refused:
                before = self.records()
                with pytest.raises(RequestValidationError, match="no token was sampled"):
                    runner.execute(rows)
                assert self.records() == before
                return
            pending = self.attempt(grown, lambda: runner.execute(rows))
            if pending is None:
                return
            self.using.update(using)
            self.waiting.append((pending, expected))
            for key, row in zip(work, expected, strict=True):
                one_output = not isinstance(row.output, (AllLogits, TargetScores))
                self.lookups += one_output and row.num_tokens > 1
                if isinstance(row.output, SampledToken):
                    self.sampled[key] = len(row.text), row.chosen
            if not later:
                self.read_late(False)

        def attempt(self, grown: dict[str, Any], call: Callable[[], Any]) -> Any:
            """Runs a call that appends tokens; returns None if it was refused, which must have changed nothing."""
            progress()
            before = self.records()
            if any(len(self.sequences.get(key, [])) + len(new) > CAPACITY for key, new in grown.items()):
                with pytest.raises(RequestValidationError, match="capacity"):
                    call()
                assert self.records() == before
                return None
            try:
                answers = call()
            except ResourceExhaustedError as problem:
                refusal = problem
            else:
                for key, new in grown.items():
                    self.sequences[key] = self.sequences.get(key, []) + new
                return answers
            assert refusal.needed is not None
            assert refusal.free is not None
            assert refusal.needed > refusal.free
            assert self.records() == before
            newcomers = sum(key not in self.sequences for key in grown)
            assert newcomers > 4 - len(self.sequences) or self.could_be_short(grown)
            return None

        def could_be_short(self, grown: dict[str, list[int]]) -> bool:
            """Whether the blocks would be short if nothing at all were reused."""
            held = {block for key in self.sequences for block in live(runner, key).blocks}
            lacking = sum(
                max(0, -(-(len(self.sequences.get(key, [])) + len(new)) // 8) - self.num_blocks(key)) + 1
                for key, new in grown.items()
            )
            return len(held) + lacking > 18

        def num_blocks(self, key: str) -> int:
            return len(live(runner, key).blocks) if key in self.sequences else 0

        def records(self) -> tuple[Any, ...]:
            table = runner._pipeline.table
            held = {key: one for key in NAMES if (one := table.live.get(key)) is not None}
            if self.waiting:  # reading, which any call may do, fills in tokens and shares blocks
                return [(key, one.slot, one.length) for key, one in held.items()], runner.lora_metrics_snapshot()
            rows = [(key, one.slot, list(one.tokens), list(one.blocks)) for key, one in held.items()]
            return rows, table.pool.num_free, runner.cache_metrics_snapshot(), runner.lora_metrics_snapshot()

        def live_id(self, pick: int) -> str:
            """One of the live ids, or one that is unknown if there are none."""
            known = sorted(self.sequences)
            return known[pick % len(known)] if known else NAMES[pick % len(NAMES)]

        def at(self, key: str) -> int:
            return len(self.sequences.get(key, []))

        @rule(key=IDS, tokens=TOKENS)
        def prefill(self, key: str, tokens: list[int]):
            tokens = tokens[: max(1, CAPACITY - self.at(key))]
            answer = self.attempt({key: tokens}, lambda: runner.prefill(key, tokens))
            if answer is not None:
                self.lookups += len(tokens) > 1
                self.expect(answer, key, FullLogits())

        @rule(key=IDS, tokens=TOKENS)
        def prefill_whatever_the_capacity(self, key: str, tokens: list[int]):
            answer = self.attempt({key: tokens}, lambda: runner.prefill(key, tokens))
            if answer is not None:
                self.lookups += len(tokens) > 1
                self.expect(answer, key, FullLogits())

        @rule(work=st.dictionaries(IDS, TOKENS, min_size=1, max_size=3))
        def verify(self, work: dict[str, list[int]]):
            rows = self.attempt(work, lambda: runner.forward_verify_batch(list(work.items())))
            for (key, tokens), logits in zip(work.items(), rows or [], strict=rows is not None):
                expected = oracles[self.bound.get(key)](self.text(key))[-len(tokens) :]
                np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)

        @rule(work=st.dictionaries(IDS, st.tuples(st.integers(0, V - 1), POLICIES)))
        def decode(self, work: dict[str, tuple[int, LogitsReturnPolicy]]):
            batch = [(key, token, self.at(key)) for key, (token, _) in work.items()]
            policies = [policy for _, policy in work.values()]
            rows = self.attempt(
                {key: [token] for key, (token, _) in work.items()},
                lambda: runner.decode_batch_with_logits_policy(batch, policies),
            )
            for (key, (_, policy)), answer in zip(work.items(), rows or [], strict=rows is not None):
                self.expect(answer, key, policy)

        @rule(picks=st.dictionaries(PICK, st.integers(1, 9), min_size=1, max_size=3), first=st.booleans())
        def decode_many(self, picks: dict[int, int], first: bool):
            """Chosen greedily on the device: each token is the best after those before it; the last is not read."""
            progress()
            counts = {self.live_id(pick): count for pick, count in picks.items()}
            runs = [
                DecodeRun(cache_id=key, token=3, pos=self.at(key), max_tokens=count) for key, count in counts.items()
            ]
            before = self.records()
            try:
                found = runner.decode_n(runs, until_one_ends=first)
            except (RequestValidationError, ResourceExhaustedError):
                assert self.records() == before
                return
            for (key, count), run in zip(counts.items(), found, strict=True):
                assert len(run.token_ids) == (min(counts.values()) if first else count)
                start = self.at(key)
                self.sequences[key] += [3, *run.token_ids[:-1]]
                self.using.pop(key, None)
                logits = oracles[self.bound.get(key)](self.text(key))[start:]
                chosen = np.take_along_axis(logits, np.array(run.token_ids)[:, None], axis=-1)[:, 0]
                np.testing.assert_allclose(chosen, logits.max(axis=-1), atol=TOLERANCE, rtol=0)

        @rule(work=st.dictionaries(IDS, st.tuples(TOKENS, st.booleans(), POLICIES)))
        def unified(self, work: dict[str, tuple[list[int], bool, LogitsReturnPolicy]]):
            items = [(key, tokens, self.at(key), last) for key, (tokens, last, _) in work.items()]
            rows = self.attempt(
                {key: tokens for key, (tokens, _, _) in work.items()},
                lambda: runner.unified_forward_with_logits_policy(items, [policy for _, _, policy in work.values()]),
            )
            if rows is None:
                return
            self.lookups += sum(len(tokens) > 1 for tokens, _, _ in work.values())
            for (key, (_, last, policy)), answer in zip(work.items(), rows, strict=True):
                assert (answer is not None) == last
                if last:
                    self.expect(answer, key, policy)

        @rule(key=IDS, length=st.integers(0, CAPACITY + 3))
        def truncate(self, key: str, length: int):
            progress()
            runner.truncate_kv(key, length)
            if length < self.at(key):
                self.sequences[key] = self.sequences[key][:length]
                if self.sampled.get(key, (0, 0))[0] > length:
                    del self.sampled[key]

        @rule(pick=PICK, back=st.integers(1, 12), tokens=TOKENS)
        def go_back_and_on(self, pick: int, back: int, tokens: list[int]):
            """What speculation does: some tokens are taken back and others follow."""
            key = self.live_id(pick)
            self.truncate(key, max(0, self.at(key) - back))
            self.prefill(key, tokens)

        @rule(pick=PICK, new=IDS)
        def fork(self, pick: int, new: str):
            progress()
            key = self.live_id(pick)
            before = self.records()
            elsewhere = new in self.bound and self.bound[new] != self.bound.get(key)
            if key not in self.sequences or new in self.sequences or elsewhere:
                with pytest.raises(RequestValidationError):
                    runner.fork(key, new)
            elif len(self.sequences) == 4:
                with pytest.raises(ResourceExhaustedError, match="slots"):
                    runner.fork(key, new)
            else:
                runner.fork(key, new)
                self.sequences[new] = list(self.sequences[key])
                self.bound.pop(new, None)
                if key in self.bound:
                    self.bound[new] = self.bound[key]
                return
            assert self.records() == before

        @rule(wanted=st.dictionaries(IDS, st.tuples(st.integers(0, CAPACITY), st.integers(0, CAPACITY)), max_size=3))
        def reserve(self, wanted: dict[str, tuple[int, int]]):
            requests = [
                KvSlotRequest(cache_id=key, target_len=target, admission_target_len=admission)
                for key, (target, admission) in wanted.items()
            ]
            before = self.records()
            progress()
            try:
                done = runner.reserve_kv_slots(requests)
            except ResourceExhaustedError:
                assert self.records() == before
                return
            assert done.free_blocks_before - done.free_blocks_after == sum(one.new_blocks for one in done.allocations)
            assert done.free_blocks_after == runner.kv_slot_capacity_snapshot().free_blocks
            for key, (target, _) in wanted.items():
                if target:
                    self.sequences.setdefault(key, [])
            again = runner.reserve_kv_slots(requests)
            assert again.free_blocks_before == again.free_blocks_after
            # What was reserved can be written, whatever else happens in the pool.
            for key, (target, _) in wanted.items():
                for position in range(self.at(key), min(target, self.at(key) + 2)):
                    logits = runner.decode(key, position % V, position)
                    self.sequences[key].append(position % V)
                    self.expect(logits, key, FullLogits())

        @rule(work=st.dictionaries(IDS, TOKENS, min_size=1, max_size=3))
        def interrupt(self, work: dict[str, list[int]]):
            """An interrupt before anything changes leaves everything as it was."""
            progress()
            before = self.records()
            items = [(key, tokens, self.at(key), True) for key, tokens in work.items()]

            def stop(*_: object) -> None:
                raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ferrum_jax.executor.pipeline.planner.plan_steps", stop)
                with pytest.raises((KeyboardInterrupt, ResourceExhaustedError, RequestValidationError)):
                    runner.unified_forward(items)
            assert self.records() == before

        @rule(pick=PICK, back=st.integers(0, 12))
        def prepare(self, pick: int, back: int):
            """Getting ready, and reserving what is there, change nothing."""
            key = self.live_id(pick)
            if key not in self.sequences or self.at(key) == CAPACITY:
                return
            self.truncate(key, max(0, self.at(key) - back))
            before = self.records()
            runner.prepare(key, 1)
            runner.reserve_kv_slots([KvSlotRequest(cache_id=key, target_len=self.at(key))])
            assert self.records() == before

        @rule(key=IDS)
        def look_at_the_kv(self, key: str):
            progress()
            if key in self.sequences:
                k, v = runner.kv_cache(key, 1)
                assert k.shape == v.shape == (self.at(key), CFG.num_key_value_heads, CFG.head_dim)
                assert np.isfinite(k).all()
                assert np.isfinite(v).all()

        @rule(key=IDS)
        def release(self, key: str):
            progress()
            runner.release(key)
            for record in (self.sequences, self.bound, self.sampled, self.using):
                record.pop(key, None)

        @rule(key=IDS, name=st.sampled_from([None, *ADAPTER_NAMES]))
        def bind(self, key: str, name: str | None):
            progress()
            before = self.records()
            adapter = None if name is None else ActiveLoraAdapter(name=name, path=folders[name])
            loaded = runner._adapters.loaded
            pinned = {one for one in loaded if loaded[one].is_pinned}
            if self.at(key) and self.bound.get(key) != name:
                with pytest.raises(RequestValidationError, match="cannot go on with"):
                    runner.set_lora_adapter_for_cache(key, adapter)
            elif name is not None and name not in loaded and len(pinned | set(self.bound.values())) >= 2:
                with pytest.raises(ResourceExhaustedError, match="all 2 of max_loras"):
                    runner.set_lora_adapter_for_cache(key, adapter)
            else:
                runner.set_lora_adapter_for_cache(key, adapter)
                self.bound.pop(key, None)
                if name is not None:
                    self.bound[key] = name
                return
            assert self.records() == before

        @rule(name=st.sampled_from(ADAPTER_NAMES))
        def load(self, name: str):
            progress()
            before, loaded = self.records(), runner._adapters.loaded
            idle = [one for one in loaded if not loaded[one].is_pinned and one not in self.bound.values()]
            if name in loaded:
                with pytest.raises(AlreadyExistsError):
                    runner.load_lora(name, folders[name])
            elif len(loaded) == 2 and not idle:
                with pytest.raises(ResourceExhaustedError, match="max_loras"):
                    runner.load_lora(name, folders[name])
            else:
                runner.load_lora(name, folders[name])
                return
            assert self.records() == before

        @rule(name=st.sampled_from(ADAPTER_NAMES))
        def unload(self, name: str):
            progress()
            before = self.records()
            if name not in runner._adapters.loaded:
                with pytest.raises(NotFoundError):
                    runner.unload_lora(name)
            elif name in self.bound.values():
                with pytest.raises(RequestValidationError, match="in use"):
                    runner.unload_lora(name)
            else:
                runner.unload_lora(name)
                return
            assert self.records() == before

        @rule(key=IDS, off=st.integers(1, 5), token=st.sampled_from([-1, V, 2**40]))
        def refuse(self, key: str, off: int, token: int):
            progress()
            before = self.records()
            with pytest.raises(RequestValidationError, match="positions"):
                runner.decode(key, 0, self.at(key) + off)
            with pytest.raises(RequestValidationError, match=str(token)):
                runner.prefill(key, [1, token])
            assert self.records() == before

        @rule(often=st.integers(0, 9))
        def reset(self, often: int):
            progress()
            if often == 0:
                runner.reset()
                poison(runner)
                self.sequences, self.bound, self.sampled, self.using = {}, {}, {}, {}

        @invariant()
        def the_records_are_right(self):
            table = runner._pipeline.table
            pool, prefixes = table.pool, table.prefixes
            assert prefixes is not None
            assert set(table.live) == set(self.sequences)
            holders: Counter[int] = Counter()
            for key, tokens in self.sequences.items():
                one = live(runner, key)
                assert len(one.tokens) == len(tokens)
                for mine, theirs in zip(tokens, one.tokens, strict=True):
                    token = mine.token if isinstance(mine, Chosen) else mine
                    assert theirs == token or (token is None and isinstance(mine, Chosen))
                assert table.table[one.slot, : len(one.blocks)].tolist() == one.blocks
                assert len(one.entries) == len(tokens) // 8 or (self.waiting and len(one.entries) < len(tokens) // 8)
                assert [entry.block for entry in one.entries] == one.blocks[: len(one.entries)]
                assert len(one.blocks) >= -(-len(tokens) // 8)
                if len(tokens) % 8 and pool.is_kept(tail := one.blocks[len(tokens) // 8]):
                    begun = one.tokens[len(tokens) // 8 * 8 :].tobytes()
                    assert prefixes._by_block[tail].tokens.startswith(begun)  # what it is known by is what it holds
                holders.update(one.blocks)
            assert [pool.num_holders(block) for block in range(18)] == [holders[block] for block in range(18)]
            assert pool.num_free == 18 - len(holders)
            assert len(prefixes) == sum(pool.is_kept(block) for block in range(18))
            assert runner.lora_metrics_snapshot()["active_cache_bindings"] == len(self.bound)
            shared = [one.adapter for one in (live(runner, key) for key in self.sequences) if one.length]
            names = [None if one is None else getattr(one, "name", "") for one in shared]
            assert names == [self.bound.get(key) for key in self.sequences if self.at(key)]
            counts = runner.cache_metrics_snapshot()
            assert counts["hits"] + counts["misses"] == self.lookups
            assert runner._programs._compiled_late == self.late_compiles

        def teardown(self):
            self.read_late(True)
            for key in NAMES:
                runner.release(key)
            assert runner.kv_slot_capacity_snapshot().free_blocks == 18
            table = runner._pipeline.table
            assert runner.lora_metrics_snapshot()["active_cache_bindings"] == 0
            assert table.live == {}
            assert sorted(table.free_slots) == [0, 1, 2, 3]

    return Machine


def live(runner: ModelRunner, key: str):
    """Returns the runner's own record of a sequence that must be there."""
    found = runner._pipeline.table.live.get(key)
    assert found is not None
    return found
