"""Slots, lengths and block tables against a plain model of them."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ferrum_jax.contract.errors import InternalError, RequestValidationError, ResourceExhaustedError
from ferrum_jax.kvcache.blocks import BlockPool
from ferrum_jax.kvcache.prefix import PrefixIndex
from ferrum_jax.kvcache.sequences import UNKNOWN, CachedSequence, SequenceTable
from ferrum_jax.kvcache.transaction import KvTransaction

SLOTS, CAPACITY, BLOCK, BLOCKS = 3, 23, 5, 11  # the last block of a row is cut; three rows want 15 blocks
IDS = st.sampled_from("abcde")


def _plan(table: SequenceTable, goals: dict[str, int], *, written: bool = True) -> KvTransaction:
    """Plans to write up to the goals, or only to have room for them."""
    counts = [goal - table.length(key) if written else 0 for key, goal in goals.items()]
    return KvTransaction(table, list(goals), [np.zeros(count, np.int32) for count in counts], targets=[*goals.values()])


class Tables(RuleBasedStateMachine):
    """Allocates, writes, truncates and releases; `lengths` and `held` are what must be true."""

    def __init__(self):
        super().__init__()
        self.table = SequenceTable(max_seqs=SLOTS, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS)
        self.lengths: dict[str, int] = {}
        self.held: dict[str, int] = {}  # blocks

    @rule(wanted=st.dictionaries(IDS, st.integers(0, CAPACITY + 2), max_size=4), written=st.booleans())
    def allocate(self, wanted: dict[str, int], written: bool):
        goals = {key: max(self.lengths.get(key, 0), target) for key, target in wanted.items()}
        held = {key: max(self.held.get(key, 0), -(-goal // BLOCK)) for key, goal in goals.items()}
        before = self._state()
        if any(goal > CAPACITY for goal in goals.values()):
            with pytest.raises(RequestValidationError, match=f"its KV capacity is {CAPACITY}"):
                _plan(self.table, goals)
        elif len(self.lengths | goals) > SLOTS or sum((self.held | held).values()) > BLOCKS:
            with pytest.raises(ResourceExhaustedError) as caught:
                _plan(self.table, goals)
            assert caught.value.needed is not None
            assert caught.value.free is not None
            assert caught.value.needed > caught.value.free
        else:
            transaction = _plan(self.table, goals, written=written)
            assert self._state() == before, "a plan has changed something"
            assert transaction.apply() == []
            transaction.commit()
            self.held |= held
            self.lengths |= {key: goals[key] if written else self.lengths.get(key, 0) for key in goals}
            return
        assert self._state() == before

    @rule(key=IDS, goal=st.integers(1, CAPACITY), count=st.integers(0, CAPACITY))
    def write_fewer_than_were_allocated(self, key: str, goal: int, count: int):
        start = self.lengths.get(key, 0)
        goal, count = max(start, goal), min(count, max(0, goal - start))
        try:
            transaction = KvTransaction(self.table, [key], [np.zeros(1, np.int32)], targets=[goal])
        except ResourceExhaustedError:
            return
        transaction.apply()
        had_room = goal <= self._writable(key)
        transaction.commit([[7] * count])
        self.lengths[key] = start + count
        if not had_room:  # what was taken for more goes back, what was there before stays
            self.held[key] = max(self.held.get(key, 0), -(-self.lengths[key] // BLOCK))

    @rule(key=IDS, new_len=st.integers(0, CAPACITY))
    def truncate(self, key: str, new_len: int):
        self.table.truncate(key, new_len)
        if new_len < self.lengths.get(key, 0):
            self.lengths[key] = new_len
            self.held[key] = -(-new_len // BLOCK)

    @rule(key=IDS)
    def release(self, key: str):
        self.table.release(key)
        self.lengths.pop(key, None)
        self.held.pop(key, None)

    @invariant()
    def lengths_are_what_was_written(self):
        assert sorted(self.table.live) == sorted(self.lengths)
        for key in "abcde":
            assert self.table.length(key) == self.lengths.get(key, 0)

    @invariant()
    def no_block_or_slot_is_lost_or_owned_twice(self):
        live = [found for key in self.lengths if (found := self.table.live.get(key)) is not None]
        owned = [block for sequence in live for block in sequence.blocks]
        assert len(set(owned)) == len(owned) == sum(self.held.values())
        assert set(owned) <= set(range(BLOCKS))
        assert self.table.pool.num_free == BLOCKS - len(owned)
        assert len({sequence.slot for sequence in live}) == len(live)

    @invariant()
    def table_rows_name_the_blocks_in_order(self):
        for key in self.lengths:
            live = self.table.live.get(key)
            assert live is not None
            assert len(live.blocks) == self.held[key]
            assert self.table.table[live.slot, : len(live.blocks)].tolist() == live.blocks

    def _writable(self, key: str) -> int:
        live = self.table.live.get(key)
        return -1 if live is None else live.writable

    def _state(self) -> tuple[object, ...]:
        live = [(key, self.table.live.get(key)) for key in "abcde"]
        rows = [(key, one and (one.slot, one.length, list(one.blocks), one.writable)) for key, one in live]
        return rows, self.table.pool.num_free, self.table.table.tolist()

    def teardown(self):
        for key in "abcde":
            self.table.release(key)
        assert self.table.pool.num_free == BLOCKS
        _plan(self.table, dict.fromkeys("abc", BLOCK)).apply()


def test_any_order_of_calls_keeps_lengths_and_blocks_right():
    run_state_machine_as_test(Tables, settings=settings(max_examples=100, stateful_step_count=30, deadline=None))


def test_the_table_has_a_column_for_the_last_cut_block():
    table = SequenceTable(max_seqs=SLOTS, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS)
    assert table.table.shape == (SLOTS, 5)
    assert table.table.dtype == np.int32


def test_each_slot_has_its_own_blocks_for_sliding_windows_in_the_last_columns():
    table = SequenceTable(
        max_seqs=SLOTS, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS, window_blocks=2, window=4
    )
    assert table.table.shape == (SLOTS, 5 + 2)
    assert table.table[:, 5:].tolist() == [[0, 1], [2, 3], [4, 5]]


def _written(table: SequenceTable, key: str, tokens: list[int]) -> CachedSequence:
    transaction = KvTransaction(table, [key], [np.array(tokens, np.int32)])
    transaction.apply()
    transaction.commit()
    return transaction.lives[0]


def test_a_sequence_is_recomputed_only_where_its_next_token_would_see_an_evicted_position():
    table = SequenceTable(
        max_seqs=1, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS, window_blocks=2, window=4
    )
    live = _written(table, "a", [0] * 18)
    assert live.evicted_before == 18 - 2 * BLOCK
    table.truncate("a", 11)  # sees 8 to 11
    assert not table.needs_recompute(live)
    table.truncate("a", 10)  # sees 7
    assert table.needs_recompute(live)
    assert live.writable == 0
    table.recomputed(live)
    assert not table.needs_recompute(live)
    assert live.writable > 0
    table.truncate("a", 0)
    assert (live.evicted_before, table.needs_recompute(live)) == (0, False)


def test_what_is_written_after_a_truncation_to_nothing_is_of_the_present_weights():
    table = SequenceTable(max_seqs=2, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS, prefixes=PrefixIndex())
    live = _written(table, "a", [1] * 9)
    table.invalidate_prefixes()
    assert (live.is_private, live.is_outdated) == (True, True)
    table.truncate("a", 1)
    assert (live.is_private, live.is_outdated) == (True, True)
    table.truncate("a", 0)
    assert (live.is_private, live.is_outdated) == (False, False)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_kept_block_without_an_entry_is_handed_out_as_any_other(lost: int):
    """An interrupt between forgetting a prefix and discarding its blocks leaves them so."""
    table = SequenceTable(max_seqs=2, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS, prefixes=PrefixIndex())
    live = _written(table, "a", list(range(1, 2 * BLOCK + 2)))
    assert table.prefixes is not None
    first, second = live.blocks[:2]
    if lost:
        table.prefixes._by_block.pop(second)
        table.prefixes._by_block[first].children.clear()
    else:
        table.prefixes.forget_adapter(None)
    table.release("a")
    taken = table.pool.allocate(BLOCKS)
    assert {first, second} <= set(taken)
    assert len(table.prefixes) == 0


def test_a_block_is_entered_as_a_prefix_once_all_its_tokens_are_known():
    table = SequenceTable(max_seqs=2, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS, prefixes=PrefixIndex())
    live = _written(table, "a", [1, 2, 3, UNKNOWN, UNKNOWN, 6])
    assert live.entries == []
    table.resolve(live, 4, 5)
    assert live.entries == []
    table.resolve(live, 3, 4)
    assert len(live.entries) == 1
    again = KvTransaction(table, ["b"], [np.arange(1, 8, dtype=np.int32)], [6])
    assert again.reused() == [BLOCK]


def test_a_token_that_comes_late_is_dropped_where_its_place_is_gone_or_taken():
    table = SequenceTable(max_seqs=2, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS)
    live = _written(table, "a", [1, UNKNOWN, UNKNOWN])
    table.truncate("a", 2)
    table.resolve(live, 2, 9)
    table.resolve(live, 0, 9)
    assert list(live.tokens) == [1, UNKNOWN]
    table.release("a")
    table.resolve(live, 1, 9)
    assert list(live.tokens) == [1, UNKNOWN]


def test_a_pool_hands_out_all_or_nothing_and_takes_back_once():
    pool = BlockPool(4)
    taken = pool.allocate(3)
    with pytest.raises(ResourceExhaustedError, match=r"need 2 KV blocks for 1 sequences, 1 of 4 are free") as caught:
        pool.allocate(2)
    assert (caught.value.needed, caught.value.free, pool.num_free) == (2, 1, 1)
    pool.release(taken[:1])
    with pytest.raises(InternalError, match="freed twice"):
        pool.release(taken[:1])
    assert sorted(pool.allocate(2) + taken[1:]) == [0, 1, 2, 3]


def test_blocks_freed_last_are_handed_out_first():
    pool = BlockPool(6)
    taken = pool.allocate(4)
    pool.release(taken)
    assert pool.allocate(1) == taken[:1]


def test_a_sequence_beyond_the_whole_pool_is_short_of_blocks_and_one_beyond_its_capacity_is_refused():
    table = SequenceTable(max_seqs=SLOTS, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=3)
    _plan(table, {"a": 8}).apply()
    with pytest.raises(ResourceExhaustedError, match="'a' needs 16 positions, the whole pool holds 15") as caught:
        _plan(table, {"a": 16}, written=False)
    assert (caught.value.needed, caught.value.free) == (2, 1)
    with pytest.raises(ResourceExhaustedError) as caught:
        table.check_capacity("b", CAPACITY)
    assert (caught.value.needed, caught.value.free) == (5, 1)
    with pytest.raises(RequestValidationError, match=f"its KV capacity is {CAPACITY}"):
        table.check_capacity("b", CAPACITY + 1)
