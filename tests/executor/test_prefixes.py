"""Prefix reuse: the same logits as without it, for the cost of what is not reused."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ferrum_jax.contract import ActiveLoraAdapter, KvSlotRequest
from ferrum_jax.contract.errors import ResourceExhaustedError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.executor import ModelRunner
from tests.executor.conftest import CFG, Oracle

PROMPT = [(5 * i + 3) % CFG.vocab_size for i in range(44)]
Oracles = dict[str | None, Oracle]


def tokens_computed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the tokens of every row that reaches the device."""
    seen: list[int] = []
    pack = runner._pipeline._pack_step

    def count(plan, rows):
        computed: Counter[int] = Counter()
        for piece in (*plan.decodes, *plan.blocks):
            computed[piece.row] += piece.size
        seen.extend(computed.values())
        return pack(plan, rows)

    monkeypatch.setattr(runner._pipeline, "_pack_step", count)
    return seen


def saved(runner: ModelRunner) -> tuple[int, int, int]:
    counts = runner.cache_metrics_snapshot()
    return counts["hits"], counts["misses"], counts["saved_prefill_tokens"]


@pytest.mark.parametrize("families", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_logits_of_families_that_share_prefixes_equal_those_without_reuse(
    families: int, reusing: ModelRunner, oracle: Oracle
):
    rng, before = random.Random(0), saved(reusing)[2]
    for family in range(families):
        base = [rng.randrange(CFG.vocab_size) for _ in range(rng.randint(9, 36))]
        for member in range(3):
            cut = rng.randint(8, len(base))
            tokens = base[:cut] + [rng.randrange(CFG.vocab_size) for _ in range(rng.randint(1, 44 - cut))]
            key, logits = f"{family}-{member}", None
            if rng.random() < 0.5:
                logits = reusing.prefill(key, tokens)
            else:  # in chunks, through the unified forward
                for start in range(0, len(tokens), 7):
                    chunk = tokens[start : start + 7]
                    logits = reusing.unified_forward([(key, chunk, start, start + 7 >= len(tokens))])[0]
            assert logits is not None
            np.testing.assert_allclose(logits, oracle(tokens)[-1], atol=1e-4, rtol=0)
            reusing.release(key)
    assert saved(reusing)[2] - before > 5 * families


def test_a_hit_computes_only_what_is_not_reused(reusing: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    reusing.prefill("a", PROMPT[:40])
    reusing.release("a")
    computed, before = tokens_computed(reusing, monkeypatch), saved(reusing)
    reusing.prefill("b", PROMPT[:40])
    assert computed == [8]  # the last token must be computed, and with it its block
    reusing.prefill("c", PROMPT[:41])
    assert computed == [8, 1]
    after = saved(reusing)
    assert [one - other for one, other in zip(after, before, strict=True)] == [2, 0, 32 + 40]


def test_known_prefixes_are_forgotten_while_sequences_go_on(
    reusing: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    version = reusing.params_version
    reusing.prefill("a", PROMPT[:40])
    reusing.release("a")
    reusing.prefill("live", PROMPT[:24])
    reusing.reset_prefix_cache()
    computed = tokens_computed(reusing, monkeypatch)
    np.testing.assert_allclose(reusing.decode("live", PROMPT[24], 24), oracle(PROMPT[:25])[-1], atol=1e-4, rtol=0)
    np.testing.assert_allclose(reusing.prefill("b", PROMPT[:40]), oracle(PROMPT[:40])[-1], atol=1e-4, rtol=0)
    assert sum(computed) == 1 + 40
    reusing.prefill("c", PROMPT[:40])
    assert sum(computed) == 1 + 40 + 8  # what came since is known again
    assert reusing.params_version == version


def test_chunks_of_whole_blocks_are_reused_without_a_step(reusing: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    reusing.prefill("a", PROMPT[:33])
    computed = tokens_computed(reusing, monkeypatch)
    for start in range(0, 32, 8):
        rows = reusing.unified_forward([("b", PROMPT[start : start + 8], start, False)])
        assert rows == [None]
    assert computed == []
    assert reusing.kv_len("b") == 32
    np.testing.assert_array_equal(reusing.kv_cache("b", 0)[0], reusing.kv_cache("a", 0)[0][:32])


def test_generated_text_is_reused(reusing: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    for position, token in enumerate(PROMPT[:20]):
        reusing.decode("a", token, position)
    reusing.release("a")
    computed = tokens_computed(reusing, monkeypatch)
    reusing.prefill("b", PROMPT[:20])
    assert computed == [4]


def test_sequences_share_blocks_while_they_live(reusing: ModelRunner):
    reusing.prefill("a", PROMPT[:40])
    reusing.prefill("b", PROMPT[:40])
    first, second = reusing.kv_block_table("a"), reusing.kv_block_table("b")
    assert first is not None
    assert second is not None
    assert first.physical_blocks == second.physical_blocks  # the last was computed twice, and kept once
    assert reusing.kv_slot_capacity_snapshot().free_blocks == 18 - 5


def test_pressure_evicts_what_was_used_longest_ago_and_refuses_nothing(reusing: ModelRunner):
    def reused(key: str) -> int:
        before = saved(reusing)[2]
        reusing.prefill(key, [ord(key) % 37, *PROMPT[:39]])
        reusing.release(key)
        return saved(reusing)[2] - before

    assert [reused(key) for key in "abca"] == [0, 0, 0, 32]
    counts = reusing.cache_metrics_snapshot()
    assert counts["entries"] == 15
    reusing.prefill("d", [1] * 44)  # six blocks; three are blank
    assert reusing.cache_metrics_snapshot()["evictions"] == counts["evictions"] + 3
    assert reused("a") == 32
    assert reused("b") < 32
    reusing.release("d")
    assert reusing.kv_slot_capacity_snapshot().free_blocks == 18


def test_what_cannot_be_evicted_is_refused_with_the_numbers(reusing: ModelRunner):
    for key in "abc":
        reusing.prefill(key, [ord(key) % 37, *PROMPT[:39]])
    with pytest.raises(ResourceExhaustedError) as caught:
        reusing.prefill("d", [1] * 40)
    assert (caught.value.needed, caught.value.free) == (5, 3)
    reusing.prefill("d", [ord("a") % 37, *PROMPT[:43]])  # of six blocks five are there


def test_a_reservation_and_a_hit_do_not_count_twice(reusing: ModelRunner):
    reusing.prefill("a", PROMPT[:40])
    reusing.reserve_kv_slots([KvSlotRequest(cache_id="b", target_len=40)])
    assert reusing.kv_slot_capacity_snapshot().free_blocks == 18 - 10
    reusing.prefill("b", PROMPT[:40])
    assert reusing.kv_slot_capacity_snapshot().free_blocks == 18 - 5


def test_what_fits_the_pool_exactly_fits_with_a_known_prefix_that_goes_on_in_its_block(
    reusing: ModelRunner, oracle: Oracle
):
    """The block that it has begun is freed for the known one only when the step is begun."""
    size, pool = reusing.plan.cache.block_size, reusing._pipeline.table.pool
    reusing.prefill("known", PROMPT[: 2 * size])
    reusing.release("known")
    reusing.prefill("a", PROMPT[: size + 2])
    rest = PROMPT[size + 2 :]
    needed = -(-len(PROMPT) // size) - 2
    others = [KvSlotRequest(cache_id=f"held {at}", target_len=size) for at in range(3)]
    while pool.num_free > needed:
        most = min(pool.num_free - needed, reusing.kv_capacity() // size)
        reusing.reserve_kv_slots([replace(others.pop(), target_len=most * size)])
    np.testing.assert_allclose(reusing.prefill("a", rest), oracle(PROMPT)[-1], atol=1e-4, rtol=0)
    assert pool.num_free == 0


def test_adapters_never_share_a_block(
    reusing: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    computed = tokens_computed(reusing, monkeypatch)
    held: dict[str | None, set[int]] = {}
    for name in (None, "one", "two"):
        key = str(name)
        if name is not None:
            reusing.set_lora_adapter_for_cache(key, ActiveLoraAdapter(name=name, path=adapter_folders[name]))
        logits = reusing.prefill(key, PROMPT[:20])
        np.testing.assert_allclose(logits, oracles[name](PROMPT[:20])[-1], atol=1e-4, rtol=0)
        table = reusing.kv_block_table(key)
        assert table is not None
        held[name] = set(table.physical_blocks)
    assert computed == [20, 20, 20]
    assert sum(map(len, held.values())) == len(set.union(*held.values()))
    for name in (None, "one", "two"):
        reusing.release(str(name))
    reusing.set_lora_adapter_for_cache("again", ActiveLoraAdapter(name="two", path=adapter_folders["two"]))
    logits = reusing.prefill("again", PROMPT[:20])
    assert computed == [20, 20, 20, 4]
    np.testing.assert_allclose(logits, oracles["two"](PROMPT[:20])[-1], atol=1e-4, rtol=0)


def test_what_is_reserved_for_an_adapter_and_decoded_without_it_is_no_prefix_of_its(
    reusing: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]
):
    adapter = ActiveLoraAdapter(name="one", path=adapter_folders["one"])
    reusing.set_lora_adapter_for_cache("a", adapter)
    reusing.reserve_kv_slots([KvSlotRequest(cache_id="a", target_len=20)])
    reusing.set_lora_adapter_for_cache("a", None)
    for at, token in enumerate(PROMPT[:17]):
        reusing.decode("a", token, at)
    reusing.release("a")
    reusing.set_lora_adapter_for_cache("b", adapter)
    np.testing.assert_allclose(reusing.prefill("b", PROMPT[:20]), oracles["one"](PROMPT[:20])[-1], atol=1e-4, rtol=0)
    reusing.release("b")


def test_an_adapter_that_is_loaded_anew_finds_no_prefix_of_the_old_one(
    reusing: ModelRunner, adapter_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    adapter = ActiveLoraAdapter(name="one", path=adapter_folders["one"])
    reusing.set_lora_adapter_for_cache("a", adapter)
    reusing.prefill("a", PROMPT[:20])
    reusing.release("a")
    entries = reusing.cache_metrics_snapshot()["entries"]
    reusing.unload_lora("one")
    assert reusing.cache_metrics_snapshot()["entries"] == entries - 2
    computed = tokens_computed(reusing, monkeypatch)
    reusing.set_lora_adapter_for_cache("b", adapter)
    reusing.prefill("b", PROMPT[:20])
    assert computed == [20]


def test_what_writes_nothing_forgets_nothing(reusing: ModelRunner, oracle: Oracle):
    reusing.prefill("a", PROMPT[:16])
    reusing.fork("a", "b")
    reusing.truncate_kv("b", 12)
    reusing.prefill("a", PROMPT[16:24])
    entries = reusing.cache_metrics_snapshot()["entries"]
    reusing.prepare("b", 1)
    reusing.reserve_kv_slots([KvSlotRequest(cache_id="b", target_len=12)])
    assert reusing.cache_metrics_snapshot()["entries"] == entries
    reusing.truncate_kv("a", 16)
    reusing.prefill("x", [9] * 20)
    logits = reusing.prefill("a", PROMPT[16:26])
    np.testing.assert_allclose(logits, oracle(PROMPT[:26])[-1], atol=1e-4, rtol=0)
    logits = reusing.prefill("b", [1, 2])
    np.testing.assert_allclose(logits, oracle([*PROMPT[:12], 1, 2])[-1], atol=1e-4, rtol=0)


def test_an_interrupt_while_blocks_are_entered_is_an_error_state(reusing: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reusing._pipeline.table, "enter", stop)
    with pytest.raises(KeyboardInterrupt):
        reusing.prefill("a", PROMPT[:9])
    assert reusing.state is ExecutorState.Error
    monkeypatch.undo()
    reusing.reset()
    assert reusing.kv_len("a") is None
    assert reusing.kv_slot_capacity_snapshot().free_blocks == 18
