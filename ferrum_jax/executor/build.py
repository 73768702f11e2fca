"""`build_runner`: the last part of loading, common to `load` and `from_params`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.compile.artifacts import Artifacts
from ferrum_jax.compile.fingerprint import describe_program
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.executor.device import KvMemory
from ferrum_jax.executor.hosts import Hosts
from ferrum_jax.executor.replicas import replicate
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.executor.sizing import EnginePlan, plan_beside
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.mesh import Placement


def build_runner(
    params: ParamTree,
    cfg: ModelConfig,
    settings: EngineConfig,
    placed: ModelPlacement,
    replicas: Sequence[Placement],
    hosts: Hosts,
    *,
    specs: ParamTree | None,
    root: Path | None,
    free: int,
    strict: bool,
    name: str = "",
    early: Artifacts | None = None,
    memory: KvMemory | None = None,
) -> ModelRunner:
    """Returns the runner of parameters that lie on the devices of the first replica, or that of all replicas.

    Args:
        params: the parameters as they are served.
        cfg: the model's.
        settings: with the model's defaults filled in.
        placed: the first replica's devices.
        replicas: the devices of every replica.
        hosts: the processes.
        specs: the undivided specs of the parameters, if a mesh divides them.
        root: the folder under which compiled programs are kept; None: they are not.
        free: bytes that this process has on each device for everything beside the parameters.
        strict: after `warmup`, a step that would have to be compiled is an error.
        name: the model's; empty: its type.
        early: artifacts that were opened already, which are used if they are of the same programs.
        memory: a KV that is allocated already, which is used if it has the planned size.
    """

    def open_artifacts(plan: EnginePlan, own: ParamTree = params, at: Placement = replicas[0]) -> Artifacts | None:
        if root is None:
            return None
        facts = describe_program(cfg, own, plan.cache, plan.sampler, plan.loras, at)
        found = Artifacts(root, facts, settings.compiler_options)
        return early if early is not None and early.facts == found.facts else found

    free = hosts.least(free)
    plan = plan_beside(params, settings, cfg, placed=placed, free_bytes=free, open_artifacts=open_artifacts)
    hosts.check_settings(cfg, plan, settings.dtype, settings.quantize, settings.layout)
    how: dict[str, Any] = {
        "strict": strict,
        "name": name,
        "compiler_options": settings.compiler_options,
        "hosts": hosts,
    }

    def runner_on(placed: ModelPlacement, own: ParamTree, memory: KvMemory | None = None) -> ModelRunner:
        artifacts = open_artifacts(plan, own, placed.placement)
        return ModelRunner(own, cfg, plan, placed=placed, specs=specs, artifacts=artifacts, memory=memory, **how)

    ready = memory if memory is not None and memory.spec == plan.cache else None
    return replicate(runner_on(placed, params, ready), params, replicas, runner_on)
