"""Many decode steps in one device call: each row's next token is chosen on the device and read by the next step."""

import itertools
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int
from numpy.typing import NDArray

from ferrum_jax.compile import sampler
from ferrum_jax.compile.sampler import MAX_STOP_IDS, SamplerState
from ferrum_jax.compile.step import ProgramContext, of_leaves
from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops.batch import Batch, Rows
from ferrum_jax.ops.shards import WHOLE as WHOLE_SHARDS
from ferrum_jax.ops.shards import Shards
from ferrum_jax.sharding.mesh import WHOLE

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, order=True)
class MultiStepKey:
    """Up to N decode steps of D rows in one device call."""

    rows: int  # D
    tokens: int  # N, chosen for each row at most
    table_columns: int  # M KV blocks per row
    adapters: bool = False  # whether rows may have a LoRA adapter

    def __str__(self) -> str:
        return f"multi-step D{self.rows} N{self.tokens} M{self.table_columns}" + " adapters" * self.adapters

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program; it takes the leaves of the parameters; the KV and the sampler's state are donated."""
        pure = of_leaves(multi_step, context, self)
        buffer = jax.ShapeDtypeStruct((packed_size(self),), jnp.int32)
        loras, stacks = ([context.loras], [context.lora_specs]) if self.adapters else ([], [])
        leaves, kv = jax.tree.leaves(context.params), context.kv_specs
        pure = context.spread(pure, (context.leaf_specs, kv, WHOLE, WHOLE, *stacks), (WHOLE, kv, WHOLE))
        return jax.jit(pure, donate_argnums=(1, 2)).lower(leaves, context.kv, context.sampler, buffer, *loras)


@flax.struct.dataclass
class PackedRows(Generic[Leaf]):
    """The rows of a multi-step program, pieces of its buffer; a row with a limit of 0 is padding."""

    tokens: Leaf  # int32 [D]: the newest token, not in the KV yet
    slots: Leaf  # int32 [D]: of the sampler
    lengths: Leaf  # int32 [D]: positions in the KV
    limits: Leaf  # int32 [D]: tokens to choose at most
    adapters: Leaf  # int32 [D]: row of the adapters' stacks, -1 for none
    stop_ids: Leaf  # int32 [D, MAX_STOP_IDS], -1 where there is none
    tables: Leaf  # int32 [D, M]


def packed_size(key: MultiStepKey) -> int:
    """Elements of the buffer."""
    return 1 + key.rows * (5 + MAX_STOP_IDS + key.table_columns)


def blank(key: MultiStepKey, *, until_one_ends: bool) -> tuple[NDArray[np.int32], PackedRows[NDArray[np.int32]]]:
    """Returns a buffer of padding and the views to fill it through; `until_one_ends`: all rows stop with the first."""
    buffer = np.zeros(packed_size(key), np.int32)
    buffer[0] = until_one_ends
    rows = _split(buffer, key)
    rows.adapters[:] = -1
    rows.stop_ids[:] = -1
    return buffer, rows


def _split(buffer: Any, key: MultiStepKey) -> PackedRows[Any]:
    widths = [1] * 5 + [MAX_STOP_IDS, key.table_columns]
    ends = itertools.accumulate((key.rows * width for width in widths), initial=1)
    pieces = [buffer[start:end] for start, end in itertools.pairwise(ends)]
    return PackedRows(*pieces[:5], *(piece.reshape(key.rows, -1) for piece in pieces[5:]))


@flax.struct.dataclass
class _Carry:
    kv: KvState[jax.Array]
    sampler: SamplerState[jax.Array]
    at: jax.Array  # int32 []: tokens chosen so far
    tokens: jax.Array  # int32 [D]: input of the next step
    alive: jax.Array  # bool [D]
    chosen: jax.Array  # int32 [N, D, 3]: as `Sampled.packed`, with the id -1 where none was chosen


def multi_step(
    params: ParamTree,
    kv: KvState[jax.Array],
    state: SamplerState[jax.Array],
    buffer: Int[Array, " size"],
    loras: ParamTree | None = None,
    *,
    cfg: ModelConfig,
    key: MultiStepKey,
    attention: str = "xla",
    shards: Shards = WHOLE_SHARDS,
) -> tuple[Int[Array, "N D 3"], KvState[jax.Array], SamplerState[jax.Array]]:
    """Decodes up to N tokens of each row. `kv` and `state` are donated.

    A row ends with a stop id or at its limit, and is padding from then on: it writes nothing and sees nothing.
    `shards` as for `step`; every device chooses all tokens itself.
    """
    rows = _split(buffer, key)
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
        logits, kv, _ = family(cfg).forward(
            params, carry.kv, batch, cfg, loras=loras, attention=attention, shards=shards
        )
        slots = jnp.where(carry.alive, rows.slots, carry.sampler.last_tokens.shape[0])
        state, found = sampler.sample(carry.sampler, logits, jnp.stack([slots, group.lengths + 1], axis=1))
        ids = jnp.where(carry.alive, found.packed[:, 0], -1)
        stopped = jnp.any(ids[:, None] == rows.stop_ids, axis=1) | (carry.at + 1 >= rows.limits)
        return _Carry(
            kv=kv,
            sampler=state,
            at=carry.at + 1,
            tokens=jnp.maximum(ids, 0),
            alive=carry.alive & ~stopped,
            chosen=carry.chosen.at[carry.at].set(found.packed.at[:, 0].set(ids)),
        )

    tokens = jnp.where(rows.tokens < 0, state.last_tokens.at[rows.slots].get(mode="clip"), rows.tokens)
    start = _Carry(
        kv=kv,
        sampler=state,
        at=jnp.int32(0),
        tokens=tokens,
        alive=wanted,
        chosen=jnp.full((key.tokens, key.rows, 3), -1, jnp.int32),
    )
    end = lax.while_loop(goes_on, step, start)
    return end.chosen, end.kv, end.sampler
