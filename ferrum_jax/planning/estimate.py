"""A model on a mesh of devices: what fits, how long a step takes at least, and what limits it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from rich.filesize import decimal

from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.errors import ConfigError, FerrumError, ResourceExhaustedError
from ferrum_jax.executor.sizing import POOL_SHARE, EnginePlan, plan_engine
from ferrum_jax.models.division import Division, divide, specs_of_one
from ferrum_jax.models.specs import ParamTree, named_leaves
from ferrum_jax.ops.moe import GATHERED
from ferrum_jax.planning.machines import Machine
from ferrum_jax.planning.subject import Subject
from ferrum_jax.planning.work import Collectives, Work, numbers_of, spec_bytes, step_collectives, step_work
from ferrum_jax.sharding.devices import AMPLE

MEMORY_SHARE = 0.9  # of a device's memory that JAX may take; the rest is the runtime's and the collectives'
STEP_TOKENS = 2048  # of prompts in a step, the engine's own default on accelerators
DEFAULT_ROWS, DEFAULT_CONTEXT = 64, 8192
MOST_SEQUENCES = 1 << 16  # that an engine takes
show_bytes = partial(decimal, precision=2)
KINDS = ("vocabulary", "attention", "feed-forward", "experts", "norms and routers")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model, the devices it is to run on, and its load."""

    subject: Subject
    machine: Machine
    data: int = 1  # replicas
    expert: int = 1
    model: int = 1
    context: int = DEFAULT_CONTEXT  # positions of every sequence
    rows: int | None = None  # sequences of one replica; None: as many as fit, `DEFAULT_ROWS` at most
    kv_dtype: str | None = None  # None: that of activations
    step_tokens: int = STEP_TOKENS
    memory_share: float = MEMORY_SHARE

    def __post_init__(self):
        object.__setattr__(self, "kv_dtype", EngineConfig(kv_dtype=self.kv_dtype).kv_dtype)  # by its full name
        cfg = self.subject.cfg.reaching(self.context, at_most=True)
        object.__setattr__(self, "subject", replace(self.subject, cfg=cfg))
        longest = cfg.max_seq_len
        if not 1 <= self.context <= longest:
            raise ConfigError(f"context is {self.context}, {self.subject.name} has 1 to {longest} positions")
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"rows is {self.rows}, expected at least 1")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share is {self.memory_share}, expected more than 0 and at most 1")
        if self.devices > 1:
            self.machine.link(self.devices)

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.expert * self.model

    @property
    def division(self) -> Division | None:
        """How the model is divided; None on one device. Raises ConfigError where the devices are too many."""
        if self.devices == 1:
            return None
        return divide(self.subject.cfg, expert=self.expert, model=self.model)

    @property
    def mesh(self) -> str:
        """The mesh in words."""
        sizes = {"data": self.data, "expert": self.expert, "model": self.model}
        return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one device"

    @property
    def activation_bytes(self) -> int:
        """Bytes of one number of the activations."""
        return np.dtype(self.subject.dtype).itemsize

    def local_specs(self) -> ParamTree:
        """Specs of the parameters that one device holds."""
        division = self.division
        return self.subject.specs if division is None else specs_of_one(self.subject.specs, division)

    def engine(self, rows: int, free_bytes: int = AMPLE) -> EnginePlan:
        """Sizes of the engine of one replica, as `load` would decide them; raises as `plan_engine`."""
        settings = EngineConfig(
            max_seqs=rows,
            kv_capacity=self.context,
            dtype=self.subject.dtype,
            kv_dtype=self.kv_dtype,
            max_step_tokens=self.step_tokens,
            attention="xla",
        )
        own = {"platform": self.machine.platform, "division": self.division}
        return plan_engine(settings, self.subject.cfg, free_bytes=free_bytes, **own)


def parameter_bytes(deployment: Deployment) -> dict[str, int]:
    """Bytes of parameters on each device, by kind, padding and copies included."""
    found: dict[str, int] = dict.fromkeys(KINDS, 0)
    for name, spec in named_leaves(deployment.local_specs()).items():
        found[_kind(name, spec)] += spec_bytes(spec, deployment.activation_bytes)
    return {kind: size for kind, size in found.items() if size}


def _kind(name: str, spec: Any) -> str:
    if "vocab" in spec.axes:
        return "vocabulary"
    if "expert" in spec.axes:
        return "experts"
    if len(spec.shape) == 1 or "router" in spec.axes:
        return "norms and routers"
    return "attention" if ".self_attn." in name else "feed-forward"


def gathered_bytes(deployment: Deployment) -> int:
    """Bytes of the experts' weights that an accelerator gathers at a time (ops/moe.py), dequantised if in groups."""
    leaves = [(name, spec) for name, spec in named_leaves(deployment.local_specs()).items() if "expert" in spec.axes]
    if not leaves:
        return 0
    layer = leaves[0][0].rpartition(".mlp.")[0] or leaves[0][0].rpartition(".block_sparse_moe.")[0]
    own = [(name, spec) for name, spec in leaves if name.startswith(f"{layer}.")]
    numbers = {name: numbers_of(name, spec) // spec.shape[0] for name, spec in own}
    size = max(numbers.values())
    held = sum(spec_bytes(spec, deployment.activation_bytes) // spec.shape[0] for _, spec in own)
    groups = max((spec.shape[-1] for name, spec in own if "scales" in name.split(".")), default=1)
    if groups > 1:
        held += sum(numbers.values()) * deployment.activation_bytes
    return max(2, GATHERED // size) * held


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The least a step of one replica takes: nothing overlaps but products and reading."""

    tokens: int  # that count, padding left out
    work: Work  # of one device
    product_s: float
    memory_s: float
    collective_s: float
    collectives: list[Collectives]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return max(self.product_s, self.memory_s) + self.collective_s

    @property
    def limit(self) -> str:
        """What takes the most time."""
        times = {"products": self.product_s, "memory": self.memory_s, "collectives": self.collective_s}
        return max(times, key=lambda name: times[name])

    def summary(self, replicas: int) -> dict[str, Any]:
        """Figures of the step, by name and unit."""
        return {
            "tokens": self.tokens,
            "operations": self.work.operations,
            "weight_bytes": self.work.weight_bytes,
            "kv_bytes": self.work.kv_bytes,
            "product_ms": self.product_s * 1e3,
            "memory_ms": self.memory_s * 1e3,
            "collective_ms": self.collective_s * 1e3,
            "step_ms": self.seconds * 1e3,
            "tokens_per_second": replicas * self.tokens / self.seconds,
            "limit": self.limit,
        }


def time_step(deployment: Deployment, rows: list[tuple[int, int]], *, padded_rows: int | None = None) -> StepTime:
    """Times a step of one replica by the roofline of the machine.

    Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model". Products run at the
    rate for bfloat16 whatever the weights are in, since they are multiplied in the activations' dtype. A collective is
    a ring and waits for the products before it.

    Args:
        deployment: where.
        rows: of each sequence, positions it holds and new tokens.
        padded_rows: rows that the step is compiled for; as many as there are if None.
    """
    division, machine, subject = deployment.division, deployment.machine, deployment.subject
    own = subject.cfg if division is None else division.local
    kv = np.dtype(deployment.kv_dtype or subject.dtype).itemsize
    itemsize = deployment.activation_bytes
    work = step_work(own, rows, itemsize=itemsize, kv_itemsize=kv, specs=deployment.local_specs())
    tokens, padding = sum(count for _, count in rows), max(0, (padded_rows or 0) - len(rows))
    collectives = step_collectives(
        division, num_tokens=tokens + padding, logit_rows=len(rows) + padding, itemsize=itemsize
    )
    spent = 0.0
    if division is not None:
        link, devices = machine.link(deployment.devices), deployment.devices
        for one in collectives:
            each = link.latency + link.hop * one.hops(devices) + one.sent_bytes(devices) / link.bandwidth
            spent += one.count * each
    return StepTime(
        tokens=tokens,
        work=work,
        product_s=work.operations / machine.bf16_rate,
        memory_s=work.num_bytes / machine.memory_rate,
        collective_s=spent,
        collectives=collectives,
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a deployment needs and reaches."""

    deployment: Deployment
    parameters: dict[str, int]  # bytes on each device, by kind
    temporary_bytes: int | None  # on each device, outputs included; None: not lowered
    usable_bytes: int  # of a device's memory
    kv_bytes_per_sequence: int  # on each device
    sequences: int  # that fit, of one replica
    rows: int  # of the steps below, of one replica
    decode: StepTime  # of one token for each row, at the full context
    prompt: StepTime  # one step of prompts, from position 0

    def summary(self) -> dict[str, Any]:
        """All figures, by name and unit."""
        at, found = self.deployment, self.decode.collectives
        return {
            "model": at.subject.name,
            "weights": at.subject.weights,
            "dtype": at.subject.dtype,
            "device": at.machine.name,
            "mesh": {"data": at.data, "expert": at.expert, "model": at.model},
            "context": at.context,
            "memory_bytes": at.machine.memory_bytes,
            "usable_bytes": self.usable_bytes,
            "parameter_bytes": sum(self.parameters.values()),
            "parameters": self.parameters,
            "temporary_bytes": self.temporary_bytes,
            "kv_bytes_per_sequence": self.kv_bytes_per_sequence,
            "sequences": at.data * self.sequences,
            "rows": at.data * self.rows,
            "interconnect": at.machine.link(at.devices).name if at.devices > 1 else None,
            "collectives": [
                {"kind": one.kind, "what": one.what, "count": one.count, "bytes": one.num_bytes} for one in found
            ],
            "decode": self.decode.summary(at.data),
            "prompt": self.prompt.summary(at.data),
        }


def estimate(deployment: Deployment, temporary_bytes: int | None = None) -> Estimate:
    """Works out what a deployment needs and reaches.

    Args:
        deployment: the model, the devices and the load.
        temporary_bytes: what a step takes beside parameters and KV on each device (`temporaries.measure`); None: not
            known, and counted as nothing.

    Raises:
        ConfigError: more devices than the model can be divided over.
        ResourceExhaustedError: parameters, or the rows asked for, do not fit; it names meshes that have room.
    """
    parameters = parameter_bytes(deployment)
    taken = sum(parameters.values()) + (temporary_bytes or 0)
    usable = int(deployment.machine.memory_bytes * deployment.memory_share)
    least = deployment.rows or 1
    sequences = most_sequences(deployment, usable - taken)
    if sequences < least:
        kv = deployment.engine(least).cache.num_bytes
        raise ResourceExhaustedError(
            f"{deployment.subject.name} in {deployment.subject.weights} on {deployment.mesh} of "
            f"{deployment.machine.name}: each device needs {show_bytes(taken)} for parameters and temporaries and "
            f"{show_bytes(kv)} for the KV of {least} x {deployment.context} positions, {show_bytes(usable)} are usable "
            f"and the KV may have {POOL_SHARE:.0%} of what is left: {sequences} such sequences fit"
            f"{_advice(deployment, temporary_bytes)}",
            needed=taken + kv,
            free=usable,
        )
    rows = deployment.rows or min(sequences, DEFAULT_ROWS)
    plan = deployment.engine(rows)
    tokens = min(deployment.step_tokens, deployment.context)
    return Estimate(
        deployment=deployment,
        parameters=parameters,
        temporary_bytes=temporary_bytes,
        usable_bytes=usable,
        kv_bytes_per_sequence=plan.cache.num_bytes // rows,
        sequences=sequences,
        rows=rows,
        decode=time_step(
            deployment, [(deployment.context - 1, 1)] * rows, padded_rows=plan.buckets.decode(rows).decode_rows
        ),
        prompt=time_step(deployment, [(0, tokens)]),
    )


def most_sequences(deployment: Deployment, free_bytes: int) -> int:
    """Counts the sequences of `context` positions that `load` would grant one replica with so much memory free.

    Raises:
        ConfigError: more devices than the model can be divided over.
    """

    def is_granted(count: int) -> bool:
        try:
            deployment.engine(count, max(0, free_bytes))
        except ResourceExhaustedError:
            return False
        return True

    if not is_granted(1):
        return 0
    low, high = 1, 2
    while high <= MOST_SEQUENCES and is_granted(high):
        low, high = high, min(2 * high, MOST_SEQUENCES + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_granted(middle) else (low, middle)
    return low


def _advice(deployment: Deployment, temporary_bytes: int | None) -> str:
    """Names the smallest larger meshes on which the load fits, as the end of a message."""
    found, model = list[str](), deployment.model
    while len(found) < 2 and 2 * deployment.expert * model <= deployment.subject.cfg.num_attention_heads:
        model *= 2
        try:
            other = replace(deployment, model=model)
            taken = sum(parameter_bytes(other).values()) + (temporary_bytes or 0)
        except FerrumError:  # nothing is known to connect so many, or the model cannot be divided so
            continue
        usable = int(other.machine.memory_bytes * other.memory_share)
        if most_sequences(other, usable - taken) >= (other.rows or 1):
            found.append(other.mesh)
    if found:
        return f"; it fits on {' or on '.join(found)}"
    return f"; it fits on no larger mesh of {deployment.machine.name} that this model can be divided over"


def describe(found: Estimate) -> dict[str, str]:
    """Returns the lines that `ferrum-jax plan` prints, by what they tell."""
    at, machine = found.deployment, found.deployment.machine
    taken = sum(found.parameters.values())
    kinds = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in found.parameters.items())
    temporaries = "not lowered" if found.temporary_bytes is None else show_bytes(found.temporary_bytes)
    # of a GPU, JAX takes 75 % unless this says otherwise
    reserved = f"; set XLA_PYTHON_CLIENT_MEM_FRACTION={at.memory_share:g}" if machine.platform == "gpu" else ""
    lines = {
        "model": f"{at.subject.name}, weights in {at.subject.weights}, activations in {at.subject.dtype}",
        "devices": f"{at.data * at.devices} x {machine.name}, {at.mesh}; {show_bytes(found.usable_bytes)} of "
        f"{show_bytes(machine.memory_bytes)} usable, {machine.memory_rate / 1e12:.2f} TB/s, "
        f"{machine.bf16_rate / 1e12:,.0f} TFLOP/s{reserved}",
        "parameters": f"{show_bytes(taken)} a device: {kinds}",
        "temporaries": f"{temporaries} a device",
        "KV": f"{show_bytes(found.kv_bytes_per_sequence)} a device for each sequence of {at.context:,} positions "
        f"({found.kv_bytes_per_sequence / at.context:,.0f} bytes a position)",
        "sequences": f"{at.data * found.sequences:,} fit, {at.data * found.rows:,} in the decode step below",
    }
    if at.devices > 1:
        link = machine.link(at.devices)
        lines["interconnect"] = f"{link.name}, {link.bandwidth / 1e9:,.0f} GB/s a device in each direction"
        for one in found.decode.collectives:
            lines[f"{one.kind}, {one.what}"] = f"{one.count} of {show_bytes(one.num_bytes)} in a decode step"
    lines["decode step"] = _describe_step(found.decode, at.data)
    lines["prompt step"] = _describe_step(found.prompt, at.data)
    return lines


def _describe_step(step: StepTime, replicas: int) -> str:
    figures = step.summary(replicas)
    return (
        f"at least {figures['step_ms']:.2f} ms for {figures['tokens']:,} tokens of a replica, at most "
        f"{figures['tokens_per_second']:,.0f} tokens/s in all: products {figures['product_ms']:.2f} ms, memory "
        f"{figures['memory_ms']:.2f} ms, collectives {figures['collective_ms']:.2f} ms; limited by {figures['limit']}"
    )
