"""The program cache, with toy computations."""

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ferrum_jax.compile.program_cache import ProgramCache
from ferrum_jax.compile.step import StepKey
from ferrum_jax.contract.errors import BackendError

SMALL, LARGE, OTHER = (StepKey(rows, 0, 0, 2, rows) for rows in (1, 4, 2))


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
    cache = ProgramCache(lowering)
    executable = cache.get(SMALL)
    assert executable(jnp.zeros(1)).tolist() == [1.0]
    assert cache.get(SMALL) is executable
    assert lowering.asked == [SMALL]
    stats = cache.stats()
    assert (stats["compiled"], stats["loaded"], stats["compiles_after_warmup"]) == (1, 0, 0)
    assert list(stats["steps"]) == [str(SMALL)]
    assert stats["compile_seconds"] == stats["steps"][str(SMALL)]["seconds"] > 0


def test_warmup_compiles_what_is_missing_and_shows_it(lowering: Lowering):
    cache = ProgramCache(lowering)
    cache.get(SMALL)
    shown: list[list[StepKey]] = []

    @contextlib.contextmanager
    def track(keys: list[StepKey]) -> Iterator[list[StepKey]]:
        shown.append(keys)
        yield keys

    cache.warmup([LARGE, SMALL, OTHER], track)
    assert shown == [[LARGE, OTHER]]
    assert sorted(lowering.asked) == sorted([SMALL, LARGE, OTHER])
    assert cache.stats()["compiled"] == 3
    assert cache.stats()["compiles_after_warmup"] == 0
    cache.warmup([LARGE])
    assert len(lowering.asked) == 3


def test_steps_are_compiled_under_the_settings_of_who_asks(lowering: Lowering):
    seen: list[str | None] = []

    def lower(key: StepKey) -> jax.stages.Lowered:
        seen.append(getattr(jax.config, "jax_default_matmul_precision"))  # noqa: B009  # which has no annotation
        return lowering(key)

    with jax.default_matmul_precision("highest"):
        ProgramCache(lower).warmup([SMALL, LARGE])
        ProgramCache(lower).ensure([OTHER])
    assert seen == ["highest"] * 3
    ProgramCache(lower).warmup([SMALL])
    assert seen[3] is None


def test_a_late_step_is_compiled_counted_and_logged(lowering: Lowering, caplog: pytest.LogCaptureFixture):
    cache = ProgramCache(lowering)
    cache.warmup([SMALL])
    with caplog.at_level(logging.WARNING):
        cache.get(SMALL)
        assert caplog.messages == []
        cache.get(LARGE)
        cache.get(LARGE)
    assert caplog.messages == [f"compiling step {LARGE} after warmup: declare it in the buckets"]
    assert cache.stats()["compiles_after_warmup"] == 1
    assert cache.stats()["compiled"] == 2


def test_strict_mode_refuses_what_warmup_did_not_compile(lowering: Lowering):
    cache = ProgramCache(lowering, strict=True)
    cache.get(OTHER)  # before warmup everything is compiled
    cache.warmup([SMALL])
    with pytest.raises(BackendError, match=f"{LARGE} was not compiled by warmup"):
        cache.get(LARGE)
    assert cache.get(SMALL) is not None
    assert LARGE not in lowering.asked
    assert cache.stats()["compiles_after_warmup"] == 0


def test_a_failing_lowering_propagates_and_leaves_nothing(lowering: Lowering):
    cache = ProgramCache(lowering)
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
        ProgramCache(refuse).get(SMALL)


def test_what_did_not_compile_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def refuse(key: StepKey) -> jax.stages.Lowered:
        asked.append(key)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    cache = ProgramCache(refuse)
    for _ in range(3):
        with pytest.raises(BackendError, match="does not compile: RESOURCE_EXHAUSTED: injected"):
            cache.get(SMALL)
    assert asked == [SMALL]
    for count, try_again in enumerate((lambda: cache.get(SMALL), lambda: cache.warmup([SMALL])), 2):
        monkeypatch.setattr("ferrum_jax.compile.program_cache.RETRY_SECONDS", 60.0 if count == 3 else 0.0)
        with pytest.raises(BackendError, match="injected"):
            try_again()
        assert len(asked) == count


def test_the_error_of_a_step_that_did_not_compile_keeps_nothing_of_its_callers():
    def refuse(key: StepKey) -> jax.stages.Lowered:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    cache = ProgramCache(refuse)

    def ask() -> weakref.ref[Any]:
        mine = jnp.zeros(3)
        for _ in range(2):
            with contextlib.suppress(BackendError):
                cache.get(SMALL)
        return weakref.ref(mine)

    kept = ask()
    gc.collect()
    assert cache._failures
    assert kept() is None


def test_a_step_that_another_process_cannot_build_is_built_again_by_all(lowering: Lowering):
    asked, failing = [], [True]

    @contextlib.contextmanager
    def together(keys: list[StepKey], **_: Any) -> Iterator[None]:
        asked.append(keys)
        yield
        if failing[0]:
            raise BackendError("process 1 of 2: it does not compile")

    cache = ProgramCache(lowering, together=together)
    for _ in range(2):
        with pytest.raises(BackendError, match="process 1"):
            cache.get(SMALL)
        with pytest.raises(BackendError, match="process 1"):
            cache.ensure([SMALL, LARGE])
    failing[0] = False
    cache.ensure([SMALL, LARGE])
    cache.get(SMALL)
    assert asked == [[SMALL], [SMALL, LARGE], [SMALL], [SMALL, LARGE], [SMALL, LARGE]]


def test_every_step_is_compiled_with_the_options_of_the_cache():
    def lower(key: StepKey) -> jax.stages.Lowered:
        return jax.jit(lambda x: jnp.sin(x) * key.decode_rows + jnp.exp(x)).lower(jnp.zeros(3))

    plain, unfused = (
        ProgramCache(lower, options=options) for options in (None, (("xla_disable_hlo_passes", "fusion"),))
    )
    unfused.warmup([LARGE])
    for key in (SMALL, LARGE):
        fewer, more = ((cache.get(key).as_text() or "").partition("\nENTRY ")[2] for cache in (plain, unfused))
        assert more.count(" = ") > fewer.count(" = ") > 0


def test_two_threads_get_one_executable(lowering: Lowering):
    barrier = threading.Barrier(2)

    def meet(key: StepKey) -> jax.stages.Lowered:
        barrier.wait(timeout=60)  # both are compiling before either is done
        return lowering(key)

    cache = ProgramCache(meet)
    found: list[jax.stages.Compiled] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get(SMALL))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] is found[1] is cache.get(SMALL)
    assert cache.stats()["compiled"] == 1
