"""Weak scaling: the load grows with the devices, and what part of their time is lost.

The ideal is the roofline of the undivided step, shared by all devices. What a device does beyond its share is padding,
and copies: key/value heads where devices outnumber them, a latent KV, routers and norms. Collectives come on top, as
nothing overlaps with them. The host prepares the next step while the device runs one, and is lost time only where it
takes longer.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ferrum_jax.planning.estimate import Deployment, StepTime, parameter_bytes, time_step

HOST_SECONDS, HOST_SECONDS_PER_ROW = 210e-6, 12e-6  # of `LLM.generate`: assumed, above what bench.overhead measures


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """A decode step on some devices; seconds."""

    devices: int
    data: int  # replicas
    model: int  # devices of each
    rows: int  # of all replicas
    fits: bool  # parameters and KV, temporaries left out
    ideal_s: float
    padding_s: float
    collective_s: float
    host_s: float  # that the device waits
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.ideal_s + self.padding_s + self.collective_s + self.host_s

    @property
    def efficiency(self) -> float:
        """Share of the devices' time that is not lost."""
        return self.ideal_s / self.seconds

    def summary(self) -> dict[str, Any]:
        """All figures, by name."""
        return asdict(self) | {"step_s": self.seconds, "efficiency": self.efficiency}


def scale(deployment: Deployment, counts: Sequence[int], *, rows_per_device: int, widest: int) -> list[ScalingRow]:
    """Times a decode step on each number of devices; mesh and rows of the deployment are replaced.

    At most `widest` devices share one replica; more devices are more replicas.

    Raises:
        ConfigError: more devices than the model can be divided over, or than anything known connects.
    """
    return [_scaled(deployment, count, rows_per_device, min(count, widest)) for count in counts]


def _scaled(deployment: Deployment, count: int, rows_per_device: int, model: int) -> ScalingRow:
    data, rows = count // model, rows_per_device * model
    load = [(deployment.context - 1, 1)] * rows
    here = replace(deployment, data=data, model=model, expert=1, rows=rows)
    whole = _busy(time_step(replace(here, data=1, model=1), load)) / model
    found = time_step(here, load)
    host = HOST_SECONDS + HOST_SECONDS_PER_ROW * rows
    waited = max(0.0, host - found.seconds)
    needed = sum(parameter_bytes(here).values()) + rows * here.engine(1).cache.num_bytes
    return ScalingRow(
        devices=data * model,
        data=data,
        model=model,
        rows=data * rows,
        fits=needed <= here.machine.memory_bytes * here.memory_share,
        ideal_s=whole,
        padding_s=_busy(found) - whole,
        collective_s=found.collective_s,
        host_s=waited,
        tokens_per_second=data * rows / (found.seconds + waited),
    )


def _busy(step: StepTime) -> float:
    return max(step.product_s, step.memory_s)
