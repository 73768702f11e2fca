"""Handles: what they tell, and that a fork is a sequence of its own."""

import numpy as np
import pytest

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import KvCacheHandle
from ferrum_jax.contract.errors import RequestValidationError, ResourceExhaustedError
from ferrum_jax.executor import ModelRunner
from tests.executor.asking import batch, item, prompt, run, token
from tests.executor.conftest import Oracle
from tests.fake import SummingLLM

PROMPT = list(range(1, 12))  # one full block and a part of one


@pytest.fixture
def executor(runner: ModelRunner) -> LlmExecutor:
    return LlmExecutor(runner)


@pytest.fixture
def handle(executor: LlmExecutor) -> KvCacheHandle:
    return run(executor.prefill(prompt(PROMPT))).kv_cache


def test_a_handle_knows_where_its_positions_lie(handle: KvCacheHandle, runner: ModelRunner):
    told = runner.kv_block_table(handle.cache_id)
    assert handle.block_table == told
    assert (handle.num_tokens, handle.num_layers, handle.num_heads, handle.head_dim) == (11, 2, 2, 10)
    assert str(handle.device) == "cpu"
    per_position = 2 * 2 * 2 * 10 * 4  # keys and values, layers, heads, width, bytes
    assert handle.stats() == {
        "cache_id": "llm-cache-0", "num_tokens": 11, "num_blocks": 2, "block_size": 8, "bytes": 16 * per_position,
    }  # fmt: skip
    assert repr(handle) == "LlmKvCacheHandle('llm-cache-0', num_tokens=11)"


def test_an_older_handle_shows_its_part_of_the_blocks(handle: KvCacheHandle):
    part = handle.with_sequence_length(8)
    assert part.block_table.physical_blocks == handle.block_table.physical_blocks[:1]
    assert part.block_table.sequence_length == 8
    assert handle.num_tokens == 11
    assert handle == part.with_sequence_length(11)


def test_keys_and_values_are_copies_of_the_handles_positions(
    executor: LlmExecutor, handle: KvCacheHandle, runner: ModelRunner
):
    for layer in (0, 1):
        keys, values = runner.kv_cache(handle.cache_id, layer)
        np.testing.assert_array_equal(handle.key_cache(layer), keys)
        np.testing.assert_array_equal(handle.value_cache(layer), values)
    kept = handle.key_cache(1).copy()
    assert kept.shape == (11, 2, 10)
    later = run(executor.decode(token(5, handle))).kv_cache
    np.testing.assert_allclose(later.key_cache(1)[:11], kept, atol=1e-6)


def test_a_fork_shares_blocks_until_either_writes(
    executor: LlmExecutor, handle: KvCacheHandle, runner: ModelRunner, oracle: Oracle
):
    free = runner.kv_slot_capacity_snapshot().free_blocks
    fork = handle.clone_handle()
    assert (fork.cache_id, fork.num_tokens) == ("llm-cache-1", 11)
    assert fork.block_table.physical_blocks == handle.block_table.physical_blocks
    assert runner.kv_slot_capacity_snapshot().free_blocks == free
    ours = run(executor.decode(token(5, handle)))
    theirs = run(executor.decode(token(6, fork)))
    np.testing.assert_allclose(ours.logits[0], oracle([*PROMPT, 5])[-1], atol=1e-4)
    np.testing.assert_allclose(theirs.logits[0], oracle([*PROMPT, 6])[-1], atol=1e-4)
    assert ours.kv_cache.block_table.physical_blocks[0] == theirs.kv_cache.block_table.physical_blocks[0]
    assert ours.kv_cache.block_table.physical_blocks[1] != theirs.kv_cache.block_table.physical_blocks[1]
    executor.release_cache(handle.cache_id)
    on = run(executor.decode(token(7, theirs.kv_cache)))
    np.testing.assert_allclose(on.logits[0], oracle([*PROMPT, 6, 7])[-1], atol=1e-4)


def test_a_fork_that_the_model_has_dropped_is_stale(executor: LlmExecutor, handle: KvCacheHandle, runner: ModelRunner):
    fork = handle.clone_handle()
    runner.release(fork.cache_id)
    assert not fork.is_valid()
    fork = handle.clone_handle()
    runner.release(fork.cache_id)
    with pytest.raises(RequestValidationError, match="its handles are stale"):
        run(executor.prefill(prompt([1, 2], fork)))


def test_a_handle_is_not_that_of_another_sequence_under_its_id(executor: LlmExecutor, runner: ModelRunner):
    def begin(tokens: list[int]) -> KvCacheHandle:
        run(executor.unified_decode(batch(item("w", tokens, 0))))
        return executor.handle("w")

    old = begin([1, 2])
    assert old == executor.handle("w")
    executor.release_cache("w")
    new = begin([3, 4])
    assert new.is_valid()
    assert not old.is_valid()
    assert old != new
    for call in (executor.decode(token(5, old)), executor.truncate_kv(old, 1)):
        with pytest.raises(RequestValidationError, match="'w': the sequence was released, its handles are stale"):
            run(call)
    for use in (old.clone_handle, lambda: old.key_cache(0), lambda: old.block_table):
        with pytest.raises(RequestValidationError, match="its handles are stale"):
            use()
    assert runner.kv_len("w") == 2
    run(executor.reset())
    assert begin([5, 6]).is_valid()
    assert not new.is_valid()


def test_a_fork_needs_a_slot(executor: LlmExecutor, handle: KvCacheHandle):
    forks = [handle.clone_handle() for _ in range(3)]
    with pytest.raises(ResourceExhaustedError) as caught:
        handle.clone_handle()
    assert (caught.value.needed, caught.value.free) == (1, 0)
    assert all(fork.is_valid() for fork in forks)


def test_a_fork_keeps_its_adapter():
    model = SummingLLM()
    executor = LlmExecutor(model)
    asked = {"ferrum_lora_adapter": "x", "ferrum_lora_path": "y"}
    fork = run(executor.prefill(prompt([1, 2], metadata=asked))).kv_cache.clone_handle()
    assert run(executor.decode(token(3, fork, metadata=asked))).kv_cache.num_tokens == 3
