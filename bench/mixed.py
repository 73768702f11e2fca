"""What does reading a prompt cost the answers beside it, by the size of its chunks?

Rows that decode at a context of 256 meet one prompt of 1,024 tokens. Unified: the prompt goes in chunk by chunk beside
the rows, by `unified_forward`, and each step gives every row a token. Apart: `prefill` takes the whole prompt while the
rows wait, and `decode_batch` then gives them as many tokens. Both do the same work, so tokens per second compare: those
of the prompt and those of the rows. The gap is the longest time between two tokens of a row, and the prompt's first
token comes after all of its chunks. The floor is the sum of the steps' floors.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from bench import card, models
from bench.floor import step_work
from bench.machine import Machine, ceilings
from bench.setting import Setting, start
from bench.timing import Contestant, alternate, summarise
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.llm import UnifiedRow
from ferrum_jax.executor.runner import ModelRunner

ROWS = 8  # that decode
CONTEXT, SMOKE_CONTEXT = 256, 16  # positions
PROMPT, SMOKE_PROMPT = 1024, 64  # tokens
CHUNKS, SMOKE_CHUNKS = (32, 64, 128, 256, 512), (16, 32)  # tokens
ENGINE = EngineConfig(
    max_seqs=ROWS + 1,
    kv_capacity=1152,
    max_step_tokens=CHUNKS[-1],
    decode_rows=(ROWS,),
)
SMOKE_ENGINE = replace(ENGINE, kv_capacity=128, max_step_tokens=SMOKE_CHUNKS[-1])


@dataclass(frozen=True)
class Course:
    """What one call saw, in milliseconds."""

    gaps: list[float]  # between the rows' tokens
    first_token: float  # from the start to the prompt's first token


def main() -> None:
    """Runs every size of a chunk and prints the table and the JSON line."""
    setting = start(card.options(__doc__), ENGINE, SMOKE_ENGINE)
    smoke = setting.found.smoke
    context, prompt = (SMOKE_CONTEXT, SMOKE_PROMPT) if smoke else (CONTEXT, PROMPT)
    rows = []
    for chunk in SMOKE_CHUNKS if smoke else CHUNKS:
        rows += _measure(setting, chunk, context, prompt)
    _show(rows)
    setting.finish("mixed", rows)


def _measure(setting: Setting, chunk: int, context: int, length: int) -> list[dict[str, Any]]:
    runner, probes = setting.runner, setting.probes
    _, go_back = models.prefilled(runner, ROWS, context)
    prompt = models.prompt(runner.model_config, length, seed=ROWS)
    courses: dict[str, list[Course]] = {"unified": [], "apart": []}

    def restore() -> None:
        go_back()
        runner.release("prompt")

    contestants = {
        "unified": Contestant(lambda: courses["unified"].append(_unified(runner, prompt, chunk, context)), restore),
        "apart": Contestant(lambda: courses["apart"].append(_apart(runner, prompt, chunk, context)), restore),
    }
    times = alternate(contestants | probes.contestants, rounds=setting.found.rounds)
    restore()
    machine = ceilings(probes, times)
    floors = _floors(runner, machine, chunk, context, length)
    tokens = length + ROWS * (length // chunk)
    rows = []
    for way, seen in courses.items():
        call, counted = times[way], seen[1:]  # the first call warmed
        worst = summarise([max(course.gaps) for course in counted])
        rows.append(
            {
                "chunk": chunk,
                "way": way,
                "tokens_per_second": tokens / call.median * 1e3,
                "call_ms": call.median,
                "call_p90_ms": call.p90,
                "worst_gap_ms": worst.median,
                "worst_gap_p90_ms": worst.p90,
                "first_token_ms": summarise([course.first_token for course in counted]).median,
                "floor_ms": floors[way],
                "call_over_floor": call.median / floors[way],
            }
        )
    return rows


def _unified(runner: ModelRunner, prompt: list[int], chunk: int, context: int) -> Course:
    gaps = []
    for at in range(0, len(prompt), chunk):
        started = time.perf_counter()
        step = at // chunk
        items: list[UnifiedRow] = [(str(row), [models.TOKEN], context + step, True) for row in range(ROWS)]
        items.append(("prompt", prompt[at : at + chunk], at, at + chunk == len(prompt)))
        runner.unified_forward(items)
        gaps.append((time.perf_counter() - started) * 1e3)
    return Course(gaps, sum(gaps))


def _apart(runner: ModelRunner, prompt: list[int], chunk: int, context: int) -> Course:
    before = time.perf_counter()
    runner.prefill("prompt", prompt)
    first_token = (time.perf_counter() - before) * 1e3
    gaps = []
    for step in range(len(prompt) // chunk):
        runner.decode_batch([(str(row), models.TOKEN, context + step) for row in range(ROWS)])
        before, started = time.perf_counter(), before
        gaps.append((before - started) * 1e3)
    return Course(gaps, first_token)


def _floors(runner: ModelRunner, machine: Machine, chunk: int, context: int, length: int) -> dict[str, float]:
    """Milliseconds that the steps of each way take at least."""

    def floor(rows: list[tuple[int, int]]) -> float:
        itemsize = jnp.dtype(runner.plan.cache.dtype).itemsize
        return step_work(runner.model_config, rows, itemsize=itemsize).floor_ms(machine)

    decodes = [[(context + step, 1)] * ROWS for step in range(length // chunk)]
    widest = runner.plan.buckets.max_step_tokens
    return {
        "unified": sum(floor([*rows, (step * chunk, chunk)]) for step, rows in enumerate(decodes)),
        "apart": sum(map(floor, decodes)) + sum(floor([(at, widest)]) for at in range(0, length, widest)),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    headings = (
        "chunk",
        "way",
        "tokens/s",
        "call ms",
        "p90",
        "worst gap ms",
        "p90",
        "first token ms",
        "floor ms",
        "/ floor",
    )
    lines = []
    for row in rows:
        cells = [f"{row['chunk']}", row["way"], f"{row['tokens_per_second']:.0f}"]
        keys = "call_ms", "call_p90_ms", "worst_gap_ms", "worst_gap_p90_ms", "first_token_ms", "floor_ms"
        lines.append([*cells, *(f"{row[key]:.1f}" for key in keys), f"{row['call_over_floor']:.2f}"])
    card.show_table(headings, lines, left=("way",))


if __name__ == "__main__":
    main()
