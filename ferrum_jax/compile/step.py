"""One forward over a batch of new tokens: its shape, its packed input, and its lowering.

Everything a step needs from the host is one int32 buffer, uploaded once. Decode rows may take the token that the
sampler chose last for their slot, which stays on the device.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from ferrum_jax.compile.edits import EditStacks, of_tokens
from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.division import Division
from ferrum_jax.models.hooks import Captured, Point
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops import sampling
from ferrum_jax.ops.batch import Batch, Rows
from ferrum_jax.ops.kernel_use import kernels
from ferrum_jax.ops.shards import WHOLE as WHOLE_SHARDS
from ferrum_jax.ops.shards import Shards
from ferrum_jax.sharding.mesh import WHOLE, Placement

Leaf = TypeVar("Leaf")
Outputs = Literal["last", "all", "scores"]
SCORED_ROWS = 128  # rows of logits in memory at once in a step of scores alone; one block's, if these are more
DEVICE_TOKEN = -1  # in the place of a token id: the one sampled last for this slot


@dataclass(frozen=True)
class ProgramContext:
    """What every program of one engine is lowered for; arrays or their shapes."""

    cfg: Any  # ModelConfig
    params: Any
    kv: Any  # KvState
    sampler: Any  # SamplerState
    loras: Any = None  # stacks of adapters, an argument of programs whose key has adapters
    attention: str = "xla"  # the backend whose layout the KV has
    placement: Placement | None = None  # None: on one device
    division: Division | None = None  # of the model over the devices of a mesh

    def spread(self, function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
        """Turns a function of one device's parts into one of the arrays on the mesh (`Placement.spread`).

        It uses the CPU's kernels where the KV has their layout.
        """

        def traced(*arrays: Any) -> Any:
            with kernels(self.attention), jax.numpy_rank_promotion("allow"):
                return function(*arrays)

        named = function.func if isinstance(function, functools.partial) else function
        traced.__name__ = named.__name__  # names the compiled module
        return traced if self.placement is None else self.placement.spread(traced, in_specs, out_specs)

    @property
    def kv_axes(self) -> tuple[str, ...]:
        """Mesh axes over which heads are divided."""
        return () if self.division is None else self.division.shards.axes

    @property
    def kv_specs(self) -> KvState[PartitionSpec]:
        """How the KV is divided."""
        return state.partitions(self.kv, self.kv_axes)

    @property
    def readable(self) -> jax.sharding.Sharding | None:
        """Sharding of results that one process of several reads: whole on every device. None for one process."""
        return self.placement.sharding() if self.placement is not None and self.placement.is_shared else None

    @property
    def leaf_specs(self) -> list[PartitionSpec]:
        """How the leaves of the parameters are divided."""
        return jax.tree.leaves(self._specs_of(self.params))

    @property
    def lora_specs(self) -> Any:
        """How the stacks of adapters are divided."""
        return self._specs_of(self.loras)

    def _specs_of(self, tree: Any) -> Any:
        if self.division is None:
            return jax.tree.map(lambda _: WHOLE, tree)
        return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


@dataclass(frozen=True, order=True)
class StepKey:
    """The static shape of one step."""

    decode_rows: int  # D rows of one token
    blocks: int  # P query blocks; a long prompt takes several in a row
    block_tokens: int  # C
    table_columns: int  # M KV blocks per row
    logit_rows: int  # R rows of logits; all D + P * C tokens where `outputs` is not "last"
    outputs: Outputs = "last"  # returns R logits; "all": logits and scores of all tokens; "scores": those alone
    adapters: bool = False  # whether rows may have a LoRA adapter
    capture: tuple[Point, ...] = ()  # hook points that are returned
    edits: tuple[Point, ...] = ()  # hook points at which rows may have edits

    @property
    def num_tokens(self) -> int:
        """X, the tokens its matrix products run over."""
        return self.decode_rows + self.blocks * self.block_tokens

    @property
    def rows_at_once(self) -> int:
        """How many rows of logits are in memory at once."""
        if self.outputs != "scores":
            return self.logit_rows
        return math.gcd(self.blocks, max(1, SCORED_ROWS // self.block_tokens)) * self.block_tokens

    def __str__(self) -> str:
        name = f"step D{self.decode_rows} P{self.blocks}x{self.block_tokens} M{self.table_columns} R{self.logit_rows}"
        name += f" {self.outputs}" * (self.outputs != "last") + " adapters" * self.adapters
        for what, points in (("capture", self.capture), ("edits", self.edits)):
            name += f" {what} {' '.join(f'{point.name}.{point.layer}' for point in points)}" if points else ""
        return name

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the step; it takes the leaves of the parameters, and the KV is donated."""
        pure = of_leaves(step, context, self)
        buffer = jax.ShapeDtypeStruct((packed_size(self),), jnp.int32)
        extra, stacks = ([context.loras], [context.lora_specs]) if self.adapters else ([], [])
        if self.edits:
            slots = context.sampler.last_tokens.shape[0]
            neutral = EditStacks.neutral(context.cfg, slots, self.edits)
            extra = [*extra, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), neutral)]
            stacks = [*stacks, WHOLE]
        groups = (PartitionSpec(None, context.kv_axes),) * (bool(self.decode_rows) + bool(self.blocks))
        captured = {point: groups if point.name == "pattern" else WHOLE for point in self.capture}
        logits = None if self.outputs == "scores" else WHOLE
        scores = None if self.outputs == "last" else (WHOLE,) * 3
        outputs = StepOutputs(logits=logits, rows=WHOLE, captured=captured, scores=scores)
        inputs = context.leaf_specs, context.kv_specs, WHOLE, WHOLE, *stacks
        pure = context.spread(pure, inputs, (outputs, context.kv_specs))
        read = None
        if any(point.name == "pattern" for point in self.capture) and context.readable is not None:
            read = replace(outputs, logits=None, rows=None, scores=None, captured=context.readable), None
        return jax.jit(pure, donate_argnums=1, out_shardings=read).lower(
            jax.tree.leaves(context.params), context.kv, context.sampler.last_tokens, buffer, *extra
        )


def of_leaves(function: Callable[..., Any], context: ProgramContext, key: Any) -> Callable[..., Any]:
    """Turns a function of the parameters into one of the list of their leaves, with its static arguments filled in.

    In every call of a program, JAX checks a list in half the time that nested mappings take.
    """
    tree, division = jax.tree.structure(context.params), context.division
    cfg, shards = (context.cfg, WHOLE_SHARDS) if division is None else (division.local, division.shards)

    @functools.wraps(function)
    def pure(leaves: list[jax.Array], *rest: Any) -> Any:
        params = jax.tree.unflatten(tree, leaves)
        return function(params, *rest, cfg=cfg, key=key, attention=context.attention, shards=shards)

    return pure


@flax.struct.dataclass
class StepOutputs(Generic[Leaf]):
    """What a step returns beside the KV."""

    logits: Leaf | None  # float32 [R, V]; None where the key wants scores alone
    rows: Leaf  # int32 [R, 2] of "last": sampler slot and position of each; else [P, 3 + C], as `VerifyKey` takes them
    captured: Captured  # at the points that the key names
    scores: tuple[Leaf, ...] | None = None  # of the R tokens, as `sampling.score` returns them; None for "last"


@flax.struct.dataclass
class PackedStep(Generic[Leaf]):
    """The pieces of a step's buffer, int32; of a NumPy buffer, they are views to fill it through."""

    decode: Rows[Leaf] | None  # tokens [D, 1]
    blocks: Rows[Leaf] | None  # tokens [P, C]
    decode_slots: Leaf  # [D]: whose token a decode row takes where its own is DEVICE_TOKEN
    block_slots: Leaf  # [P]
    decode_edit_rows: Leaf  # [D]: row of the stacks of edits; empty where the key has none
    block_edit_rows: Leaf  # [P]
    logit_index: Leaf  # [R]: which of the X tokens
    sample_slots: Leaf  # [R]: slot whose settings choose a token there; one past the last: the choice is dropped
    sample_positions: Leaf  # [R]: of the token to be chosen, in its sequence
    targets: Leaf  # [R]: the token to be scored after each one; empty for "last", like `scored`
    scored: Leaf  # [1]: which scores are wanted, as `sampling.score` takes it


def packed_size(key: StepKey) -> int:
    """Elements of the buffer of one step."""
    per_row = 3 + key.adapters + bool(key.edits) + key.table_columns
    rows = 3 * key.logit_rows if key.outputs == "last" else key.logit_rows + 1
    return key.decode_rows * (1 + per_row) + key.blocks * (key.block_tokens + per_row) + rows


def split(buffer: Any, key: StepKey) -> PackedStep[Any]:
    """Cuts a buffer, NumPy or traced, into its pieces."""
    at = 0

    def take(size: int) -> Any:
        nonlocal at
        at += size
        return buffer[at - size : at]

    groups, slots, edit_rows = [], [], []
    for rows, tokens in ((key.decode_rows, 1), (key.blocks, key.block_tokens)):
        slots.append(take(rows))
        edit_rows.append(take(rows if key.edits else 0))
        if not rows:
            groups.append(None)
            continue
        group = Rows(
            tokens=take(rows * tokens).reshape(rows, tokens),
            lengths=take(rows),
            counts=take(rows),
            tables=take(rows * key.table_columns).reshape(rows, key.table_columns),
            adapters=take(rows) if key.adapters else None,
        )
        groups.append(group)
    last, scored = (key.logit_rows, 0) if key.outputs == "last" else (0, key.logit_rows)
    sizes = *[last] * 3, scored, min(scored, 1)
    return PackedStep(*groups, *slots, *edit_rows, *map(take, sizes))


def blank(key: StepKey, num_slots: int) -> tuple[NDArray[np.int32], PackedStep[NDArray[np.int32]]]:
    """Returns a buffer of padding and the views to fill it through."""
    buffer = np.zeros(packed_size(key), np.int32)
    packed = split(buffer, key)
    packed.sample_slots[:] = num_slots
    packed.block_slots[:] = num_slots
    packed.decode_edit_rows[:] = packed.block_edit_rows[:] = num_slots
    if key.adapters:
        for group in (packed.decode, packed.blocks):
            if group is not None and group.adapters is not None:
                group.adapters[:] = -1
    return buffer, packed


def step(
    params: ParamTree,
    kv: KvState[jax.Array],
    last_tokens: Int[Array, " S"],
    buffer: Int[Array, " size"],
    *extra: Any,
    cfg: ModelConfig,
    key: StepKey,
    attention: str = "xla",
    shards: Shards = WHOLE_SHARDS,
) -> tuple[StepOutputs[jax.Array], KvState[jax.Array]]:
    """Runs the new tokens of one packed batch through the model. `kv` is donated.

    `extra` are the stacks of adapters and the interventions, where the key has them. With `shards`, parameters and KV
    are one device's parts, and `cfg` counts its heads.
    """
    packed = split(buffer, key)
    groups = []
    if packed.decode is not None:
        sampled = last_tokens.at[packed.decode_slots].get(mode="clip")[:, None]
        tokens = jnp.where(packed.decode.tokens == DEVICE_TOKEN, sampled, packed.decode.tokens)
        groups.append(replace(packed.decode, tokens=tokens))
    if packed.blocks is not None:
        groups.append(packed.blocks)
    read, index = None, None
    if key.outputs != "last":
        read = functools.partial(_read_scores, packed=packed, key=key)
        blocks = packed.blocks
        assert blocks is not None
        heads = [packed.block_slots, blocks.lengths, blocks.counts]
        rows = jnp.concatenate([*(head[:, None] for head in heads), blocks.tokens], axis=1)
    else:
        index = packed.logit_index
        rows = jnp.stack([packed.sample_slots, packed.sample_positions], axis=1)
    batch = Batch(groups=tuple(groups), logit_rows=index)
    rest = list(extra)
    loras = rest.pop(0) if key.adapters else None
    interventions = {}
    if key.edits:
        blocks = jnp.repeat(packed.block_edit_rows, key.block_tokens)
        interventions = of_tokens(rest.pop(0), jnp.concatenate([packed.decode_edit_rows, blocks]))
    found, kv, captured = family(cfg).forward(
        params,
        kv,
        batch,
        cfg,
        loras=loras,
        attention=attention,
        capture=key.capture,
        interventions=interventions,
        shards=shards,
        read=read,
    )
    logits, scores = (found, None) if read is None else found
    return StepOutputs(logits=logits, rows=rows, captured=captured, scores=scores), kv


def _read_scores(
    head: Callable[[jax.Array], jax.Array], x: Float[Array, "X D"], *, packed: PackedStep[jax.Array], key: StepKey
) -> tuple[jax.Array | None, tuple[jax.Array, ...]]:
    """Returns the logits and scores of all tokens; or scores alone, with the logits of some tokens at a time."""
    wanted = packed.scored[0]
    if key.outputs == "all":
        logits = head(x)
        return logits, sampling.score(logits, packed.targets, wanted)
    parts = x.reshape(-1, key.rows_at_once, x.shape[-1]), packed.targets.reshape(-1, key.rows_at_once)
    found = lax.map(lambda part: sampling.score(head(part[0]), part[1], wanted), parts)
    return None, jax.tree.map(lambda one: one.reshape(-1, one.shape[-1]), found)
