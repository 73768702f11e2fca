"""How do the backends of attention compare, by batch and context?

Some layers' attention in one program, each layer's queries being the outputs of the one before, over a KV of its own,
each backend with the layout that it reads, in turn: rows of one token after a context, and query blocks of one prompt
after a prefix. Times are of one layer. No weights are read: the floor is the time of reading the keys and values that
are seen, or of their products, whichever is larger. Blocks of a row lie anywhere in the pool.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import card, models
from bench.floor import Work
from bench.machine import Probes, ceilings, make_probes, measure
from bench.timing import Contestant, alternate
from ferrum_jax.config import ATTENTIONS, ModelConfig
from ferrum_jax.contract.errors import FerrumError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.backends import cache_spec, choose_attention
from ferrum_jax.ops.attention import attend
from ferrum_jax.ops.batch import Rows

BLOCK = 128  # positions
LAYERS, MOST_LAYERS = 4, 64  # in one program; more on an accelerator, where a few short rows take less than a dispatch
MOST_BYTES = 4e9  # of the KV, where there are more layers than LAYERS
BURST = 4  # calls in a row


@dataclass(frozen=True)
class Load:
    """Rows of one token, each of a sequence of its own; or of several, consecutive query blocks of one prompt."""

    rows: int
    tokens: int
    context: int


LOADS = [Load(rows, 1, context) for context in (1024, 8192) for rows in (1, 8, 32)]
LOADS += [Load(128, 1, 1024), Load(1, 1, 16384), Load(16, 128, 0), Load(16, 128, 6144)]
SMOKE_LOADS = [Load(2, 1, 64), Load(2, 16, 32)]


def main() -> None:
    """Runs the sweep and prints the table and the JSON line."""
    found = card.options(__doc__)
    subject = models.read(found)
    probes = make_probes(subject.dtype, smoke=found.smoke)
    conditions = card.show_card(subject, machine=measure(probes))
    rows = []
    for load in SMOKE_LOADS if found.smoke else LOADS:
        rows += _measure(load, subject.config, subject.dtype, probes, found.rounds)
    _show(rows)
    card.finish("attention", found, conditions, rows)


def _measure(load: Load, cfg: ModelConfig, dtype: str, probes: Probes, rounds: int) -> list[dict[str, Any]]:
    work = _work(load, cfg, dtype)
    layers = _num_layers(work)
    calls = {name: Contestant(_call(load, cfg, dtype, name, layers), burst=BURST) for name in _possible(cfg, dtype)}
    times = alternate(calls | probes.contestants, rounds=rounds)
    machine = ceilings(probes, times)
    floor = work.floor_ms(machine)
    return [
        {
            "backend": name,
            "rows": load.rows,
            "tokens": load.tokens,
            "context": load.context,
            "layers": layers,
            "call_ms": times[name].median / layers,
            "call_p90_ms": times[name].p90 / layers,
            "read_gb_per_second": work.num_bytes * layers / times[name].median / 1e6,
            "floor_ms": floor,
            "floor_limit": work.limit(machine),
            "call_over_floor": times[name].median / layers / floor,
        }
        for name in calls
    ]


def _num_layers(work: Work) -> int:
    """How many layers, of that work each, take long beside a dispatch and have a KV that fits."""
    if jax.default_backend() == "cpu":
        return LAYERS
    return max(LAYERS, min(MOST_LAYERS, int(MOST_BYTES // work.num_bytes)))


def _possible(cfg: ModelConfig, dtype: str) -> list[str]:
    names = []
    for name in ATTENTIONS:
        try:
            choose_attention(name, cfg, platform=jax.default_backend(), dtype=dtype, kv_dtype=dtype, block_size=BLOCK)
        except FerrumError:
            continue  # this device or this model is not for it
        names.append(name)
    return names


def _call(load: Load, cfg: ModelConfig, dtype: str, backend: str, layers: int) -> Callable[[], Any]:
    """Compiles the attention of some layers over a KV full of random numbers."""
    sequences = load.rows if load.tokens == 1 else 1
    columns = -(-(load.context + load.rows * load.tokens // sequences) // BLOCK)
    every = cache_spec(cfg, num_blocks=sequences * columns, block_size=BLOCK, dtype=dtype, attention=backend)
    spec = replace(every, num_layers=layers)
    order = np.random.default_rng(0).permutation(spec.num_blocks).astype(np.int32).reshape(sequences, columns)
    before = np.zeros(load.rows, np.int32) if load.tokens == 1 else np.arange(load.rows, dtype=np.int32) * load.tokens
    rows = Rows(
        tokens=jnp.zeros((load.rows, load.tokens), jnp.int32),
        lengths=jnp.asarray(load.context + before),
        counts=jnp.full(load.rows, load.tokens, jnp.int32),
        tables=jnp.asarray(np.broadcast_to(order, (load.rows, columns))),
    )
    keys = iter(jax.random.split(jax.random.key(0), 3))
    kv = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape, leaf.dtype), state.shapes(spec))
    q = jax.random.normal(next(keys), (load.rows, load.tokens, cfg.num_attention_heads, cfg.head_dim), dtype)

    def attend_all(q: jax.Array, kv: KvState[jax.Array], rows: Rows[jax.Array]) -> jax.Array:
        for layer in range(layers):
            q = attend(q, kv, layer, rows, scale=cfg.head_dim**-0.5, window=None, backend=backend)
        return q

    compiled = jax.jit(attend_all).lower(q, kv, rows).compile()
    return lambda: compiled(q, kv, rows)


def _work(load: Load, cfg: ModelConfig, dtype: str) -> Work:
    """Two products for every pair of a token and a position it sees; what is cached is read once a sequence."""
    sequences, tokens = (load.rows, 1) if load.tokens == 1 else (1, load.rows * load.tokens)
    pairs = tokens * load.context + tokens * (tokens + 1) // 2
    width = cfg.head_dim * jnp.dtype(dtype).itemsize
    value = cfg.head_dim if cfg.latent is None else cfg.latent.kv_lora_rank
    return Work(
        operations=2 * sequences * pairs * cfg.num_attention_heads * (cfg.head_dim + value),
        num_bytes=(1 if cfg.latent else 2) * sequences * (load.context + tokens) * cfg.num_key_value_heads * width,
    )


def _show(rows: list[dict[str, Any]]) -> None:
    headings = "backend", "rows", "tokens", "context", "call ms", "p90", "GB/s", "floor ms", "limit", "/ floor"
    lines = []
    for row in rows:
        cells = [row["backend"], f"{row['rows']}", f"{row['tokens']}", f"{row['context']}", f"{row['call_ms']:.3f}"]
        cells += [f"{row['call_p90_ms']:.3f}", f"{row['read_gb_per_second']:.1f}", f"{row['floor_ms']:.3f}"]
        cells += [row["floor_limit"], f"{row['call_over_floor']:.2f}"]
        lines.append(cells)
    card.show_table(headings, lines, left=("backend", "limit"))


if __name__ == "__main__":
    main()
