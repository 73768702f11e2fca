"""The books of blocks and slots against a plain model of them."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ferrum_jax.contract.errors import InternalError, RequestValidationError, ResourceExhaustedError
from ferrum_jax.kvcache.blocks import BlockPool
from ferrum_jax.kvcache.growth import Growth, Want
from ferrum_jax.kvcache.slots import SlotTable

SLOTS, CAPACITY, BLOCK, BLOCKS = 3, 23, 5, 11  # the last block of a row is cut; three rows want 15 blocks
IDS = st.sampled_from("abcde")
WANTED = st.dictionaries(IDS, st.integers(0, CAPACITY + 2), max_size=4)


def _grow(slots: SlotTable, goals: dict[str, int], *, written: bool = True) -> Growth:
    """Plans to write up to the goals, or only to have room for them."""
    counts = [goal - slots.length(key) if written else 0 for key, goal in goals.items()]
    wants = [Want(key, np.zeros(count, np.int32)) for key, count in zip(goals, counts, strict=True)]
    return Growth(slots, wants, list(goals.values()))


class Books(RuleBasedStateMachine):
    """Grows, writes, truncates and releases; `lengths` and `held` are what must be true."""

    def __init__(self):
        super().__init__()
        self.slots = SlotTable(max_seqs=SLOTS, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS)
        self.lengths: dict[str, int] = {}
        self.held: dict[str, int] = {}  # blocks

    @rule(
        wanted=st.dictionaries(IDS, st.integers(0, CAPACITY + 2), max_size=4),
        written=st.booleans(),
        undone=st.booleans(),
    )
    def grow(self, wanted: dict[str, int], written: bool, undone: bool):
        goals = {key: max(self.lengths.get(key, 0), target) for key, target in wanted.items()}
        held = {key: max(self.held.get(key, 0), -(-goal // BLOCK)) for key, goal in goals.items()}
        before = self._books()
        if any(goal > CAPACITY for goal in goals.values()):
            with pytest.raises(RequestValidationError, match=f"its KV capacity is {CAPACITY}"):
                _grow(self.slots, goals)
        elif len(self.lengths | goals) > SLOTS or sum((self.held | held).values()) > BLOCKS:
            with pytest.raises(ResourceExhaustedError) as caught:
                _grow(self.slots, goals)
            assert caught.value.needed is not None
            assert caught.value.free is not None
            assert caught.value.needed > caught.value.free
        else:
            growth = _grow(self.slots, goals, written=written)
            growth.apply()
            if undone:
                growth.undo()
                assert self._books() == before
                return
            growth.commit()
            self.held |= held
            self.lengths |= {key: goals[key] if written else self.lengths.get(key, 0) for key in goals}
            return
        assert self._books() == before

    @rule(key=IDS, new_len=st.integers(0, CAPACITY))
    def truncate(self, key: str, new_len: int):
        self.slots.truncate(key, new_len)
        if new_len < self.lengths.get(key, 0):
            self.lengths[key] = new_len
            self.held[key] = -(-new_len // BLOCK)

    @rule(key=IDS)
    def release(self, key: str):
        self.slots.release(key)
        self.lengths.pop(key, None)
        self.held.pop(key, None)

    @invariant()
    def lengths_are_what_was_written(self):
        assert self.slots.cache_ids == list(self.lengths)
        for key in "abcde":
            assert self.slots.length(key) == self.lengths.get(key, 0)

    @invariant()
    def no_block_or_slot_is_lost_or_owned_twice(self):
        live = [found for key in self.lengths if (found := self.slots.get(key)) is not None]
        owned = [block for sequence in live for block in sequence.blocks]
        assert len(set(owned)) == len(owned) == sum(self.held.values())
        assert set(owned) <= set(range(BLOCKS))
        assert self.slots.pool.num_free == BLOCKS - len(owned)
        assert len({sequence.slot for sequence in live}) == len(live)

    @invariant()
    def table_rows_name_the_blocks_in_order(self):
        for key in self.lengths:
            live = self.slots.get(key)
            assert live is not None
            assert len(live.blocks) == self.held[key]
            assert self.slots.table[live.slot, : len(live.blocks)].tolist() == live.blocks

    def _books(self) -> tuple[object, ...]:
        live = [(key, self.slots.get(key)) for key in "abcde"]
        rows = [(key, one and (one.slot, one.length, list(one.blocks))) for key, one in live]
        return rows, self.slots.pool.num_free

    def teardown(self):
        for key in "abcde":
            self.slots.release(key)
        assert self.slots.pool.num_free == BLOCKS
        _grow(self.slots, dict.fromkeys("abc", BLOCK)).apply()


def test_any_sequence_of_calls_keeps_the_books():
    run_state_machine_as_test(Books, settings=settings(max_examples=100, stateful_step_count=30, deadline=None))


def test_the_table_has_a_column_for_the_last_cut_block():
    slots = SlotTable(max_seqs=SLOTS, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS)
    assert slots.table.shape == (SLOTS, 5)
    assert slots.table.dtype == np.int32


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
