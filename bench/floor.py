"""The least a step can cost: operations that must be done and bytes that must be read, counted from the configuration.

Attention counts the positions that are seen, and no softmax, norm or rotation is counted: the floor is below what any
implementation can reach. Of experts, each token meets those it chooses, and a step reads as many as tokens would choose
that choose evenly and by themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.machine import Machine
from bench.timing import Timing
from ferrum_jax.config import ModelConfig
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import named_leaves


@dataclass(frozen=True)
class Work:
    """What a step must do."""

    operations: int  # two for each multiplication and addition
    num_bytes: int  # weights and KV read once

    def floor_ms(self, machine: Machine) -> float:
        """Milliseconds that a machine needs at least, whichever of the two limits it."""
        return max(self.operations / machine.product_rate, self.num_bytes / machine.read_rate) * 1e3

    def limit(self, machine: Machine) -> str:
        """Which of the two limits a machine."""
        by_products = self.operations / machine.product_rate > self.num_bytes / machine.read_rate
        return "products" if by_products else "reading"


def against_floor(work: Work, machine: Machine, call: Timing) -> dict[str, float]:
    """Returns the times of a call, its work and how far it is above the floor, as a row's columns."""
    floor = work.floor_ms(machine)
    return {
        "call_ms": call.median,
        "call_p90_ms": call.p90,
        "floor_ms": floor,
        "call_over_floor": call.median / floor,
        **place(work, machine),
    }


def place(work: Work, machine: Machine) -> dict[str, float]:
    """Says where a call stands on the roofline of the machine as it was then, as a row's columns."""
    return {
        "operations": work.operations,
        "num_bytes": work.num_bytes,
        "product_rate": round(machine.product_rate),
        "read_rate": round(machine.read_rate),
    }


def decode_work(cfg: ModelConfig, *, rows: int, context: int, itemsize: int) -> Work:
    """Work of one token for each of `rows` sequences that hold `context` positions already."""
    return step_work(cfg, [(context, 1)] * rows, itemsize=itemsize)


def prefill_work(cfg: ModelConfig, *, tokens: int, itemsize: int) -> Work:
    """Work of a prompt from position 0, of whose tokens only the last wants logits."""
    return step_work(cfg, [(0, tokens)], itemsize=itemsize)


def step_work(cfg: ModelConfig, rows: Sequence[tuple[int, int]], *, itemsize: int) -> Work:
    """Work of a step: each row holds some positions and has some new tokens, of which the last wants logits."""
    named = named_leaves(family(cfg).param_specs(cfg)).items()
    leaves = [spec for name, spec in named if name.startswith("model.layers.")]
    experts = sum(math.prod(spec.shape) for spec in leaves if "expert" in spec.axes)
    products = sum(math.prod(spec.shape) for spec in leaves if "expert" not in spec.axes and len(spec.shape) == 2)
    head = cfg.vocab_size * cfg.hidden_size
    seen, held = 0, 0  # positions, summed over layers: by every token, and by any
    for window in cfg.layer_windows:
        for start, count in rows:
            spans = [min(at + 1, window or at + 1) for at in range(start, start + count)]
            seen += sum(spans)
            held += min(start + count, spans[0] + count - 1)
    if cfg.latent is None:
        attention = 4 * cfg.num_attention_heads * cfg.head_dim * seen
        cached = 2 * cfg.num_key_value_heads * cfg.head_dim * held
    else:  # one vector is the key of all heads, and but for what turns their value, too
        value = cfg.latent.kv_lora_rank
        attention = 2 * cfg.num_attention_heads * (2 * value + cfg.latent.qk_rope_head_dim) * seen
        cached = (value + cfg.latent.qk_rope_head_dim) * held
    tokens = sum(count for _, count in rows)
    share = 0.0 if cfg.experts is None else cfg.experts.num_experts_per_tok / cfg.experts.num_experts
    multiplied, met = round(experts * share * tokens), round(experts * (1 - (1 - share) ** tokens))
    return Work(
        operations=2 * (products * tokens + multiplied) + 2 * head * len(rows) + attention,
        num_bytes=itemsize * (products + met + head + cached),
    )
