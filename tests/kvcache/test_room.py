"""Where a sequence may write with no more bookkeeping: never into what another holds, or a prefix is entered for."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ferrum_jax.contract.errors import FerrumError
from ferrum_jax.kvcache.growth import Growth, Want
from ferrum_jax.kvcache.prefix import PrefixIndex
from ferrum_jax.kvcache.slots import SlotTable

CAPACITY, BLOCK = 23, 5
IDS = st.sampled_from("abcd")


class Sharing(RuleBasedStateMachine):
    """Grows with prefixes, reserves, forks, truncates and releases; tokens are few, so that prefixes are hit."""

    def __init__(self):
        super().__init__()
        self.slots = SlotTable(
            max_seqs=4, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=14, prefixes=PrefixIndex()
        )

    def _grow(self, key: str, tokens: list[int], target: int | None, *, undone: bool = False) -> None:
        want = Want(key, np.array(tokens, np.int32), max(0, len(tokens) - 1))
        try:
            growth = Growth(self.slots, [want], None if target is None else [target])
        except FerrumError:
            return
        growth.apply()
        growth.undo() if undone else growth.commit()

    @rule(key=IDS, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), undone=st.booleans())
    def write(self, key: str, tokens: list[int], undone: bool):
        self._grow(key, tokens, None, undone=undone)

    @rule(key=IDS, more=st.integers(0, 12))
    def reserve(self, key: str, more: int):
        self._grow(key, [], self.slots.length(key) + more)

    @rule(key=IDS, token=st.integers(0, 1))
    def append(self, key: str, token: int):
        live = self.slots.get(key)
        if live is not None and live.length < live.room:
            length = live.length
            self.slots.append([live], [token])
            assert live.length == length + 1
            assert len(live.entries) == live.length // BLOCK

    @rule(key=IDS, new_key=IDS)
    def fork(self, key: str, new_key: str):
        if self.slots.get(key) is not None and self.slots.get(new_key) is None:
            self.slots.fork(key, new_key)

    @rule(key=IDS, new_len=st.integers(0, CAPACITY))
    def truncate(self, key: str, new_len: int):
        self.slots.truncate(key, new_len)

    @rule(key=IDS)
    def release(self, key: str):
        self.slots.release(key)

    @invariant()
    def room_is_in_blocks_of_ones_own(self):
        for key in self.slots.cache_ids:
            live = self.slots.get(key)
            assert live is not None
            assert live.room <= min(CAPACITY, len(live.blocks) * BLOCK)
            for position in range(live.length, live.room):
                block = live.blocks[position // BLOCK]
                assert self.slots.table[live.slot, position // BLOCK] == block
                assert self.slots.pool.num_holders(block) == 1
                assert not self.slots.pool.is_kept(block)


def test_room_is_in_blocks_of_ones_own_whatever_happens():
    run_state_machine_as_test(Sharing, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))


def test_a_sequence_has_room_until_its_blocks_end_and_none_while_its_last_is_shared():
    slots = SlotTable(max_seqs=2, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=14)
    growth = Growth(slots, [Want("a", np.zeros(7, np.int32))])
    growth.apply()
    growth.commit()
    live = slots.get("a")
    assert live is not None
    assert live.room == 2 * BLOCK
    slots.fork("a", "b")
    assert live.room == 0
    slots.release("b")
    slots.truncate("a", 6)
    assert live.room == 2 * BLOCK
    slots.truncate("a", 5)
    assert live.room == 5, "the block that would be written next is not its own"
