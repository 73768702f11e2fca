"""Every method in any order, prefixes reused, forks sharing blocks: still the logits of the cache-free forward."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import ENGINE, Oracle, make_runner
from tests.executor.machine import everything
from tests.long import OPERATIONS, SEED


@pytest.fixture(scope="module")
def reusing(params: ParamTree) -> Iterator[ModelRunner]:
    """A warm runner that reuses prefixes."""
    with make_runner(
        params,
        replace(ENGINE, prefix_cache=True, verify_blocks=(1, 2), max_loras=2, max_lora_rank=4, multi_step_tokens=4),
    ) as runner:
        runner.warmup()
        yield runner


Oracles = dict[str | None, Oracle]


def _run(runner: ModelRunner, oracles: Oracles, folders: dict[str, str], operations: int, steps: int) -> int:
    """Runs examples of `steps` operations until there were so many operations; gives their number."""
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
    assert _run(reusing, oracles, adapter_folders, operations=1000, steps=40) >= 1000


@pytest.mark.slow
def test_very_many_sequences_of_calls_do(reusing: ModelRunner, oracles: Oracles, adapter_folders: dict[str, str]):
    print(f"{_run(reusing, oracles, adapter_folders, OPERATIONS, steps=100):,} operations, seed {SEED}")
