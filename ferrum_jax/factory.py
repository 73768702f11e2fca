"""From an `ExecutorConfig` to an executor. What each field does is a table in `docs/contract.md`."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.config.engine import CompilerOptions
from ferrum_jax.contract.checks import check_flag, is_integer
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, safe_repr
from ferrum_jax.contract.execution import (
    AttentionType,
    ExecutorAttentionConfig,
    ExecutorConfig,
    ExecutorMemoryConfig,
    ExecutorType,
    ModelExecutorFactory,
    OptimizationConfig,
)
from ferrum_jax.contract.values import DataType, Device, ModelInfo
from ferrum_jax.executor.llm_executor.executor import LlmExecutor
from ferrum_jax.executor.llm_executor.worker import wait_through_cancellation, when_done
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.executor.sizing import plan_engine
from ferrum_jax.loading import Checkpoint, load, open_checkpoint, plan_ahead
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import num_parameters
from ferrum_jax.sharding.devices import JaxDevice, find_device

_DTYPES = {DataType.FP32: "float32", DataType.FP16: "float16", DataType.BF16: "bfloat16"}
_TYPES = (
    ExecutorType.Sequential,
    ExecutorType.Batch,
    ExecutorType.ContinuousBatch,
    ExecutorType.Speculative,
    ExecutorType.TensorParallel,
)
_ENGINE_OPTIONS = (
    "attention", "kv_blocks", "max_step_tokens", "max_loras", "max_lora_rank", "layout", "quantize", "mesh",
)  # fmt: skip
_OPTIONS = (*_ENGINE_OPTIONS, "kv_dtype", "compiler_options", "engine", "strict", "progress", "executor_type")
_FIELD_OF = {  # settings of `load` that have a field of their own
    "path": "model_info.model_id",
    "dtype": "dtype",
    "device": "device",
    "max_seqs": "max_batch_size",
    "kv_capacity": "max_sequence_length",
    "block_size": "attention_config.block_size",
    "prefix_cache": "memory_config.enable_kv_cache_sharing",
    "memory_fraction": "memory_config.max_memory_usage",
}
_FIXED = (  # part, field that can only be True, and why
    ("attention_config", "enable_paged_attention", "the KV is always paged; block_size sets the size of a page"),
    ("memory_config", "enable_memory_pooling", "the KV is always one pool; memory_pool_size sets its bytes"),
)
_FUSION_PASSES = "fusion,priority-fusion,multi_output_fusion"  # of XLA for CPUs and GPUs
_GRAPH_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
_PARTS = {
    "model_info": ModelInfo,
    "device": Device,
    "dtype": DataType,
    "attention_config": ExecutorAttentionConfig,
    "memory_config": ExecutorMemoryConfig,
    "optimization_config": OptimizationConfig,
    "executor_options": Mapping,
}


class LlmExecutorFactory(ModelExecutorFactory):
    """Loads checkpoints behind `LlmExecutor`s; keeps no state."""

    async def create_executor(self, config: ExecutorConfig) -> LlmExecutor:
        """Loads a model off the event loop; `warmup` compiles its declared steps, `shutdown` frees it.

        When cancelled it waits for the load to end and frees what was loaded.

        Raises:
            FerrumError: as `validate_config`, and whatever `load` finds in the weights.
        """
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor-factory")
        future = pool.submit(_build, config)
        pool.shutdown(wait=False)
        try:
            await when_done(future)
        except BaseException as reason:  # cancelled, or the loop is gone and closes its coroutines
            future.add_done_callback(_close_runner)
            if isinstance(reason, asyncio.CancelledError):
                await wait_through_cancellation(future)
            raise
        return future.result()[0]

    async def create_batch_executor(self, config: ExecutorConfig) -> LlmExecutor:
        """As `create_executor`; a configuration of the type Sequential is a ConfigError."""
        options = getattr(config, "executor_options", None)
        if isinstance(options, Mapping) and options.get("executor_type") is ExecutorType.Sequential:
            raise ConfigError("executor_type is Sequential: a batch executor needs another type, or none")
        return await self.create_executor(config)

    def supported_types(self) -> tuple[ExecutorType, ...]:
        """Kinds of executor that can be asked for; all but Sequential are every `LlmExecutor` at once."""
        return _TYPES

    def validate_config(self, config: ExecutorConfig) -> None:
        """Raises for every field that cannot be honoured; reads headers of the checkpoint, no weights.

        Raises:
            ConfigError: a field of the wrong type, out of range, or at odds with the model or another field.
            UnsupportedError: a field asks for what is not built.
            NotFoundError: `model_info.model_id` is no path of a model.
            DeviceError: there is no such device.
            ResourceExhaustedError: the KV would not fit into what is free.
        """
        _check(config)


def _build(config: ExecutorConfig) -> tuple[LlmExecutor, ModelRunner]:
    source, engine, info = _check(config)
    strict, progress = config.executor_options.get("strict", False), config.executor_options.get("progress", True)
    runner = load(source, device=config.device, engine=engine, strict=strict, progress=progress)
    try:
        warm, info = partial(runner.warmup, progress=progress), replace(info, dtype=runner.model_info().dtype)
        return LlmExecutor(runner, info, warm=warm, close=runner.close), runner
    except BaseException:
        runner.close()
        raise


def _close_runner(future: Future[tuple[LlmExecutor, ModelRunner]]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()[1].close()


def _check(config: ExecutorConfig) -> tuple[Checkpoint, EngineConfig, ModelInfo]:
    """Opens the model of a configuration that can be honoured, and derives its settings and identity."""
    if not isinstance(config, ExecutorConfig):
        raise ConfigError(f"config is a {type(config).__name__}, expected an ExecutorConfig")
    for name, kind in _PARTS.items():
        if not isinstance(getattr(config, name), kind):
            raise ConfigError(f"{name} is {safe_repr(getattr(config, name))}, expected a {kind.__name__}")
    for part, name, why in _FIXED:
        if not check_flag(f"{part}.{name}", getattr(getattr(config, part), name), ConfigError):
            raise UnsupportedError(f"{part}.{name} is False, only True can be honoured: {why}")
    _check_numerics(config)
    _check_options(config)
    device = find_device(config.device)
    source = open_checkpoint(config.model_info.model_id)
    info = _check_info(config, source.config)
    _check_attention(config.attention_config, source.config)
    engine = _engine(config, device).over_environment()
    source.config = source.config.reaching(config.max_sequence_length, at_most=True)  # as `load` does
    placed = ModelPlacement.on_mesh(source.config, engine.mesh_sizes, device)
    if config.executor_options.get("executor_type") is ExecutorType.TensorParallel and placed.division is None:
        raise ConfigError(
            f"executor_type is TensorParallel and the mesh is {engine.mesh_sizes or 'one device'}: set "
            "executor_options['mesh'] to one with several devices along model or expert"
        )
    if config.memory_config.memory_pool_size is not None:
        engine = _sized(engine, config.memory_config.memory_pool_size, source.config, placed)
    plan_ahead(engine, source, placed)
    return source, engine, info


def _check_numerics(config: ExecutorConfig) -> None:
    is_mixed = config.optimization_config.enable_mixed_precision
    if check_flag("enable_mixed_precision", is_mixed, ConfigError) and config.dtype is DataType.FP32:
        raise ConfigError(
            "enable_mixed_precision is True and dtype FP32: set dtype BF16 or FP16, with which "
            "softmax, norms and logits are float32"
        )
    if config.dtype not in _DTYPES:
        known = ", ".join(dtype.name for dtype in _DTYPES)
        raise UnsupportedError(f"dtype {config.dtype.name}: weights are computed in {known}")


def _check_options(config: ExecutorConfig) -> None:
    for name, value in config.executor_options.items():
        if name in _FIELD_OF:
            raise ConfigError(f"executor_options[{name!r}]: set {_FIELD_OF[name]} instead")
        if name not in _OPTIONS:
            raise ConfigError(f"executor_options[{safe_repr(name)}] is unknown, known are {', '.join(_OPTIONS)}")
        if name in ("strict", "progress"):
            check_flag(f"executor_options[{name!r}]", value, ConfigError)
    if not isinstance(kind := config.executor_options.get("executor_type", ExecutorType.Batch), ExecutorType):
        raise ConfigError(f"executor_options['executor_type'] is {safe_repr(kind)}, expected an ExecutorType")
    if kind not in _TYPES:
        raise UnsupportedError(f"executor_type {kind}: built are {', '.join(known.name for known in _TYPES)}")
    if kind is ExecutorType.Sequential and config.max_batch_size != 1:
        raise ConfigError(
            f"executor_type is Sequential and max_batch_size {safe_repr(config.max_batch_size)}: a sequential executor "
            "runs one sequence, set max_batch_size to 1 or another type"
        )


def _check_info(config: ExecutorConfig, cfg: ModelConfig) -> ModelInfo:
    """Returns the model's identity; what `model_info` states must be true, 0 and the empty string state nothing."""
    stated = config.model_info
    truth: dict[str, Any] = {
        "model_type": cfg.model_type,
        "num_parameters": num_parameters(family(cfg).param_specs(cfg)),
        "hidden_size": cfg.hidden_size,
        "num_layers": cfg.num_hidden_layers,
        "num_heads": cfg.num_attention_heads,
        "num_kv_heads": cfg.num_key_value_heads,
        "vocab_size": cfg.vocab_size,
    }
    for name, found in truth.items():
        value = getattr(stated, name)
        if not isinstance(value, (int, str)) or value not in (0, "", found):
            raise ConfigError(f"model_info.{name} is {safe_repr(value)}, the checkpoint has {found!r}")
    for part, prefix in ((stated, "model_info."), (config, "")):
        length = part.max_sequence_length
        most = cfg.reaching(length if is_integer(length) else 0).max_seq_len
        if not is_integer(length) or not 0 <= length <= most:
            raise ConfigError(f"{prefix}max_sequence_length is {safe_repr(length)}, the model can reach {most}")
    for name, kind in (("device", Device), ("dtype", DataType)):
        if not isinstance(value := getattr(stated, name), kind):
            raise ConfigError(f"model_info.{name} is {safe_repr(value)}, expected a {kind.__name__}")
    if stated.device != config.device:
        raise ConfigError(f"model_info.device is {stated.device}, device is {config.device}")
    if stated.dtype is not config.dtype and _DTYPES.get(stated.dtype) != cfg.dtype:
        raise ConfigError(
            f"model_info.dtype is {stated.dtype}, expected {config.dtype} or the checkpoint's {cfg.dtype}"
        )
    longest = stated.max_sequence_length or cfg.reaching(config.max_sequence_length, at_most=True).max_seq_len
    return replace(stated, max_sequence_length=longest, dtype=config.dtype, **truth)


def _check_attention(attention: ExecutorAttentionConfig, cfg: ModelConfig) -> None:
    kind, heads, kv_heads = attention.attention_type, cfg.num_attention_heads, cfg.num_key_value_heads
    windows = {window for window in cfg.layer_windows if window is not None}
    if not isinstance(kind, AttentionType):
        raise ConfigError(f"attention_type is {safe_repr(kind)}, expected an AttentionType")
    possible = {  # grouped queries are any, every KV is paged, and every kernel has flash attention's online softmax
        AttentionType.MultiHead: heads == kv_heads,
        AttentionType.MultiQuery: kv_heads == 1,
        AttentionType.SlidingWindow: bool(windows),
    }
    if not possible.get(kind, True):
        raise ConfigError(
            f"attention_type is {kind!r}, the model has {heads} heads, {kv_heads} key/value heads and windows "
            f"{sorted(windows)}"
        )
    check_flag("attention_config.enable_flash_attention", attention.enable_flash_attention, ConfigError)
    size = attention.sliding_window_size
    if size is not None and not (isinstance(size, int) and windows == {size}):
        raise ConfigError(f"sliding_window_size is {safe_repr(size)}, the model has {sorted(windows)}")


def _compiler_options(config: ExecutorConfig, device: JaxDevice) -> CompilerOptions:
    """Returns the options of XLA that differ from its own choice; None if there are none."""
    wanted, options = config.optimization_config, dict[str, Any]()
    level, flags = wanted.optimization_level, wanted.custom_flags
    if not is_integer(level) or not 0 <= level <= 3:
        raise ConfigError(f"optimization_level is {safe_repr(level)}, expected an integer from 0 to 3")
    if level != 2:
        options["xla_backend_optimization_level"] = level
    if not check_flag("enable_kernel_fusion", wanted.enable_kernel_fusion, ConfigError):
        options["xla_disable_hlo_passes"] = _FUSION_PASSES
    if options and device.platform not in ("cpu", "gpu"):
        raise UnsupportedError(f"{' and '.join(options)}: XLA for {config.device} has no such option")
    if check_flag("enable_cuda_graphs", wanted.enable_cuda_graphs, ConfigError):
        if device.platform != "gpu":
            raise UnsupportedError(f"enable_cuda_graphs is True, {config.device} has no graphs: set it to False")
        options["xla_gpu_enable_command_buffer"] = _GRAPH_COMMANDS
    if not isinstance(flags, Mapping) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise ConfigError(f"custom_flags is {safe_repr(flags)}, expected options of XLA that are True or False")
    for given in (flags, config.executor_options.get("compiler_options")):
        for name, value in dict(EngineConfig(compiler_options=given).compiler_options or ()).items():
            if options.setdefault(name, value) != value:
                raise ConfigError(f"{name} is {safe_repr(value)}, another field makes it {safe_repr(options[name])}")
    return options or None


def _engine(config: ExecutorConfig, device: JaxDevice) -> EngineConfig:
    memory, options = config.memory_config, config.executor_options
    check_flag("enable_kv_cache_sharing", memory.enable_kv_cache_sharing, ConfigError)
    for name, value in (("max_batch_size", config.max_batch_size), ("max_memory_usage", memory.max_memory_usage)):
        if value is None:
            raise ConfigError(f"{name} is None, expected a number")
    if memory.memory_pool_size is not None and options.get("kv_blocks") is not None:
        pool, blocks = safe_repr(memory.memory_pool_size), safe_repr(options["kv_blocks"])
        raise ConfigError(f"memory_pool_size is {pool} and kv_blocks is {blocks}: give one")
    return EngineConfig(
        dtype=_DTYPES[config.dtype],
        kv_dtype=options.get("kv_dtype"),
        max_seqs=config.max_batch_size,
        kv_capacity=config.max_sequence_length,
        block_size=config.attention_config.block_size,
        prefix_cache=memory.enable_kv_cache_sharing,
        memory_fraction=memory.max_memory_usage,
        compiler_options=_compiler_options(config, device),
        **{name: options.get(name) for name in _ENGINE_OPTIONS},
    ).joined(options.get("engine"))


def _sized(engine: EngineConfig, pool_bytes: Any, cfg: ModelConfig, placed: ModelPlacement) -> EngineConfig:
    """Returns the settings with as many blocks as the pool's bytes hold on each device."""
    if not is_integer(pool_bytes):
        raise ConfigError(f"memory_pool_size is {safe_repr(pool_bytes)}, expected a number of bytes")
    how: dict[str, Any] = {"platform": placed.placement.first.platform, "division": placed.division}
    spec = plan_engine(replace(engine, kv_blocks=1), cfg, **how, free_bytes=2**62).cache
    block_bytes = spec.bytes_per_position * spec.block_size  # 0 if all layers have sliding-window caches
    windows = spec.num_bytes - block_bytes
    if pool_bytes < spec.num_bytes:
        beside = f", sliding-window caches {windows}" if windows else ""
        raise ConfigError(
            f"memory_pool_size is {safe_repr(pool_bytes)}, one KV block takes {block_bytes} bytes{beside}"
        )
    return replace(engine, kv_blocks=(pool_bytes - windows) // block_bytes) if block_bytes else engine
