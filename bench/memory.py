"""How much memory does an engine take, stage by stage, beside what its weights and its KV must take?

The resident set of the process (which counts the pages of a mapped checkpoint, too) and, where the device tells, its
memory in use: at the start, with the weights, with the KV, with every step compiled, and after a prompt and a decoded
token. Memory is no distribution: each figure is read once.
"""

from typing import Any

import jax
import psutil

from bench import card, models
from ferrum_jax.sharding.devices import find_device

PROMPT = 512  # tokens


def main() -> None:
    """Walks through the stages and prints the table and the JSON line."""
    found = card.options(__doc__, timed=False)
    jax.block_until_ready(jax.numpy.zeros(1))  # the backend itself
    rows = [_stage("start", 0)]
    subject = models.read(found)
    jax.block_until_ready(subject.params)
    rows.append(_stage("weights", sum(leaf.nbytes for leaf in jax.tree.leaves(subject.params))))
    runner = models.run(subject, models.WIDE)
    rows.append(_stage("KV", runner.plan.cache.num_bytes))
    runner.warmup(progress=True)
    rows.append(_stage("compiled steps", 0))
    runner.prefill("a", models.prompt(subject.config, PROMPT))
    runner.decode("a", 1, PROMPT)
    temporary = [step.get("temporary_bytes", 0) for step in runner.compile_stats()["steps"].values()]
    rows.append(_stage("one prompt", max(temporary)))
    conditions = card.show_card(subject, runner.plan.cache)
    _show(rows)
    print("expected: bytes that a stage must add; of the last, the largest temporaries of a step at most")
    card.finish("memory", found, conditions, rows)


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
