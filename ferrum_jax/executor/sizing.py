"""How large everything is: an `EngineConfig` made concrete for one model on one device."""

from dataclasses import dataclass

from ferrum_jax.compile.buckets import Ladders, ladder
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.contract.errors import ConfigError, ResourceExhaustedError, UnsupportedError
from ferrum_jax.kvcache.state import CacheSpec

DEFAULT_SEQUENCES = 8
DEFAULT_CAPACITY = 4096  # positions
DEFAULT_BLOCK = 128  # positions
SMALLEST_CHUNK = 16  # tokens


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Sizes of one engine, all decided."""

    max_seqs: int
    kv_capacity: int  # positions
    cache: CacheSpec
    ladders: Ladders
    prefix_cache: bool = False


def plan_engine(engine: EngineConfig, cfg: ModelConfig, *, platform: str, free_bytes: int) -> EnginePlan:
    """Decides every size that was left open.

    Args:
        engine: what was asked for.
        cfg: the model.
        platform: `cpu`, `gpu` or `tpu`.
        free_bytes: what the device has left for the KV, the parameters being there already.

    Raises:
        ConfigError: sizes contradict each other or the model.
        UnsupportedError: a setting asks for what this build does not have.
        ResourceExhaustedError: the KV that was asked for does not fit.
    """
    refuse_unbuilt(engine)
    max_seqs = engine.max_seqs or DEFAULT_SEQUENCES
    capacity = min(engine.kv_capacity or DEFAULT_CAPACITY, cfg.max_seq_len)
    block_size = engine.block_size or min(DEFAULT_BLOCK, capacity)
    columns = -(-capacity // block_size)

    def spec(num_blocks: int) -> CacheSpec:
        return CacheSpec(
            num_layers=cfg.num_hidden_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=cfg.num_key_value_heads,
            head_dim=cfg.head_dim,
            dtype=engine.kv_dtype or engine.dtype or ("float32" if platform == "cpu" else "bfloat16"),
        )

    fraction = engine.memory_fraction or (0.5 if platform == "cpu" else 0.85)
    block_bytes = spec(1).num_bytes
    affordable = int(free_bytes * fraction) // block_bytes
    # Given as such, the pool may be smaller than all sequences together could fill: that is paging.
    num_blocks = max_seqs * columns if engine.kv_blocks is None else engine.kv_blocks
    both = engine.max_seqs is not None and engine.kv_capacity is not None
    asked = engine.kv_blocks is not None or both
    if num_blocks > affordable:
        if asked or affordable < (1 if engine.kv_capacity is None else columns):
            raise ResourceExhaustedError(
                f"a KV of {num_blocks} blocks takes {num_blocks * block_bytes:,} bytes; {fraction:.0%} of the "
                f"{free_bytes:,} free bytes hold {affordable}",
                needed=num_blocks,
                free=affordable,
            )
        num_blocks = affordable
    if engine.kv_capacity is None:
        capacity = min(capacity, num_blocks * block_size)
    return EnginePlan(
        max_seqs=max_seqs,
        kv_capacity=capacity,
        cache=spec(num_blocks),
        ladders=_ladders(engine, max_seqs, capacity, -(-capacity // block_size), platform),
        prefix_cache=bool(engine.prefix_cache),
    )


def _ladders(engine: EngineConfig, max_seqs: int, capacity: int, columns: int, platform: str) -> Ladders:
    step_tokens = engine.max_step_tokens or (512 if platform == "cpu" else 2048)
    longest = min(step_tokens, capacity)
    smallest = min(SMALLEST_CHUNK, longest)
    decode_rows = engine.decode_rows or ladder(max_seqs)
    chunk_tokens = engine.chunk_tokens or ladder(longest, start=smallest)
    chunk_rows = engine.chunk_rows or ladder(max(1, min(max_seqs, step_tokens // chunk_tokens[0])), factor=4)
    verify_rows = engine.verify_rows or (ladder(max_seqs, factor=4) if engine.spec_tokens else (1,))
    verify_tokens = engine.verify_tokens or ladder(min(64, longest), start=smallest, factor=4)
    for name, given in (("decode_rows", decode_rows), ("chunk_rows", chunk_rows), ("verify_rows", verify_rows)):
        if given[-1] > max_seqs:
            raise ConfigError(f"{name} ends in {given[-1]}, max_seqs is {max_seqs}")
    return Ladders(
        decode_rows=decode_rows,
        chunk_rows=chunk_rows,
        chunk_tokens=chunk_tokens,
        verify_tokens=verify_tokens,
        verify_rows=verify_rows,
        max_step_tokens=step_tokens,
        table_columns=columns,
    )


def refuse_unbuilt(engine: EngineConfig) -> None:
    """Raises UnsupportedError for settings that ask for what this build does not have."""
    if engine.max_loras or engine.max_lora_rank:
        raise UnsupportedError(
            f"max_loras={engine.max_loras}, max_lora_rank={engine.max_lora_rank}: LoRA is not built yet; leave both 0"
        )
    if engine.spec_tokens:
        raise UnsupportedError(
            f"speculative decoding ({engine.spec_tokens} tokens) is not built yet; unset FERRUM_SPEC_N"
        )
