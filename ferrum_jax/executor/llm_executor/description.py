"""Reports of an executor's model, also where the model itself reports nothing.

A model of the four required methods reports only its sizes. All else is 0 or empty here, never a guess.
"""

import inspect

from ferrum_jax.contract.answers import check_kind
from ferrum_jax.contract.checks import is_integer
from ferrum_jax.contract.errors import ModelError, safe_repr
from ferrum_jax.contract.execution import AttentionType, ExecutorCapabilities, ExecutorMemoryUsage, MemoryRequirements
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.values import DataType, Device, ModelInfo

UNKNOWN_MEMORY = ExecutorMemoryUsage(allocated_bytes=0, used_bytes=0, peak_bytes=0, utilization_percent=0.0)


def overrides(model: DecoderOnlyLLM, *methods: str) -> bool:
    """True if the model's class has one of the contract's optional methods of its own."""
    return any(getattr(type(model), name) is not getattr(DecoderOnlyLLM, name) for name in methods)


def warm_quietly(model: DecoderOnlyLLM) -> None:
    """Warms a model up without its progress bar, if it has one."""
    parameters = inspect.signature(model.warmup).parameters.values()
    takes_progress = any(one.name == "progress" or one.kind is one.VAR_KEYWORD for one in parameters)
    model.warmup(progress=False) if takes_progress else model.warmup()


def model_info(model: DecoderOnlyLLM) -> ModelInfo:
    """Identity and size; where the model reports none, the sizes of its configuration and 0 for the others.

    The dtype and the device are then those of its logits: float32 on the host.
    """
    info = check_kind(model, "model_info", model.model_info(), ModelInfo)
    if info is not None:
        return info
    sizes = model.config
    return ModelInfo(
        model_id=type(model).__name__,
        model_type="unknown",
        num_parameters=0,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=0,
        num_kv_heads=sizes.num_kv_heads,
        vocab_size=sizes.vocab_size,
        max_sequence_length=sizes.max_seq_len,
        dtype=DataType.FP32,
        device=Device("cpu"),
        metadata={"not_told": ("model_type", "num_parameters", "num_heads", "dtype", "device")},
    )


def capabilities(model: DecoderOnlyLLM, info: ModelInfo) -> ExecutorCapabilities:
    """Capabilities; where the model reports none, those that its class and its configuration show.

    The batch is then 1 row, because nothing says that more would share a forward, and memory per token of activations
    and overhead are 0.
    """
    built = check_kind(model, "capabilities", model.capabilities(), ExecutorCapabilities)
    if built is not None:
        if not is_integer(built.max_batch_size) or built.max_batch_size < 1:
            found = safe_repr(built.max_batch_size)
            raise ModelError(f"{type(model).__name__}.capabilities() has max_batch_size {found}, expected at least 1")
        return built
    sizes = model.config
    kv_bytes = 2 * sizes.num_kv_heads * sizes.head_dim * info.dtype.size_in_bytes
    attention = AttentionType.GroupedQuery
    if info.num_kv_heads in (1, info.num_heads):
        attention = AttentionType.MultiHead if info.num_heads == info.num_kv_heads else AttentionType.MultiQuery
    return ExecutorCapabilities(
        max_batch_size=1,
        max_sequence_length=model.kv_capacity(),
        attention_mechanisms=(attention,) if info.num_heads else (),
        supports_dynamic_batching=overrides(model, "decode_batch"),
        supports_continuous_batching=overrides(model, "unified_forward"),
        supports_speculative_decoding=True,  # token by token where the model has no better
        supports_tensor_parallelism=False,
        supports_pipeline_parallelism=False,
        supported_dtypes=(info.dtype,),
        supported_devices=(info.device,),
        memory_requirements=MemoryRequirements(
            parameter_memory=int(info.num_parameters * info.dtype.size_in_bytes),
            activation_memory_per_token=0,
            kv_cache_memory_per_token=int(kv_bytes),
            overhead_memory=0,
        ),
    )
