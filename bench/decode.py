"""What does a decode step cost by batch and context, and how much of that is the host's?

The contract's call (`decode_batch`: checks, one upload, the step, logits in NumPy) takes turns with the bare compiled
step on a KV of its own, whose input is on the device already and whose output stays there. The difference of the
medians is the host's share. Each step is rolled back, so that the context stays where it is.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from bench import card, models
from bench.bare import BareStep
from bench.floor import against_floor, decode_work
from bench.machine import Probes, ceilings
from bench.setting import start
from bench.timing import Contestant, alternate
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.runner import ModelRunner

BATCHES = (1, 2, 4, 8)  # rows
CONTEXTS = (128, 512, 1536)  # positions
SMOKE_BATCHES, SMOKE_CONTEXTS = (1, 3), (16, 64)
ENGINE = EngineConfig(
    max_seqs=8,
    kv_capacity=2048,
    decode_rows=BATCHES,
    query_blocks=(1,),
    block_tokens=512,
    verify_tokens=16,
)
SMOKE_ENGINE = replace(ENGINE, max_seqs=3, kv_capacity=128, decode_rows=SMOKE_BATCHES, block_tokens=64)
BURST = 4  # calls in a row


def main() -> None:
    """Runs the sweep and prints the table and the JSON line."""
    setting = start(card.options(__doc__), ENGINE, SMOKE_ENGINE)
    found, runner = setting.found, setting.runner
    batches, contexts = (SMOKE_BATCHES, SMOKE_CONTEXTS) if found.smoke else (BATCHES, CONTEXTS)
    bare = {batch: BareStep.of(runner, batch) for batch in batches}
    rows = []
    for context in contexts:
        rows += [_measure(runner, setting.probes, bare[batch], batch, context, found.rounds) for batch in batches]
        runner.reset()
    _show(rows)
    setting.finish("decode", rows)


def _measure(
    runner: ModelRunner, probes: Probes, bare: BareStep, batch: int, context: int, rounds: int
) -> dict[str, Any]:
    decodes, restore = models.prefilled(runner, batch, context)
    times = alternate(
        {
            "call": Contestant(lambda: runner.decode_batch(decodes), restore, BURST),
            "bare": Contestant(bare.at(context), restore, BURST),
        }
        | probes.contestants,
        rounds=rounds,
    )
    restore()
    itemsize = jnp.dtype(runner.plan.cache.dtype).itemsize
    work = decode_work(runner.model_config, rows=batch, context=context, itemsize=itemsize)
    machine, call, step = ceilings(probes, times), times["call"], times["bare"]
    return {
        "rows": batch,
        "context": context,
        "step_ms": step.median,
        "host_ms": call.median - step.median,
        "tokens_per_second": batch / call.median * 1e3,
        "read_gb_per_second": work.num_bytes / step.median / 1e6,
        **against_floor(work, machine, call),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    headings = "rows", "context", "call ms", "p90", "step ms", "host ms", "tokens/s", "GB/s", "floor ms", "/ floor"
    lines = []
    for row in rows:
        cells = [f"{row['rows']}", f"{row['context']}", f"{row['call_ms']:.2f}", f"{row['call_p90_ms']:.2f}"]
        cells += [f"{row['step_ms']:.2f}", f"{row['host_ms']:.2f}", f"{row['tokens_per_second']:.1f}"]
        cells += [f"{row['read_gb_per_second']:.1f}", f"{row['floor_ms']:.2f}", f"{row['call_over_floor']:.2f}"]
        lines.append(cells)
    card.show_table(headings, lines)


if __name__ == "__main__":
    main()
