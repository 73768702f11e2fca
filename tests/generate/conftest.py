"""Runners of one tiny model that share what they have compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import pytest

from ferrum_jax import EngineConfig, models
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CAPACITY, CFG, make_runner

ENGINE = EngineConfig(
    dtype="float32", max_seqs=16, kv_capacity=CAPACITY, block_size=8, kv_blocks=48, max_step_tokens=16,
    decode_rows=(1, 8), query_blocks=(4,), block_tokens=4, verify_blocks=(1,), verify_tokens=4,
)  # fmt: skip
MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="session")
def params() -> ParamTree:
    return models.specs.initialise(models.family(CFG).param_specs(CFG), jax.random.key(0), "float32", scale=0.4)


@pytest.fixture(scope="session")
def repeating_params() -> ParamTree:
    """Small weights: the answers repeat themselves, so that lookup finds something."""
    return models.specs.initialise(models.family(CFG).param_specs(CFG), jax.random.key(0), "float32", scale=0.2)


@pytest.fixture(scope="session")
def new_runner(params: ParamTree) -> MakeRunner:
    """Makes runners; those whose KV has one size compile a program once."""
    shared: dict[Any, tuple[dict[Any, Any], dict[Any, float]]] = {}

    def make(weights: ParamTree = params, *, strict: bool = False, **changes: Any) -> ModelRunner:
        runner = make_runner(weights, replace(ENGINE, **changes), strict=strict)
        plan = runner.plan
        sizes, programs = (plan.cache, plan.sampler, plan.pool_layers, plan.window), runner._programs
        programs._steps, programs._compile_seconds = shared.setdefault(sizes, ({}, {}))
        return runner

    return make


@pytest.fixture(scope="session")
def common_runner(new_runner: MakeRunner) -> Iterator[ModelRunner]:
    with new_runner(prefix_cache=True) as runner:
        yield runner


@pytest.fixture
def runner(common_runner: ModelRunner) -> ModelRunner:
    """A runner without sequences or known prefixes."""
    common_runner.reset()
    return common_runner


@contextmanager
def crowded(runner: ModelRunner, free: int) -> Iterator[None]:
    """Leaves so many blocks free meanwhile; the others have to come back."""
    ids: list[str] = []
    while (taken := runner.kv_slot_capacity_snapshot().free_blocks - free) > 0:
        ids.append(f"crowd-{len(ids)}")
        runner.prefill(ids[-1], [len(ids)] * min(CAPACITY, taken * runner.plan.cache.block_size))
    yield
    assert runner.kv_slot_capacity_snapshot().free_blocks == free
    for cache_id in ids:
        runner.release(cache_id)


def is_empty(runner: ModelRunner) -> bool:
    return runner.kv_slot_capacity_snapshot().free_blocks == runner.plan.cache.num_blocks
