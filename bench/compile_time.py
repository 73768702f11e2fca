"""How long does `warmup` take, in all and by step?

Every step of the default buckets is lowered and compiled on all cores, once, so there is neither a median nor anything
to warm. The seconds of a step are wall-clock while others compile beside it, so they add up to more than the whole.
"""

import time
from typing import Any

import jax

from bench import card, models
from ferrum_jax.config import EngineConfig

ENGINE = EngineConfig(max_seqs=8, kv_capacity=2048)
SMOKE = EngineConfig(max_seqs=1, kv_capacity=64)


def main() -> None:
    """Compiles every step and prints the table and the JSON line."""
    found = card.options(__doc__, timed=False)
    subject = models.read(found)
    runner = models.run(subject, SMOKE if found.smoke else ENGINE)
    conditions = card.show_card(subject, runner.plan.cache)
    conditions["persistent_cache"] = jax.config.values["jax_compilation_cache_dir"]
    if conditions["persistent_cache"]:
        print("JAX's persistent cache is on: unset JAX_COMPILATION_CACHE_DIR to time the compiler")
    started = time.perf_counter()
    runner.warmup(progress=True)
    seconds = time.perf_counter() - started
    stats = runner.compile_stats()
    rows: list[dict[str, Any]] = [{"step": name, **figures} for name, figures in stats["steps"].items()]
    _show(rows)
    per_step = seconds / len(rows)
    print(f"{len(rows)} steps in {seconds:.1f} s, {per_step:.2f} s a step; their own seconds add up to "
          f"{stats['compile_seconds']:.1f}")  # fmt: skip
    card.finish("compile_time", found, conditions, rows, steps=len(rows), seconds=seconds, seconds_per_step=per_step)


def _show(rows: list[dict[str, Any]]) -> None:
    lines = [[row["step"], f"{row['seconds']:.2f}", f"{row.get('temporary_bytes', 0) / 1e6:.1f}"] for row in rows]
    card.show_table(("step", "seconds", "temporaries MB"), lines, left=("step",))


if __name__ == "__main__":
    main()
