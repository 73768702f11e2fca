"""Every method in any order, prefixes reused, forks sharing blocks: still the logits of the cache-free forward."""

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from ferrum_jax.executor import ModelRunner
from tests.executor.conftest import Oracle
from tests.executor.machine import everything
from tests.long import OPERATIONS, SEED

Oracles = dict[str | None, Oracle]


def run_machine(runner: ModelRunner, oracles: Oracles, folders: dict[str, str], operations: int, steps: int) -> int:
    """Runs examples of `steps` operations until there were so many operations; returns their number."""
    print(f"seed {SEED}")
    done, rounds = 0, 0

    def count() -> None:
        nonlocal done
        done += 1

    while done < operations:
        machine = seed(SEED + rounds)(everything(runner, oracles, folders, count))
        rounds += 1
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=min(max(1, (operations - done) // steps), 50),
                stateful_step_count=steps,
                deadline=None,
                database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
            ),
        )
    return done


def test_any_sequence_of_calls_gives_the_logits_of_the_cache_free_forward(
    reusing: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]
):
    assert run_machine(reusing, oracles, adapter_folders, operations=400, steps=40) >= 400


@pytest.mark.slow
def test_very_many_sequences_of_calls_do(reusing: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]):
    assert run_machine(reusing, oracles, adapter_folders, OPERATIONS, steps=100) >= OPERATIONS
