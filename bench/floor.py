"""The least a step can cost: operations that must be done and bytes that must be read, counted from the configuration.

Attention counts the positions that are seen, and no softmax, norm or rotation is counted: the floor is below what any
implementation can reach.
"""

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
    """Gives the times of a call and how far they are above the floor, as a row's columns."""
    floor = work.floor_ms(machine)
    return {
        "call_ms": call.median,
        "call_p90_ms": call.p90,
        "floor_ms": floor,
        "call_over_floor": call.median / floor,
    }


def decode_work(cfg: ModelConfig, *, rows: int, context: int, itemsize: int) -> Work:
    """Work of one token for each of `rows` sequences that hold `context` positions already."""
    return _work(cfg, starts=[context] * rows, each=1, itemsize=itemsize)


def prefill_work(cfg: ModelConfig, *, tokens: int, itemsize: int) -> Work:
    """Work of a prompt from position 0, of whose tokens only the last wants logits."""
    return _work(cfg, starts=[0], each=tokens, itemsize=itemsize)


def _work(cfg: ModelConfig, *, starts: list[int], each: int, itemsize: int) -> Work:
    """Work of `each` new tokens of sequences that hold `starts` positions; each sequence's last token wants logits."""
    leaves = named_leaves(family(cfg).param_specs(cfg)).items()
    products = sum(
        spec.shape[0] * spec.shape[1]
        for name, spec in leaves
        if name.startswith("model.layers.") and len(spec.shape) == 2
    )
    head = cfg.vocab_size * cfg.hidden_size
    seen, held = 0, 0  # positions, summed over layers: by every token, and by any
    for window in cfg.layer_windows:
        for start in starts:
            spans = [min(at + 1, window or at + 1) for at in range(start, start + each)]
            seen += sum(spans)
            held += min(start + each, spans[0] + each - 1)
    attention = 4 * cfg.num_attention_heads * cfg.head_dim * seen
    cached = 2 * cfg.num_key_value_heads * cfg.head_dim * held
    return Work(
        operations=2 * products * len(starts) * each + 2 * head * len(starts) + attention,
        num_bytes=itemsize * (products + head + cached),
    )
