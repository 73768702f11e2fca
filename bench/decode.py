"""What does a decode step cost by batch and context, and how much of that is the host's?

The contract's call (`decode_batch`: checks, one upload, the step, logits in NumPy) takes turns with the bare compiled
step on a KV of its own, whose input is packed already and whose output stays where it is. The difference of the medians
is the host's share. Each step is rolled back, so that the context stays where it is.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import card, models
from bench.floor import against_floor, decode_work
from bench.machine import Probes, ceilings
from bench.setting import start
from bench.timing import Contestant, alternate
from ferrum_jax.compile.buckets import StepKey
from ferrum_jax.compile.packing import blank
from ferrum_jax.compile.steps import lower_step
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.kvcache import state

BATCHES = (1, 2, 4, 8)  # rows
CONTEXTS = (128, 512, 1536)  # positions
SMOKE_BATCHES, SMOKE_CONTEXTS = (1, 3), (16, 64)
ENGINE = EngineConfig(
    max_seqs=8,
    kv_capacity=2048,
    decode_rows=BATCHES,
    chunk_rows=(1,),
    chunk_tokens=(512,),
    verify_tokens=(16,),
)
SMOKE_ENGINE = replace(ENGINE, max_seqs=3, kv_capacity=128, decode_rows=SMOKE_BATCHES, chunk_tokens=(64,))
BURST = 4  # calls in a row


def main() -> None:
    """Runs the sweep and prints the table and the JSON line."""
    setting = start(__doc__, ENGINE, SMOKE_ENGINE)
    found, runner = setting.found, setting.runner
    batches, contexts = (SMOKE_BATCHES, SMOKE_CONTEXTS) if found.smoke else (BATCHES, CONTEXTS)
    bare = {batch: _bare_step(runner, batch) for batch in batches}
    rows = []
    for context in contexts:
        for row in range(max(batches)):
            runner.prefill(str(row), models.prompt(runner.model_config, context, seed=row))
        rows += [_measure(runner, setting.probes, bare[batch], batch, context, found.rounds) for batch in batches]
        runner.reset()
    _show(rows)
    setting.finish("decode", rows)


def _measure(
    runner: ModelRunner, probes: Probes, bare: Callable[[int], Any], batch: int, context: int, rounds: int
) -> dict[str, Any]:
    decodes, restore = models.decodes(runner, batch, context)
    times = alternate(
        {
            "call": Contestant(lambda: runner.decode_batch(decodes), restore, BURST),
            "bare": Contestant(lambda: bare(context), burst=BURST),
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


def _bare_step(runner: ModelRunner, batch: int) -> Callable[[int], Any]:
    """Compiles one decode step; gives a function that runs it, its KV going round, at a context."""
    spec, columns = runner.plan.cache, runner.plan.ladders.table_columns
    key = StepKey(batch, 0, 0, columns)
    executable = lower_step(runner.model_config, runner.params, state.shapes(spec), key).compile()
    buffer, (group,) = blank(key)
    group.tokens[:], group.counts[:] = 1, 1
    group.tables[:] = np.arange(batch * columns).reshape(batch, columns) % spec.num_blocks
    kv = state.empty(spec)

    def run(context: int) -> Any:
        nonlocal kv
        group.lengths[:] = context
        outputs, kv = executable(runner.params, kv, buffer)
        return jax.block_until_ready(outputs)

    return run


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
