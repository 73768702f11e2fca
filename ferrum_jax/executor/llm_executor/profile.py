"""What an executor says of its model where the model itself says nothing.

A model of four methods tells its sizes alone. What it does not tell is 0 or empty here, never a guess.
"""

from ferrum_jax.contract.execution import AttentionType, ExecutorCapabilities, ExecutorMemoryUsage, MemoryRequirements
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.values import DataType, Device, ModelInfo

UNKNOWN_MEMORY = ExecutorMemoryUsage(allocated_bytes=0, used_bytes=0, peak_bytes=0, utilization_percent=0.0)


def overrides(model: DecoderOnlyLLM, *methods: str) -> bool:
    """Says whether the model's class has one of the contract's optional methods of its own."""
    return any(getattr(type(model), name) is not getattr(DecoderOnlyLLM, name) for name in methods)


def info(model: DecoderOnlyLLM) -> ModelInfo:
    """Gives the model's identity; without its word, the sizes of its configuration and 0 for what they do not say.

    The dtype and the device are then those of its logits: float32 on the host.
    """
    told = model.model_info()
    if told is not None:
        return told
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


def capabilities(model: DecoderOnlyLLM, identity: ModelInfo) -> ExecutorCapabilities:
    """Gives what was built; without the model's word, what its class and its configuration show.

    The batch is then 1 row, for nothing says that more would share a forward, and memory per token of activations and
    overhead are 0.
    """
    told = model.capabilities()
    if told is not None:
        return told
    sizes = model.config
    kv_bytes = 2 * sizes.num_kv_heads * sizes.head_dim * identity.dtype.size_in_bytes
    return ExecutorCapabilities(
        max_batch_size=1,
        max_sequence_length=model.kv_capacity(),
        attention_mechanisms=_attention(identity),
        supports_dynamic_batching=overrides(model, "decode_batch"),
        supports_continuous_batching=overrides(model, "unified_forward"),
        supports_speculative_decoding=overrides(model, "forward_verify"),
        supports_tensor_parallelism=False,
        supports_pipeline_parallelism=False,
        supported_dtypes=(identity.dtype,),
        supported_devices=(identity.device,),
        memory_requirements=MemoryRequirements(
            parameter_memory=int(identity.num_parameters * identity.dtype.size_in_bytes),
            activation_memory_per_token=0,
            kv_cache_memory_per_token=int(kv_bytes),
            overhead_memory=0,
        ),
    )


def _attention(identity: ModelInfo) -> tuple[AttentionType, ...]:
    if not identity.num_heads:
        return ()
    if identity.num_heads == identity.num_kv_heads:
        return (AttentionType.MultiHead,)
    return (AttentionType.MultiQuery if identity.num_kv_heads == 1 else AttentionType.GroupedQuery,)
