"""Where a sequence may write without new blocks: never into what another holds, or a prefix is entered for."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ferrum_jax.contract.errors import FerrumError, ResourceExhaustedError
from ferrum_jax.kvcache.prefix import PrefixIndex
from ferrum_jax.kvcache.sequences import UNKNOWN, SequenceTable
from ferrum_jax.kvcache.transaction import KvTransaction

CAPACITY, BLOCK, BLOCKS = 23, 5, 14
IDS = st.sampled_from("abcd")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Sharing(RuleBasedStateMachine):
    """Writes with prefixes, reserves, forks, truncates and releases; tokens are few, so that prefixes are hit.

    `tokens` are what each sequence must hold, `held` what was written last to each position of each block.
    """

    def __init__(self):
        super().__init__()
        self.table = SequenceTable(
            max_seqs=4, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS, prefixes=PrefixIndex()
        )
        self.tokens: dict[str, list[int]] = {}
        self.held = np.full((BLOCKS, BLOCK), -2)

    @rule(rows=st.dictionaries(IDS, TOKENS, min_size=1, max_size=3))
    def write(self, rows: dict[str, list[int]]):
        arrays = [np.array(tokens, np.int32) for tokens in rows.values()]
        before = self._state()
        try:
            transaction = KvTransaction(self.table, list(rows), arrays, [len(tokens) - 1 for tokens in arrays])
        except FerrumError:
            assert self._state() == before
            return
        assert self._state() == before
        reused = transaction.reused()
        assert all(0 <= count < len(tokens) for count, tokens in zip(reused, rows.values(), strict=True))
        for source, destination in transaction.apply():
            self.held[destination] = self.held[source]
        for at, (key, tokens) in enumerate(rows.items()):
            live = transaction.lives[at]
            for offset in range(reused[at], len(tokens)):
                block, inside = divmod(live.length + offset, BLOCK)
                self.held[live.blocks[block], inside] = tokens[offset]
            self.tokens[key] = self.tokens.get(key, []) + tokens
        transaction.commit()

    @rule(key=IDS, more=st.integers(0, 12))
    def reserve(self, key: str, more: int):
        target = self.table.length(key) + more
        try:
            transaction = KvTransaction(self.table, [key], [np.zeros(0, np.int32)], targets=[target])
        except FerrumError:
            return
        for source, destination in transaction.apply():
            self.held[destination] = self.held[source]
        transaction.commit()
        self.tokens.setdefault(key, [])

    @rule(key=IDS, token=st.integers(0, 1))
    def append(self, key: str, token: int):
        live = self.table.live.get(key)
        if live is not None and live.length < live.writable:
            block, inside = divmod(live.length, BLOCK)
            self.held[live.blocks[block], inside] = token
            self.table.append([live], [[token]])
            self.tokens[key].append(token)
            assert len(live.entries) == live.length // BLOCK

    @rule(key=IDS, new_key=IDS)
    def fork(self, key: str, new_key: str):
        if self.table.live.get(key) is not None and self.table.live.get(new_key) is None:
            self.table.fork(key, new_key)
            self.tokens[new_key] = self.tokens[key][:]

    @rule(key=IDS, new_len=st.integers(0, CAPACITY))
    def truncate(self, key: str, new_len: int):
        self.table.truncate(key, new_len)
        if key in self.tokens:
            del self.tokens[key][new_len:]

    @rule(key=IDS)
    def release(self, key: str):
        self.table.release(key)
        self.tokens.pop(key, None)

    @invariant()
    def a_sequence_may_write_in_blocks_of_its_own_alone(self):
        for key in self.table.live:
            live = self.table.live.get(key)
            assert live is not None
            assert live.writable <= min(CAPACITY, len(live.blocks) * BLOCK)
            for position in range(live.length, live.writable):
                block = live.blocks[position // BLOCK]
                assert self.table.table[live.slot, position // BLOCK] == block
                assert self.table.pool.num_holders(block) == 1
                assert not self.table.pool.is_kept(block)

    @invariant()
    def blocks_hold_the_tokens_of_all_who_share_them(self):
        for key, tokens in self.tokens.items():
            live = self.table.live.get(key)
            assert live is not None
            assert list(live.tokens) == tokens
            assert self.held[live.blocks].ravel()[: len(tokens)].tolist() == tokens

    def _state(self) -> tuple[object, ...]:
        live = [(key, self.table.live.get(key)) for key in "abcd"]
        rows = [(key, one and (one.slot, list(one.tokens), list(one.blocks), one.writable)) for key, one in live]
        pool = self.table.pool
        return rows, pool.num_free, [pool.num_holders(block) for block in range(BLOCKS)], self.table.table.tolist()


def test_shared_blocks_are_never_written_whatever_happens():
    run_state_machine_as_test(Sharing, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))


def _write(table: SequenceTable, key: str, tokens: list[int], reusable: int = 0) -> KvTransaction:
    transaction = KvTransaction(table, [key], [np.array(tokens, np.int32)], [reusable])
    transaction.apply()
    transaction.commit()
    return transaction


def test_a_sequence_may_write_until_its_blocks_end_and_not_at_all_while_its_last_is_shared():
    table = SequenceTable(max_seqs=2, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS)
    live = _write(table, "a", [0] * 7).lives[0]
    assert live.writable == 2 * BLOCK
    table.fork("a", "b")
    assert live.writable == 0
    table.release("b")
    table.truncate("a", 6)
    assert live.writable == 2 * BLOCK
    table.truncate("a", 5)
    assert live.writable == 5, "the block that would be written next is not its own"


def test_the_last_block_is_copied_for_all_who_share_it_but_one():
    table = SequenceTable(max_seqs=3, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS)
    shared = _write(table, "a", [0] * 7).lives[0].blocks[1]
    table.fork("a", "b")
    table.fork("a", "c")
    transaction = KvTransaction(table, ["a", "b", "c"], [np.array([at], np.int32) for at in range(3)])
    assert (transaction.num_new_blocks, transaction.copied_ids) == (2, ["a", "b"])
    copies = transaction.apply()
    transaction.commit()
    assert [source for source, _ in copies] == [shared, shared]
    assert len({transaction.lives[at].blocks[1] for at in range(3)}) == 3
    assert table.pool.num_free == BLOCKS - 4


def test_all_rows_of_a_transaction_get_their_blocks_or_none_does():
    table = SequenceTable(max_seqs=3, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=5)
    _write(table, "a", [0] * 4)
    with pytest.raises(ResourceExhaustedError, match="need 5 KV blocks for 2 sequences, 4 of 5 are free"):
        KvTransaction(table, ["a", "b"], [np.zeros(6, np.int32), np.zeros(16, np.int32)])
    assert ([*table.live], table.pool.num_free) == (["a"], 4)


def test_a_prefix_is_reused_up_to_the_last_token_that_may_be():
    table = SequenceTable(max_seqs=3, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS, prefixes=PrefixIndex())
    tokens = list(range(12))
    _write(table, "a", tokens)
    for reusable, expected in ((4, 0), (5, 5), (9, 5), (12, 10)):
        assert KvTransaction(table, ["b"], [np.array(tokens, np.int32)], [reusable]).reused() == [expected]
    assert KvTransaction(table, ["b"], [np.array(tokens, np.int32)], [12], ["another"]).reused() == [0]


def test_a_block_whose_tokens_the_host_does_not_know_is_no_prefix_and_ends_no_hit():
    table = SequenceTable(max_seqs=3, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=BLOCKS, prefixes=PrefixIndex())
    _write(table, "a", list(range(10)))
    live = _write(table, "b", [*range(4), UNKNOWN]).lives[0]
    tokens = np.arange(5, 10, dtype=np.int32)
    assert KvTransaction(table, ["b"], [tokens], [5]).reused() == [0]
    table.resolve(live, 4, 4)
    assert KvTransaction(table, ["b"], [tokens], [5]).reused() == [5]


def test_blocks_of_a_prefix_in_use_are_not_handed_out_to_another_row_of_the_same_call():
    table = SequenceTable(max_seqs=3, kv_capacity=CAPACITY, block_size=BLOCK, num_blocks=3, prefixes=PrefixIndex())
    _write(table, "a", list(range(10)))
    table.release("a")  # its two blocks rest, and may be evicted
    assert table.pool.num_free == 3
    tokens = np.arange(11, dtype=np.int32)
    with pytest.raises(ResourceExhaustedError):
        KvTransaction(table, ["b", "c"], [tokens, np.ones(1, np.int32)], [10, 0])
    transaction = KvTransaction(table, ["b"], [tokens], [10])
    assert transaction.reused() == [10]
