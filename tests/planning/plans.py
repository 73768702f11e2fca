"""Deployments of tiny models, and a device whose figures are easy to reckon with."""

from typing import Any

from ferrum_jax.config import ModelConfig
from ferrum_jax.models.quantisation import choose_formats
from ferrum_jax.planning.estimate import Deployment
from ferrum_jax.planning.machines import Link, Machine
from ferrum_jax.planning.subject import Subject
from tests import tiny

NEAR = Link(name="near", bandwidth=1e6, most_devices=4, latency=1e-3)
FAR = Link(name="far", bandwidth=1e5, most_devices=8, latency=3e-3, hop=1e-3)
TOY = Machine(name="toy", platform="gpu", memory_bytes=1_000_000, memory_rate=1e7, bf16_rate=1e9, links=(NEAR, FAR))


def deployment(
    name: str | ModelConfig, machine: Machine = TOY, quantize: str | None = None, **settings: Any
) -> Deployment:
    """A tiny model in float32, or with weights in 8 bits."""
    cfg = tiny.model_config(name) if isinstance(name, str) else name
    formats = {} if quantize is None else choose_formats(cfg, quantize)
    subject = Subject(name="tiny", cfg=cfg, dtype="float32", formats=formats)
    given: dict[str, Any] = {"context": 64} | settings
    return Deployment(subject=subject, machine=machine, **given)
