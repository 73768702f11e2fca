"""How large everything is: an `EngineConfig` made concrete for one model on one device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from ferrum_jax.compile.artifacts import Artifacts, compile_and_save, memory_of
from ferrum_jax.compile.buckets import AnyKey, GatherKey, InstallKey, Ladders, LoopKey, StepKey, ladder
from ferrum_jax.compile.lowering import lower
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.contract.errors import (
    BackendError,
    ConfigError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models import adapters, specs
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.backends import cache_spec, choose_attention
from ferrum_jax.models.layout import SCANNED
from ferrum_jax.models.rings import num_ring_blocks
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops.quantised import activation_dtype

MOST_IN_FLIGHT = 2  # steps of one call, whose outputs lie on the device together
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
    seats: tuple[int | None, ...] = ()  # of each layer among those that keep everything; None: it keeps a ring
    window: int = 1  # positions that a token sees in a ring, itself included
    prefix_cache: bool = False
    loras: LoraSpec | None = None
    spec_tokens: int = 0  # drafted at a time; 0: no speculation

    def declared(self) -> list[AnyKey]:
        """Every device call that legal traffic can need, adapters included."""
        keys = self.ladders.declared(adapters=self.loras is not None)
        if self.loras is not None:
            keys.append(InstallKey(self.loras.max_loras, self.loras.max_rank))
        # Of rings alone, nothing is gathered.
        return [key for key in keys if self.cache.num_layers or not isinstance(key, GatherKey)]

    def seat_of(self, layer: int) -> int:
        """Gives a layer's place among those that keep everything.

        Raises:
            RequestValidationError: the model has no such layer.
            UnsupportedError: the layer keeps a ring.
        """
        if layer >= len(self.seats):
            raise RequestValidationError(f"layer is {layer}, the model has {len(self.seats)}")
        if (seat := self.seats[layer]) is None:
            raise UnsupportedError(
                f"layer {layer} keeps its window of {self.window} positions alone; window_kv=False keeps all"
            )
        return seat

    def first(self) -> list[AnyKey]:
        """The steps of a short prompt and of the tokens after it, which most answers begin with."""
        ladders, columns = self.ladders, self.ladders.table_columns
        return [
            StepKey(0, ladders.chunk_rows[0], ladders.chunk_tokens[0], columns),
            StepKey(ladders.decode_rows[0], 0, 0, columns),
        ]


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
    max_seqs = engine.max_seqs or DEFAULT_SEQUENCES
    capacity = min(engine.kv_capacity or DEFAULT_CAPACITY, cfg.max_seq_len)
    block_size = engine.block_size or min(DEFAULT_BLOCK, capacity)
    columns = -(-capacity // block_size)
    dtype = engine.dtype or ("float32" if platform == "cpu" else "bfloat16")
    kv_dtype = engine.kv_dtype or dtype
    attention = choose_attention(
        engine.attention,
        cfg,
        platform=platform,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        layout=engine.layout,
    )

    chunks = _ladders(engine, max_seqs, capacity, columns, platform)
    window, ring_blocks = _ring(engine, cfg, chunks, block_size, columns)
    in_rings = [bool(ring_blocks) and seen is not None for seen in cfg.layer_windows]
    whole = [layer for layer, is_ring in enumerate(in_rings) if not is_ring]

    def spec(num_blocks: int) -> CacheSpec:
        return replace(
            cache_spec(cfg, num_blocks=num_blocks, block_size=block_size, dtype=kv_dtype, attention=attention),
            num_layers=len(whole),
            ring_layers=sum(in_rings),
            ring_blocks=ring_blocks,
            num_rings=max_seqs if ring_blocks else 0,
        )

    loras = _lora_spec(engine)
    free_bytes = max(0, free_bytes - 2 * stack_bytes(cfg, loras, engine.dtype or spec(1).dtype))
    fraction = engine.memory_fraction or (0.5 if platform == "cpu" else 0.85)
    block_bytes, rings_bytes = spec(1).num_bytes - spec(0).num_bytes, spec(0).num_bytes
    for_blocks = int(free_bytes * fraction) - rings_bytes
    if for_blocks < 0:
        raise ResourceExhaustedError(
            f"rings of {ring_blocks} blocks for {max_seqs} sequences take {rings_bytes:,} bytes; {fraction:.0%} of "
            f"{free_bytes:,} bytes are free for them: ask for fewer max_seqs",
            needed=rings_bytes,
            free=int(free_bytes * fraction),
        )
    # Given as such, the pool may be smaller than all sequences together could fill: that is paging.
    num_blocks = max_seqs * columns if engine.kv_blocks is None else engine.kv_blocks
    affordable = for_blocks // block_bytes if block_bytes else num_blocks
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
        ladders=_ladders(engine, max_seqs, capacity, -(-capacity // block_size) + ring_blocks, platform),
        seats=tuple(None if is_ring else whole.index(layer) for layer, is_ring in enumerate(in_rings)),
        window=window,
        prefix_cache=bool(engine.prefix_cache),
        loras=loras,
        spec_tokens=engine.spec_tokens or 0,
    )


def plan_beside(
    params: ParamTree,
    engine: EngineConfig,
    cfg: ModelConfig,
    *,
    platform: str,
    free_bytes: int,
    open_artifacts: Callable[[EnginePlan], Artifacts | None] = lambda _: None,
) -> EnginePlan:
    """As `plan_engine`, for parameters that are on their device, leaving room for what the steps need while they run.

    A pool of at most half the free memory leaves enough. For a larger one the largest steps are compiled, which tells
    their temporary memory, and the pool is planned anew in what is left;
    artifacts know it from an earlier start.
    """
    plan = plan_engine(engine, cfg, platform=platform, free_bytes=free_bytes)
    if 2 * plan.cache.num_bytes <= free_bytes:
        return plan
    stacks = None
    if plan.loras is not None:
        stacks = specs.shapes(adapters.stack_specs(cfg, plan.loras), activation_dtype(params).name)
    steps = plan.ladders.steps(adapters=stacks is not None)
    largest = {key.outputs: key for key in reversed(steps)}  # those that give all logits may take more
    artifacts = open_artifacts(plan)
    # Many rows of one token take more for their logits than a chunk does.
    rows = StepKey(plan.ladders.decode_rows[-1], 0, 0, plan.ladders.table_columns, adapters=stacks is not None)
    keys = [*largest.values(), rows, *plan.ladders.loops(adapters=stacks is not None)[-1:]]
    taken = max(_temporary_bytes(cfg, params, plan, key, stacks, artifacts) for key in keys)
    return plan_engine(engine, cfg, platform=platform, free_bytes=max(0, free_bytes - taken))


def _temporary_bytes(
    cfg: ModelConfig,
    params: ParamTree,
    plan: EnginePlan,
    key: StepKey | LoopKey,
    stacks: Any,
    artifacts: Artifacts | None,
) -> int:
    """Bytes that a step takes beside its parameters and its KV."""
    name = f"measured {key!r}"
    kept = None if artifacts is None else artifacts.find(name)
    if kept is not None:
        return _beside(kept.memory)

    def lowered() -> jax.stages.Lowered:
        return lower(cfg, params, state.shapes(plan.cache), stacks, key, plan.cache.attention)

    try:
        return _beside(memory_of(compile_and_save(name, lowered, artifacts).executable))
    except jax.errors.JaxRuntimeError as problem:
        raise BackendError(f"step {key} does not compile: {problem}") from problem


def _beside(memory: dict[str, int]) -> int:
    """Temporaries of the step that runs, and outputs of all that are begun."""
    if not memory:
        return 0
    return memory["temporary_bytes"] + MOST_IN_FLIGHT * (memory["output_bytes"] - memory["alias_bytes"])


def _ladders(engine: EngineConfig, max_seqs: int, capacity: int, columns: int, platform: str) -> Ladders:
    step_tokens = engine.max_step_tokens or (512 if platform == "cpu" else 2048)
    longest = min(step_tokens, capacity)
    smallest = min(SMALLEST_CHUNK, longest)
    # Two rows cost little less than four, whose weights are as many: a bucket of two is not worth its warm-up.
    decode_rows = engine.decode_rows or tuple(n for n in ladder(max_seqs) if n != 2 or max_seqs == 2)
    chunk_tokens = engine.chunk_tokens or ladder(longest, start=smallest)
    chunk_rows = engine.chunk_rows or ladder(max(1, min(max_seqs, step_tokens // chunk_tokens[0])), factor=4)
    verify_rows = engine.verify_rows or (ladder(max_seqs, factor=4) if engine.spec_tokens else (1,))
    verify_tokens = engine.verify_tokens or ladder(min(64, longest), start=smallest, factor=4)
    if engine.spec_tokens and engine.verify_tokens is None:  # a draft and the token before it, without padding
        verify_tokens = tuple(sorted({min(engine.spec_tokens + 1, longest), *verify_tokens}))
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
        loop_tokens=engine.loop_tokens or 0,
    )


def _ring(engine: EngineConfig, cfg: ModelConfig, chunks: Ladders, block_size: int, columns: int) -> tuple[int, int]:
    """Decides the window and the blocks of a sequence's ring, 1 and 0 where it has none."""
    windows = [window for window in cfg.layer_windows if window is not None]
    if engine.window_kv is False or (engine.window_kv is None and (not windows or engine.prefix_cache)):
        return 1, 0
    obstacle = None
    if not windows:
        obstacle = f"no layer of this {cfg.model_type} has a window"
    elif engine.prefix_cache:
        obstacle = "prefix_cache shares what is kept, and a window is not kept"
    elif engine.layout == SCANNED:
        obstacle = "the layers of layout 'scanned' share one KV"
    if obstacle is not None:
        if engine.window_kv:
            raise ConfigError(f"window_kv: {obstacle}")
        return 1, 0
    longest = max(chunks.chunk_tokens[-1], chunks.verify_tokens[-1])
    blocks = num_ring_blocks(max(windows), longest, block_size)
    return (max(windows), blocks) if engine.window_kv or 2 * blocks <= columns else (1, 0)


def _lora_spec(engine: EngineConfig) -> LoraSpec | None:
    if not engine.max_loras and not engine.max_lora_rank:
        return None
    if not engine.max_loras or not engine.max_lora_rank:
        raise ConfigError(
            f"max_loras is {engine.max_loras or 0} and max_lora_rank is {engine.max_lora_rank or 0}: "
            "adapters need both to be at least 1"
        )
    return LoraSpec(max_loras=engine.max_loras, max_rank=engine.max_lora_rank)


def stack_bytes(cfg: ModelConfig, spec: LoraSpec | None, dtype: str) -> int:
    """Bytes of the stacks of adapters; while one is loaded, they are there twice."""
    if spec is None:
        return 0
    leaves = jax.tree.leaves(specs.shapes(adapters.stack_specs(cfg, spec), dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
