"""Mixtures of experts: each token goes through the few that its router chose, and no others.

Shazeer et al. 2017, "Outrageously Large Neural Networks", without capacities: whatever the load, no token is dropped.

The tokens are sorted by expert and cut into tiles, each of a few rows of one expert. A CPU goes over the tiles in a
loop, one expert's weights at a time; other devices gather the weights of many tiles and multiply them at once.
`lax.ragged_dot` would say the same in one operation, but on CPUs and NVIDIA GPUs XLA makes of it a product with every
expert.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ferrum_jax.ops.linear import linear
from ferrum_jax.ops.quantised import QuantisedWeight, Weight, is_quantised

Expert = Callable[[Any, jax.Array], jax.Array]  # of its own weights and tokens [rows, D], to [rows, D]

CPU_TILE, TILE = 32, 128  # most rows of a tile: larger ones are mostly padding until each expert has many
GATHERED = 1 << 27  # numbers of one product's weights that are gathered at a time


class _Tiles(NamedTuple):
    """Where A = X * U choices, U for each token, are multiplied."""

    tokens: jax.Array  # int32 [tiles, rows]: which token each row is; rows that are left over are any
    experts: jax.Array  # int32 [tiles]
    is_used: jax.Array  # bool [tiles]
    places: jax.Array  # int32 [A]: the row of each choice, counted over all tiles


def swiglu_experts(
    x: Float[Array, "X D"],
    chosen: Int[Array, "X U"],
    shares: Float[Array, "X U"],
    gate: Float[Array, "E F D"] | QuantisedWeight,
    up: Float[Array, "E F D"] | QuantisedWeight,
    down: Float[Array, "E D F"] | QuantisedWeight,
) -> Float[Array, "X D"]:
    """Sums `share * down @ (silu(gate @ x) * (up @ x))` over the U experts that each token has chosen.

    Products are as `linear` makes them; weights are `[out, in]`, and may be quantised. The rest is `weigh_experts`'.
    """
    return weigh_experts(x, chosen, shares, (gate, up, down), _swiglu)


def weigh_experts(
    x: Float[Array, "X D"], chosen: Int[Array, "X U"], shares: Float[Array, "X U"], stacks: Any, expert: Expert
) -> Float[Array, "X D"]:
    """Sums `share * expert(own, x)` over the U experts that each token has chosen.

    The sum is taken in float32, in the order of `chosen`, and rounded once. What a token gets depends on the other
    tokens by rounding alone.

    On a CPU, gradients of the weights pass over all experts once for each tile.

    Args:
        x: tokens.
        chosen: ids of experts, from 0 to E - 1; those of one token differ.
        shares: what each of them counts, float32.
        stacks: a tree of the weights of all experts, `[E, ...]`; any may be quantised.
        expert: what one does with a tree of its own, whose leaves lack the first axis.
    """
    size = max(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(stacks, is_leaf=is_quantised))
    outs = lax.platform_dependent(
        x,
        chosen.astype(jnp.int32),
        stacks,
        cpu=partial(_outputs, expert, largest=CPU_TILE, at_once=1),
        default=partial(_outputs, expert, largest=TILE, at_once=max(2, GATHERED // size)),
    )
    return jnp.sum(outs.astype(jnp.float32) * shares[..., None], axis=1).astype(x.dtype)


def clamped_swiglu(
    gate: Float[Array, "X F"], up: Float[Array, "X F"], alpha: float, limit: float
) -> Float[Array, "X F"]:
    """Computes `(up + 1) * gate * sigmoid(alpha * gate)`, the gate at most `limit` and `up` within it on both sides.

    OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))


def _swiglu(own: tuple[Weight, Weight, Weight], x: jax.Array) -> jax.Array:
    gate, up, down = own
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def _outputs(expert: Expert, x: jax.Array, chosen: jax.Array, stacks: Any, *, largest: int, at_once: int) -> jax.Array:
    """Gives each choice's output, `[X, U, D]`, by tiles of up to `largest` rows, `at_once` of them in a step."""
    tiles = _tile(chosen, jax.tree.leaves(stacks)[0].shape[0], largest, at_once)

    @jax.checkpoint  # to keep for gradients what is multiplied here would be to copy every expert's weights
    def multiply(tokens: jax.Array, index: jax.Array) -> jax.Array:
        own = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacks)
        return expert(own, x.at[tokens].get(mode="promise_in_bounds"))

    def step(carry: None, xs: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        tokens, experts, is_used = xs
        zeros = jnp.zeros((*tokens.shape, x.shape[1]), x.dtype)
        run = multiply if at_once == 1 else jax.vmap(multiply)
        return carry, lax.cond(jnp.any(is_used), run, lambda *_: zeros, tokens, experts)

    xs: tuple[jax.Array, ...] = tiles.tokens, tiles.experts, tiles.is_used
    if at_once > 1:
        xs = tuple(leaf.reshape(-1, min(at_once, len(leaf)), *leaf.shape[1:]) for leaf in xs)
    _, outs = lax.scan(step, None, xs)
    rows = outs.reshape(-1, x.shape[1]).at[tiles.places].get(mode="promise_in_bounds")
    return rows.reshape(*chosen.shape, -1)


def _tile(chosen: jax.Array, num_experts: int, largest: int, at_once: int) -> _Tiles:
    """Plans as many tiles as the worst load needs, or more to make full steps; those past the real load are not used.

    A tile has as many rows as the power of two above what an expert gets on average, up to `largest`.
    """
    choices = chosen.size
    size = min(1 << (choices // num_experts).bit_length(), largest)
    most = min(choices, choices // size + num_experts)
    most = -(-most // min(at_once, most)) * min(at_once, most)
    mine, index = chosen.ravel(), jnp.arange(most, dtype=jnp.int32)
    order = jnp.argsort(mine, stable=True).astype(jnp.int32)  # which choice comes where, sorted by expert
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(choices, dtype=jnp.int32))
    counts = jnp.zeros(num_experts, jnp.int32).at[mine].add(1)
    starts, tiles = jnp.cumsum(counts, dtype=jnp.int32) - counts, -(-counts // size)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    experts = jnp.minimum(jnp.searchsorted(ends, index, side="right"), num_experts - 1).astype(jnp.int32)
    first = starts[experts] + (index - (ends - tiles)[experts]) * size
    rows = jnp.clip(first[:, None] + jnp.arange(size, dtype=jnp.int32), 0, choices - 1)
    return _Tiles(
        tokens=order[rows] // chosen.shape[1],
        experts=experts,
        is_used=index < ends[-1],
        places=(ends - tiles)[mine] * size + rank - starts[mine],
    )
