"""The step cache with toy computations, and that real steps write the KV in place."""

import logging
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from ferrum_jax.compile.buckets import StepKey
from ferrum_jax.compile.steps import StepCache, lower_step
from ferrum_jax.contract.errors import BackendError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models import family, specs
from tests.executor.conftest import CFG

SMALL, LARGE, OTHER = StepKey(1, 0, 0, 2), StepKey(4, 0, 0, 2), StepKey(2, 0, 0, 2)


class Lowering:
    """Lowers a toy for each key and remembers which were asked for."""

    def __init__(self):
        self.asked: list[StepKey] = []
        self.broken: set[StepKey] = set()

    def __call__(self, key: StepKey) -> jax.stages.Lowered:
        self.asked.append(key)
        if key in self.broken:
            raise ValueError(f"no {key}")
        return jax.jit(lambda x: x + key.decode_rows).lower(jnp.zeros(key.decode_rows))


@pytest.fixture
def lowering() -> Lowering:
    return Lowering()


def test_a_step_is_compiled_once_and_then_found(lowering: Lowering):
    cache = StepCache(lowering)
    executable = cache.get(SMALL)
    assert executable(jnp.zeros(1)).tolist() == [1.0]
    assert cache.get(SMALL) is executable
    assert lowering.asked == [SMALL]
    stats = cache.stats()
    assert (stats["compiled"], stats["loaded"], stats["compiles_after_warmup"]) == (1, 0, 0)
    assert list(stats["steps"]) == [str(SMALL)]
    assert stats["compile_seconds"] == stats["steps"][str(SMALL)]["seconds"] > 0


def test_warmup_compiles_what_is_missing_and_shows_it(lowering: Lowering):
    cache = StepCache(lowering)
    cache.get(SMALL)
    shown: list[list[StepKey]] = []

    def track(keys: list[StepKey]) -> Iterator[StepKey]:
        shown.append(keys)
        yield from keys

    cache.warmup([LARGE, SMALL, OTHER], track)
    assert shown == [[LARGE, OTHER]]
    assert sorted(lowering.asked) == sorted([SMALL, LARGE, OTHER])
    assert cache.stats()["compiled"] == 3
    assert cache.stats()["compiles_after_warmup"] == 0
    cache.warmup([LARGE])
    assert len(lowering.asked) == 3


def test_a_late_step_is_compiled_counted_and_logged(lowering: Lowering, caplog: pytest.LogCaptureFixture):
    cache = StepCache(lowering)
    cache.warmup([SMALL])
    with caplog.at_level(logging.WARNING):
        cache.get(SMALL)
        assert caplog.messages == []
        cache.get(LARGE)
        cache.get(LARGE)
    assert caplog.messages == [f"compiling step {LARGE} after warmup: declare it in the ladders"]
    assert cache.stats()["compiles_after_warmup"] == 1
    assert cache.stats()["compiled"] == 2


def test_strict_mode_refuses_what_warmup_did_not_compile(lowering: Lowering):
    cache = StepCache(lowering, strict=True)
    cache.get(OTHER)  # before warmup everything is compiled
    cache.warmup([SMALL])
    with pytest.raises(BackendError, match=f"{LARGE} was not compiled by warmup"):
        cache.get(LARGE)
    assert cache.get(SMALL) is not None
    assert LARGE not in lowering.asked
    assert cache.stats()["compiles_after_warmup"] == 0


def test_a_failing_lowering_propagates_and_leaves_nothing(lowering: Lowering):
    cache = StepCache(lowering)
    lowering.broken = {LARGE}
    with pytest.raises(ValueError, match=f"no {LARGE}"):
        cache.get(LARGE)
    assert cache.stats()["compiled"] == 0
    with pytest.raises(ValueError, match=f"no {LARGE}"):
        cache.warmup([SMALL, LARGE])
    cache.get(OTHER)  # that warmup did not end, so this is not late
    assert cache.stats()["compiles_after_warmup"] == 0
    cache.warmup([SMALL])
    with pytest.raises(ValueError, match=f"no {LARGE}"):
        cache.get(LARGE)
    assert cache.stats()["compiles_after_warmup"] == 0
    lowering.broken = set()
    assert cache.get(LARGE) is cache.get(LARGE)
    assert cache.stats()["compiles_after_warmup"] == 1


def test_what_the_compiler_refuses_is_a_backend_error_that_names_the_step():
    def refuse(key: StepKey) -> jax.stages.Lowered:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    with pytest.raises(BackendError, match=f"{SMALL} does not compile: RESOURCE_EXHAUSTED: injected"):
        StepCache(refuse).get(SMALL)


def test_two_threads_get_one_executable(lowering: Lowering):
    barrier = threading.Barrier(2)

    def meet(key: StepKey) -> jax.stages.Lowered:
        barrier.wait(timeout=60)  # both are compiling before either is done
        return lowering(key)

    cache = StepCache(meet)
    found: list[jax.stages.Compiled] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get(SMALL))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] is found[1] is cache.get(SMALL)
    assert cache.stats()["compiled"] == 1


MIXED, VERIFY = StepKey(2, 1, 8, 2), StepKey(0, 1, 5, 2, "all")


@pytest.mark.parametrize(
    ("key", "block_size", "num_blocks"),
    [(MIXED, 4, 1), (MIXED, 8, 3), (MIXED, 64, 1), (MIXED, 64, 200), (VERIFY, 64, 200)],
)
def test_a_step_of_any_kind_writes_the_kv_in_place(key: StepKey, block_size: int, num_blocks: int):
    spec = CacheSpec(
        num_layers=CFG.num_hidden_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=CFG.num_key_value_heads,
        head_dim=CFG.head_dim,
        dtype="float32",
    )
    shapes = specs.shapes(family(CFG).param_specs(CFG), "float32")
    memory = lower_step(CFG, shapes, state.shapes(spec), key).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= spec.num_bytes
    if num_blocks == 200:  # where the pool is large, nothing of its size is copied: not even one layer of K
        assert memory.temp_size_in_bytes < spec.num_bytes / 4
