"""What most benchmarks begin with: a model that runs, the machine's ceilings and the card, then warm-up."""

import argparse
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


def start(found: argparse.Namespace, engine: EngineConfig, smoke: EngineConfig) -> Setting:
    """Loads and warms up the model that the options ask for, with `--smoke` as `smoke` says, and shows the card."""
    subject = models.read(found)
    probes = make_probes(subject.dtype, smoke=found.smoke)
    runner = models.run(subject, smoke if found.smoke else engine)
    conditions = card.show_card(subject, runner.plan.cache, measure(probes))
    runner.warmup(progress=True)
    return Setting(found, runner, probes, conditions)
