"""The least a step can cost: operations that must be done and bytes that must be read, counted from the configuration.

What is counted, and what is not, is said in ferrum_jax/planning/work.py: the floor is below what any implementation can
reach.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.machine import Machine
from bench.timing import Timing
from ferrum_jax.config import ModelConfig
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.planning import work


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


def decode_work(cfg: ModelConfig, *, rows: int, context: int, itemsize: int, specs: ParamTree | None = None) -> Work:
    """Work of one token for each of `rows` sequences that hold `context` positions already."""
    return step_work(cfg, [(context, 1)] * rows, itemsize=itemsize, specs=specs)


def prefill_work(cfg: ModelConfig, *, tokens: int, itemsize: int) -> Work:
    """Work of a prompt from position 0, of whose tokens only the last wants logits."""
    return step_work(cfg, [(0, tokens)], itemsize=itemsize)


def step_work(
    cfg: ModelConfig, rows: Sequence[tuple[int, int]], *, itemsize: int, specs: ParamTree | None = None
) -> Work:
    """Work of a step: each row holds some positions and has some new tokens, of which the last wants logits.

    `specs` are those of the parameters, if some are quantised.
    """
    found = work.step_work(cfg, rows, itemsize=itemsize, specs=specs)
    return Work(operations=found.operations, num_bytes=found.num_bytes)
