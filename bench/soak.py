"""Does an hour of random traffic compile anything, leak memory or slow down?

After a warm start, requests of random lengths and settings go through the scheduler in this process, always
twice as many as there are rows: greedy and drawn, with penalties and log-probabilities, some sharing prefixes, some
given up half way; the pool of KV blocks is too small for all of them, so that some give their place up and are read
anew. Counted are what JAX compiles (must be nothing), the resident set over time, tokens per second in every sixtieth
of the run, and the blocks that are free at the end (must be all).
"""

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil

from bench import card, models
from bench.setting import start
from bench.timing import count_compiles, fit_line, summarise
from bench.traffic import Arrival, Traffic
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.scheduler import Scheduler

WINDOWS = 60  # of the run, each a row
SMOKE_MINUTES = 0.05
ENGINE = EngineConfig(
    max_seqs=8,
    kv_capacity=512,
    block_size=16,
    kv_blocks=8 * 16,  # half of what the rows could fill
    prefix_cache=True,
    max_step_tokens=256,
    decode_rows=(1, 8),
)
SMOKE_ENGINE = replace(
    ENGINE,
    max_seqs=4,
    kv_capacity=64,
    kv_blocks=8,
    max_step_tokens=64,
    decode_rows=(4,),
)
GIVEN_UP = 0.002  # share of the steps after which somebody leaves


@dataclass
class Window:
    """What happened in one stretch of the run."""

    minutes: float  # since the start, at its end
    resident_bytes: int
    tokens_per_second: float
    finished: int = 0
    given_up: int = 0


@dataclass
class Source:
    """Draws requests: lengths, settings, and a beginning that may be another's."""

    runner: ModelRunner
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def next(self, now: float) -> Arrival:
        """Returns a request that arrives now."""
        draw, capacity = self.draw, self.runner.plan.kv_capacity
        length = int(draw.integers(1, capacity // 2))
        family = models.prompt(self.runner.model_config, capacity, seed=int(draw.integers(4)))
        shared = int(draw.integers(0, length))
        own = models.prompt(self.runner.model_config, length - shared, seed=int(draw.integers(1 << 30)))
        return Arrival(now, family[:shared] + own, self._params(capacity // 2))

    def _params(self, most: int) -> SamplingParams:
        draw = self.draw
        length, seed = int(draw.integers(1, most)), int(draw.integers(1 << 31))
        if draw.random() < 0.5:
            return SamplingParams(max_tokens=length, seed=seed, logprobs=bool(draw.random() < 0.2))
        return SamplingParams(
            max_tokens=length,
            seed=seed,
            temperature=float(draw.uniform(0.1, 1.5)),
            top_k=int(draw.choice([0, 1, 40])),
            top_p=float(draw.uniform(0.5, 1.0)),
            min_p=float(draw.choice([0.0, 0.05])),
            repetition_penalty=float(draw.choice([1.0, 1.2])),
        )


def main() -> None:
    """Runs the traffic and prints the table, the verdict and the JSON line; fails if anything was compiled or lost."""
    setting = start(card.options(__doc__, timed=False, more=_more), ENGINE, SMOKE_ENGINE)
    runner = setting.runner
    scheduler = Scheduler(runner, max_rows=runner.plan.max_seqs, chunk_tokens=runner.plan.buckets.max_step_tokens)
    minutes = setting.found.minutes or (SMOKE_MINUTES if setting.found.smoke else 60.0)
    with count_compiles() as compiled:
        windows = _run(scheduler, runner, minutes)
    blocks = runner.kv_slot_capacity_snapshot()
    rows: list[dict[str, Any]] = [vars(window) for window in windows]
    later = rows[len(rows) // 2 :]
    growth = fit_line([row["minutes"] / 60 for row in later], [row["resident_bytes"] for row in later]).slope
    lost = blocks.total_blocks - blocks.free_blocks
    speeds = [summarise([row["tokens_per_second"] for row in part]).median for part in (rows[: len(rows) // 2], later)]
    _show(rows)
    print(
        f"{len(compiled)} compiles, {lost} of {blocks.total_blocks} blocks lost; in the second half the resident set "
        f"grows by {growth / 1e6:+.1f} MB an hour, and speed is {speeds[1] / speeds[0]:.2f} times that of the first"
    )
    figures = {"compiles": len(compiled), "lost_blocks": lost, "growth_bytes_per_hour": growth}
    setting.finish("soak", rows, **figures, later_over_earlier=speeds[1] / speeds[0])
    if compiled or lost:
        raise SystemExit(1)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=card.above_zero, help="of traffic [60]")


def _run(scheduler: Scheduler, runner: ModelRunner, minutes: float) -> list[Window]:
    traffic, source, process = Traffic(scheduler), Source(runner), psutil.Process()
    windows: list[Window] = []
    wanted, each = 2 * runner.plan.max_seqs, minutes * 60 / WINDOWS
    while len(windows) < WINDOWS:
        before, tokens, finished, given_up = traffic.now, traffic.num_tokens, 0, 0
        while traffic.now < before + each:
            while len(traffic) < wanted:
                traffic.submit(source.next(traffic.now))
            finished += len(traffic.step())
            if source.draw.random() < GIVEN_UP:
                traffic.abort(int(source.draw.integers(len(traffic))))
                given_up += 1
        rate = (traffic.num_tokens - tokens) / (traffic.now - before)
        windows.append(Window(traffic.now / 60, process.memory_info().rss, rate, finished, given_up))
    while len(traffic):
        traffic.abort(0)
    return windows


def _show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows[:: max(1, len(rows) // 12)]:
        cells = [f"{row['minutes']:.2f}", f"{row['resident_bytes'] / 1e6:,.1f}", f"{row['tokens_per_second']:.1f}"]
        lines.append([*cells, f"{row['finished']}", f"{row['given_up']}"])
    card.show_table(("minutes", "resident MB", "tokens/s", "finished", "given up"), lines)


if __name__ == "__main__":
    main()
