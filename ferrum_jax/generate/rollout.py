"""Generation as one pure function, for the caller's own `jit`, `vmap` or `shard_map`, under any mesh."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ferrum_jax.config import ATTENTIONS, DTYPES, ModelConfig, check_model_config
from ferrum_jax.contract.decoding import Sampling, is_integer
from ferrum_jax.contract.errors import InvalidParameterError, safe_repr
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import LATENTS, CacheSpec, KvState
from ferrum_jax.models.adapters import without_unused
from ferrum_jax.models.arrays import as_integers, check_range
from ferrum_jax.models.backends import cache_spec, check_backend
from ferrum_jax.models.hooks import (
    Intervention,
    Point,
    check_interventions,
    edits_of,
    partitions_of_edit,
    rows_as_tokens,
    steered,
    with_edits,
)
from ferrum_jax.models.layout import check_shapes
from ferrum_jax.models.registry import family
from ferrum_jax.models.sequences import checked_adapters
from ferrum_jax.models.specs import ParamTree, as_plain
from ferrum_jax.ops.batch import Batch, Rows
from ferrum_jax.ops.quantised import activation_dtype
from ferrum_jax.ops.sampling import SampleInputs, sample
from ferrum_jax.sharding.types import (
    explicit_axes,
    explicit_mesh,
    partition_of,
    promoting_ranks,
    vary_alike,
    with_auto_axes,
)

SEEDS = 'jax.random.bits(key, (B,), "uint32") draws them'
BLOCK = 128  # positions in a block of a KV that is made here
Leaf = TypeVar("Leaf")


@flax.struct.dataclass
class Rollout(Generic[Leaf]):
    """Generated tokens; after a row's end, ids are -1 and log-probabilities 0."""

    token_ids: Leaf  # int32 [B, N]
    logprobs: Leaf  # float32 [B, N], under the model's own distribution


def kv_spec(
    params: ParamTree, cfg: ModelConfig, *, rows: int, positions: int, dtype: str | None = None, attention: str = "xla"
) -> CacheSpec:
    """Returns the spec of the KV that `generate_fn` needs for `rows` sequences of up to `positions` tokens each.

    `positions` counts prompt and answer.

    Raises:
        InvalidParameterError: `rows` or `positions` is not an integer of at least 1, a name is unknown, or `cfg` is no
            `ModelConfig`.
    """
    check_model_config(cfg)
    for name, value in (("rows", rows), ("positions", positions)):
        if not is_integer(value) or value < 1:
            raise InvalidParameterError(f"{name} is {safe_repr(value)}, expected an integer of at least 1")
    for name, value, known in (("dtype", dtype, DTYPES), ("attention", attention, ATTENTIONS)):
        if value not in known and (name, value) != ("dtype", None):
            raise InvalidParameterError(
                f"{name} is {safe_repr(value)}, expected {', '.join(known[:-1])} or {known[-1]}"
            )
    block_size = min(positions, BLOCK)
    return cache_spec(
        cfg,
        num_blocks=rows * -(-positions // block_size),
        block_size=block_size,
        dtype=activation_dtype(params).name if dtype is None else dtype,
        attention=attention,
    )


@promoting_ranks
def generate_fn(
    params: ParamTree,
    kv: KvState[jax.Array] | None,
    tokens: jax.Array,  # int32 [B, T]
    lengths: jax.Array,  # int32 [B]
    seeds: jax.Array,  # uint32 [B]
    cfg: ModelConfig,
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),
    stop_ids: Iterable[int] = (),
    attention: str = "xla",
    loras: ParamTree | None = None,
    adapters: jax.Array | None = None,  # int32 [B]
    steering: jax.Array | None = None,  # [L, D]
    interventions: Mapping[Any, Intervention] | None = None,
    sharding: NamedSharding | None = None,
) -> tuple[Rollout[jax.Array], KvState[jax.Array]]:
    """Continues every prompt of a batch by up to `max_tokens` tokens, as the engine would with the same seeds.

    Under `jit`, `cfg`, `max_tokens`, `sampling`, `stop_ids` and `attention` are static or closed over; a `kv` that is
    donated is written in place. Decoding is one `scan`, so log-probabilities are differentiable; a row that has ended
    is padding until all rows have ended.

    If rows are sharded over the caller's mesh, each device generates its own rows, with only their KV, in a `shard_map`
    over the axes that shard rows; the compiler shards the rest over the other axes. Parameters that are sharded over
    axes of the rows are gathered first. Explicit axes are read from the type of `tokens`; auto axes are given by
    `sharding`, without which the compiler decides, and may give every device the whole KV.

    Args:
        params: the model's, in any layout.
        kv: a KV like `state.empty(kv_spec(...))`, whatever its contents; if None, one is made here.
        tokens: prompts, padded on the right.
        lengths: of the prompts, at least 1 each.
        seeds: the noise of a sampled token depends only on its row's seed and its position.
        cfg: the model's configuration. Frequencies of LongRoPE (Phi-3) are chosen for T + `max_tokens` positions,
            unless it has the long ones.
        max_tokens: the most tokens to generate for each row.
        sampling: how tokens are chosen; the default is greedy.
        stop_ids: ids that end a row; the row includes the one that ended it.
        attention: the backend for whose layout the KV was made.
        loras: adapter stacks, as for `models.forward`, differentiable too.
        adapters: the adapter of each row, as there; give both or neither.
        steering: added to the output of each layer, for all tokens; an argument, so that new values do not recompile.
        interventions: an `Edit` or a function by hook point (models/hooks.py), applied to prompt and answer. Arrays
            broadcast against `[B, 1, ...]`. A function is given `[B, T, ...]` and the positions `[B, T]`; T is 1 in the
            answer. If rows are sharded, B counts the rows of one device.
        sharding: how `tokens` are sharded over a mesh with auto axes: `NamedSharding(mesh, P("data"))`.

    Returns:
        The generated tokens and the KV, both sharded by rows as `tokens` are. If rows are sharded, the blocks of a
        given KV must be sharded alike, along its second axis.

    Raises:
        InvalidParameterError: shapes disagree, `max_tokens` is below 1 or so large that positions exceed int32, `kv`
            has too few blocks or is another model's, a token is not in the vocabulary, a length is not from 1 to T, or
            only one of `loras` and `adapters` is given.
            Traced tokens and lengths are not checked: results for wrong ones are undefined.
        UnsupportedError: `attention` cannot serve the model.
    """
    params = as_plain(params)
    check_shapes(params, cfg)
    check_backend(attention, params, cfg)
    if isinstance(seeds, jax.Array) and jnp.issubdtype(seeds.dtype, jax.dtypes.prng_key):
        raise InvalidParameterError(f"seeds are a PRNG key, expected uint32 [B]: {SEEDS}")
    if isinstance(stop_ids, str) or not isinstance(stop_ids, Iterable) or getattr(stop_ids, "ndim", 1) != 1:
        raise InvalidParameterError(f"stop_ids is {safe_repr(stop_ids)}, expected several token ids, such as (2,)")
    if not isinstance(stop_ids, (jax.Array, np.ndarray)):
        stop_ids = tuple(stop_ids)
    for name, values, most in (("seeds", seeds, 2**32 - 1), ("stop_ids", stop_ids, 2**31 - 1)):
        given = values if isinstance(values, jax.Array) else np.asarray(values)
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise InvalidParameterError(f"{name} are {given.dtype}, expected integers")
        if isinstance(given, np.ndarray) and given.size and not 0 <= given.min() <= given.max() <= most:
            raise InvalidParameterError(f"{name} are {safe_repr(values)}, expected integers from 0 to {most}")
    tokens, lengths = as_integers("tokens", tokens), as_integers("lengths", lengths)
    seeds = jnp.asarray(seeds, jnp.uint32)
    if tokens.ndim != 2 or 0 in tokens.shape or lengths.shape != seeds.shape or lengths.shape != tokens.shape[:1]:
        raise InvalidParameterError(
            f"tokens have shape {list(tokens.shape)}, lengths {list(lengths.shape)}, seeds {list(seeds.shape)}: "
            f"expected [B, T], [B] and [B] of at least 1 each ({SEEDS})"
        )
    if type(sampling) is not Sampling:
        raise InvalidParameterError(
            f"sampling is a {type(sampling).__name__}, expected a Sampling: max_tokens, seeds and stop_ids are "
            "arguments, and there are no other settings here"
        )
    most = 2**31 - 1 - tokens.shape[1]  # positions are int32
    if not is_integer(max_tokens) or not 1 <= max_tokens <= most:
        raise InvalidParameterError(f"max_tokens is {safe_repr(max_tokens)}, expected an integer from 1 to {most}")
    check_range("lengths", lengths, 1, tokens.shape[1])
    check_range("tokens", tokens, 0, cfg.vocab_size - 1, lengths)
    batch, length = tokens.shape
    loras, adapters = checked_adapters(loras, adapters, cfg, batch)
    checked = check_interventions(interventions, cfg)
    if steering is not None:
        checked = steered(steering, checked, cfg, ())
    cfg = cfg.reaching(length + max_tokens)
    given = _Arrays(params, kv, tokens, lengths, seeds, loras, adapters, edits_of(checked))
    mesh = explicit_mesh(given)
    if mesh is None and sharding is not None and explicit_axes(sharding.mesh.abstract_mesh):
        mesh = sharding.mesh.abstract_mesh
    rows = (*(partition_of(tokens) if sharding is None else sharding.spec), None)[0]
    compute = partial(
        _generate, checked, cfg, max_tokens=max_tokens, sampling=sampling, stop_ids=stop_ids, attention=attention
    )
    needed = batch, length + max_tokens
    if kv is not None:
        _check_kv(kv, cfg, attention)
    if rows is None:
        _check_blocks(kv, *needed)
    else:
        over = mesh if sharding is None else sharding.mesh
        assert over is not None
        axes = rows if isinstance(rows, tuple) else (rows,)
        _check_blocks(kv, *needed, math.prod(over.shape[axis] for axis in axes))
        by_row, of_kv = PartitionSpec(rows), PartitionSpec(None, rows)
        own = (partitions_of_edit(point, edit, rows, batch) for point, edit in zip(checked, given.edits, strict=True))
        compute = jax.shard_map(
            compute,
            mesh=None if mesh is not None or sharding is None else sharding.mesh,
            in_specs=(_Arrays(PartitionSpec(), of_kv, by_row, by_row, by_row, PartitionSpec(), by_row, tuple(own)),),
            out_specs=(by_row, of_kv),
            axis_names=set(axes),
        )
    kept = PartitionSpec(None, rows) if kv is None else jax.tree.map(partition_of, kv)
    return with_auto_axes(compute, given, out_specs=(PartitionSpec(rows), kept), mesh=mesh)


class _Arrays(NamedTuple):
    """The arguments of generation that may be sharded, differentiated and vmapped; or the sharding of each."""

    params: Any
    kv: Any
    tokens: Any
    lengths: Any
    seeds: Any
    loras: Any
    adapters: Any
    edits: tuple[Any, ...]  # one for each intervention; None for a function


def _generate(
    interventions: Mapping[Point, Intervention],
    cfg: ModelConfig,
    given: _Arrays,
    *,
    max_tokens: int,
    sampling: Sampling,
    stop_ids: Iterable[int],
    attention: str,
) -> tuple[Rollout[jax.Array], KvState[jax.Array]]:
    """Generates all rows or, inside a `shard_map`, the rows of one device."""
    params, kv, tokens, lengths, seeds, loras, adapters, edits = vary_alike(*given)
    interventions = with_edits(interventions, edits)
    batch, length = tokens.shape
    if kv is None:
        kv = state.empty(kv_spec(params, cfg, rows=batch, positions=length + max_tokens, attention=attention))
    columns = -(-(length + max_tokens) // state.block_size(kv))
    tables = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
    tokens, lengths = tokens.astype(jnp.int32), lengths.astype(jnp.int32)
    loras = without_unused(loras, adapters)
    rows = jnp.arange(batch, dtype=jnp.int32)
    stops = jnp.asarray(list(stop_ids), jnp.int32)
    ones = jnp.ones(batch, jnp.float32)

    def forward(kv: KvState[jax.Array], group: Rows[jax.Array], wanted: jax.Array):
        step = Batch(groups=(replace(group, adapters=adapters),), logit_rows=wanted)
        edits = rows_as_tokens(interventions, *group.tokens.shape)
        logits, kv, _ = family(cfg).forward(
            params, kv, step, cfg, loras=loras, attention=attention, interventions=edits
        )
        return logits, kv

    def choose(logits: jax.Array, seen: jax.Array, alive: jax.Array, at: jax.Array):
        inputs = SampleInputs(
            temperature=ones * sampling.temperature,
            top_k=jnp.full(batch, min(sampling.top_k, cfg.vocab_size), jnp.int32),
            top_p=ones * sampling.top_p,
            min_p=ones * sampling.min_p,
            repetition_penalty=ones * sampling.repetition_penalty,
            seed=seeds,
            position=lengths + at,
            seen=seen,
        )
        choice = sample(logits, inputs)
        ids = jnp.where(alive, choice.token_ids, -1)
        stopped = jnp.any(ids[:, None] == stops, axis=1)
        seen = seen.at[rows, jnp.maximum(ids, 0)].max(alive)
        return Rollout(ids, jnp.where(alive, choice.logprobs, 0.0)), seen, alive & ~stopped

    def decode(carry, at: jax.Array):
        kv, last, seen, alive = carry
        group = Rows(
            tokens=jnp.maximum(last, 0)[:, None],
            lengths=lengths + at - 1,
            counts=alive.astype(jnp.int32),
            tables=tables,
        )
        logits, kv = forward(kv, group, rows)
        found, seen, alive = choose(logits, seen, alive, at)
        return (kv, found.token_ids, seen, alive), found

    prompts = Rows(tokens=tokens, lengths=jnp.zeros_like(lengths), counts=lengths, tables=tables)
    logits, kv = forward(kv, prompts, rows * length + lengths - 1)
    real = jnp.arange(length, dtype=jnp.int32) < lengths[:, None]
    seen = jnp.zeros((batch, cfg.vocab_size), jnp.bool_).at[rows[:, None], tokens].max(real)
    first, seen, alive = choose(logits, seen, jnp.ones(batch, jnp.bool_), jnp.int32(0))
    if max_tokens == 1:  # without jit a scan of no steps is refused
        return jax.tree.map(lambda one: one[:, None], first), kv
    steps = jnp.arange(1, max_tokens, dtype=jnp.int32)
    (written, *_), later = lax.scan(decode, (kv, first.token_ids, seen, alive), steps)
    return jax.tree.map(lambda one, many: jnp.concatenate([one[None], many]).T, first, later), written


def _check_kv(kv: KvState[jax.Array], cfg: ModelConfig, attention: str) -> None:
    """Raises InvalidParameterError for a KV of another model; it may be one for another backend."""
    num_blocks, block_size, dtype = state.num_blocks(kv), state.block_size(kv), kv.k.dtype.name
    own = cache_spec(cfg, num_blocks=num_blocks, block_size=block_size, dtype=dtype, attention=attention)
    if (own.layout in LATENTS) != (kv.layout in LATENTS):
        raise InvalidParameterError(f"kv has the layout {kv.layout!r}, this model's {own.layout!r}: make it by kv_spec")
    wanted = state.shapes(replace(own, layout=kv.layout))
    shapes = [[list(side.shape) for side in (one.k, one.v) if side is not None] for one in (kv, wanted)]
    if shapes[0] != shapes[1]:
        raise InvalidParameterError(f"kv has arrays {shapes[0]}, this model's are {shapes[1]}: make it by kv_spec")


def _check_blocks(kv: KvState[jax.Array] | None, rows: int, positions: int, parts: int = 1) -> None:
    """Raises InvalidParameterError if devices cannot divide the rows or blocks evenly, or if the KV is too small."""
    if rows % parts:
        raise InvalidParameterError(f"{rows} rows cannot be divided over {parts} devices")
    if kv is None:
        return
    needed, found = rows * -(-positions // state.block_size(kv)), state.num_blocks(kv)
    if found < needed:
        raise InvalidParameterError(f"{rows} rows of {positions} positions need {needed} KV blocks, there are {found}")
    if found % parts:
        raise InvalidParameterError(f"{found} KV blocks cannot be divided over {parts} devices, as the rows are")
