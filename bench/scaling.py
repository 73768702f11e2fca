"""How does the time of a decode step grow with the batch, and with the context?

The contract's `decode_batch` at a context of 256 for batches of 1 to 64, and at batch 1 for contexts of 128 to 8,064,
each row of the table beside its floor. The straight line nearest to the medians of a sweep has a slope (what one more
row or position costs), an intercept (what a step costs before any) and a residual (the root mean square of how far the
medians are from it).
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from bench import card, models
from bench.floor import against_floor, decode_work
from bench.machine import ceilings
from bench.setting import Setting, start
from bench.timing import Contestant, alternate, fit_line
from ferrum_jax.config import EngineConfig

BATCHES, SMOKE_BATCHES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)
CONTEXTS, SMOKE_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8064), (16, 32, 96)  # positions
CONTEXT, SMOKE_CONTEXT = 256, 16  # positions of the sweep over batches
BLOCK = 128  # positions
ENGINE = EngineConfig(
    max_seqs=BATCHES[-1],
    kv_capacity=CONTEXTS[-1] + BLOCK,
    block_size=BLOCK,
    kv_blocks=BATCHES[-1] * (CONTEXT // BLOCK + 1),
    decode_rows=BATCHES,
    query_blocks=(1,),
    block_tokens=512,
    verify_tokens=16,
)
SMOKE_ENGINE = replace(
    ENGINE, max_seqs=4, kv_capacity=128, block_size=16, kv_blocks=32, decode_rows=SMOKE_BATCHES, block_tokens=16
)
BURST = 4  # calls in a row


def main() -> None:
    """Runs both sweeps and prints the table, the lines and the JSON line."""
    setting = start(card.options(__doc__), ENGINE, SMOKE_ENGINE)
    smoke = setting.found.smoke
    context = SMOKE_CONTEXT if smoke else CONTEXT
    by_batch = [_measure(setting, "batch", batch, context) for batch in (SMOKE_BATCHES if smoke else BATCHES)]
    setting.runner.reset()
    by_context = [_measure(setting, "context", 1, length) for length in (SMOKE_CONTEXTS if smoke else CONTEXTS)]
    rows = by_batch + by_context
    _show(rows)
    lines = {"batch": _fit("rows", by_batch), "context": _fit("context", by_context)}
    setting.finish("scaling", rows, lines=lines)


def _measure(setting: Setting, sweep: str, batch: int, context: int) -> dict[str, Any]:
    runner, probes = setting.runner, setting.probes
    decodes, restore = models.prefilled(runner, batch, context)
    call = Contestant(lambda: runner.decode_batch(decodes), restore, BURST)
    times = alternate({"call": call} | probes.contestants, rounds=setting.found.rounds)
    restore()
    itemsize = jnp.dtype(runner.plan.cache.dtype).itemsize
    work = decode_work(runner.model_config, rows=batch, context=context, itemsize=itemsize)
    columns = against_floor(work, ceilings(probes, times), times["call"])
    return {"sweep": sweep, "rows": batch, "context": context, **columns}


def _fit(name: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Prints the line nearest to the medians of one sweep, in ms and by what it sweeps, and gives it back."""
    line = fit_line([row[name] for row in rows], [row["call_ms"] for row in rows])
    unit = {"rows": "row", "context": "position"}[name]
    print(
        f"{line.slope * 1e3:.1f} us for one more {unit}, {line.intercept:.2f} ms before any, "
        f"{line.residual:.2f} ms off the line in root mean square"
    )
    return {"slope_ms": line.slope, "intercept_ms": line.intercept, "residual_ms": line.residual}


def _show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        cells = [row["sweep"], f"{row['rows']}", f"{row['context']}", f"{row['call_ms']:.2f}"]
        lines.append([*cells, f"{row['call_p90_ms']:.2f}", f"{row['floor_ms']:.2f}", f"{row['call_over_floor']:.2f}"])
    card.show_table(("sweep", "rows", "context", "call ms", "p90", "floor ms", "/ floor"), lines, left=("sweep",))


if __name__ == "__main__":
    main()
