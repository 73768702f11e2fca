"""A runner for parameters that are on a device already, for example in a training loop."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ferrum_jax.compile.artifacts import Artifacts, artifacts_folder, check_compiler_options
from ferrum_jax.compile.fingerprint import describe_program
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.config.engine import MeshSizes
from ferrum_jax.contract.checks import differences, listed
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError, UnsupportedError, safe_repr
from ferrum_jax.executor.device import KvMemory
from ferrum_jax.executor.hosts import Hosts
from ferrum_jax.executor.replicas import replicate
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.executor.sizing import EnginePlan, plan_beside
from ferrum_jax.executor.weights import brought_to, check_fits_config
from ferrum_jax.models.layout import CHECKPOINT, FUSED, layout_of, recipes
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.quantisation import specs_like
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree, as_plain, named_leaves
from ferrum_jax.ops.quantised import activation_dtype
from ferrum_jax.sharding.mesh import Placement, outside_meshes, place_on_mesh
from ferrum_jax.sharding.processes import telling


@outside_meshes()
def from_params(
    params: ParamTree,
    cfg: ModelConfig,
    *,
    mesh: MeshSizes | jax.sharding.Mesh = None,
    engine: EngineConfig | None = None,
    strict: bool = False,
    **settings: Any,
) -> ModelRunner:
    """Serves parameters as they are, without a copy, on the device where they lie; or divided over a mesh.

    Args:
        params: the tree that `load_params` and `models.init_params` return, in any layout, wherever it lies.
        cfg: the model's.
        mesh: as for `load`. Arrays that lie on its devices in the form in which they are served are not copied.
        engine: how to run it; fields that are None are chosen for the model and the device.
        strict: after `warmup`, a step that would have to be compiled is an error.
        **settings: fields of `EngineConfig`, which override those of `engine`. Compiled steps are kept on disk only in
            the folder that `artifacts` or `FERRUM_ARTIFACTS` names; `artifacts=True` is the user's cache folder.

    Raises:
        InvalidParameterError: a parameter is no array on a device, or they are not this model's.
        ConfigError: settings contradict each other or the parameters.
        UnsupportedError: the parameters lie on several devices and there is no mesh.
        ResourceExhaustedError: the KV that was asked for does not fit.
    """
    if not isinstance(cfg, ModelConfig):
        raise InvalidParameterError(f"cfg is a {type(cfg).__name__}, expected a ModelConfig: models.config_from_hf")
    params = as_plain(params)
    for leaf in jax.tree.leaves(params):
        if not isinstance(leaf, jax.Array):
            raise InvalidParameterError(f"a parameter is a {type(leaf).__name__}, expected arrays of JAX on a device")
    if not jax.tree.leaves(params):
        raise InvalidParameterError("there are no parameters")
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(params)):
        raise InvalidParameterError("a parameter was deleted, as donated ones are: give live arrays")
    places = {device for leaf in jax.tree.leaves(params) for device in leaf.devices()}
    own = None if isinstance(mesh, jax.sharding.Mesh) else mesh
    if isinstance(folder := settings.get("artifacts"), os.PathLike):
        settings["artifacts"] = os.fspath(folder)
    if not isinstance(engine, EngineConfig | None):
        raise ConfigError(f"engine is {safe_repr(engine)}, expected an EngineConfig")
    given = EngineConfig(**settings, mesh=own).over(engine or EngineConfig())
    asked_mesh = mesh if isinstance(mesh, jax.sharding.Mesh) else given.over_environment().mesh_sizes
    if len(places) != 1 and not asked_mesh:
        raise UnsupportedError(
            f"the parameters lie on {len(places)} devices, a runner has one: give the mesh to serve on, such as "
            f"mesh={{'model': {len(places)}}}, or parameters on one device, jax.device_put(params, device)"
        )
    device = min(places, key=lambda one: (one.process_index != jax.process_index(), one.id))
    try:
        dtype, layout = activation_dtype(params).name, _layout(params, cfg, given.layout)
    except (LookupError, TypeError, AttributeError):
        raise _no_parameters(params, cfg) from None
    theirs = EngineConfig(dtype=dtype, layout=layout)
    for name in ("dtype", "layout"):
        if getattr(given, name) not in (None, getattr(theirs, name)):
            raise ConfigError(f"{name} is {getattr(given, name)!r}, these parameters have {getattr(theirs, name)!r}")
    if given.quantize:
        raise ConfigError(f"quantize is {given.quantize!r}, which belongs to `load`: parameters are served as they are")
    check_fits_config(params, cfg, layout)
    asked = theirs.over(given).over_environment()
    check_compiler_options(asked.compiler_options, device)
    cfg = cfg.reaching(asked.kv_capacity or 0)
    replicas = place_on_mesh(asked_mesh, device)
    hosts = Hosts.of(replicas)
    with telling(hosts.channel if hosts.are_several else None):
        hosts.check_placement(replicas[0])
        placed = ModelPlacement.of(cfg, replicas[0])
        specs = None if placed.division is None else specs_like(params, cfg)
        first = placed.placement.first
        params = brought_to(first, params) if specs is None else placed.divide(params, specs)
        root = None if asked.artifacts is None else artifacts_folder(asked.artifacts)
        free = placed.placement.free_bytes()
        return serve(params, cfg, asked, placed, replicas, hosts, specs=specs, root=root, free=free, strict=strict)


def serve(
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


def _no_parameters(tree: Any, cfg: ModelConfig) -> InvalidParameterError:
    """Says how a tree differs from that of a checkpoint, and what converts other trees."""
    wanted = {name: list(spec.shape) for name, spec in named_leaves(family(cfg).param_specs(cfg)).items()}
    given = {name: list(leaf.shape) for name, leaf in named_leaves(tree).items()}
    problems = listed(differences(given, wanted)) or "they are not nested dicts and lists"
    unknown = [name for name in given if name not in wanted][:3]
    problems += f"; there are {', '.join(unknown)}, …" if unknown else ""
    return InvalidParameterError(
        f"these are not the parameters of this {cfg.model_type}: {problems} (ferrum_jax.weights.foreign.from_tree "
        "converts trees of other models, and from_hf_names a checkpoint's tensors by name)"
    )


def _layout(params: ParamTree, cfg: ModelConfig, asked: str | None) -> str:
    """Returns the layout of parameters: the one asked for, if in this family it is the same as the one found."""
    found = layout_of(params)
    if asked not in (CHECKPOINT, FUSED) or found not in (CHECKPOINT, FUSED):
        return found
    return asked if recipes(cfg, asked) == recipes(cfg, found) else found
