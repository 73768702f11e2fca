"""What does each layout of the parameters gain, and what does it cost to compile?

The bare compiled step over parameters as the checkpoint has them, with q, k, v and gate, up fused, and with the layers
stacked and run in one loop (ferrum_jax/models/layout.py); the three take turns. Beside the times stand the seconds to
trace and to compile, and the bytes the step takes beside its parameters and its KV.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from bench import card, models
from bench.bare import BareStep
from bench.timing import Contestant, alternate
from ferrum_jax.compile.step import StepKey
from ferrum_jax.config import LAYOUTS
from ferrum_jax.models.backends import cache_spec, choose_attention

BLOCK_SIZE = 128  # positions
BLOCK_TOKENS = 64  # of a query block
BURST = 4  # decode steps in a row


@dataclass(frozen=True)
class Phase:
    """A step of one kind."""

    name: str
    decode_rows: int
    blocks: int  # of one prompt, of BLOCK_TOKENS tokens each
    context: int  # positions before them


PHASES = (
    Phase("decode 1 at 256", 1, 0, 256),
    Phase("decode 8 at 256", 8, 0, 256),
    Phase("decode 1 at 1024", 1, 0, 1024),
    Phase("prefill 128", 0, 2, 0),
    Phase("prefill 512", 0, 8, 0),
    Phase("prefill 2048", 0, 32, 0),
)
SMOKE_PHASES = (Phase("decode 1 at 16", 1, 0, 16), Phase("prefill 64", 0, 1, 0))


def main() -> None:
    """Runs every phase in every layout and prints the table and the JSON line."""
    found = card.options(__doc__)
    subject = models.read(found)
    conditions = card.show_card(subject)
    params = {layout: models.laid_out(subject, layout) for layout in LAYOUTS}
    rows = []
    for phase in SMOKE_PHASES if found.smoke else PHASES:
        steps = {layout: _bare(subject, params[layout], phase, layout) for layout in LAYOUTS}
        times = alternate(
            {
                layout: Contestant(step.at(phase.context), burst=BURST if phase.decode_rows else 1)
                for layout, step in steps.items()
            },
            rounds=found.rounds,
        )
        for layout, step in steps.items():
            memory = step.executable.memory_analysis()
            rows.append(
                {
                    "phase": phase.name,
                    "layout": layout,
                    "step_ms": times[layout].median,
                    "step_p90_ms": times[layout].p90,
                    "checkpoint_over_this": times[LAYOUTS[0]].median / times[layout].median,
                    "trace_seconds": step.trace_seconds,
                    "compile_seconds": step.compile_seconds,
                    "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
                }
            )
    card.show_table(HEADINGS, _cells(rows))
    card.finish("layouts", found, conditions, rows)


HEADINGS = "step", "layout", "ms", "p90", "gain", "trace s", "compile s", "temporary MB"


def _bare(subject: models.Subject, params: Any, phase: Phase, layout: str) -> BareStep:
    columns = -(-(phase.context + max(1, phase.blocks * BLOCK_TOKENS)) // BLOCK_SIZE)
    cfg = subject.config
    dtype = jnp.dtype(subject.dtype).name
    attention = choose_attention(
        None, cfg, platform=jax.default_backend(), dtype=dtype, kv_dtype=dtype, block_size=BLOCK_SIZE, layout=layout
    )
    blocks = 2 * columns * max(1, phase.decode_rows)
    spec = cache_spec(cfg, num_blocks=blocks, block_size=BLOCK_SIZE, dtype=dtype, attention=attention)
    tokens = BLOCK_TOKENS if phase.blocks else 0
    key = StepKey(phase.decode_rows, phase.blocks, tokens, columns, max(1, phase.decode_rows))
    return BareStep(cfg, params, spec, key)


def _cells(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        memory = row["temporary_bytes"]
        yield [
            row["phase"],
            row["layout"],
            f"{row['step_ms']:.2f}",
            f"{row['step_p90_ms']:.2f}",
            f"{row['checkpoint_over_this']:.2f}",
            f"{row['trace_seconds']:.2f}",
            f"{row['compile_seconds']:.2f}",
            "" if memory is None else f"{memory / 1e6:.1f}",
        ]


if __name__ == "__main__":
    main()
