"""What does the host add to a decode step, by rows and by number of parameter leaves?

The wall-clock time of the contract's `decode_batch` (checks, block tables, packing, one upload, dispatch, logits in
NumPy) minus that of the bare `Compiled` whose arguments are on the device already; both wait for the device and take
turns in bursts. Before each call of either the same undoing is asked for, untimed, though before a bare call there is
less to undo. Bare calls that follow each other at once are shown beside. The models are tiny, so that the difference is
not lost in the step; so is their vocabulary, so that no copy of logits counts. More layers make more leaves, each of
which costs either side its dispatch: the third model has as many as SmolLM2 in the checkpoint's layout, the last is
the same as it is served by default. With the smallest model, `decode_n` is compared with its bare loop in the same way;
with the last, `LLM.generate` at temperature 0.8 with the bare step, alone and with the sampler after it: what one more
token of every row takes within an answer. `--model` measures that model instead.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from bench import card, models
from bench.bare import BareLoop, BareStep
from bench.generation import measure_generation
from bench.timing import Contestant, alternate, fit_line
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.decoding import DecodeRun
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.models.layout import CHECKPOINT, layout_of
from ferrum_jax.sharding.devices import default_dtype, find_device

ROWS, SMOKE_ROWS = (1, 2, 4, 8, 16, 32, 64), (1, 8)
# Layers, of 9 leaves each, and the layout; None is that of `load`.
MODELS = ((2, CHECKPOINT), (8, CHECKPOINT), (30, CHECKPOINT), (30, None))
SMOKE_MODELS = ((1, CHECKPOINT), (2, None))
CONTEXT = 16  # positions
BURST = 20  # calls in a row
LOOP = 32  # tokens of a row in one call of `decode_n`
AIMS = {1: 150.0, 64: 300.0}  # microseconds over the bare step at most, by rows
LOOP_AIM = 15.0  # microseconds a token
GENERATE_ROWS = (1, 64)
TEMPERATURE = 0.8


def main() -> None:
    """Measures every model and number of rows, and prints the table, the aims and the JSON line."""
    found = card.options(__doc__)
    sizes = SMOKE_ROWS if found.smoke else ROWS
    cards: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    loops: list[dict[str, Any]] = []
    generated: list[dict[str, Any]] = []
    subjects = list(_subjects(found))
    for subject, layout in subjects:
        is_first, is_last = not rows, subject is subjects[-1][0]
        runner = models.run(subject, _engine(sizes, LOOP if is_first else 0), layout)
        cards.append(card.show_card(subject, runner.plan.cache))
        runner.warmup(progress=True)
        loops += [_measure_loop(runner, count, found.rounds) for count in sizes if runner.loop_tokens]
        rows += [_measure(runner, count, found.rounds) for count in sizes]
        runner.close()
        if is_last:
            generated = _generated(subject, sizes, found.rounds)
    _show(rows)
    _show_loops(loops)
    _show_generated(generated)
    ends = {max(row["leaves"] for row in rows), rows[-1]["leaves"]}
    judged = [row for row in rows if row["rows"] in AIMS and row["leaves"] in ends]
    aims = [_judge(f"decode_batch of {row['leaves']} leaves", row) for row in judged]
    aims += [_judge("LLM.generate", row) for row in generated if row["rows"] in AIMS]
    by_leaf = _by_leaf(rows)
    if by_leaf is not None:
        print(f"one more leaf: {by_leaf:.2f} us of the bare call at 1 row, its arithmetic included")
    more = {"loops": loops, "generate": generated, "aims": aims, "bare_us_by_leaf": by_leaf}
    card.finish("overhead", found, card.together(cards), rows, **more)


def _subjects(found: argparse.Namespace) -> Iterator[tuple[models.Subject, str | None]]:
    if found.model is not None:
        yield models.read(found), None
        return
    dtype = default_dtype(find_device(None))
    for layers, layout in SMOKE_MODELS if found.smoke else MODELS:
        cfg = replace(models.TINY, num_hidden_layers=layers, layer_windows=(None,) * layers)
        yield models.random(f"tiny random, {layers} layers", cfg, dtype), layout


def _engine(sizes: tuple[int, ...], loop_tokens: int) -> EngineConfig:
    return EngineConfig(
        max_seqs=sizes[-1],
        kv_capacity=2 * CONTEXT + LOOP,
        multi_step_tokens=loop_tokens,
        decode_rows=sizes,
        query_blocks=(1, sizes[-1]),
        block_tokens=CONTEXT,
    )


def _measure(runner: ModelRunner, count: int, rounds: int) -> dict[str, Any]:
    decodes, restore = models.prefilled(runner, count, CONTEXT)
    bare = BareStep.of(runner, count).at(CONTEXT)
    contestants = {
        "call": Contestant(lambda: runner.decode_batch(decodes), restore, BURST),
        "bare": Contestant(bare, restore, BURST),
        "bare at once": Contestant(bare, burst=BURST),
    }
    times = alternate(contestants, rounds=rounds)
    restore()
    return {
        "rows": count,
        "leaves": len(jax.tree.leaves(runner.params)),
        "layout": layout_of(runner.params),
        "call_us": times["call"].median * 1e3,
        "call_p90_us": times["call"].p90 * 1e3,
        "bare_us": times["bare"].median * 1e3,
        "bare_p90_us": times["bare"].p90 * 1e3,
        "bare_at_once_us": times["bare at once"].median * 1e3,
        "host_us": (times["call"].median - times["bare"].median) * 1e3,
        "calls": times["call"].count,
    }


def _measure_loop(runner: ModelRunner, count: int, rounds: int) -> dict[str, Any]:
    decodes, restore = models.prefilled(runner, count, CONTEXT)
    runs = [DecodeRun(cache_id=one, token=token, pos=at, max_tokens=LOOP) for one, token, at in decodes]
    contestants = {
        "call": Contestant(lambda: runner.decode_n(runs), restore, BURST),
        "bare": Contestant(BareLoop(runner, count).at(CONTEXT), restore, BURST),
    }
    times = alternate(contestants, rounds=rounds)
    restore()
    host = (times["call"].median - times["bare"].median) * 1e3
    return {
        "rows": count,
        "tokens": LOOP,
        "call_us": times["call"].median * 1e3,
        "bare_us": times["bare"].median * 1e3,
        "host_us_a_step": host / LOOP,
        "host_us_a_token": host / LOOP / count,
    }


def _generated(subject: models.Subject, sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Measures `LLM.generate`, without the multi-step programs that it would use."""
    counts = tuple(sorted({min(count, sizes[-1]) for count in GENERATE_ROWS}))
    runner = models.run(subject, _engine(counts, 0))
    runner.warmup(progress=True)
    found = [_generate(runner, count, rounds) for count in counts]
    runner.close()
    return found


def _generate(runner: ModelRunner, count: int, rounds: int) -> dict[str, Any]:
    found = measure_generation(runner, count, context=CONTEXT, tokens=LOOP + 1, temperature=TEMPERATURE, rounds=rounds)
    return {
        "rows": count,
        "call_us": found.call_us,
        "bare_us": found.bare_us,
        "sampled_us": found.sampled_us,
        "host_us": found.call_us - found.bare_us,
        "over_sampled_us": found.call_us - found.sampled_us,
    }


def _by_leaf(rows: list[dict[str, Any]]) -> float | None:
    """Microseconds that one more leaf costs the bare call at the fewest rows; None with one model alone.

    A model whose layers run in a loop has another program, and does not count.
    """
    fewest = [row for row in rows if row["rows"] == rows[0]["rows"] and row["layout"] == CHECKPOINT]
    if len(fewest) < 2:
        return None
    return fit_line([row["leaves"] for row in fewest], [row["bare_us"] for row in fewest]).slope


def _judge(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Prints whether one number of rows reached its aim, and gives that back."""
    aim = AIMS[row["rows"]]
    reached = row["host_us"] <= aim
    print(
        f"aim: {name} at most {aim:.0f} us over the bare step at {row['rows']} rows: "
        f"{'reached' if reached else 'missed'} with {row['host_us']:.0f}"
    )
    return {"call": name, "rows": row["rows"], "aim_us": aim, "host_us": row["host_us"], "reached": reached}


def _show_loops(loops: list[dict[str, Any]]) -> None:
    keys = "call_us", "bare_us"
    lines = [
        [f"{row['rows']}", *(f"{row[key]:.0f}" for key in keys), f"{row['host_us_a_step']:.1f}",
         f"{row['host_us_a_token']:.2f}"]
        for row in loops
    ]  # fmt: skip
    card.show_table(("rows", f"decode_n({LOOP}) us", "bare us", "host us a step", "host us a token"), lines)
    if loops:
        most = loops[0]["host_us_a_token"]
        print(
            f"aim: host at most {LOOP_AIM:.0f} us a token at {loops[0]['rows']} row in decode_n({LOOP}): "
            f"{'reached' if most <= LOOP_AIM else 'missed'} with {most:.1f}"
        )


def _show_generated(generated: list[dict[str, Any]]) -> None:
    keys = "call_us", "bare_us", "host_us", "sampled_us", "over_sampled_us"
    lines = [[f"{row['rows']}", *(f"{row[key]:.0f}" for key in keys)] for row in generated]
    headings = "rows", "LLM.generate us a step", "bare us", "over bare us", "with sampler us", "over that us"
    card.show_table(headings, lines)


def _show(rows: list[dict[str, Any]]) -> None:
    keys = "call_us", "call_p90_us", "bare_us", "bare_p90_us", "host_us", "bare_at_once_us"
    lines = [[f"{row['rows']}", f"{row['leaves']}", *(f"{row[key]:.0f}" for key in keys)] for row in rows]
    card.show_table(("rows", "leaves", "call us", "p90", "bare us", "p90", "host us", "bare at once us"), lines)


if __name__ == "__main__":
    main()
