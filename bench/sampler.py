"""What does the choice of a token cost, by its settings, with XLA's code and with the CPU's kernel?

`ops.sampling.choose` alone, of random scores for the model's vocabulary, both ways in turn, and `likeliest`, which
finds what `logprobs=k` reports. With a deviation of 4 few tokens are likely, with 1 thousands are. The floor is the
time of reading the scores once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from bench import card, models
from bench.floor import Work
from bench.machine import Probes, ceilings, make_probes, measure
from bench.timing import Contestant, alternate
from ferrum_jax.ops import native, sampling
from ferrum_jax.ops.kernel_use import kernels
from ferrum_jax.ops.sampling import SampleInputs

ROWS = (1, 8)
BURST = 20  # calls in a row
LIKELIEST = "the 20 likeliest"
SETTINGS: dict[str, tuple[float, dict[str, float]]] = {  # the scores' deviation, and how they are sampled
    "greedy": (4, {"temperature": 0}),
    "temperature": (4, {"temperature": 0.8}),
    "top-k 50": (4, {"temperature": 0.8, "top_k": 50}),
    "min-p 0.05": (4, {"temperature": 0.8, "min_p": 0.05}),
    "top-p 0.95, few likely": (4, {"temperature": 0.8, "top_p": 0.95}),
    "top-p 0.95, many likely": (1, {"temperature": 0.8, "top_p": 0.95}),
    LIKELIEST: (4, {}),
}


def main() -> None:
    """Runs every setting and prints the table and the JSON line."""
    found = card.options(__doc__)
    subject = models.read(found)
    probes = make_probes("float32", smoke=found.smoke)
    conditions = card.show_card(subject, machine=measure(probes))
    rows = [
        _measure(name, count, subject.config.vocab_size, probes, found.rounds) for count in ROWS for name in SETTINGS
    ]
    _show(rows)
    card.finish("sampler", found, conditions, rows)


def _measure(name: str, rows: int, vocab_size: int, probes: Probes, rounds: int) -> dict[str, Any]:
    ways = dict(_ways(name, rows, vocab_size))
    calls = {way: Contestant(call, burst=BURST) for way, call in ways.items()}
    times = alternate(calls | probes.contestants, rounds=rounds)
    floor = Work(operations=0, num_bytes=4 * rows * vocab_size).floor_ms(ceilings(probes, times))
    found: dict[str, Any] = {"setting": name, "rows": rows, "floor_ms": floor}
    for way in ways:
        found |= {f"{way}_ms": times[way].median, f"{way}_p90_ms": times[way].p90}
    return found


def _ways(name: str, rows: int, vocab_size: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    deviation, asked = SETTINGS[name]
    scores = jax.random.normal(jax.random.key(0), (rows, vocab_size)) * deviation
    inputs = SampleInputs(
        temperature=jnp.full(rows, asked.get("temperature", 1), jnp.float32),
        top_k=jnp.full(rows, asked.get("top_k", 0), jnp.int32),
        top_p=jnp.full(rows, asked.get("top_p", 1), jnp.float32),
        min_p=jnp.full(rows, asked.get("min_p", 0), jnp.float32),
        seed=jnp.arange(rows, dtype=jnp.uint32),
        position=jnp.arange(rows, dtype=jnp.int32),
    )

    def run(scores: jax.Array, inputs: SampleInputs[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return sampling.likeliest(scores) if name == LIKELIEST else sampling.choose(scores, inputs)

    for way, use in {"xla": False, "kernel": True}.items():
        if use and (jax.default_backend() != "cpu" or native.instruction_set() is None):
            continue
        with kernels("cpu" if use else "xla"):
            compiled = jax.jit(lambda *given: run(*given)).lower(scores, inputs).compile()
        yield way, lambda compiled=compiled: compiled(scores, inputs)


def _show(rows: list[dict[str, Any]]) -> None:
    headings = "setting", "rows", "XLA ms", "p90", "kernel ms", "p90", "floor ms"
    fields = "xla_ms", "xla_p90_ms", "kernel_ms", "kernel_p90_ms", "floor_ms"
    lines = [
        [row["setting"], f"{row['rows']}", *(f"{row[field]:.3f}" if field in row else "" for field in fields)]
        for row in rows
    ]
    card.show_table(headings, lines, left=("setting",))


if __name__ == "__main__":
    main()
