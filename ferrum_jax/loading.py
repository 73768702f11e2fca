"""From a path to a running model."""

import inspect
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax

from ferrum_jax.compile.artifacts import Artifacts, artifacts_folder, check_compiler_options
from ferrum_jax.compile.fingerprint import describe_program
from ferrum_jax.compile.program_cache import trim_heap
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.config.engine import CompilerOptions, MeshSizes
from ferrum_jax.contract.checks import check_flag
from ferrum_jax.contract.decoding import is_integer
from ferrum_jax.contract.errors import ConfigError, FerrumError, NotFoundError, ResourceExhaustedError, safe_repr
from ferrum_jax.contract.values import Device
from ferrum_jax.executor.device import EMPTY_KV, KvMemory
from ferrum_jax.executor.hosts import Hosts
from ferrum_jax.executor.replicas import replicate
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.executor.sizing import DEFAULT_BLOCK, EnginePlan, plan_beside, plan_engine
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models import specs
from ferrum_jax.models.backends import choose_attention, layout_for, settle_attention
from ferrum_jax.models.layout import CHECKPOINT, SCANNED, joinable, layout_specs
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.quantisation import Format, Formats, choose_formats, quantised_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops import native
from ferrum_jax.sharding import processes
from ferrum_jax.sharding.devices import JaxDevice, default_dtype, find_device
from ferrum_jax.sharding.mesh import Placement, outside_meshes, place_on_mesh
from ferrum_jax.sharding.processes import telling
from ferrum_jax.weights import orbax
from ferrum_jax.weights.assemble import assemble, lay_out_on_host
from ferrum_jax.weights.folder import SafetensorsSource
from ferrum_jax.weights.gguf import GgufSource
from ferrum_jax.weights.hub import resolve
from ferrum_jax.weights.huge_pages import DevicePlacer
from ferrum_jax.weights.safetensors_file import check_regular

ModelPath = str | os.PathLike[str]
Checkpoint = SafetensorsSource | GgufSource | orbax.OrbaxSource
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@.+)?")
_OURS = {  # by vLLM's name
    "model": "path, the first argument",
    "tensor_parallel_size": 'mesh={"model": n}',
    "data_parallel_size": 'mesh={"data": n}',
    "max_model_len": "kv_capacity",
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "max_step_tokens",
    "gpu_memory_utilization": "memory_fraction, a share of the free memory",
    "quantization": "quantize",
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_dtype": "kv_dtype",
    "num_speculative_tokens": "speculation=Speculation(num_tokens=n)",
    "speculative_config": "speculation=Speculation(...)",
}


@outside_meshes()
def load(
    path: ModelPath | Checkpoint,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    max_seqs: int | None = None,
    kv_capacity: int | None = None,
    block_size: int | None = None,
    prefix_cache: bool | None = None,
    kv_blocks: int | None = None,
    memory_fraction: float | None = None,
    max_step_tokens: int | None = None,
    engine: EngineConfig | None = None,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    device: str | Device | JaxDevice | None = None,
    mesh: MeshSizes | jax.sharding.Mesh = None,
    artifacts: ModelPath | bool | None = None,
    strict: bool = False,
    progress: bool = True,
    *,
    attention: str | None = None,
    layout: str | None = None,
    quantize: str | None = None,
) -> ModelRunner:
    """Loads a model and gets it ready to serve; nothing is compiled until `warmup` or the first call.

    What is None comes from `engine`, then from the `FERRUM_…` variables, then from the model and the device.

    On several hosts (docs/several-hosts.md) every process calls it. It returns in process 0 alone. In the others it
    follows process 0 until the runner is closed or process 0 ends, and then raises SystemExit(0).

    Args:
        path: a Hugging Face folder or id `org/name`, a `.gguf` file, or an Orbax checkpoint; or one that
            `open_checkpoint` opened.
        dtype: of weights and activations; float32 on CPU and bfloat16 elsewhere if None.
        kv_dtype: of cached keys and values; `dtype` if None. `float8_e4m3fn` (or `fp8`) has 3 bits of mantissa and
            no scales: what is beyond 448 becomes that.
        max_seqs: live sequences.
        kv_capacity: positions one sequence can reach; the model's maximum up to 4096 if None.
        block_size: positions per KV block.
        prefix_cache: reuse of common prefixes.
        kv_blocks: blocks in the pool.
        memory_fraction: share of free device memory that the pool may take.
        max_step_tokens: tokens of prompts in one step; longer prompts run in several.
        engine: an `EngineConfig` with the buckets.
        max_loras: adapters loaded at a time.
        max_lora_rank: largest rank of an adapter.
        device: `cpu`, `cuda:0`, …; JAX's default device if None.
        mesh: devices along the axes `data` (replicas), `expert` and `model` (which divide one replica), such as
            `{"model": 4}`, taken from `device` on; or a mesh of these axes.
        artifacts: folder where compiled steps are kept for later starts; the user's cache folder if None or True, none
            if False. Loading one runs code, so a folder that somebody else may write is not used.
        strict: after `warmup`, a step that would have to be compiled is an error.
        progress: show bars on standard error while working.
        attention: its backend: `xla`, `cpu`, `triton` or `tpu`; the platform's own if None.
        layout: of the parameters: `checkpoint` as they are named there, `fused` or `scanned` (models/layout.py);
            if None, `scanned` where the kernels for CPUs serve layers that are alike, `fused` where `triton` attends
            and what is joined has one format, else `checkpoint`.
        quantize: `int8` or `float8_e4m3fn`: every matrix in so many bits, with a scale for each of its rows; `keep`: in
            the bits, groups and scales that a quantised checkpoint has it in; `auto`: in 16 bits, too, and only where
            the kernels for CPUs multiply it so; `none` dequantises those of folders and GGUF files. If None, it is
            `auto` where those kernels serve the model, else `none`. Activations stay in `dtype`.

    Raises:
        FerrumError: a subclass that says what is wrong with the path, the model or a setting.
    """
    strict, progress = check_flag("strict", strict, ConfigError), check_flag("progress", progress, ConfigError)
    settings = _asked(
        engine,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=attention,
        max_seqs=max_seqs,
        kv_capacity=kv_capacity,
        block_size=block_size,
        prefix_cache=prefix_cache,
        kv_blocks=kv_blocks,
        memory_fraction=memory_fraction,
        max_step_tokens=max_step_tokens,
        layout=layout,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        artifacts=artifacts,
        quantize=quantize,
        mesh=mesh,
    )
    wanted = mesh if isinstance(mesh, jax.sharding.Mesh) else settings.mesh_sizes
    channel = processes.join(wanted)
    with telling(channel):
        return _load(path, settings, device, wanted, channel, strict=strict, progress=progress)


def check_settings(settings: Mapping[str, Any], *beside: str) -> None:
    """Checks the keyword arguments of a later `load`, before a model is looked for; its caller knows others `beside`.

    Raises:
        ConfigError: `load` has no such argument, or no engine can have its value.
    """
    known, own = inspect.signature(load).parameters, {field.name for field in fields(EngineConfig)}
    for name in sorted(settings.keys() - known.keys()):
        hint = f"here it is {_OURS[name]}" if name in _OURS else f"known are {', '.join([*beside, *list(known)[1:]])}"
        if name in own:
            hint = f"give engine=EngineConfig({name}=...)"
        raise ConfigError(f"there is no setting {name!r}: {hint}")
    _asked(settings.get("engine"), **{name: value for name, value in settings.items() if name in own})


def _asked(engine: EngineConfig | None, **given: Any) -> EngineConfig:
    """Joins settings given as arguments with those of `engine` and of the environment."""
    for name in ("max_loras", "max_lora_rank"):
        if is_integer(count := given.get(name)) and count == 0:
            given[name] = None
    if isinstance(folder := given.get("artifacts"), os.PathLike):
        given["artifacts"] = os.fspath(folder)
    if isinstance(given.get("mesh"), jax.sharding.Mesh):
        given["mesh"] = None
    return EngineConfig(**given).joined(engine).over_environment()


def _load(
    path: ModelPath | Checkpoint,
    settings: EngineConfig,
    device: str | Device | JaxDevice | None,
    mesh: Mapping[str, int] | jax.sharding.Mesh,
    channel: processes.Channel | None,
    *,
    strict: bool,
    progress: bool,
) -> ModelRunner:
    """Loads a model once all settings are known, in every process."""
    target = find_device(device)
    source = path if isinstance(path, Checkpoint) else open_checkpoint(_on_disk(path, progress))
    source.config = source.config.reaching(settings.kv_capacity or 0, at_most=True)
    replicas = place_on_mesh(mesh, target)
    if device is not None and isinstance(mesh, jax.sharding.Mesh) and target != replicas[0].first:
        raise ConfigError(f"device is {device}, but the mesh begins with {replicas[0].first}: leave out the device")
    hosts = Hosts.of(replicas, channel)
    placed, target = ModelPlacement.of(source.config, replicas[0]), replicas[0].first
    settings = with_defaults(settings, source, target, is_divided=placed.division is not None)
    free = hosts.least(placed.placement.free_bytes())
    ahead, root = plan_ahead(settings, source, placed, free), artifacts_folder(settings.artifacts)
    early = None if root is None else _open_artifacts(root, source, ahead, placed, settings)
    if early is not None:  # which takes as long as reading a small model, and needs another core
        early.preload([EMPTY_KV, *map(repr, ahead.first())])
    laid = served_specs(source, settings, target)
    taken = placed.num_bytes(laid, settings.dtype or default_dtype(target))
    memory = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv") as pool:  # on a CPU its zeros take seconds, too
        if target.platform == "cpu" and 2 * ahead.cache.num_bytes <= free - taken:
            memory = pool.submit(_allocate_ahead, ahead.cache, replicas[0], early, settings.compiler_options)
        params, cfg = _read(source, settings, placed, progress and hosts.leads)
    memory = None if memory is None else memory.result()

    def open_artifacts(plan: EnginePlan, own: ParamTree = params, at: Placement = replicas[0]) -> Artifacts | None:
        if root is None:
            return None
        found = Artifacts(
            root, describe_program(cfg, own, plan.cache, plan.sampler, plan.loras, at), settings.compiler_options
        )
        return early if early is not None and early.facts == found.facts else found

    free = hosts.least(placed.placement.free_bytes() if memory is None else max(0, free - taken))
    plan = plan_beside(params, settings, cfg, placed=placed, free_bytes=free, open_artifacts=open_artifacts)
    hosts.check_same("a model or settings", repr((cfg, plan, settings.dtype, settings.quantize, settings.layout)))
    ready = memory if memory is not None and memory.spec == plan.cache else None

    def runner_on(placed: ModelPlacement, params: ParamTree, memory: KvMemory | None) -> ModelRunner:
        return ModelRunner(
            params,
            cfg,
            plan,
            placed=placed,
            specs=None if placed.division is None else laid,
            strict=strict,
            name=Path(source.path).name,
            artifacts=open_artifacts(plan, params, placed.placement),
            memory=memory,
            compiler_options=settings.compiler_options,
            hosts=hosts,
        )

    return replicate(runner_on(placed, params, ready), params, replicas, lambda at, own: runner_on(at, own, None))


def _allocate_ahead(
    spec: CacheSpec, placement: Placement, artifacts: Artifacts | None, options: CompilerOptions
) -> KvMemory | None:
    try:
        memory = KvMemory(spec, placement, artifacts, options)
        memory.allocate_ahead()
    except ResourceExhaustedError:  # said again, if it is still so when the parameters are there
        return None
    return memory


def _open_artifacts(
    root: Path, source: Checkpoint, plan: EnginePlan, placed: ModelPlacement, settings: EngineConfig
) -> Artifacts:
    """Opens the artifacts of parameters that are read meanwhile, given the shapes and places they should have."""
    device = placed.placement.first
    params = placed.shapes(served_specs(source, settings, device), settings.dtype or default_dtype(device))
    facts = describe_program(source.config, params, plan.cache, plan.sampler, plan.loras, placed.placement)
    return Artifacts(root, facts, settings.compiler_options)


def load_params(
    path: ModelPath | Checkpoint,
    dtype: str | None = None,
    *,
    layout: str = CHECKPOINT,
    device: str | Device | JaxDevice | None = None,
    quantize: str | None = None,
    progress: bool = False,
) -> tuple[ParamTree, ModelConfig]:
    """Reads a checkpoint into a plain tree of arrays, named as there if so laid out, and its configuration.

    It has a path or is a Hugging Face id, as for `load`.

    With `quantize`, as for `load`, matrices are `QuantisedWeight`s in that tree; `auto` is what it is there where the
    kernels for CPUs serve.
    """
    target = find_device(device)
    settings = EngineConfig(dtype=dtype, layout=layout, quantize=quantize)
    source = path if isinstance(path, Checkpoint) else open_checkpoint(_on_disk(path, progress))
    return _read(source, settings, ModelPlacement.on_one(target), progress)


def _on_disk(path: ModelPath, progress: bool) -> ModelPath:
    """Returns the path of a model; that of its download for a Hugging Face id that is no path."""
    if not isinstance(path, str) or not _HUB_ID.fullmatch(path) or path.endswith(".gguf") or os.path.lexists(path):
        return path
    is_of_a_folder = os.path.isdir(path.partition("/")[0])  # that is here: a model in it is missing
    return path if is_of_a_folder else resolve(path, progress=progress)


def open_checkpoint(path: ModelPath) -> Checkpoint:
    """Opens a Hugging Face folder, a GGUF file or an Orbax checkpoint: headers and configuration.

    Of the weights only a head that a tied model has beside its embeddings is read: one that differs unties the model.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f"path is {safe_repr(path)}, expected the path of a model")
    try:
        place = Path(path).expanduser()
        found = place.exists()
    except (OSError, RuntimeError) as problem:  # too long a name, or nobody's home
        raise NotFoundError(f"{path} cannot be found: {problem}") from None
    if not found:
        raise NotFoundError(f"{place} does not exist")
    check_regular(place)
    if place.is_file():
        return GgufSource(place)
    return orbax.OrbaxSource(place) if orbax.is_checkpoint(place) else SafetensorsSource(place)


def plan_ahead(
    settings: EngineConfig, source: Checkpoint, placed: ModelPlacement, free: int | None = None
) -> EnginePlan:
    """Decides the sizes of an engine before its parameters are on the devices; `load` decides again when they are.

    The dtype is the device's own if not set, and so many bytes are free as the device says if `free` is None.

    Raises:
        ConfigError: as `param_specs`, or the compiler refuses an option.
        FerrumError: as `plan_engine`.
    """
    device = placed.placement.first
    check_compiler_options(settings.compiler_options, device)
    settings = with_defaults(settings, source, device, is_divided=placed.division is not None)
    settings = settle_attention(settings, source.config if placed.division is None else placed.division.local, device)
    taken = placed.num_bytes(served_specs(source, settings, device), settings.dtype or default_dtype(device))
    left = max(0, (placed.placement.free_bytes() if free is None else free) - taken)
    return plan_engine(settings, source.config, platform=device.platform, free_bytes=left, division=placed.division)


def param_specs(
    source: Checkpoint, quantize: str | None, dtype: str | None = None, layout: str = CHECKPOINT
) -> ParamTree:
    """Describes the parameters as they will be: quantised where the checkpoint has them so, or where `quantize` asks.

    Raises:
        ConfigError: the checkpoint is quantised in another way already.
    """
    plain = family(source.config).param_specs(source.config)
    return quantised_specs(plain, _formats(source, quantize, dtype, layout) or source.formats)


def served_specs(source: Checkpoint, settings: EngineConfig, device: JaxDevice) -> ParamTree:
    """Describes the parameters in the layout they are served in, undivided; raises as `param_specs`."""
    dtype, layout = settings.dtype or default_dtype(device), settings.layout or CHECKPOINT
    return layout_specs(param_specs(source, settings.quantize, dtype, layout), source.config, layout)


def with_defaults(
    settings: EngineConfig, source: Checkpoint, device: JaxDevice, *, is_divided: bool = False
) -> EngineConfig:
    """Fills in what the parameters of a model will be on a device: dtype, layout, and whether they keep their bits.

    They do (`auto`) where the kernels for CPUs serve the model, whose products read what the checkpoint has, and
    elsewhere are dequantised, also if `auto` was asked for. The layout is that of `layout_for`, unless a mesh divides
    the parameters, or formats stand in the way of it.

    Raises:
        FerrumError: as `choose_attention`.
    """
    settings = settings.over(EngineConfig(dtype=default_dtype(device)))
    dtype = settings.dtype or default_dtype(device)
    chosen = choose_attention(
        settle_attention(settings, source.config, device).attention,
        source.config,
        platform=device.platform,
        dtype=dtype,
        kv_dtype=settings.kv_dtype or dtype,
        block_size=settings.block_size or DEFAULT_BLOCK,
        layout=settings.layout,
    )
    if settings.quantize in (None, "auto"):
        settings = replace(settings, quantize="auto" if chosen == "cpu" else "none")
    if settings.layout is not None:
        return settings
    best = CHECKPOINT if is_divided else layout_for(source.config, chosen)
    if best != CHECKPOINT and not _can_join(source, settings.quantize, dtype, best):
        best = CHECKPOINT
    return replace(settings, layout=best)


def _can_join(source: Checkpoint, quantize: str | None, dtype: str, layout: str) -> bool:
    """Whether the weights that a layout joins have the same formats and, where it stacks them, kernels multiply so.

    Otherwise they would be dequantised to be joined, or copied out of the stack in every step.
    """
    try:
        formats = dict(_formats(source, quantize, dtype, CHECKPOINT) or source.formats)
    except FerrumError:  # `param_specs` reports it
        return False
    served = _multiplied(formats, source.config) if layout == SCANNED else formats
    return joinable(served, source.config, layout) == formats


def _formats(source: Checkpoint, quantize: str | None, dtype: str | None, layout: str) -> Formats:
    """Says what remains to be quantised, or to be kept as it is."""
    if quantize in ("keep", "auto"):
        if isinstance(source, orbax.OrbaxSource):
            return {}
        if quantize == "keep":
            return source.native_formats()
        found = _narrow_formats(source) if dtype == "float32" else {}
        found |= source.native_formats(skip=True)
        return joinable(_multiplied(found, source.config), source.config, layout)
    asked = {} if quantize in (None, "none") else choose_formats(source.config, quantize)
    if asked and source.formats and asked != source.formats:
        kinds = ", ".join(sorted({form.dtype for form in source.formats.values()}))
        raise ConfigError(
            f"quantize is {quantize!r}, but {len(source.formats)} weights of {source.path} are quantised already "
            f"({kinds}): leave it out to take them as they are"
        )
    return {} if source.formats else asked


def _multiplied(formats: Formats, cfg: ModelConfig) -> dict[str, Format]:
    """Picks the formats that kernels multiply as they are; latents' up-projections are widened in every step."""
    plain = specs.named_leaves(family(cfg).param_specs(cfg))
    return {
        name: form
        for name, form in formats.items()
        if name in plain and ".kv_b_proj." not in name and native.reads(form.dtype, plain[name].shape[-1])
    }


def _narrow_formats(source: SafetensorsSource | GgufSource) -> dict[str, Format]:
    """Matrices that the checkpoint has in 16 bits, but for routers."""
    stored, plain = source.stored_dtypes(), specs.named_leaves(family(source.config).param_specs(source.config))
    matrices = {
        name for name, spec in plain.items()
        if len(spec.shape) - ("expert" in spec.axes) >= 2 and "router" not in spec.axes
    }  # fmt: skip
    return {name: Format(stored[name]) for name in matrices & stored.keys()}


def _read(
    source: Checkpoint, asked: EngineConfig, placed: ModelPlacement, progress: bool
) -> tuple[ParamTree, ModelConfig]:
    device = placed.placement.first
    dtype, layout = asked.dtype or default_dtype(device), asked.layout or CHECKPOINT
    formats = _formats(source, asked.quantize, dtype, layout)
    read_native = None
    if asked.quantize in ("keep", "auto") and not isinstance(source, orbax.OrbaxSource):
        read_native = source.read_native
    try:
        if not isinstance(source, orbax.OrbaxSource) or formats:
            params = assemble(
                source,
                source.config,
                layout=layout,
                dtype=dtype,
                placed=placed,
                ignorable=lambda name: _ignorable(name, source.config),
                formats=formats,
                read_native=read_native,
                progress=progress,
            )
        elif layout == CHECKPOINT:
            params = source.restore(dtype, placed, DevicePlacer(device) if placed.division is None else None)
        else:
            laid, host = served_specs(source, asked, device), ModelPlacement.on_one(find_device("cpu"))
            params = lay_out_on_host(source.restore(dtype, host), source.config, layout, placed, laid)
    except (MemoryError, jax.errors.JaxRuntimeError) as problem:
        needed = placed.num_bytes(served_specs(source, asked, device), dtype)
        raise ResourceExhaustedError(
            f"{source.path}: {needed:,} bytes of parameters in {dtype} cannot be put on {device}: {problem}"
        ) from problem
    trim_heap()
    return params, source.config


def _ignorable(name: str, cfg: ModelConfig) -> bool:
    """Rotary tables, a head equal to the embeddings, and layers of DeepSeek V3 that guess a second token."""
    guesses = cfg.model_type == "deepseek_v3" and name.startswith(f"model.layers.{cfg.num_hidden_layers}.")
    return guesses or name.endswith("rotary_emb.inv_freq") or (cfg.tie_word_embeddings and name == "lm_head.weight")
