"""Laws 5 and 7: after warm-up nothing compiles, and the KV is written in place."""

import random

import jax
import jax.numpy as jnp
import pytest

from ferrum_jax.compile import sampler
from ferrum_jax.compile.sampler import SamplerSpec
from ferrum_jax.compile.step import ProgramContext, StepKey
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract import (
    FullLogits,
    GreedyArgmax,
    GreedyRepetitionPenalty,
    KvSlotRequest,
    LogitsReturnPolicy,
    TokenSelectionMask,
)
from ferrum_jax.contract.errors import BackendError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models import specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CAPACITY, CFG, late_compiles, make_runner
from tests.shipped import SMOLLM2


def test_a_compilation_is_counted(compiles: list[str]):
    jax.jit(lambda x: x * 3 + 1).lower(jnp.zeros(7)).compile()
    assert compiles


def test_500_random_legal_calls_after_warmup_compile_nothing(reusing: ModelRunner, compiles: list[str]):
    rng, before = random.Random(7), reusing.compile_stats()
    assert {str(key) for key in reusing.plan.declared()} <= before["steps"].keys()
    compiles.clear()
    for _ in range(500):
        _one_legal_call(reusing, rng)
    assert compiles == []
    assert reusing.compile_stats() == before


def _policy(rng: random.Random) -> LogitsReturnPolicy:
    if rng.random() < 0.4:
        return FullLogits()
    mask = [0, *(rng.randrange(2) for _ in range(20)), 1]
    return GreedyArgmax(
        token_mask=rng.choice([None, TokenSelectionMask(fingerprint=0, valid_token_mask=mask)]),
        repetition_penalty=rng.choice([None, GreedyRepetitionPenalty(penalty=1.3, token_ids=[1, 5])]),
    )


def _one_legal_call(runner: ModelRunner, rng: random.Random) -> None:
    ids = list("abcd")  # as many as there are slots
    key = rng.choice(ids)
    length = runner.kv_len(key) or 0
    free = runner.kv_slot_capacity_snapshot().free_blocks
    room = min(CAPACITY - length, free * 8)
    if room < 1:
        runner.release(key)
        return
    tokens = [rng.randrange(CFG.vocab_size) for _ in range(rng.randint(1, room))]
    match rng.randrange(17):
        case 0 | 1:
            runner.prefill(key, tokens)
        case 2:
            runner.forward_verify(key, tokens)
        case 3:
            runner.decode(key, tokens[0], length)
        case 4 | 5 | 6:
            chosen = [i for i in ids if (runner.kv_len(i) or 0) < CAPACITY][: min(rng.randint(1, 4), free)]
            batch = [(i, rng.randrange(CFG.vocab_size), runner.kv_len(i) or 0) for i in chosen]
            runner.decode_batch_with_logits_policy(batch, [_policy(rng) for _ in batch])
            runner.decode_batch_with_full_logits([], True)
        case 7 | 8 | 9:
            items, left = [], free * 8
            for i in rng.sample(ids, rng.randint(1, 4)):
                at = runner.kv_len(i) or 0
                count = min(rng.choice([1, 1, 5, 30]), CAPACITY - at, left - 8)
                if count > 0:
                    items.append((i, [rng.randrange(CFG.vocab_size)] * count, at, rng.random() < 0.5))
                    left -= count + 8
            runner.unified_forward_with_logits_policy(items, [_policy(rng) for _ in items])
        case 10:
            runner.truncate_kv(key, rng.randint(0, length))
        case 11:
            runner.prepare(key, rng.randint(1, CAPACITY - length))
            runner.prepare_kv_capacity(key, CAPACITY)
        case 12:
            runner.score_batch([(key, tokens, tokens)])
        case 13:
            runner.reserve_kv_slots([KvSlotRequest(cache_id=key, target_len=rng.randint(0, length + room))])
        case 14:
            unknown = [i for i in ids if runner.kv_len(i) is None]
            if unknown and runner.kv_len(key) is not None:
                runner.fork(key, unknown[0])
                runner.kv_cache(key, rng.randrange(2))
        case _:
            runner.release(key) if rng.random() < 0.8 else runner.reset()


def test_a_step_that_warmup_did_not_declare_is_refused_in_strict_mode(params: ParamTree):
    with make_runner(params, strict=True) as runner:
        runner._programs.warmup([runner.plan.buckets.decode(1)])
        with pytest.raises(BackendError, match="strict mode"):
            runner.prefill("a", [1, 2])
        assert runner.kv_len("a") is None
        assert runner.decode("a", 1, 0).shape == (CFG.vocab_size,)
        assert late_compiles(runner) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "num_blocks"), [(8, 18), (64, 1), (64, 4), (1, 44), (16, 300)])
def test_the_kv_is_written_in_place_in_every_layout(params: ParamTree, block_size: int, num_blocks: int):
    engine = EngineConfig(
        dtype="float32", max_seqs=1, kv_capacity=CAPACITY, block_size=block_size, kv_blocks=num_blocks
    )
    with make_runner(params, engine) as runner:
        runner.decode("a", 1, 0)
        runner.prefill("a", [1] * 20)
        stats = runner.compile_stats()["steps"]
        for name, step in stats.items():
            if not name.startswith("step"):
                continue
            assert step["alias_bytes"] >= runner.plan.cache.num_bytes, name
            if num_blocks == 300:
                assert step["temporary_bytes"] < runner.plan.cache.num_bytes / 4, name


@pytest.mark.slow
def test_temporaries_of_smollm2s_decode_step_stay_small():
    rows, length, block = 8, 1024, 128
    spec = CacheSpec(
        num_layers=30, num_blocks=rows * length // block, block_size=block, num_kv_heads=3, head_dim=64, dtype="float32"
    )
    shapes = specs.shapes(family(SMOLLM2).param_specs(SMOLLM2), "float32")
    slots = sampler.shapes(SamplerSpec(num_slots=rows, vocab_size=SMOLLM2.vocab_size, capacity=length))
    context = ProgramContext(SMOLLM2, shapes, state.shapes(spec), slots)
    memory = StepKey(rows, 0, 0, length // block, rows).lower(context).compile().memory_analysis()
    assert memory is not None
    two_layers = 2 * spec.num_bytes // spec.num_layers
    logits, activations = rows * SMOLLM2.vocab_size * 4, rows * (1536 * 3 + 576 * 4) * 4
    assert memory.alias_size_in_bytes >= spec.num_bytes
    assert memory.temp_size_in_bytes < two_layers + logits + activations
