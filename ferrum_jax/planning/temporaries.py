"""What a step takes beside parameters and KV, from lowering and compiling it for a mesh of CPU devices.

No weights are needed: a step is lowered for shapes. The CPU stands in for the accelerator, which is not here. The
step is compiled in float32, since for 16 bits a CPU's products would copy every weight to float32; so activations are
counted with twice their bytes, which leaves room for what an accelerator keeps beside them.

A model of one layer of each kind and one of two are compiled, and further layers are extrapolated. A dense layer adds
little to those before it. Experts of a prompt add the outputs of all their tiles: XLA's CPU compiler makes these
buffers for all layers at the start. They are in the activations' dtype, and counted so.
"""

from dataclasses import replace
from typing import Any

from ferrum_jax.compile.artifacts import memory_of
from ferrum_jax.compile.step import ProgramContext, StepKey
from ferrum_jax.config import ModelConfig
from ferrum_jax.executor.sizing import bytes_beside, context_of, largest_steps
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.planning.estimate import DEFAULT_ROWS, Deployment, gathered_bytes
from ferrum_jax.planning.subject import Subject
from ferrum_jax.sharding.devices import find_device

LOWERED = "float32"
QUICKLY: Any = {"xla_llvm_disable_expensive_passes": True}  # of machine code: it is never run


def measure(deployment: Deployment) -> int:
    """Bytes that the largest steps take on each device: temporaries, and the outputs of two steps.

    Raises:
        ConfigError: more devices than the model can be divided over.
        DeviceError: there are fewer CPU devices than the mesh has, as `jax_num_cpu_devices` says, or JAX has no CPU
            backend.
    """
    few, more = (compiled_bytes(deployment, few_layers(deployment.subject.cfg, times)) for times in (1, 2))
    num_few = few_layers(deployment.subject.cfg, 1).num_hidden_layers
    further = max(0, deployment.subject.cfg.num_hidden_layers - num_few)
    by_layer = max(0, more - few) / num_few * deployment.activation_bytes / 4
    return few + round(by_layer * further) + gathered_bytes(deployment)


def few_layers(cfg: ModelConfig, times: int) -> ModelConfig:
    """The same model with so many layers of each kind: with and without experts, and of each window."""
    sparse = (False,) * cfg.num_hidden_layers if cfg.experts is None else cfg.experts.sparse_layers
    kinds = sorted(set(zip(sparse, cfg.layer_windows, strict=True)), key=str) * times
    experts = cfg.experts and replace(cfg.experts, sparse_layers=tuple(is_sparse for is_sparse, _ in kinds))
    return replace(
        cfg,
        num_hidden_layers=len(kinds),
        layer_windows=tuple(window for _, window in kinds),
        layers_without_rope=(),
        experts=experts,
    )


def compiled_bytes(deployment: Deployment, cfg: ModelConfig) -> int:
    """Compiles the largest steps of a model in the place of the deployment's; returns the most that one takes."""
    subject = Subject(name=deployment.subject.name, cfg=cfg, dtype=LOWERED)
    context, keys = lower_for(replace(deployment, subject=subject, kv_dtype=None))
    return max(bytes_beside(memory_of(key.lower(context).compile(compiler_options=QUICKLY))) for key in keys)


def lower_for(deployment: Deployment) -> tuple[ProgramContext, list[StepKey]]:
    """What the steps of a deployment are lowered with on a mesh of CPU devices, and the largest of them."""
    cfg = deployment.subject.cfg
    mesh = {"expert": deployment.expert, "model": deployment.model}
    placed = ModelPlacement.on_mesh(cfg, mesh, find_device("cpu"))
    plan = deployment.engine(deployment.rows or DEFAULT_ROWS)
    params = placed.shapes(deployment.subject.specs, deployment.subject.dtype)
    return context_of(cfg, params, plan.cache, plan.sampler, placed), largest_steps(plan.buckets)
