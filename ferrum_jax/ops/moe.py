"""Mixtures of experts: each token is computed by the few experts that its router chose.

Shazeer et al. 2017, "Outrageously Large Neural Networks", without capacity limits: no token is dropped.

A choice is a token with one of its experts. With kernels that read the weights, a CPU multiplies all choices at once
(ops/native). Otherwise choices are sorted by expert and cut into tiles, each of a few rows of one expert. In steps of
many choices a GPU multiplies the tiles in a kernel (experts_triton.py), if it reads the weights. If no kernel is used,
a CPU loops over the tiles, one expert's weights at a time; other devices gather the weights of many tiles and multiply
them at once. `lax.ragged_dot` does this in one operation, but on CPUs and NVIDIA GPUs XLA expands it to a product with
every expert.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ferrum_jax.ops import experts_triton, native
from ferrum_jax.ops.experts_triton import TiledWeight
from ferrum_jax.ops.kernel_use import kernels
from ferrum_jax.ops.linear import ChosenWeight, StackedWeight, linear
from ferrum_jax.ops.quantised import is_quantised
from ferrum_jax.ops.shards import local_ids
from ferrum_jax.sharding.types import vary_alike, vary_like

Expert = Callable[[Any, jax.Array], jax.Array]  # given its weights and tokens [rows, D], returns [rows, D]

CPU_TILE, TILE = 32, 128  # most rows of a tile: larger tiles are mostly padding unless each expert has many rows
GATHERED = 1 << 27  # numbers of one product's weights that are gathered at a time


class _Tiles(NamedTuple):
    """How A = X * U choices, U for each token, are arranged in tiles."""

    tokens: jax.Array  # int32 [tiles, rows]: the token of each row; any token in unused rows
    experts: jax.Array  # int32 [tiles]
    is_used: jax.Array  # bool [tiles]
    row_of_choice: jax.Array  # int32 [A], counted over all tiles


def choose_in_groups(
    scores: Float[Array, "X E"], num_chosen: int, *, num_groups: int, num_kept: int, num_best: int
) -> Int[Array, "X U"]:
    """Returns the ids of the experts with the highest scores within the `num_kept` groups with the highest scores.

    Groups have equal sizes, in the order of experts; a group's score is the sum of its `num_best` highest scores.
    DeepSeek-AI 2024, "DeepSeek-V2", section 2.2.2.
    """
    if num_groups > 1:
        by_group = scores.reshape(len(scores), num_groups, -1)
        of_group = jnp.sum(lax.top_k(by_group, num_best)[0], axis=-1)
        groups = jnp.arange(num_groups, dtype=jnp.int32)
        kept = jnp.any(lax.top_k(of_group, num_kept)[1][:, :, None] == groups, axis=1)  # [X, groups]
        scores = jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, num_chosen)[1]


def weigh_experts(
    x: Float[Array, "X D"],
    chosen: Int[Array, "X U"],
    shares: Float[Array, "X U"],
    stacks: Any,
    expert: Expert,
    first: Int[Array, ""] | None = None,
) -> Float[Array, "X D"]:
    """Sums `share * expert(own, x)` over the U experts chosen for each token.

    The sum is taken in float32, in the order of `chosen`, and rounded once. Other tokens affect a token's output only
    by rounding.

    On a CPU, computing gradients of the weights goes over all experts once for each tile.

    Args:
        x: tokens.
        chosen: ids of experts, from 0 to E - 1, distinct for each token.
        shares: the factor of each chosen expert's output, float32.
        stacks: a tree of the weights of all experts, `[E, ...]`; any may be quantised.
        expert: computes one expert, given its weights (a tree whose leaves lack the first axis) and tokens. With
            kernels it is called once for all choices, and the weights are `ChosenWeight`s or `TiledWeight`s, which
            `linear` takes.
        first: id of the first expert of the stacks, if other devices hold other experts, which add nothing here.
    """
    weights = jax.tree.leaves(stacks, is_leaf=_is_weight)
    chosen, is_here = local_ids(chosen, weights[0].shape[0], first)
    matrices = [leaf.stack if isinstance(leaf, StackedWeight) else leaf for leaf in weights if len(leaf.shape) == 3]
    if all(native.can_multiply(x, stack, native.MOST_ROWS // chosen.shape[1]) for stack in matrices):
        outs = _outputs_of_kernels(expert, x, chosen, stacks)
    elif chosen.size > _tiles_at_once(stacks) and all(experts_triton.can_multiply(x, stack) for stack in matrices):
        outs = _outputs_of_triton(expert, x, chosen, stacks, has_all=is_here is None).astype(jnp.float32)
    else:
        stacks = jax.tree.map(_alone, stacks, is_leaf=_is_weight)
        with kernels("xla"):  # kernels would need a copy of each expert's weights
            outs = _outputs_of_tiles(expert, x, chosen, stacks, has_all=is_here is None).astype(jnp.float32)
    if is_here is not None:
        outs = jnp.where(is_here[..., None], outs, 0.0)
    return jnp.sum(outs * shares[..., None], axis=1).astype(x.dtype)


def _is_weight(leaf: Any) -> bool:
    return is_quantised(leaf) or isinstance(leaf, StackedWeight)


def _alone(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, StackedWeight) else leaf


def _outputs_of_kernels(expert: Expert, x: jax.Array, chosen: jax.Array, stacks: Any) -> jax.Array:
    """Returns outputs of all choices, `[X, U, D]`: every choice is a row of the products."""
    ids = chosen.ravel()

    def own(leaf: Any) -> Any:
        if len(leaf.shape) < 3:  # a bias is a row for each choice
            return _alone(leaf)[ids]
        return ChosenWeight(*_of_all_layers(leaf, ids))

    outs = expert(jax.tree.map(own, stacks, is_leaf=_is_weight), jnp.repeat(x, chosen.shape[1], axis=0))
    return outs.reshape(*chosen.shape, -1)


def _of_all_layers(leaf: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    """Returns a stack of experts and ids in it; the experts of stacked layers are joined into one stack."""
    if not isinstance(leaf, StackedWeight):
        return leaf, ids
    experts = leaf.shape[0]
    every = jax.tree.map(lambda stack: stack.reshape(-1, *stack.shape[2:]), leaf.stack)
    # The id `experts`, another device's expert, would name the next layer's first, which must not be read.
    return every, jnp.where((ids >= 0) & (ids < experts), ids + leaf.layer * experts, -1)


def _outputs_of_triton(expert: Expert, x: jax.Array, chosen: jax.Array, stacks: Any, *, has_all: bool) -> jax.Array:
    """Returns outputs of all choices, `[X, U, D]`: tiles of one expert each are the rows of the products."""
    num_experts = jax.tree.leaves(stacks, is_leaf=_is_weight)[0].shape[0]
    tiles = _tile(chosen, num_experts + (not has_all), experts_triton.LEAST_ROWS, experts_triton.MOST_ROWS, at_once=1)
    ids = jnp.where(tiles.is_used & (tiles.experts < num_experts), tiles.experts, -1)

    def own(leaf: Any) -> Any:
        if len(leaf.shape) < 3:  # a bias is a row for each token of a tile
            return jnp.repeat(_alone(leaf)[ids], tiles.tokens.shape[1], axis=0)
        return TiledWeight(*_of_all_layers(leaf, ids))

    rows = x.at[tiles.tokens.ravel()].get(mode="promise_in_bounds")
    outs = expert(jax.tree.map(own, stacks, is_leaf=_is_weight), rows)
    return outs.at[tiles.row_of_choice].get(mode="promise_in_bounds").reshape(*chosen.shape, -1)


def _outputs_of_tiles(expert: Expert, x: jax.Array, chosen: jax.Array, stacks: Any, *, has_all: bool) -> jax.Array:
    """Returns outputs of all choices, `[X, U, D]`, computed in tiles of one expert each."""
    outputs = partial(_outputs, expert, has_all=has_all)
    return lax.platform_dependent(
        x,
        chosen,
        stacks,
        cpu=partial(outputs, largest=CPU_TILE, at_once=1),
        default=partial(outputs, largest=TILE, at_once=_tiles_at_once(stacks)),
    )


def _tiles_at_once(stacks: Any) -> int:
    """Returns for how many tiles weights are gathered at a time; XLA's GPU code copies none for tiles of one row."""
    return max(2, GATHERED // max(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(stacks, is_leaf=_is_weight)))


def clamped_swiglu(
    gate: Float[Array, "X F"], up: Float[Array, "X F"], alpha: float, limit: float
) -> Float[Array, "X F"]:
    """Computes `(up + 1) * gate * sigmoid(alpha * gate)`, with gate clipped above at `limit` and up at +-`limit`.

    OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))


def swiglu(own: tuple[Any, Any, Any], x: jax.Array) -> jax.Array:
    """Computes `down @ (silu(gate @ x) * (up @ x))` for one expert, `x` [X, D]."""
    gate, up, down = own
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def _outputs(
    expert: Expert, x: jax.Array, chosen: jax.Array, stacks: Any, *, largest: int, at_once: int, has_all: bool = True
) -> jax.Array:
    """Returns outputs of all choices, `[X, U, D]`, computed in tiles of up to `largest` rows, `at_once` in a step.

    Unless this device `has_all` experts, the id one past its last stands for experts of other devices; their outputs
    are arbitrary.
    """
    x, chosen, stacks = vary_alike(x, chosen, stacks)  # devices that differ in x skip different steps
    num_experts = jax.tree.leaves(stacks)[0].shape[0]
    tiles = _tile(chosen, num_experts if has_all else num_experts + 1, 1, largest, at_once)
    if not has_all:
        tiles = tiles._replace(
            experts=jnp.minimum(tiles.experts, num_experts - 1), is_used=tiles.is_used & (tiles.experts < num_experts)
        )

    @jax.checkpoint  # residuals of these products would be copies of every expert's weights
    def multiply(tokens: jax.Array, index: jax.Array) -> jax.Array:
        own = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacks)
        return expert(own, x.at[tokens].get(mode="promise_in_bounds"))

    run = multiply if at_once == 1 else jax.vmap(multiply)

    def step(carry: None, xs: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        tokens, experts, is_used = xs
        zeros = vary_like(jnp.zeros((*tokens.shape, x.shape[1]), x.dtype), x)
        return carry, lax.cond(jnp.any(is_used), run, lambda *_: zeros, tokens, experts)

    xs: tuple[jax.Array, ...] = tiles.tokens, tiles.experts, tiles.is_used
    if at_once > 1:
        xs = tuple(leaf.reshape(-1, min(at_once, len(leaf)), *leaf.shape[1:]) for leaf in xs)
    # A single step is computed whether or not its tiles are used: a branch would make the host of a GPU wait.
    outs = run(*(leaf[0] for leaf in xs[:2])) if len(xs[0]) == 1 else lax.scan(step, None, xs)[1]
    rows = outs.reshape(-1, x.shape[1]).at[tiles.row_of_choice].get(mode="promise_in_bounds")
    return rows.reshape(*chosen.shape, -1)


def _tile(chosen: jax.Array, num_experts: int, least: int, largest: int, at_once: int) -> _Tiles:
    """Arranges choices in as many tiles as the worst load needs, rounded up to full steps; tiles may be unused.

    A tile's rows are the power of two above an expert's average number of choices, from `least` to `largest`.
    """
    choices = chosen.size
    size = min(max(1 << (choices // num_experts).bit_length(), least), largest)
    most = min(choices, choices // size + num_experts)
    most = -(-most // min(at_once, most)) * min(at_once, most)
    mine, index = chosen.ravel(), jnp.arange(most, dtype=jnp.int32)
    order = lax.platform_dependent(mine, cpu=_argsort_on_cpu, default=_argsort)  # choices by expert
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(choices, dtype=jnp.int32))
    counts = jnp.zeros(num_experts, jnp.int32).at[mine].add(1)
    starts, tiles = jnp.cumsum(counts, dtype=jnp.int32) - counts, -(-counts // size)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    # As `jnp.searchsorted`, which fails in a `shard_map` over some of a mesh's axes (JAX 0.10 to 0.12).
    experts = jnp.minimum(jnp.sum(ends <= index[:, None], axis=1, dtype=jnp.int32), num_experts - 1)
    first = starts[experts] + (index - (ends - tiles)[experts]) * size
    rows = jnp.clip(first[:, None] + jnp.arange(size, dtype=jnp.int32), 0, choices - 1)
    return _Tiles(
        tokens=order[rows] // chosen.shape[1],
        experts=experts,
        is_used=index < ends[-1],
        row_of_choice=(ends - tiles)[mine] * size + rank - starts[mine],
    )


def _argsort(experts: jax.Array) -> jax.Array:
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    return vary_like(order, experts)  # JAX types the indices as the same on all devices


def _argsort_on_cpu(experts: jax.Array) -> jax.Array:
    """Computes a stable argsort by XLA's `top_k`: a program with its sort cannot be serialised once it has run.

    The CPU backend's own `top_k` must choose fewer elements than there are, so one is added that is never chosen.
    """
    scores = jnp.pad(-experts.astype(jnp.float32), (0, 1), constant_values=-jnp.inf)
    return lax.top_k(scores, len(experts))[1]  # equal scores keep their order
