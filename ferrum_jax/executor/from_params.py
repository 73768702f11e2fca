"""A runner for parameters that are on a device already, for example in a training loop."""

import os
from typing import Any

import jax

from ferrum_jax.compile.artifacts import artifacts_folder, check_compiler_options
from ferrum_jax.config import EngineConfig, ModelConfig, check_model_config
from ferrum_jax.config.engine import MeshSizes
from ferrum_jax.contract.checks import differences, listed
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError, UnsupportedError, safe_repr
from ferrum_jax.executor.build import build_runner
from ferrum_jax.executor.hosts import Hosts
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.executor.weights import brought_to, check_fits_config, moving, strongly_typed
from ferrum_jax.models.layout import CHECKPOINT, FUSED, layout_of, recipes
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.quantisation import specs_like
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree, as_plain, named_leaves
from ferrum_jax.ops.quantised import activation_dtype
from ferrum_jax.sharding.mesh import outside_meshes, place_on_mesh
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
        cfg: the model's. With LongRoPE (Phi-3) frequencies are chosen for `kv_capacity`, unless it has the long ones;
            functions given the `model_config` of what is returned compute what is served.
        mesh: as for `load`. Arrays that lie on its devices in the form in which they are served are not copied.
        engine: how to run it; fields that are None are chosen for the model and the device: `kv_capacity`, positions
            of one sequence, is the model's maximum, up to 4096.
        strict: after `warmup`, a step that would have to be compiled is an error.
        **settings: fields of `EngineConfig`, which override those of `engine`. Compiled steps are kept on disk only in
            the folder that `artifacts` or `FERRUM_ARTIFACTS` names; `artifacts=True` is the user's cache folder.

    Raises:
        InvalidParameterError: a parameter is no array on a device, or they are not this model's.
        ConfigError: settings contradict each other or the parameters.
        UnsupportedError: the parameters lie on several devices and there is no mesh.
        ResourceExhaustedError: the KV that was asked for does not fit.
    """
    check_model_config(cfg)
    params = strongly_typed(as_plain(params))
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
        with moving():
            params = brought_to(first, params) if specs is None else placed.divide(params, specs)
        root = None if asked.artifacts is None else artifacts_folder(asked.artifacts)
        free = placed.placement.free_bytes(is_needed=asked.kv_blocks is None)
        return build_runner(
            params, cfg, asked, placed, replicas, hosts, specs=specs, root=root, free=free, strict=strict
        )


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
