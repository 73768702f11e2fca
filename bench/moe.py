"""Does a token cost what the experts cost that it goes through, or what all experts of the layer cost?

Two layers at the shape of Qwen3-30B-A3B: 128 experts of 3 x 768 x 2048, of which a token chooses 8, with random weights
and a small vocabulary. For each batch, in turn: a compiled decode step of different tokens; one layer's experts over
random tokens, whose choices are counted (`active`); and the same tokens through every expert, the others' outputs
weighed by zero. The floor of the layer reads the active experts' weights once and multiplies by what was chosen.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import card, models
from bench.bare import BareStep
from bench.floor import Work, decode_work
from bench.machine import Probes, ceilings, make_probes, measure
from bench.models import Subject
from bench.timing import Contestant, alternate
from ferrum_jax.compile.step import StepKey
from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models.backends import cache_spec
from ferrum_jax.models.feed_forward import NAMES, mix_experts, route
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops import native
from ferrum_jax.ops.kernel_use import kernels
from ferrum_jax.ops.linear import linear
from ferrum_jax.planning.subject import CONFIGURATIONS
from ferrum_jax.sharding.devices import default_dtype, find_device

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows
SMOKE_BATCHES = (1, 8)
CONTEXT, BLOCK = 64, 64  # positions before the token, positions in a KV block
BURST = 4  # calls in a row
CHANGES = {"num_hidden_layers": 2, "vocab_size": 32768}
TINY = {"hidden_size": 32, "moe_intermediate_size": 24, "num_experts": 16, "num_experts_per_tok": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 193}  # fmt: skip


def main() -> None:
    """Runs the sweep over batches and prints the table and the JSON line."""
    found = card.options(__doc__)
    if found.model is not None:
        raise SystemExit(f"the model is two layers of qwen3-30b-a3b, --model {found.model} contradicts that")
    cfg = ModelConfig.from_hf(CONFIGURATIONS["qwen3-30b-a3b"] | CHANGES | (TINY if found.smoke else {}))
    name = "tiny random experts" if found.smoke else "two layers of qwen3-30b-a3b, random weights"
    subject = models.random(name, cfg, default_dtype(find_device(None)))
    probes = make_probes(subject.dtype, smoke=found.smoke)
    batches = SMOKE_BATCHES if found.smoke else BATCHES
    conditions = card.show_card(subject, _cache(cfg, subject, batches[-1]), measure(probes))
    rows = [_measure(subject, batch, probes, found.rounds) for batch in batches]
    _show(rows)
    card.finish("moe", found, conditions, rows)


def _cache(cfg: ModelConfig, subject: Subject, rows: int) -> CacheSpec:
    return cache_spec(cfg, num_blocks=2 * rows, block_size=BLOCK, dtype=subject.dtype, attention=_kernels())


def _kernels() -> str:
    """Returns the kernels that a served step uses here."""
    if find_device(None).platform == "gpu":
        return "triton"
    return "xla" if native.instruction_set() is None else "cpu"


def _measure(subject: Subject, batch: int, probes: Probes, rounds: int) -> dict[str, Any]:
    cfg, experts = subject.config, subject.config.experts
    assert experts is not None
    step = BareStep(cfg, subject.params, _cache(cfg, subject, batch), StepKey(batch, 0, 0, 2, batch))
    tokens = np.random.default_rng(batch).permutation(cfg.vocab_size)[:batch, None]
    block: ParamTree = subject.params["model"]["layers"][0]["mlp"]
    x = jax.random.normal(jax.random.key(batch), (batch, cfg.hidden_size), subject.dtype)
    chosen, *_ = route(linear(x, block["gate"]["weight"]), experts)
    active = len(np.unique(chosen))
    calls = {
        "step": step.at(CONTEXT, tokens),
        "layer": _compiled(lambda block, x: mix_experts(block, x, experts)[0], block, x),
        "every": _compiled(lambda block, x: _every_expert(block, x, cfg), block, x),
    }
    sides = {name: Contestant(call, burst=BURST) for name, call in calls.items()}
    times = alternate(sides | probes.contestants, rounds=rounds)
    itemsize, size = np.dtype(subject.dtype).itemsize, 3 * experts.moe_intermediate_size * cfg.hidden_size
    work = Work(operations=2 * chosen.size * size, num_bytes=itemsize * active * size)
    machine = ceilings(probes, times)
    whole = decode_work(cfg, rows=batch, context=CONTEXT, itemsize=itemsize)
    return {
        "rows": batch,
        "active": active,
        "experts": experts.num_experts,
        "layer_ms": times["layer"].median,
        "layer_p90_ms": times["layer"].p90,
        "floor_ms": work.floor_ms(machine),
        "layer_over_floor": times["layer"].median / work.floor_ms(machine),
        "every_ms": times["every"].median,
        "every_over_layer": times["every"].median / times["layer"].median,
        "step_ms": times["step"].median,
        "step_p90_ms": times["step"].p90,
        "step_floor_ms": whole.floor_ms(machine),
        "step_over_floor": times["step"].median / whole.floor_ms(machine),
        "step_ms_per_token": times["step"].median / batch,
        **{rate: round(value) for rate, value in asdict(machine).items()},
    }


def _compiled(function: Callable[..., jax.Array], block: ParamTree, x: jax.Array) -> Callable[[], jax.Array]:
    with kernels(_kernels()):  # as a step has it
        executable = jax.jit(function).lower(block, x).compile()
    return lambda: executable(block, x)


def _every_expert(block: ParamTree, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Goes over all experts of a layer, each with every token."""
    experts = cfg.experts
    assert experts is not None
    logits = linear(x, block["gate"]["weight"])
    chosen, shares, _ = route(logits, experts)
    weighed = jnp.zeros(logits.shape, jnp.float32).at[jnp.arange(len(x))[:, None], chosen].set(shares)

    def step(total: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        gate, up, down, share = one
        made = linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)
        return total + share[:, None] * made, None

    stacks = *(block["experts"][name]["weight"] for name in NAMES), weighed.T
    return jax.lax.scan(step, jnp.zeros(x.shape, jnp.float32), stacks)[0].astype(x.dtype)


def _show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        cells = [f"{row['rows']}", f"{row['active']} of {row['experts']}"]
        cells += [f"{row[name]:.1f}" for name in ("layer_ms", "layer_p90_ms", "floor_ms")]
        cells += [f"{row['layer_over_floor']:.2f}", f"{row['every_ms']:.1f}", f"{row['every_over_layer']:.2f}"]
        cells += [f"{row['step_ms']:.1f}", f"{row['step_floor_ms']:.1f}", f"{row['step_ms_per_token']:.1f}"]
        lines.append(cells)
    headings = ("rows", "active", "layer ms", "p90", "floor ms", "/ floor", "every ms", "/ layer", "step ms",
                "floor ms", "a token")  # fmt: skip
    card.show_table(headings, lines)


if __name__ == "__main__":
    main()
