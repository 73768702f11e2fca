"""How much memory does an engine take, stage by stage, beside what its weights and its KV must take?

The resident set of the process (which counts the pages of a mapped checkpoint, too) and, where the device tells, its
memory in use: at the start, with the weights, with the KV, warm, and after a prompt and a decoded token. A first start
compiles every declared step, a later one finds them on disk, and both load what they use: each is a process of its own.
Memory is no distribution: each figure is read once. What may be taken at the end is what interpreter and JAX took at
the start, the parameters, the KV, the largest temporaries of a step, and 300 MB for everything else; the ratio is of
what is taken to that, in the device's memory where it has its own. Parameters have the checkpoint's layout, whose
programs are the largest.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import psutil

from bench import card, models
from ferrum_jax.models.layout import CHECKPOINT
from ferrum_jax.sharding.devices import find_device

PROMPT = 512  # tokens
ALLOWANCE = 300_000_000  # bytes of compiled steps, tokenizers, allocators


def main() -> None:
    """Starts twice, or is one of the starts, and prints the tables and the JSON line."""
    found = card.options(__doc__, timed=False, more=_more)
    if found.artifacts is not None:
        _start(found)
        return
    starts = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("first", "later"):
            print(f"{name} start", flush=True)
            starts[name] = _run_start(found, Path(scratch, "artifacts"))
    ratios = {f"{name}_ratio": start["ratio"] for name, start in starts.items()}
    rows = [{"start": name, **row} for name, start in starts.items() for row in start["rows"]]
    card.finish("memory", found, starts["first"]["card"], rows, **ratios)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--artifacts", type=Path, help="be one start, with compiled steps kept in this folder")


def _run_start(found: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs one start as a process of its own, and gives its JSON object."""
    command = [sys.executable, "-m", "bench.memory", "--artifacts", str(folder)]
    command += ["--smoke"] if found.smoke else []
    command += [] if found.model is None else ["--model", found.model]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"a start failed with {done.returncode}: {done.stdout[-2000:]}")
    *shown, line = done.stdout.splitlines()
    print("\n".join(shown), flush=True)
    return json.loads(line)


def _start(found: argparse.Namespace) -> None:
    """Walks through the stages and prints the table and the JSON line."""
    jax.block_until_ready(jax.numpy.zeros(1))  # the backend itself
    rows = [_stage("start", 0)]
    subject = models.read(found)
    jax.block_until_ready(subject.params)
    rows.append(_stage("weights", sum(leaf.nbytes for leaf in jax.tree.leaves(subject.params))))
    runner = models.run(subject, models.WIDE, CHECKPOINT, artifacts=found.artifacts)
    rows.append(_stage("KV", runner.plan.cache.num_bytes))
    runner.warmup(progress=True)
    rows.append(_stage("warm", 0))
    runner.prefill("a", models.prompt(subject.config, PROMPT))
    runner.decode("a", 1, PROMPT)
    stats = runner.compile_stats()
    rows.append(_stage("one prompt", max(step.get("temporary_bytes", 0) for step in stats["steps"].values())))
    conditions = card.show_card(subject, runner.plan.cache)
    _show(rows)
    print("expected: bytes that a stage must add; of the last, the largest temporaries of a step at most")
    print(f"steps in memory: {len(stats['steps'])}, of them compiled here {stats['compiled']}")
    taken, allowed = _judge(rows)
    card.finish("memory", found, conditions, rows, taken_bytes=taken, allowed_bytes=allowed, ratio=taken / allowed)


def _judge(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Prints whether the whole stays within what may be taken, and gives both in bytes."""
    kind = "resident_bytes" if rows[-1]["device_bytes"] is None else "device_bytes"
    taken = rows[-1][kind]
    allowed = rows[0][kind] + sum(row["expected_bytes"] for row in rows) + ALLOWANCE
    print(
        f"taken {taken / 1e6:,.1f} MB of the {allowed / 1e6:,.1f} MB that start, weights, KV, temporaries and "
        f"{ALLOWANCE / 1e6:.0f} MB make: {taken / allowed:.2f}, {'within' if taken <= allowed else 'above'}"
    )
    return taken, allowed


def _stage(name: str, expected: int) -> dict[str, Any]:
    stats = find_device(None).memory_stats() or {}
    resident = psutil.Process().memory_info().rss
    return {
        "stage": name,
        "expected_bytes": expected,
        "resident_bytes": resident,
        "device_bytes": stats.get("bytes_in_use"),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    lines = []
    before = rows[0]["resident_bytes"]
    for row in rows:
        device = "" if row["device_bytes"] is None else f"{row['device_bytes'] / 1e6:,.1f}"
        added, before = row["resident_bytes"] - before, row["resident_bytes"]
        cells = [row["stage"], f"{row['resident_bytes'] / 1e6:,.1f}", f"{added / 1e6:,.1f}"]
        lines.append([*cells, f"{row['expected_bytes'] / 1e6:,.1f}", device])
    card.show_table(("stage", "resident MB", "added", "expected", "device MB"), lines, left=("stage",))


if __name__ == "__main__":
    main()
