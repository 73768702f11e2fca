"""How fast is a prompt of 32 to 2048 tokens taken in, beside the machine's floor?

The contract's `prefill` into an empty sequence, which gives the last token's logits in NumPy. What exceeds the largest
step runs in several.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from bench import card, models
from bench.floor import against_floor, prefill_work
from bench.machine import Probes, ceilings
from bench.setting import start
from bench.timing import Contestant, alternate
from ferrum_jax.compile.planner import plan_steps
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.runner import ModelRunner

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)  # tokens
SMOKE_LENGTHS = (32, 128, 256)
ENGINE = EngineConfig(
    max_seqs=1,
    kv_capacity=2048,
    decode_rows=(1,),
)
SMOKE_ENGINE = replace(ENGINE, kv_capacity=256)


def main() -> None:
    """Runs every length and prints the table and the JSON line."""
    setting = start(card.options(__doc__), ENGINE, SMOKE_ENGINE)
    found, runner = setting.found, setting.runner
    lengths = SMOKE_LENGTHS if found.smoke else LENGTHS
    rows = [_measure(runner, setting.probes, tokens, found.rounds) for tokens in lengths]
    _show(rows)
    setting.finish("prefill", rows)


def _measure(runner: ModelRunner, probes: Probes, tokens: int, rounds: int) -> dict[str, Any]:
    ids = models.prompt(runner.model_config, tokens)
    prefill = Contestant(lambda: runner.prefill("a", ids), runner.reset)
    times = alternate({"ours": prefill} | probes.contestants, rounds=rounds, pause=0.0)
    machine, timing = ceilings(probes, times), times["ours"]
    itemsize = jnp.dtype(runner.plan.cache.dtype).itemsize
    work = prefill_work(runner.model_config, tokens=tokens, itemsize=itemsize)
    return {
        "tokens": tokens,
        "steps": len(plan_steps([tokens], runner.plan.buckets)),
        "tokens_per_second": tokens / timing.median * 1e3,
        "gflop_per_second": work.operations / timing.median / 1e6,
        **against_floor(work, machine, timing),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    headings = "tokens", "steps", "call ms", "p90", "tokens/s", "GFLOP/s", "floor ms", "/ floor"
    lines = []
    for row in rows:
        cells = [f"{row['tokens']}", f"{row['steps']}", f"{row['call_ms']:.1f}", f"{row['call_p90_ms']:.1f}"]
        cells += [f"{row['tokens_per_second']:.0f}", f"{row['gflop_per_second']:.1f}"]
        lines.append([*cells, f"{row['floor_ms']:.1f}", f"{row['call_over_floor']:.2f}"])
    card.show_table(headings, lines)


if __name__ == "__main__":
    main()
