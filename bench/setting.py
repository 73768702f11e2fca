"""What most benchmarks begin with: options, a model that runs, the machine's ceilings and the card, then warm-up."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import card, models
from bench.machine import Probes, make_probes, measure
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.runner import ModelRunner


@dataclass(frozen=True)
class Setting:
    """A warm runner and the conditions it runs under."""

    found: argparse.Namespace
    runner: ModelRunner
    probes: Probes
    conditions: dict[str, Any]

    def finish(self, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
        """Prints the result as one line of JSON, and writes it to `--json` if asked."""
        card.finish(name, self.found, self.conditions, rows, **more)


def start(
    description: str | None,
    engine: EngineConfig,
    smoke: EngineConfig,
    *,
    timed: bool = True,
    more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Setting:
    """Reads the options, loads and warms the model up, `--smoke` with the engine `smoke`, and shows the card."""
    found = card.options(description, timed=timed, more=more)
    subject = models.read(found)
    probes = make_probes(subject.dtype, smoke=found.smoke)
    runner = models.run(subject, smoke if found.smoke else engine)
    conditions = card.show_card(subject, runner.plan.cache, measure(probes))
    runner.warmup(progress=True)
    return Setting(found, runner, probes, conditions)
