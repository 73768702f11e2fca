"""From an `ExecutorConfig` to an executor. What each field does is a table in `docs/contract.md`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from ferrum_jax.config import EngineConfig, ModelConfig, dtype_name
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, shown
from ferrum_jax.contract.execution import (
    AttentionType,
    ExecutorAttentionConfig,
    ExecutorConfig,
    ExecutorMemoryConfig,
    ExecutorType,
    OptimizationConfig,
)
from ferrum_jax.contract.executor import ModelExecutorFactory
from ferrum_jax.contract.values import DataType, Device, ModelInfo
from ferrum_jax.executor.llm_executor.executor import LlmExecutor
from ferrum_jax.executor.llm_executor.worker import Worker
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.executor.sizing import plan_engine
from ferrum_jax.loading import Checkpoint, load, open_checkpoint, plan_ahead
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import num_parameters
from ferrum_jax.sharding.devices import find_device

_DTYPES = {DataType.FP32: "float32", DataType.FP16: "float16", DataType.BF16: "bfloat16"}
_TYPES = (ExecutorType.Sequential, ExecutorType.Batch, ExecutorType.ContinuousBatch, ExecutorType.Speculative)
_ENGINE_OPTIONS = ("attention", "kv_blocks", "max_step_tokens", "max_loras", "max_lora_rank", "layout", "quantize")
_OPTIONS = (*_ENGINE_OPTIONS, "kv_dtype", "engine", "strict", "progress", "executor_type")
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
_ONLY = (  # part, field, the one value there is, why
    (
        "attention_config",
        "enable_flash_attention",
        False,
        "no flash setting: the option 'attention' names the kernel",
    ),
    ("attention_config", "enable_paged_attention", True, "the KV is always paged"),
    ("memory_config", "enable_memory_pooling", True, "the KV is always one preallocated pool"),
    ("optimization_config", "enable_cuda_graphs", False, "XLA decides on command buffers"),
    ("optimization_config", "enable_kernel_fusion", True, "XLA always fuses"),
    ("optimization_config", "enable_mixed_precision", False, "weights and activations share `dtype`"),
    ("optimization_config", "optimization_level", 2, "XLA's default level is the only one"),
)
_PARTS = (
    ("model_info", ModelInfo),
    ("device", Device),
    ("dtype", DataType),
    ("attention_config", ExecutorAttentionConfig),
    ("memory_config", ExecutorMemoryConfig),
    ("optimization_config", OptimizationConfig),
    ("executor_options", Mapping),
)


@dataclass(frozen=True)
class _Order:
    """A configuration that was found to be possible."""

    source: Checkpoint
    device: Device
    engine: EngineConfig
    strict: bool
    progress: bool
    info: ModelInfo


class LlmExecutorFactory(ModelExecutorFactory):
    """Loads checkpoints behind `LlmExecutor`s; it holds nothing."""

    async def create_executor(self, config: ExecutorConfig) -> LlmExecutor:
        """Loads a model off the event loop; `warmup` compiles its declared steps, `shutdown` frees it.

        When cancelled it waits for the load to end and frees what was loaded.

        Raises:
            FerrumError: as `validate_config`, and whatever `load` finds in the weights.
        """
        executor, _ = await Worker("executor-factory").run(partial(_build, config), lambda built: built[1].close())
        return executor

    async def create_batch_executor(self, config: ExecutorConfig) -> LlmExecutor:
        """As `create_executor`: every `LlmExecutor` batches."""
        return await self.create_executor(config)

    def supported_types(self) -> tuple[ExecutorType, ...]:
        """Kinds of executor that an `LlmExecutor` is, all at once."""
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
        _order(config)


def _build(config: ExecutorConfig) -> tuple[LlmExecutor, ModelRunner]:
    order = _order(config)
    runner = load(order.source, device=order.device, engine=order.engine, strict=order.strict, progress=order.progress)
    try:
        warm = partial(runner.warmup, progress=order.progress)
        info = replace(order.info, dtype=runner.model_info().dtype)
        return LlmExecutor(runner, info, warm=warm, close=runner.close), runner
    except BaseException:
        runner.close()
        raise


def _order(config: ExecutorConfig) -> _Order:
    if not isinstance(config, ExecutorConfig):
        raise ConfigError(f"config is a {type(config).__name__}, expected an ExecutorConfig")
    for name, kind in _PARTS:
        if not isinstance(getattr(config, name), kind):
            raise ConfigError(f"{name} is {shown(getattr(config, name))}, expected a {kind.__name__}")
    for part, name, only, why in _ONLY:
        _refuse_other(f"{part}.{name}", getattr(getattr(config, part), name), only, why)
    flags = config.optimization_config.custom_flags
    if not isinstance(flags, Mapping):
        raise ConfigError(f"custom_flags is {shown(flags)}, expected a mapping")
    if flags:
        raise UnsupportedError(f"custom_flags {shown(flags)}: there are none to set")
    if config.dtype not in _DTYPES:
        raise UnsupportedError(
            f"dtype {config.dtype.name}: weights are computed in {', '.join(d.name for d in _DTYPES)}"
        )
    options = _checked_options(config.executor_options)
    device = find_device(config.device)
    source = open_checkpoint(_checked_path(config.model_info.model_id))
    info = _checked_info(config, source.config)
    _refuse_attention(config.attention_config, source.config)
    engine = _engine(config, options).over_environment()
    if config.memory_config.memory_pool_size is not None:
        engine = _sized(engine, config.memory_config.memory_pool_size, source.config, device.platform)
    plan_ahead(engine, source, device)
    return _Order(source, config.device, engine, options.get("strict", False), options.get("progress", True), info)


def _refuse_other(name: str, value: Any, only: Any, why: str) -> None:
    if type(value) is not type(only):
        raise ConfigError(f"{name} is {shown(value)}, expected a {type(only).__name__}")
    if value != only:
        raise UnsupportedError(f"{name} is {shown(value)}, only {only!r} can be honoured: {why}")


def _checked_path(path: Any) -> str:
    if not isinstance(path, str) or not path:
        raise ConfigError(f"model_info.model_id is {shown(path)}, expected the path of a model")
    return path


def _checked_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in options.items():
        if name in _FIELD_OF:
            raise ConfigError(f"executor_options[{name!r}]: set {_FIELD_OF[name]} instead")
        if name not in _OPTIONS:
            raise ConfigError(f"executor_options[{shown(name)}] is unknown, known are {', '.join(_OPTIONS)}")
        if name in ("strict", "progress") and not isinstance(value, bool):
            raise ConfigError(f"executor_options[{name!r}] is {shown(value)}, expected True or False")
        if name == "engine" and not isinstance(value, EngineConfig | None):
            raise ConfigError(f"executor_options['engine'] is a {type(value).__name__}, expected an EngineConfig")
        if name == "executor_type" and not isinstance(value, ExecutorType):
            raise ConfigError(f"executor_options['executor_type'] is {shown(value)}, expected an ExecutorType")
        if name == "executor_type" and value not in _TYPES:
            raise UnsupportedError(f"executor_type {value}: built are {', '.join(kind.name for kind in _TYPES)}")
    return options


def _checked_info(config: ExecutorConfig, cfg: ModelConfig) -> ModelInfo:
    """Gives the model's identity; what `model_info` states must be true, 0 and the empty string state nothing."""
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
            raise ConfigError(f"model_info.{name} is {shown(value)}, the checkpoint has {found!r}")
    for name, length in (
        ("model_info.max_sequence_length", stated.max_sequence_length),
        ("max_sequence_length", config.max_sequence_length),
    ):
        most = cfg.reaching(length if isinstance(length, int) else 0).max_seq_len
        if not isinstance(length, int) or length > most:
            raise ConfigError(f"{name} is {shown(length)}, the model can reach {most}")
    if not isinstance(stated.device, Device):
        raise ConfigError(f"model_info.device is {shown(stated.device)}, expected a Device")
    if stated.device != config.device:
        raise ConfigError(f"model_info.device is {stated.device}, device is {config.device}")
    if not isinstance(stated.dtype, DataType):
        raise ConfigError(f"model_info.dtype is {shown(stated.dtype)}, expected a DataType")
    if stated.dtype is not config.dtype and _DTYPES.get(stated.dtype) != cfg.dtype:
        raise ConfigError(
            f"model_info.dtype is {stated.dtype}, expected {config.dtype} or the checkpoint's {cfg.dtype}"
        )
    return replace(
        stated, max_sequence_length=stated.max_sequence_length or cfg.max_seq_len, dtype=config.dtype, **truth
    )


def _refuse_attention(attention: ExecutorAttentionConfig, cfg: ModelConfig) -> None:
    kind, heads, kv_heads = attention.attention_type, cfg.num_attention_heads, cfg.num_key_value_heads
    windows = {window for window in cfg.layer_windows if window is not None}
    if not isinstance(kind, AttentionType):
        raise ConfigError(f"attention_type is {shown(kind)}, expected an AttentionType")
    if kind is AttentionType.Flash:
        raise UnsupportedError("attention_type Flash: no flash setting, the option 'attention' names the kernel")
    possible = {
        AttentionType.MultiHead: heads == kv_heads,
        AttentionType.MultiQuery: kv_heads == 1,
        AttentionType.GroupedQuery: True,  # of which the two above are the ends
        AttentionType.Paged: True,
        AttentionType.SlidingWindow: bool(windows),
    }
    if not possible[kind]:
        raise ConfigError(
            f"attention_type is {kind!r}, the model has {heads} heads, {kv_heads} key/value heads and windows "
            f"{sorted(windows)}"
        )
    size = attention.sliding_window_size
    if size is not None and not (isinstance(size, int) and windows == {size}):
        raise ConfigError(f"sliding_window_size is {shown(size)}, the model has {sorted(windows)}")


def _engine(config: ExecutorConfig, options: Mapping[str, Any]) -> EngineConfig:
    memory, kv_dtype = config.memory_config, options.get("kv_dtype")
    if not isinstance(memory.enable_kv_cache_sharing, bool):
        raise ConfigError(f"enable_kv_cache_sharing is {shown(memory.enable_kv_cache_sharing)}, expected True or False")
    if memory.memory_pool_size is not None and options.get("kv_blocks") is not None:
        raise ConfigError(
            f"memory_pool_size is {shown(memory.memory_pool_size)} and kv_blocks is {shown(options['kv_blocks'])}: "
            "give one"
        )
    asked = EngineConfig(
        dtype=_DTYPES[config.dtype],
        kv_dtype=None if kv_dtype is None else dtype_name(kv_dtype),
        max_seqs=config.max_batch_size,
        kv_capacity=config.max_sequence_length,
        block_size=config.attention_config.block_size,
        prefix_cache=memory.enable_kv_cache_sharing,
        memory_fraction=memory.max_memory_usage,
        **{name: options.get(name) for name in _ENGINE_OPTIONS},
    )
    engine = options.get("engine") or EngineConfig()
    for field in fields(EngineConfig):
        mine, theirs = getattr(asked, field.name), getattr(engine, field.name)
        if mine is not None and theirs is not None and mine != theirs:
            raise ConfigError(f"{field.name} is {mine!r} in the configuration and {theirs!r} in its `engine` option")
    return asked.over(engine)


def _sized(engine: EngineConfig, pool_bytes: Any, cfg: ModelConfig, platform: str) -> EngineConfig:
    """Gives the pool as many blocks as its bytes hold."""
    if isinstance(pool_bytes, bool) or not isinstance(pool_bytes, int):
        raise ConfigError(f"memory_pool_size is {shown(pool_bytes)}, expected a number of bytes")
    block_bytes = plan_engine(replace(engine, kv_blocks=1), cfg, platform=platform, free_bytes=2**62).cache.num_bytes
    if pool_bytes < block_bytes:
        raise ConfigError(f"memory_pool_size is {shown(pool_bytes)}, one KV block takes {block_bytes} bytes")
    return replace(engine, kv_blocks=pool_bytes // block_bytes)
