"""What does a prompt of 1,024 tokens cost when 1,008 of them are reused, beside the same prompt cold?

The contract's `prefill`, cold into a pool that holds no prefix, and again after the same prompt but for its last 16
tokens was there. Blocks of 16 positions, so that 63 of them are the 1,008. The floor is that of a step of the last 16.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from bench import card, models
from bench.floor import step_work
from bench.machine import Probes, ceilings
from bench.setting import start
from bench.timing import Contestant, alternate
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.runner import ModelRunner

BLOCK = 16  # positions
ENGINE = EngineConfig(
    max_seqs=2,
    kv_capacity=1024,
    block_size=BLOCK,
    prefix_cache=True,
    decode_rows=(1,),
)
SMOKE_ENGINE = replace(ENGINE, kv_capacity=128)


def main() -> None:
    """Times both prefills in turn and prints the table and the JSON line."""
    setting = start(card.options(__doc__), ENGINE, SMOKE_ENGINE)
    found, runner = setting.found, setting.runner
    rows = [_measure(runner, setting.probes, found.rounds)]
    row = rows[0]
    cells = [f"{row['tokens']}", f"{row['reused']}", f"{row['cold_ms']:.1f}", f"{row['reused_ms']:.1f}"]
    cells += [f"{row['ratio']:.1f}", f"{row['floor_ms']:.1f}", f"{row['reused_over_floor']:.2f}"]
    headings = "tokens", "reused", "cold ms", "reused ms", "cold / reused", "floor ms", "reused / floor"
    card.show_table(headings, [cells])
    setting.finish("prefix", rows)


def _measure(runner: ModelRunner, probes: Probes, rounds: int) -> dict[str, Any]:
    ids = models.prompt(runner.model_config, runner.plan.kv_capacity)
    family = [*ids[:-BLOCK], *reversed(ids[-BLOCK:])]

    def leave_the_prefix() -> None:
        runner.reset()
        runner.prefill("first", family)
        runner.release("first")

    contestants = {
        "cold": Contestant(lambda: runner.prefill("cold", ids), runner.reset),
        "reused": Contestant(lambda: runner.prefill("again", ids), leave_the_prefix),
    }
    times = alternate(contestants | probes.contestants, rounds=rounds, pause=0.0)
    itemsize = jnp.dtype(runner.plan.cache.dtype).itemsize
    work = step_work(runner.model_config, [(len(ids) - BLOCK, BLOCK)], itemsize=itemsize)
    floor = work.floor_ms(ceilings(probes, times))
    before = runner.cache_metrics_snapshot()["saved_prefill_tokens"]
    contestants["reused"].restore()
    runner.prefill("again", ids)
    return {
        "tokens": len(ids),
        "reused": runner.cache_metrics_snapshot()["saved_prefill_tokens"] - before,
        "cold_ms": times["cold"].median,
        "cold_p90_ms": times["cold"].p90,
        "reused_ms": times["reused"].median,
        "reused_p90_ms": times["reused"].p90,
        "ratio": times["cold"].median / times["reused"].median,
        "floor_ms": floor,
        "reused_over_floor": times["reused"].median / floor,
    }


if __name__ == "__main__":
    main()
