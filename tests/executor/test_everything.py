"""Every method in any order, prefixes reused, forks sharing blocks: still the logits of the cache-free forward."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import ENGINE, Oracle, make_runner
from tests.executor.machine import everything


@pytest.fixture(scope="module")
def reusing(params: ParamTree) -> Iterator[ModelRunner]:
    """A warm runner that reuses prefixes."""
    with make_runner(params, replace(ENGINE, prefix_cache=True, verify_rows=(1, 2))) as runner:
        runner.warmup()
        yield runner


def _run(runner: ModelRunner, oracle: Oracle, operations: int, steps: int) -> int:
    """Runs examples of `steps` operations until there were so many operations; gives their number."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1

    machine = everything(runner, oracle, count)
    while done < operations:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max(1, (operations - done) // steps),
                stateful_step_count=steps,
                deadline=None,
                database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
            ),
        )
    return done


def test_any_sequence_of_calls_gives_the_logits_of_the_cache_free_forward(reusing: ModelRunner, oracle: Oracle):
    assert _run(reusing, oracle, operations=1000, steps=40) >= 1000


@pytest.mark.slow
def test_very_many_sequences_of_calls_do(reusing: ModelRunner, oracle: Oracle):
    operations = int(os.environ.get("OPERATIONS", "20000"))
    print(f"{_run(reusing, oracle, operations, steps=100):,} operations")
