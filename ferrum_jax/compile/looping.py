"""Many decode steps in one device call: each row's next token is chosen on the device and read by the next step."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int
from numpy.typing import NDArray

from ferrum_jax.compile.bits import num_words, pack_flags, unpack_flags
from ferrum_jax.compile.buckets import LoopKey
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.decoding import MOST_STOP_IDS, Sampling
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops.batch import Batch, Rows
from ferrum_jax.ops.sampling import SampleInputs, sample

Leaf = TypeVar("Leaf")
GREEDY = Sampling()


@flax.struct.dataclass
class LoopRows(Generic[Leaf]):
    """D rows of a loop, as they lie in its one buffer; a row with a limit of 0 is padding."""

    tokens: Leaf  # int32 [D]: each row's newest token, not in the KV yet
    lengths: Leaf  # int32 [D]: positions in the KV
    limits: Leaf  # int32 [D]: tokens to choose at most
    adapters: Leaf  # int32 [D]: row of the adapters' stacks, -1 for none
    seeds: Leaf  # uint32 bits [D]
    top_k: Leaf  # int32 [D]
    temperature: Leaf  # float32 bits [D]
    top_p: Leaf  # float32 bits [D]
    min_p: Leaf  # float32 bits [D]
    penalty: Leaf  # float32 bits [D]
    stop_ids: Leaf  # int32 [D, MOST_STOP_IDS], -1 where there is none
    tables: Leaf  # int32 [D, M]
    seen: Leaf  # bits [D, V / 32]: tokens of the sequence so far, for the penalty


@dataclass(frozen=True, eq=False)
class LoopRow:
    """What one sequence brings into a loop."""

    token: int
    length: int
    limit: int
    table: NDArray[np.int32]  # [M]
    stop_ids: Sequence[int]
    sampling: Sampling
    seed: int
    adapter: int  # row of the stacks, -1 for none
    seen: NDArray[np.int32]  # [n], used where there is a penalty


def loop_size(key: LoopKey, vocab_size: int) -> int:
    """Elements of the buffer of one loop."""
    return 1 + key.rows * (10 + MOST_STOP_IDS + key.table_columns + num_words(vocab_size))


def _split(buffer: Any, key: LoopKey, vocab_size: int) -> LoopRows[Any]:
    """Cuts a buffer, NumPy or traced, behind its first element; NumPy pieces are views."""
    widths = [1] * 10 + [MOST_STOP_IDS, key.table_columns, num_words(vocab_size)]
    ends = itertools.accumulate((key.rows * width for width in widths), initial=1)
    pieces = [buffer[start:end] for start, end in itertools.pairwise(ends)]
    return LoopRows(*pieces[:10], *(piece.reshape(key.rows, -1) for piece in pieces[10:]))


def pack_loop(rows: Sequence[LoopRow], key: LoopKey, vocab_size: int, *, until_one_ends: bool) -> NDArray[np.int32]:
    """Packs the rows of one loop into its buffer; `until_one_ends`, it ends with the first row that does."""
    buffer, count = np.zeros(loop_size(key, vocab_size), np.int32), len(rows)
    buffer[0] = until_one_ends
    into = _split(buffer, key, vocab_size)
    into.adapters[count:], into.stop_ids[:] = -1, -1
    into.top_p.view(np.float32)[:], into.penalty.view(np.float32)[:] = 1.0, 1.0
    into.tokens[:count] = [row.token for row in rows]
    into.lengths[:count] = [row.length for row in rows]
    into.limits[:count] = [row.limit for row in rows]
    into.adapters[:count] = [row.adapter for row in rows]
    into.seeds[:count].view(np.uint32)[:] = [row.seed for row in rows]
    into.tables[:count] = [row.table for row in rows]
    for at, row in enumerate(rows):
        if row.stop_ids:
            into.stop_ids[at, : len(row.stop_ids)] = row.stop_ids
        if row.sampling != GREEDY:
            _pack_sampling(into, at, row, vocab_size)
    return buffer


def _pack_sampling(into: LoopRows[NDArray[np.int32]], at: int, row: LoopRow, vocab_size: int) -> None:
    how = row.sampling
    into.top_k[at] = min(how.top_k, vocab_size)
    into.temperature.view(np.float32)[at] = how.temperature
    into.top_p.view(np.float32)[at] = how.top_p
    into.min_p.view(np.float32)[at] = how.min_p
    into.penalty.view(np.float32)[at] = how.repetition_penalty
    if how.repetition_penalty != 1.0:
        flags = np.zeros(vocab_size, np.bool_)
        flags[row.seen] = True
        into.seen[at] = pack_flags(flags)


@flax.struct.dataclass
class _Carry:
    kv: KvState[jax.Array]
    at: jax.Array  # int32 []: tokens chosen so far
    tokens: jax.Array  # int32 [D]: to be read
    alive: jax.Array  # bool [D]
    seen: jax.Array  # bool [D, V]
    token_ids: jax.Array  # int32 [N, D], -1 where none was chosen
    logprobs: jax.Array  # float32 [N, D]


def decode_loop(
    params: ParamTree,
    kv: KvState[jax.Array],
    buffer: jax.Array,
    loras: ParamTree | None = None,
    *,
    cfg: ModelConfig,
    key: LoopKey,
    attention: str = "xla",
) -> tuple[Int[Array, "2 N D"], KvState[jax.Array]]:
    """Decodes up to N tokens of each row; gives their ids and the bits of their float32 log-probabilities.

    A row ends with a stop id or at its limit, and is padding from then on: it writes nothing and sees nothing. Tokens
    that were not chosen have the id -1. `kv` is donated.
    """
    rows = _split(buffer, key, cfg.vocab_size)
    wanted = rows.limits > 0

    def goes_on(carry: _Carry) -> jax.Array:
        one_ended = jnp.any(wanted & ~carry.alive) & (buffer[0] != 0)
        return (carry.at < key.tokens) & jnp.any(carry.alive) & ~one_ended

    def step(carry: _Carry) -> _Carry:
        group = Rows(
            tokens=carry.tokens[:, None],
            lengths=rows.lengths + carry.at,
            counts=carry.alive.astype(jnp.int32),
            tables=rows.tables,
            adapters=rows.adapters if key.adapters else None,
        )
        batch = Batch(groups=(group,), logit_rows=jnp.arange(key.rows, dtype=jnp.int32))
        logits, kv = family(cfg).forward(params, carry.kv, batch, cfg, loras=loras, attention=attention)
        choice = sample(logits, _inputs(rows, carry, group.lengths + 1))
        ids = jnp.where(carry.alive, choice.token_ids, -1)
        stopped = jnp.any(ids[:, None] == rows.stop_ids, axis=1) | (carry.at + 1 >= rows.limits)
        read = jnp.maximum(ids, 0)
        return _Carry(
            kv=kv,
            at=carry.at + 1,
            tokens=read,
            alive=carry.alive & ~stopped,
            seen=carry.seen.at[jnp.arange(key.rows), read].max(carry.alive),
            token_ids=carry.token_ids.at[carry.at].set(ids),
            logprobs=carry.logprobs.at[carry.at].set(choice.logprobs),
        )

    shape = (key.tokens, key.rows)
    end = lax.while_loop(
        goes_on,
        step,
        _Carry(
            kv=kv,
            at=jnp.int32(0),
            tokens=rows.tokens,
            alive=wanted,
            seen=unpack_flags(rows.seen, cfg.vocab_size),
            token_ids=jnp.full(shape, -1, jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
        ),
    )
    return jnp.stack([end.token_ids, lax.bitcast_convert_type(end.logprobs, jnp.int32)]), end.kv


def _inputs(rows: LoopRows[jax.Array], carry: _Carry, position: jax.Array) -> SampleInputs[jax.Array]:
    def real(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits, jnp.float32)

    return SampleInputs(
        temperature=jnp.where(carry.alive, real(rows.temperature), 0.0),
        top_k=rows.top_k,
        top_p=real(rows.top_p),
        min_p=real(rows.min_p),
        repetition_penalty=real(rows.penalty),
        seed=lax.bitcast_convert_type(rows.seeds, jnp.uint32),
        position=position,
        seen=carry.seen,
    )
