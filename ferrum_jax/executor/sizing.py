"""Decides every size: turns an `EngineConfig` into an `EnginePlan`, for one model on one device or a mesh."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from ferrum_jax.compile import sampler
from ferrum_jax.compile.artifacts import Artifacts, compile_and_save, memory_of
from ferrum_jax.compile.block_programs import GatherKey, InstallKey
from ferrum_jax.compile.buckets import Buckets, ProgramKey, bucket_sizes, two_sizes
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.compile.sampler import SamplerSpec
from ferrum_jax.compile.step import ProgramContext, StepKey
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.config.engine import CompilerOptions
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
from ferrum_jax.models.backends import cache_spec, choose_attention, settle_attention
from ferrum_jax.models.division import Division, specs_of_one
from ferrum_jax.models.layout import SCANNED
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.sliding_window import num_window_blocks
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops.quantised import activation_dtype

MOST_IN_FLIGHT = 2  # steps whose outputs are on the device at once
POOL_SHARE = 0.85  # of an accelerator's free memory, by default; the rest is for the temporary memory of steps
DEFAULT_SEQUENCES = 8
ACCELERATOR_SEQUENCES = (64, 32, 16)  # by default, the most whose KV fits into half of the free memory
DEFAULT_CAPACITY = 4096  # positions
DEFAULT_BLOCK = 128  # positions
POOL_BITS = 4  # significant bits of a number of blocks that free memory decides
VERIFY_TOKENS = 8  # C of the small query blocks, in steps that return the logits of every token
LOGIT_TOKENS = 64  # tokens of a long row that get logits in one step, where every token has them


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Sizes of one engine, all decided."""

    max_seqs: int
    kv_capacity: int  # positions
    cache: CacheSpec
    buckets: Buckets
    vocab_size: int
    pool_layers: tuple[int | None, ...] = ()  # index of each layer in the paged pool; None: it has a window cache
    window: int = 1  # positions that a token sees in a sliding-window cache, itself included
    prefix_cache: bool = False
    loras: LoraSpec | None = None
    spec_tokens: int = 0  # drafted at a time; 0: no speculation

    @property
    def sampler(self) -> SamplerSpec:
        """Sizes of the sampler."""
        return SamplerSpec(num_slots=self.max_seqs, vocab_size=self.vocab_size, capacity=self.kv_capacity)

    def declared(self, *, drafts: bool = False) -> list[ProgramKey]:
        """Every program that legal traffic can need, adapters and (with `drafts` or `spec_tokens`) drafts included."""
        keys = self.buckets.declared(adapters=self.loras is not None, drafts=drafts or bool(self.spec_tokens))
        if self.loras is not None:
            keys.append(InstallKey(self.loras.max_loras, self.loras.max_rank))
        # A model of sliding-window layers alone has no pool to gather from.
        return [key for key in keys if self.cache.num_layers or not isinstance(key, GatherKey)]

    def pool_layer_of(self, layer: int) -> int:
        """Returns a layer's index in the paged pool.

        Raises:
            RequestValidationError: the model has no such layer.
            UnsupportedError: the layer has a sliding-window cache.
        """
        if layer >= len(self.pool_layers):
            raise RequestValidationError(f"layer is {layer}, the model has {len(self.pool_layers)}")
        if (pool_layer := self.pool_layers[layer]) is None:
            raise UnsupportedError(
                f"layer {layer} keeps its window of {self.window} positions alone; window_kv=False keeps all"
            )
        return pool_layer

    def first(self) -> list[ProgramKey]:
        """The programs of a short prompt and the decode steps after it, which most requests need first."""
        step, decode = self.buckets.blocks(1, mixed=False), self.buckets.decode(1)
        return [step, decode, sampler.ConfigureKey(self.kv_capacity), *self.buckets.samples(step.logit_rows)]


def plan_engine(
    engine: EngineConfig, cfg: ModelConfig, *, platform: str, free_bytes: int, division: Division | None = None
) -> EnginePlan:
    """Decides every size that was left open.

    Where no number of sequences, rows or blocks is given, an accelerator has as many sequences, 64 at most, as half of
    its free memory (or `memory_fraction`) holds at full length; the other half is left for a draft or a trainer.
    If fewer blocks fit than the sequences could fill, their number is rounded down to `POOL_BITS` significant bits: a
    later start with a little more or less free memory has the same sizes, and finds its programs on disk.
    `free_bytes` is what the device, or each device of a mesh, has left beside the parameters.

    Raises:
        ConfigError: sizes contradict each other or the model.
        UnsupportedError: a setting asks for what this build does not have.
        ResourceExhaustedError: the KV that was asked for does not fit.
    """
    capacity = min(engine.kv_capacity or DEFAULT_CAPACITY, cfg.max_seq_len)
    given = (engine.max_seqs, engine.kv_blocks, engine.decode_rows, engine.verify_blocks)
    if platform != "cpu" and not any(given):
        share = engine.memory_fraction or 0.5
        for count in ACCELERATOR_SEQUENCES:
            whole = replace(engine, max_seqs=count, kv_capacity=capacity, memory_fraction=share)
            with contextlib.suppress(ResourceExhaustedError):
                return _plan_sizes(whole, cfg, platform=platform, free_bytes=free_bytes, division=division)
    return _plan_sizes(engine, cfg, platform=platform, free_bytes=free_bytes, division=division)


def _plan_sizes(
    engine: EngineConfig, cfg: ModelConfig, *, platform: str, free_bytes: int, division: Division | None
) -> EnginePlan:
    own = cfg if division is None else division.local
    max_seqs = engine.max_seqs or DEFAULT_SEQUENCES
    capacity = min(engine.kv_capacity or DEFAULT_CAPACITY, cfg.max_seq_len)
    block_size = engine.block_size or min(DEFAULT_BLOCK, capacity)
    columns = -(-capacity // block_size)
    dtype = engine.dtype or ("float32" if platform == "cpu" else "bfloat16")
    kv_dtype = engine.kv_dtype or dtype
    attention = choose_attention(
        engine.attention,
        own,
        platform=platform,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        layout=engine.layout,
    )

    blocks = _buckets(engine, max_seqs, capacity, columns, platform, attention)
    window, window_blocks = _window(replace(engine, attention=attention), cfg, blocks, block_size, columns)
    windowed = [bool(window_blocks) and seen is not None for seen in cfg.layer_windows]
    whole = [layer for layer, is_windowed in enumerate(windowed) if not is_windowed]

    def spec(num_blocks: int) -> CacheSpec:
        return replace(
            cache_spec(own, num_blocks=num_blocks, block_size=block_size, dtype=kv_dtype, attention=attention),
            num_layers=len(whole),
            window_layers=sum(windowed),
            window_blocks=window_blocks,
            window_slots=max_seqs if window_blocks else 0,
        )

    loras = _lora_spec(engine)
    sampler_bytes = SamplerSpec(num_slots=max_seqs, vocab_size=cfg.vocab_size, capacity=capacity).num_bytes
    beside = 2 * stack_bytes(cfg, loras, engine.dtype or spec(1).dtype, division) + sampler_bytes
    if beside > free_bytes:
        raise ResourceExhaustedError(
            f"max_seqs={max_seqs} and max_loras={engine.max_loras or 0} take {beside:,} bytes beside the KV, there are "
            f"{free_bytes:,} free bytes",
            needed=beside,
            free=free_bytes,
        )
    free_bytes -= beside
    fraction = engine.memory_fraction or (0.5 if platform == "cpu" else POOL_SHARE)
    block_bytes, windows_bytes = spec(1).num_bytes - spec(0).num_bytes, spec(0).num_bytes
    for_blocks = int(free_bytes * fraction) - windows_bytes
    if for_blocks < 0:
        raise ResourceExhaustedError(
            f"sliding-window caches of {window_blocks} blocks for {max_seqs} sequences take {windows_bytes:,} bytes; "
            f"{fraction:.2g} of {free_bytes:,} bytes are free for them: ask for fewer max_seqs",
            needed=windows_bytes,
            free=int(free_bytes * fraction),
        )
    # `kv_blocks` may be fewer than all sequences together could fill: that is paging.
    num_blocks = max_seqs * columns if engine.kv_blocks is None else engine.kv_blocks
    affordable = for_blocks // block_bytes if block_bytes else num_blocks
    both = engine.max_seqs is not None and engine.kv_capacity is not None
    asked = engine.kv_blocks is not None or both
    if num_blocks > affordable:
        if asked or affordable < (1 if engine.kv_capacity is None else columns):
            raise ResourceExhaustedError(
                f"a KV of {num_blocks} blocks takes {num_blocks * block_bytes:,} bytes; {fraction:.2g} of the "
                f"{free_bytes:,} free bytes hold {affordable}: ask for {_smaller_pool(engine, fraction)}",
                needed=num_blocks,
                free=affordable,
            )
        num_blocks = max(_rounded_down(affordable), 1 if engine.kv_capacity is None else columns)
    if engine.kv_capacity is None:
        capacity = min(capacity, num_blocks * block_size)
    return EnginePlan(
        max_seqs=max_seqs,
        kv_capacity=capacity,
        cache=spec(num_blocks),
        buckets=_buckets(engine, max_seqs, capacity, -(-capacity // block_size) + window_blocks, platform, attention),
        vocab_size=cfg.vocab_size,
        pool_layers=tuple(None if is_windowed else whole.index(layer) for layer, is_windowed in enumerate(windowed)),
        window=window,
        prefix_cache=bool(engine.prefix_cache),
        loras=loras,
        spec_tokens=engine.spec_tokens or 0,
    )


def _rounded_down(blocks: int) -> int:
    """Clears all but the first `POOL_BITS` bits of a number: at most an eighth of it."""
    rest = max(0, blocks.bit_length() - POOL_BITS)
    return blocks >> rest << rest


def _smaller_pool(engine: EngineConfig, fraction: float) -> str:
    """Says which settings make a pool fit."""
    if engine.kv_blocks is not None:
        less = "fewer kv_blocks"
    elif engine.kv_capacity is None:
        less = "a smaller block_size"  # one block is too large
    else:
        less = f"{'fewer max_seqs, ' * (engine.max_seqs is not None)}a smaller kv_capacity"
    return f"{less} or a larger memory_fraction" if fraction < 1 else less


def plan_beside(
    params: ParamTree,
    engine: EngineConfig,
    cfg: ModelConfig,
    *,
    placed: ModelPlacement,
    free_bytes: int,
    open_artifacts: Callable[[EnginePlan], Artifacts | None] = lambda _: None,
) -> EnginePlan:
    """As `plan_engine`, for parameters that are on their device, leaving room for the temporary memory of steps.

    A pool of at most half the free memory leaves enough. For a larger one the largest steps are compiled, or found in
    the artifacts of an earlier start, to learn their temporary memory; the pool is then planned again in the rest.
    """
    given = {"platform": placed.placement.first.platform, "division": placed.division}
    own = cfg if placed.division is None else placed.division.local
    engine = settle_attention(engine, own, placed.placement.first, warn=True)
    plan = plan_engine(engine, cfg, **given, free_bytes=free_bytes)
    if 2 * plan.cache.num_bytes <= free_bytes:
        return plan
    stacks = None
    if plan.loras is not None:
        stacks = placed.shapes(adapters.stack_specs(cfg, plan.loras), activation_dtype(params).name)
    artifacts, used = open_artifacts(plan), stacks is not None
    keys = [*largest_steps(plan.buckets, adapters=used), *plan.buckets.multi_steps(adapters=used)[-1:]]
    context = context_of(cfg, params, plan.cache, plan.sampler, placed, stacks)
    taken = max(_temporary_bytes(key, context, artifacts, engine.compiler_options) for key in keys)
    return plan_engine(engine, cfg, **given, free_bytes=max(0, free_bytes - taken))


def context_of(
    cfg: ModelConfig, params: Any, cache: CacheSpec, sizes: SamplerSpec, placed: ModelPlacement, loras: Any = None
) -> ProgramContext:
    """Returns what a model's programs are lowered for; `params` and `loras` are arrays or their shapes."""
    at = placed.placement
    slots = at.place(sampler.shapes(sizes))
    return ProgramContext(cfg, params, state.shapes_on(at, cache), slots, loras, cache.attention, at, placed.division)


def largest_steps(buckets: Buckets, *, adapters: bool = False) -> list[StepKey]:
    """Returns the steps that may take the most memory while they run."""
    largest = {key.outputs: key for key in reversed(buckets.steps(adapters=adapters))}  # logits of all tokens take more
    # Many rows of one token take more for their logits than prompts do.
    return [*largest.values(), replace(buckets.decode(buckets.decode_rows[-1]), adapters=adapters)]


def _temporary_bytes(
    key: StepKey | MultiStepKey, context: ProgramContext, artifacts: Artifacts | None, options: CompilerOptions
) -> int:
    """Bytes that a step takes beside its parameters and its KV."""
    name = f"measured {key!r}"
    kept = None if artifacts is None else artifacts.find(name)
    if kept is not None:
        return bytes_beside(kept.memory)
    try:
        return bytes_beside(memory_of(compile_and_save(name, lambda: key.lower(context), artifacts, options)[0]))
    except jax.errors.JaxRuntimeError as problem:
        raise BackendError(f"step {key} does not compile: {problem}") from problem


def bytes_beside(memory: dict[str, int]) -> int:
    """Bytes of the running step's temporaries and of the outputs of all steps in flight, from `memory_of`."""
    if not memory:
        return 0
    return memory["temporary_bytes"] + MOST_IN_FLIGHT * (memory["output_bytes"] - memory["alias_bytes"])


def _buckets(
    engine: EngineConfig, max_seqs: int, capacity: int, columns: int, platform: str, attention: str
) -> Buckets:
    """Chooses the sizes that steps are compiled for."""
    is_cpu = platform == "cpu"
    step_tokens = engine.max_step_tokens or (1024 if is_cpu else 2048)
    # XLA's attention gathers a sequence's KV for each of its query blocks; the kernels read it in place.
    usual = 32 if attention == "cpu" else 64 if is_cpu else 128
    drafted = engine.spec_tokens + 1 if engine.spec_tokens else VERIFY_TOKENS
    small = engine.verify_tokens or drafted
    block_tokens = min(engine.block_tokens or max(usual, small), step_tokens, capacity)
    most = max(1, min(step_tokens, max_seqs * capacity) // block_tokens)
    query_blocks = engine.query_blocks or bucket_sizes(most)
    # On a CPU a separate decode step costs about as little as joining it to the largest step.
    mixed_blocks = two_sizes(query_blocks)[:1] if is_cpu else two_sizes(query_blocks)
    # A given `block_tokens` also bounds how many tokens of a row have logits in one step.
    logit_blocks = 1 if engine.block_tokens else max(1, min(LOGIT_TOKENS, capacity) // block_tokens)
    # Two rows read the same weights as four and cost little less: a bucket of two is not worth its warm-up.
    decode_rows = engine.decode_rows or tuple(n for n in bucket_sizes(max_seqs) if n != 2 or max_seqs == 2)
    verify_tokens = min(small, block_tokens)
    verify_blocks = engine.verify_blocks or (bucket_sizes(max_seqs, factor=4) if engine.spec_tokens else (1,))
    for name, given in (("decode_rows", decode_rows), ("verify_blocks", verify_blocks)):
        if given[-1] > max_seqs:
            raise ConfigError(f"{name} ends in {given[-1]}, max_seqs is {max_seqs}")
    if engine.query_blocks and engine.max_step_tokens and query_blocks[-1] * block_tokens > step_tokens:
        raise ConfigError(
            f"query_blocks end in {query_blocks[-1]} of {block_tokens} tokens, max_step_tokens is {step_tokens}"
        )
    return Buckets(
        decode_rows=decode_rows,
        query_blocks=query_blocks,
        mixed_blocks=mixed_blocks,
        block_tokens=block_tokens,
        verify_blocks=verify_blocks,
        verify_tokens=verify_tokens,
        table_columns=columns,
        kv_capacity=capacity,
        max_rows=max_seqs,
        logit_blocks=min(query_blocks[-1], logit_blocks),
        multi_step_tokens=engine.multi_step_tokens or 0,
        step_overhead=16 if is_cpu else 256,
        sample_ways=sampler.WAYS if platform == "gpu" else (sampler.BRANCHES,),
    )


def _window(engine: EngineConfig, cfg: ModelConfig, buckets: Buckets, block_size: int, columns: int) -> tuple[int, int]:
    """Decides the window and the blocks of a sequence's sliding-window cache, 1 and 0 where it has none."""
    windows = [window for window in cfg.layer_windows if window is not None]
    if engine.window_kv is False or (engine.window_kv is None and (not windows or engine.prefix_cache)):
        return 1, 0
    obstacle = None
    if not windows:
        obstacle = f"no layer of this {cfg.model_type} has a window"
    elif engine.prefix_cache:
        obstacle = "prefix_cache shares what is kept, and a window is not kept"
    elif engine.layout == SCANNED and engine.attention != "cpu":
        obstacle = "the layers of layout 'scanned' share one KV"
    if obstacle is not None:
        if engine.window_kv:
            raise ConfigError(f"window_kv: {obstacle}")
        return 1, 0
    blocks = num_window_blocks(max(windows), min(buckets.max_step_tokens, buckets.kv_capacity), block_size)
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


def stack_bytes(cfg: ModelConfig, spec: LoraSpec | None, dtype: str, division: Division | None = None) -> int:
    """Bytes of the stacks of adapters on each device; there are two copies while an adapter is put there."""
    if spec is None:
        return 0
    stacks = adapters.stack_specs(cfg, spec)
    return specs.num_bytes(stacks if division is None else specs_of_one(stacks, division), dtype)
