"""Layers with a window keep no more than that, and nobody can tell by the logits."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import models
from ferrum_jax.compile.step import StepKey, StepOutputs
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract import ActiveLoraAdapter, DecodeRun
from ferrum_jax.contract.errors import ConfigError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.executor import ModelRunner, plan_engine
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.devices import find_device
from tests.executor import test_runner_laws as laws
from tests.executor.conftest import CAPACITY, CFG, WINDOWED, Oracle, make_runner, poison

CACHE_SIZE = 16  # positions: a window of 9 and chunks of 8 in blocks of 8


def text(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(CFG.vocab_size, size=count).tolist()


def agree(logits: np.ndarray, oracle: Oracle, tokens: Sequence[int]) -> None:
    rows = np.atleast_2d(logits)
    np.testing.assert_allclose(rows, oracle(tokens)[len(tokens) - len(rows) :], atol=laws.TOLERANCE, rtol=0)


def test_a_sliding_window_cache_takes_its_blocks_and_no_more(runner: ModelRunner):
    cache = runner.plan.cache
    assert (cache.num_layers, cache.window_layers, cache.window_blocks * cache.block_size) == (1, 1, CACHE_SIZE)
    assert cache.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(runner._device.kv))


@pytest.mark.parametrize("new_len", [0, 1, 8, 9, 10, 20, 35, 36, 42])
def test_a_sequence_goes_on_from_any_earlier_length(runner: ModelRunner, oracle: Oracle, new_len: int):
    tokens = text(CAPACITY)
    runner.prefill("a", tokens[:-1])
    runner.truncate_kv("a", new_len)
    other = [*tokens[:new_len], 5, 7]
    agree(runner.decode("a", 5, new_len), oracle, other[:-1])
    agree(runner.decode("a", 7, new_len + 1), oracle, other)


def test_what_is_still_in_the_cache_is_not_computed_again(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch):
    runner.prefill("a", text(40))
    steps = []
    step = runner._device.step

    def count(key, buffer):
        steps.append(key)
        return step(key, buffer)

    monkeypatch.setattr(runner._device, "step", count)
    runner.truncate_kv("a", 40 - (CACHE_SIZE - 8))  # the first position seen next is the oldest in the cache
    runner.prefill("a", [1, 2])
    assert len(steps) == 1
    runner.truncate_kv("a", 40 - (CACHE_SIZE - 8) - 1)
    runner.prefill("a", [1, 2])
    assert len(steps) == 1 + 4 + 1, "31 positions take four chunks of 8"


def test_steps_that_recompute_a_sequence_are_ready_before_the_call_begins(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
):
    runner.prefill("a", text(30))
    runner.truncate_kv("a", 20)
    ready, run = set(), []
    get, step = runner._programs.get, runner._device.step

    def record(key: StepKey, buffer: np.ndarray) -> StepOutputs:
        run.append((key, set(ready)))
        return step(key, buffer)

    monkeypatch.setattr(runner._programs, "get", lambda key: (ready.add(key), get(key))[1])
    monkeypatch.setattr(runner._device, "step", record)
    runner.decode("a", 1, 20)
    assert len(run) > 1
    assert {key for key, _ in run} <= run[0][1]


def test_forks_go_their_own_ways(runner: ModelRunner, oracle: Oracle):
    tokens = text(37)
    runner.prefill("a", tokens)
    runner.fork("a", "b")
    rows = runner.decode_batch([("a", 1, 37), ("b", 2, 37)])
    agree(rows[0], oracle, [*tokens, 1])
    agree(rows[1], oracle, [*tokens, 2])
    agree(runner.forward_verify("b", [3, 4, 5]), oracle, [*tokens, 2, 3, 4, 5])


@pytest.mark.slow
def test_multi_step_decoding_wraps_around_and_recomputes_what_was_evicted(runner: ModelRunner, oracle: Oracle):
    tokens = text(40, seed=3)
    runner.prefill("a", tokens)
    runner.truncate_kv("a", 20)
    sequence = [*tokens[:20], 6]
    (run,) = runner.decode_n([DecodeRun(cache_id="a", token=6, pos=20, max_tokens=18)])
    for token in run.token_ids:
        assert token == int(oracle(sequence)[-1].argmax())
        sequence.append(token)
    agree(runner.decode("a", sequence[-1], len(sequence) - 1), oracle, sequence)


@pytest.mark.slow
def test_what_is_computed_again_has_its_adapter(
    params: ParamTree, oracles: dict[str | None, Oracle], adapter_folders: dict[str, str]
):
    tokens = text(40, seed=5)
    with make_runner(params, replace(WINDOWED, max_loras=1, max_lora_rank=4)) as runner:
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=adapter_folders["one"]))
        runner.prefill("a", tokens)
        runner.truncate_kv("a", 15)
        agree(runner.decode("a", 4, 15), oracles["one"], [*tokens[:15], 4])


def test_keys_of_a_layer_with_a_sliding_window_cache_are_not_to_be_had(runner: ModelRunner):
    runner.prefill("a", text(20))
    assert runner.kv_cache("a", 1)[0].shape == (20, CFG.num_key_value_heads, CFG.head_dim)
    with pytest.raises(UnsupportedError, match="layer 0 keeps its window of 9 positions alone"):
        runner.kv_cache("a", 0)


def _plan(**given):
    cfg = replace(CFG, **given.pop("cfg", {}))
    return plan_engine(EngineConfig(**given), cfg, platform="cpu", free_bytes=given.pop("free", 10**9))


def test_a_sliding_window_cache_is_chosen_where_it_halves_what_the_layers_keep_at_least():
    sizes = {"block_size": 16, "max_step_tokens": 32}
    assert _plan(kv_capacity=512, **sizes).cache.window_blocks == 3
    assert _plan(kv_capacity=64, **sizes).cache.window_blocks == 0
    assert _plan(kv_capacity=64, window_kv=True, **sizes).cache.window_blocks == 3
    assert _plan(kv_capacity=512, window_kv=False, **sizes).cache.window_blocks == 0
    assert _plan(kv_capacity=512, prefix_cache=True, **sizes).cache.window_blocks == 0
    assert _plan(kv_capacity=512, layout="scanned", attention="xla", **sizes).cache.window_blocks == 0
    assert _plan(kv_capacity=512, cfg={"layer_windows": (None, None)}, **sizes).cache.window_blocks == 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"prefix_cache": True}, "prefix_cache shares"),
        ({"layout": "scanned", "attention": "xla"}, "share one KV"),
        ({"cfg": {"layer_windows": (None, None)}}, "no layer of this qwen3 has a window"),
    ],
)
def test_a_sliding_window_cache_that_cannot_be_is_refused(given: dict[str, object], reason: str):
    with pytest.raises(ConfigError, match=reason):
        _plan(window_kv=True, **given)


def test_sliding_window_caches_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(
        ResourceExhaustedError, match=r"sliding-window caches of 5 blocks for 8 sequences take 51,200 bytes"
    ):
        plan_engine(
            EngineConfig(window_kv=True, block_size=8, max_step_tokens=32), CFG, platform="cpu", free_bytes=50_000
        )


@pytest.mark.slow
def test_thousands_of_tokens_are_served_in_a_window_and_a_block():
    cfg = replace(CFG, model_type="mistral", qk_norm=False, attention_bias=False, layer_windows=(64, 64))
    cfg = replace(cfg, max_position_embeddings=4096)
    params = models.specs.initialise(models.family(cfg).param_specs(cfg), jax.random.key(1), "float32", scale=0.4)
    tokens = text(4000, seed=2)
    expected = np.asarray(jax.jit(lambda ids: models.forward(params, ids, cfg))(jnp.asarray([tokens])))[0]
    engine = EngineConfig(
        max_seqs=1, kv_capacity=4096, block_size=16, max_step_tokens=17, decode_rows=(1,), query_blocks=(1,),
        block_tokens=17, verify_tokens=17,
    )  # fmt: skip
    plan = plan_engine(engine, cfg, platform="cpu", free_bytes=10**8)
    assert plan.cache.num_bytes == cfg.num_hidden_layers * (64 + 16) * plan.cache.bytes_per_layer
    with ModelRunner(params, cfg, plan, device=find_device("cpu")) as runner:
        runner.warmup(progress=False)
        poison(runner)
        for start in range(0, 4000, 500):
            logits = runner.prefill("a", tokens[start : start + 500])
            np.testing.assert_allclose(logits, expected[start + 499], atol=1e-4, rtol=0)
        for length in (3999, 3990, 3500, 777, 64, 63, 1, 0):
            runner.truncate_kv("a", length)
            logits = runner.forward_verify("a", tokens[length : length + 40])
            np.testing.assert_allclose(logits, expected[length : length + 40], atol=1e-4, rtol=0)
        assert runner.compile_stats()["compiles_after_warmup"] == 0
