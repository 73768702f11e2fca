"""Whole sequences through a model without a cache: logits, log-probabilities, and what hook points show and change.

These are the functions that research code embeds. Under a mesh of the caller's, of whatever kind of axes, and inside
`jax.shard_map`, they give what they give on one device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.kvcache import state
from ferrum_jax.models.backends import cache_spec
from ferrum_jax.models.hooks import (
    ATTENTION,
    Intervention,
    Point,
    check_interventions,
    check_points,
    check_shape,
    edits_of,
    hidden_points,
    rows_as_tokens,
    state_number,
    steered,
    with_edits,
)
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops.batch import Batch, Rows
from ferrum_jax.ops.quantised import activation_dtype
from ferrum_jax.sharding.types import explicit_mesh, partition_of, with_auto_axes


def forward(params: ParamTree, tokens: Int[Array, "B T"], cfg: ModelConfig, **options: Any) -> Float[Array, "B T V"]:
    """Runs whole sequences from position 0 and returns the logits of every token, float32.

    It is the family's serving forward without a cache, so it may be differentiated, vmapped, scanned and jitted
    (with `cfg` closed over or static). There is no padding: to batch sequences of different lengths, pad on the right
    and ignore the logits there. The other arguments, and what is raised, are those of `run`.
    """
    return run(params, tokens, cfg, **options)[0]


def capture(
    params: ParamTree,
    tokens: Int[Array, "B T"],
    cfg: ModelConfig,
    *,
    hidden: Sequence[int] = (),
    attention_weights: Sequence[int] = (),
    **options: Any,
) -> tuple[Float[Array, "B T V"], dict[int, Array], dict[int, Array]]:
    """As `forward`; returns also hidden states `[B, T, D]` and attention weights `[B, N, T, T]` of chosen layers.

    `hidden` counts layers: 0 is the embeddings, L the output of the last layer, before the final norm. Layers of
    `attention_weights` go from 0 to L-1. Both are static under `jit`; the other arguments are those of `run`.

    Raises:
        InvalidParameterError: as `run`, or a layer does not exist.
    """
    states, weights = hidden_points(hidden, attention_weights, cfg)
    logits, captured = run(params, tokens, cfg, capture=(*states, *weights), **options)
    by_state = {state_number(point): captured[point] for point in states}
    return logits, by_state, {point.layer: captured[point] for point in weights if point.layer is not None}


class _Arrays(NamedTuple):
    """What a forward is given that may be divided, differentiated and mapped."""

    params: ParamTree
    tokens: jax.Array
    inputs_embeds: jax.Array | None
    loras: ParamTree | None
    adapters: jax.Array | None
    edits: tuple[Any, ...]  # by intervention; None where it is a function


def run(
    params: ParamTree,
    tokens: Int[Array, "B T"],
    cfg: ModelConfig,
    *,
    capture: Sequence[Any] = (),
    inputs_embeds: Float[Array, "B T D"] | None = None,
    loras: ParamTree | None = None,
    adapters: Int[Array, " B"] | None = None,
    steering: Float[Array, "L D"] | Float[Array, "L B T D"] | None = None,
    interventions: Mapping[Any, Intervention] | None = None,
    attention: str | None = None,
    remat: bool = False,
) -> tuple[Float[Array, "B T V"], dict[Point, Array]]:
    """As `forward`; returns also the arrays at hook points, by point: `captured["z", 3]` is `[B, T, N, H]`.

    Under a mesh with explicit axes the compiler divides the computation, as under auto axes; results are divided as
    `tokens` are by rows and positions, and along no other axis.

    Args:
        params: the model's, in any layout.
        tokens: token ids; the logits of ids outside the vocabulary are undefined.
        cfg: the model's.
        capture: hook points, such as `("z", 3)`, `("resid_post", None)` for all layers, or `blocks.3.attn.hook_z`;
            static under `jit`. What is captured is what goes on: after the interventions there.
        inputs_embeds: used instead of the tokens' embeddings, after any factor that the family multiplies those by.
        loras: adapter stacks (models/adapters.py) in the parameters' dtype, differentiable like them.
        adapters: the adapter of each row; an index outside the stacks, such as -1, is none.
        steering: added to the output of each layer, for all tokens or for each one.
        interventions: an `Edit` or a function by hook point (models/hooks.py). What an edit has broadcasts against the
            array there, whose first axes are `[B, T]`; a function is given that array and int32 `[B, T]` positions, and
            returns its like. They are differentiable. Under explicit axes a function is given arrays of auto axes.
        attention: a backend that attends over a paged KV, as in serving, instead of over the tokens alone; of those
            only `xla` has gradients, and needs far more memory for them.
        remat: gradients recompute each layer instead of keeping what is inside it.

    Raises:
        InvalidParameterError: only one of `loras` and `adapters` is given, an array has another shape, tokens are not
            integers, or a hook point is unknown.
        UnsupportedError: this model has no such hook point.
    """
    points = check_points(capture, cfg)
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise InvalidParameterError(f"tokens have shape {list(tokens.shape)}, expected [B, T] of at least 1 each")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InvalidParameterError(f"tokens are {tokens.dtype}, expected integers")
    if (loras is None) != (adapters is None):
        raise InvalidParameterError("`loras` and `adapters` are given together or not at all, only one of them is")
    batch, length = tokens.shape
    changes = check_interventions(interventions, cfg)
    if steering is not None:
        changes = steered(jnp.asarray(steering), changes, cfg, (batch, length, cfg.hidden_size))
    if adapters is not None:
        adapters = jnp.asarray(adapters)
        check_shape("adapters", adapters, "[B]", (batch,))
        if not jnp.issubdtype(adapters.dtype, jnp.integer):
            raise InvalidParameterError(f"adapters are {adapters.dtype}, expected integers")
    if inputs_embeds is not None:
        inputs_embeds = jnp.asarray(inputs_embeds)
        check_shape("inputs_embeds", inputs_embeds, "[B, T, D]", (batch, length, cfg.hidden_size))
    cfg = cfg.reaching(length)
    given = _Arrays(params, tokens, inputs_embeds, loras, adapters, edits_of(changes))

    def compute(given: _Arrays) -> tuple[jax.Array, dict[Point, jax.Array]]:
        return _compute(given, with_edits(changes, given.edits), cfg, points, attention, remat)

    mesh = explicit_mesh(given)
    if mesh is None:
        return compute(given)
    row, position = (*partition_of(tokens), None, None)[:2]
    captured = {
        point: PartitionSpec(row, None, position) if point.name in ATTENTION else PartitionSpec(row, position)
        for point in points
    }
    return with_auto_axes(mesh, compute, given, out_specs=(PartitionSpec(row, position), captured))


def _compute(
    given: _Arrays,
    interventions: Mapping[Point, Intervention],
    cfg: ModelConfig,
    points: tuple[Point, ...],
    attention: str | None,
    remat: bool,
) -> tuple[jax.Array, dict[Point, jax.Array]]:
    params, (batch, length) = given.params, given.tokens.shape
    columns, kv = 0, cast(Any, None)
    if attention is not None:
        size, dtype = min(length, 128), activation_dtype(params).name
        columns = -(-length // size)
        kv = state.empty(cache_spec(cfg, num_blocks=batch * columns, block_size=size, dtype=dtype, attention=attention))
    rows = Rows(
        tokens=given.tokens.astype(jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        counts=jnp.full(batch, length, jnp.int32),
        tables=jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns),
        adapters=None if given.adapters is None else given.adapters.astype(jnp.int32),
    )
    embeds = given.inputs_embeds
    logits, _, captured = family(cfg).forward(
        params,
        kv,
        Batch(groups=(rows,), logit_rows=None),
        cfg,
        inputs_embeds=None if embeds is None else embeds.reshape(batch * length, -1),
        loras=given.loras,
        attention=attention or "xla",
        capture=points,
        interventions=rows_as_tokens(interventions, batch, length),
        remat=remat,
    )

    def by_row(found: Any) -> jax.Array:
        if isinstance(found, tuple):  # attention of the one group of rows
            return found[0][..., :length]
        return found.reshape(batch, length, *found.shape[1:])

    return logits.reshape(batch, length, -1), {point: by_row(found) for point, found in captured.items()}


def logits_of(params: ParamTree, x: Float[Array, "*B D"], cfg: ModelConfig) -> Float[Array, "*B V"]:
    """Logits of hidden states, float32: the final norm, then the product with the vocabulary."""

    def compute(params: ParamTree, x: jax.Array) -> jax.Array:
        return family(cfg).head(params, x.reshape(-1, x.shape[-1]), cfg).reshape(*x.shape[:-1], -1)

    mesh = explicit_mesh(params, x)
    if mesh is None:
        return compute(params, x)
    return with_auto_axes(mesh, compute, params, x, out_specs=PartitionSpec(*partition_of(x)[: x.ndim - 1]))
