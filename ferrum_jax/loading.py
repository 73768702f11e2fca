"""Loading: from the path of a checkpoint to a model that is ready to serve."""

import contextlib
import inspect
import logging
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
from ferrum_jax.executor import sizing
from ferrum_jax.executor.build import build_runner
from ferrum_jax.executor.device import EMPTY_KV, KvMemory
from ferrum_jax.executor.hosts import Hosts
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.executor.sizing import DEFAULT_BLOCK, EnginePlan, plan_engine
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
from ferrum_jax.weights.hub import model_name, resolve
from ferrum_jax.weights.huge_pages import DevicePlacer
from ferrum_jax.weights.safetensors_file import check_regular

ModelPath = str | os.PathLike[str]
Checkpoint = SafetensorsSource | GgufSource | orbax.OrbaxSource
_log = logging.getLogger(__name__)
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(@.+)?")
_OURS = {  # this package's argument, by vLLM's name
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

    An argument that is None is taken from `engine`, then from the `FERRUM_…` variables, then from model and device.

    On several hosts (docs/several-hosts.md) every process calls this. It returns only in process 0. The other processes
    follow process 0 inside this call until the runner is closed or process 0 ends, and then raise SystemExit(0).

    Args:
        path: a Hugging Face folder or id `org/name`, a `.gguf` file, or an Orbax checkpoint; or a checkpoint from
            `open_checkpoint`.
        dtype: of weights and activations; if None, float32 on CPU and bfloat16 elsewhere.
        kv_dtype: of cached keys and values; `dtype` if None. `float8_e4m3fn` (or `fp8`) has 3 bits of mantissa and no
            scales: numbers are clipped to -448 to 448.
        max_seqs: live sequences, in each replica of the mesh.
        kv_capacity: positions that one sequence can have; a number above the model's maximum is cut to that. If None,
            the model's maximum, up to 4096.
        block_size: positions per KV block.
        prefix_cache: reuse of common prefixes.
        kv_blocks: blocks in the pool.
        memory_fraction: share of free device memory that the pool may take.
        max_step_tokens: prompt tokens in one step; longer prompts run in several steps.
        engine: an `EngineConfig`, for instance with the buckets.
        max_loras: adapters loaded at a time.
        max_lora_rank: largest rank of an adapter.
        device: `cpu`, `cuda:0`, …; JAX's default device if None.
        mesh: devices along the axes `data` (replicas), `expert` and `model` (which divide one replica), such as
            `{"model": 4}`, taken from `device` on; or a `jax.sharding.Mesh` with these axes.
        artifacts: folder for compiled steps, which later starts load; the user's cache folder if None or True, no
            folder if False. Loading a step runs its code, so a folder that other users may write to is not used.
        strict: after `warmup`, a step that is not compiled yet raises an error.
        progress: show bars on standard error while working.
        attention: the attention backend: `xla`, `cpu`, `triton` or `tpu`; the platform's own if None.
        layout: of the parameters (models/layout.py): `checkpoint`, `fused` or `scanned`. If None: `scanned` where the
            CPU kernels serve layers that are all alike, `fused` where `triton` attends and the weights to be fused have
            one format, else `checkpoint`.
        quantize: `int8` or `float8_e4m3fn`: every matrix in this dtype, with a scale for each row. `keep`: matrices of
            a quantised checkpoint stay as they are stored, with their bits, groups and scales. `auto`: as `keep`, also
            for 16-bit matrices, but only for matrices that the CPU kernels read in this form. `none`: matrices of
            folders and GGUF files are dequantised. If None, `auto` where the CPU kernels serve the model, else `none`.
            Activations stay in `dtype`.

    Raises:
        FerrumError: a subclass that says what is wrong with the path, the model or a setting.
    """
    settings = _asked(locals())  # first: nothing but the arguments is there yet
    strict, progress = check_flag("strict", strict, ConfigError), check_flag("progress", progress, ConfigError)
    wanted = mesh if isinstance(mesh, jax.sharding.Mesh) else settings.mesh_sizes
    channel = processes.join(wanted)
    with telling(channel):
        return _load(path, settings, device, wanted, channel, strict=strict, progress=progress)


def check_settings(settings: Mapping[str, Any], *beside: str) -> None:
    """Checks keyword arguments for a later `load`, before a model is looked for.

    `beside` names further arguments that the caller has itself, for the error message.

    Raises:
        ConfigError: `load` has no such argument, or a value is wrong for any model.
    """
    known, own = inspect.signature(load).parameters, {field.name for field in fields(EngineConfig)}
    for name in sorted(settings.keys() - known.keys()):
        hint = f"here it is {_OURS[name]}" if name in _OURS else f"known are {', '.join([*beside, *list(known)[1:]])}"
        if name in own:
            hint = f"give engine=EngineConfig({name}=...)"
        raise ConfigError(f"there is no setting {name!r}: {hint}")
    _asked(settings)


def _asked(given: Mapping[str, Any]) -> EngineConfig:
    """Joins those arguments of `load` that are settings with `engine` and the environment."""
    own = {field.name: given[field.name] for field in fields(EngineConfig) if field.name in given}
    for name in ("max_loras", "max_lora_rank"):
        if is_integer(count := own.get(name)) and count == 0:
            own[name] = None
    if isinstance(folder := own.get("artifacts"), os.PathLike):
        own["artifacts"] = os.fspath(folder)
    if isinstance(own.get("mesh"), jax.sharding.Mesh):
        own["mesh"] = None
    return EngineConfig(**own).joined(given.get("engine")).over_environment()


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
    """Loads a model with given settings, in every process."""
    target = find_device(device)
    source = path if isinstance(path, Checkpoint) else open_checkpoint(_on_disk(path, progress))
    source.config = source.config.reaching(settings.kv_capacity or 0, at_most=True)
    replicas = place_on_mesh(mesh, target)
    if device is not None and isinstance(mesh, jax.sharding.Mesh) and target != replicas[0].first:
        raise ConfigError(f"device is {device}, but the mesh begins with {replicas[0].first}: leave out the device")
    hosts = Hosts.of(replicas, channel)
    with telling(hosts.channel if channel is None and hosts.are_several else None):  # one that was opened just now
        return _load_on(source, settings, replicas, hosts, strict=strict, progress=progress)


def _load_on(
    source: Checkpoint,
    settings: EngineConfig,
    replicas: list[Placement],
    hosts: Hosts,
    *,
    strict: bool,
    progress: bool,
) -> ModelRunner:
    """Loads a model onto its devices."""
    hosts.check_placement(replicas[0])
    placed, target = ModelPlacement.of(source.config, replicas[0]), replicas[0].first
    asked, settings = settings, with_defaults(settings, source, target, is_divided=placed.division is not None)
    if asked.quantize is None and settings.quantize == "none" and hosts.leads:
        _tell_dequantised(source, settings, placed)
    reads_free = settings.kv_blocks is None
    free = hosts.least(placed.placement.free_bytes(is_needed=reads_free))
    ahead, root = plan_ahead(settings, source, placed, free), artifacts_folder(settings.artifacts)
    early = None if root is None else _open_artifacts(root, source, ahead, placed, settings)
    if early is not None:  # loading them takes as long as reading a small model, and runs on another core
        early.preload([EMPTY_KV, *map(repr, ahead.first())])
    laid = served_specs(source, settings, target)
    taken = placed.num_bytes(laid, settings.dtype or default_dtype(target))
    memory = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv") as pool:  # on a CPU, zeroing the KV takes seconds
        if target.platform == "cpu" and 2 * ahead.cache.num_bytes <= free - taken:
            memory = pool.submit(_allocate_ahead, ahead.cache, replicas[0], early, settings.compiler_options)
        params, cfg = _read(source, settings, placed, progress and hosts.leads)
    memory = None if memory is None else memory.result()
    free = placed.placement.free_bytes(is_needed=reads_free) if memory is None else max(0, free - taken)
    runner = build_runner(
        params,
        cfg,
        settings,
        placed,
        replicas,
        hosts,
        specs=None if placed.division is None else laid,
        root=root,
        free=free,
        strict=strict,
        name=model_name(source.path),
        early=early,
        memory=memory,
    )
    longest, capacity = cfg.reaching(cfg.max_position_embeddings).max_seq_len, runner.kv_capacity()
    if settings.kv_capacity is None and capacity == sizing.DEFAULT_CAPACITY < longest:
        text = "%s: a sequence can have %d positions, the model can have %d with kv_capacity (--kv-capacity)"
        _log.info(text, runner.name, capacity, longest)
    return runner


def _tell_dequantised(source: Checkpoint, settings: EngineConfig, placed: ModelPlacement) -> None:
    """Warns if weights are served in more bits than the checkpoint has, as `quantize` is not given."""
    kept: Formats = {}
    if not isinstance(source, orbax.OrbaxSource):
        with contextlib.suppress(FerrumError):  # not all of them can be kept
            kept = source.native_formats()
    if kept:
        dtype, plain = settings.dtype or "float32", family(source.config).param_specs(source.config)
        sizes = (placed.num_bytes(own, dtype) / 1e6 for own in (plain, quantised_specs(plain, kept)))
        _log.warning(
            "%s: %d quantised weights are dequantised to %s; the parameters take %.0f MB of each device, and %.0f with "
            "quantize='keep', which serves them as they are stored",
            source.path, len(kept), dtype, *sizes,
        )  # fmt: skip


def _allocate_ahead(
    spec: CacheSpec, placement: Placement, artifacts: Artifacts | None, options: CompilerOptions
) -> KvMemory | None:
    try:
        memory = KvMemory(spec, placement, artifacts, options)
        memory.allocate_ahead()
    except ResourceExhaustedError:  # raised again later if it is still true with the parameters on the device
        return None
    return memory


def _open_artifacts(
    root: Path, source: Checkpoint, plan: EnginePlan, placed: ModelPlacement, settings: EngineConfig
) -> Artifacts:
    """Opens the artifacts of a model whose parameters are not read yet, by their expected shapes and shardings."""
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
    """Reads a checkpoint into a tree of arrays, and returns also its configuration; `path` is as for `load`.

    In the layout `checkpoint` the tree has the checkpoint's names. With `quantize`, as for `load`, matrices are
    `QuantisedWeight`s; `auto` does here what it does in `load` where the CPU kernels serve the model.
    """
    target = find_device(device)
    settings = EngineConfig(dtype=dtype, layout=layout, quantize=quantize)
    source = path if isinstance(path, Checkpoint) else open_checkpoint(_on_disk(path, progress))
    return _read(source, settings, ModelPlacement.on_one(target), progress)


def _on_disk(path: ModelPath, progress: bool) -> ModelPath:
    """Returns the path of a model; for a Hugging Face id that is not a path, the path of its download."""
    if not isinstance(path, str) or not _HUB_ID.fullmatch(path) or path.endswith(".gguf") or os.path.lexists(path):
        return path
    is_of_a_folder = os.path.isdir(path.partition("/")[0])  # then this is a path to a missing model
    return path if is_of_a_folder else resolve(path, progress=progress)


def open_checkpoint(path: ModelPath) -> Checkpoint:
    """Opens a Hugging Face folder, a GGUF file or an Orbax checkpoint: reads headers and configuration.

    It reads no weights, except the head of a tied model that stores one: a head that differs from the embeddings unties
    the model.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f"path is {safe_repr(path)}, expected the path of a model")
    try:
        place = Path(path).expanduser()
        found = place.exists()
    except (OSError, RuntimeError) as problem:  # the name is too long, or `~user` does not exist
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
    """Plans the sizes of an engine before its parameters are on the devices; `load` plans again when they are.

    The dtype defaults to the device's own, and `free` bytes to the device's free memory.

    Raises:
        ConfigError: as `param_specs`, or the compiler refuses an option.
        FerrumError: as `plan_engine`.
    """
    device = placed.placement.first
    check_compiler_options(settings.compiler_options, device)
    settings = with_defaults(settings, source, device, is_divided=placed.division is not None)
    settings = settle_attention(settings, source.config if placed.division is None else placed.division.local, device)
    taken = placed.num_bytes(served_specs(source, settings, device), settings.dtype or default_dtype(device))
    if free is None:
        free = placed.placement.free_bytes(is_needed=settings.kv_blocks is None)
    left = max(0, free - taken)
    return plan_engine(settings, source.config, platform=device.platform, free_bytes=left, division=placed.division)


def param_specs(
    source: Checkpoint, quantize: str | None, dtype: str | None = None, layout: str = CHECKPOINT
) -> ParamTree:
    """Returns the specs of the parameters, quantised as in the checkpoint or as `quantize` says.

    Raises:
        ConfigError: the checkpoint is quantised in another way already.
    """
    plain = family(source.config).param_specs(source.config)
    return quantised_specs(plain, _formats(source, quantize, dtype, layout) or source.formats)


def served_specs(source: Checkpoint, settings: EngineConfig, device: JaxDevice) -> ParamTree:
    """Returns the specs of the undivided parameters in the layout that is served; raises as `param_specs`."""
    dtype, layout = settings.dtype or default_dtype(device), settings.layout or CHECKPOINT
    return layout_specs(param_specs(source, settings.quantize, dtype, layout), source.config, layout)


def with_defaults(
    settings: EngineConfig, source: Checkpoint, device: JaxDevice, *, is_divided: bool = False
) -> EngineConfig:
    """Fills in a model's dtype, quantisation and layout on a device.

    If it is None or `auto`, `quantize` becomes `auto` where the CPU kernels serve the model, as they read the
    checkpoint's own formats, and `none` elsewhere. The layout is that of `layout_for`, or `checkpoint` if a mesh
    divides the parameters or formats prevent fusing or stacking.

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
    """Whether weights that a layout fuses have the same format and, if it stacks them, kernels read this format.

    Otherwise they would be dequantised to be fused, or copied out of the stack in every step.
    """
    try:
        formats = dict(_formats(source, quantize, dtype, CHECKPOINT) or source.formats)
    except FerrumError:  # `param_specs` reports it
        return False
    served = _multiplied(formats, source.config) if layout == SCANNED else formats
    return joinable(served, source.config, layout) == formats


def _formats(source: Checkpoint, quantize: str | None, dtype: str | None, layout: str) -> Formats:
    """Returns the formats of weights that loading quantises, or that it keeps as they are stored."""
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
    """Selects the formats that CPU kernels read; latents' up-projections would be dequantised in every step."""
    plain = specs.named_leaves(family(cfg).param_specs(cfg))
    return {
        name: form
        for name, form in formats.items()
        if name in plain and ".kv_b_proj." not in name and native.reads(form.dtype, plain[name].shape[-1])
    }


def _narrow_formats(source: SafetensorsSource | GgufSource) -> dict[str, Format]:
    """Returns the formats of matrices, except routers, that the checkpoint stores in 16 bits."""
    stored = source.stored_dtypes()
    return {name: Format(stored[name]) for name in choose_formats(source.config, "int8").keys() & stored.keys()}


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
            laid = served_specs(source, asked, device)
            params = lay_out_on_host(source.restore(dtype, None), source.config, layout, placed, laid)
    except (MemoryError, jax.errors.JaxRuntimeError) as problem:
        needed = placed.num_bytes(served_specs(source, asked, device), dtype)
        raise ResourceExhaustedError(
            f"{source.path}: {needed:,} bytes of parameters in {dtype} cannot be put on {device}: {problem}"
        ) from problem
    trim_heap()
    return params, source.config


def _ignorable(name: str, cfg: ModelConfig) -> bool:
    """Whether a tensor is not needed: a rotary table, a tied head, or a multi-token prediction layer of DeepSeek V3."""
    guesses = cfg.model_type == "deepseek_v3" and name.startswith(f"model.layers.{cfg.num_hidden_layers}.")
    return guesses or name.endswith("rotary_emb.inv_freq") or (cfg.tie_word_embeddings and name == "lm_head.weight")
