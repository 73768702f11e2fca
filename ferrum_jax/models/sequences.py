"""Forwards of whole sequences without a cache: logits, log-probabilities, captures and interventions at hook points.

These are the functions that research code calls. Under a caller's mesh, with axes of any type, and inside
`jax.shard_map`, they compute the same as on one device.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from ferrum_jax.config import ModelConfig, check_model_config
from ferrum_jax.contract.checks import is_integer, is_real
from ferrum_jax.contract.errors import InvalidParameterError, safe_repr
from ferrum_jax.kvcache import state
from ferrum_jax.models.adapters import checked_stacks, without_unused
from ferrum_jax.models.arrays import as_integers, as_numbers, check_range, check_shape
from ferrum_jax.models.backends import cache_spec, check_backend
from ferrum_jax.models.hooks import (
    ATTENTION,
    Intervention,
    Point,
    check_interventions,
    check_points,
    edits_of,
    hidden_points,
    rows_as_tokens,
    state_number,
    steered,
    with_edits,
)
from ferrum_jax.models.layout import check_shapes
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree, as_plain
from ferrum_jax.ops.batch import Batch, Rows
from ferrum_jax.ops.quantised import activation_dtype
from ferrum_jax.ops.sampling import over_temperature, token_logprobs
from ferrum_jax.sharding.types import partition_of, promoting_ranks, vary_alike, with_auto_axes

_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)  # a device may flush smaller numbers to 0
BLOCK = 256  # `log_probs`: tokens whose logits are in memory at once


def forward(params: ParamTree, tokens: Int[Array, "B T"], cfg: ModelConfig, **options: Any) -> Float[Array, "B R V"]:
    """Runs whole sequences from position 0 and returns float32 logits of every token, or of R tokens of each row.

    This is the family's serving forward without a cache. It may be differentiated, vmapped, scanned and jitted (with
    `cfg` closed over or static). There is no padding mask: to batch sequences of different lengths, pad on the right
    and ignore the logits of the padding. With LongRoPE (Phi-3) frequencies are chosen for T, unless `cfg` has the
    long ones: `cfg.reaching(n)` keeps one choice for every T up to n. The other arguments and the errors are those of
    `run`.
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
) -> tuple[Float[Array, "B R V"], dict[int, Array], dict[int, Array]]:
    """As `forward`; returns also hidden states `[B, T, D]` and attention weights `[B, N, T, T]` of chosen layers.

    `hidden` counts layers passed: 0 is the embeddings, L the output of the last layer, before the final norm.
    `attention_weights` are layers from 0 to L-1. Both are static under `jit`; the other arguments are those of `run`.

    Raises:
        InvalidParameterError: as `run`, or a layer does not exist.
    """
    check_model_config(cfg)
    states, weights = hidden_points(hidden, attention_weights, cfg)
    logits, captured = run(params, tokens, cfg, capture=(*states, *weights), **options)
    by_state = {state_number(point): captured[point] for point in states}
    return logits, by_state, {point.layer: captured[point] for point in weights if point.layer is not None}


class _Arrays(NamedTuple):
    """The arguments of a forward that may be sharded, differentiated and vmapped."""

    params: ParamTree
    tokens: jax.Array
    inputs_embeds: jax.Array | None
    loras: ParamTree | None
    adapters: jax.Array | None
    edits: tuple[Any, ...]  # one for each intervention; None for a function
    logits: jax.Array | None  # int32 [B, R]: positions in each row whose logits are returned; None: all
    first_layer: jax.Array | None  # None if it is an int


@promoting_ranks
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
    logits: Literal["all", "last", "none"] | Int[Array, "B R"] = "all",
    first_layer: int | Int[Array, ""] = 0,
    attention: str | None = None,
    remat: bool | Literal["products"] = False,
) -> tuple[Float[Array, "B R V"], dict[Point, Array]]:
    """As `forward`; returns also the arrays at hook points, by point: `captured["z", 3]` is `[B, T, N, H]`.

    Under a mesh with explicit axes the compiler shards the computation, as under auto axes; results are sharded by rows
    and positions as `tokens` are, and along no other axis.

    Args:
        params: the model's, in any layout.
        tokens: token ids; inside `jit` they cannot be checked, and logits of ids outside the vocabulary are undefined.
        cfg: the model's configuration.
        capture: hook points, such as `("z", 3)`, `("resid_post", None)` for all layers, or `blocks.3.attn.hook_z`;
            static under `jit`. Arrays are captured after the interventions at their point.
        inputs_embeds: used instead of the tokens' embeddings, in their dtype; a family's factor on embeddings is not
            applied to them.
        loras: adapter stacks (models/adapters.py) in the parameters' dtype, differentiable like them; a layer may leave
            out projections.
        adapters: the adapter of each row; an index outside the stacks, such as -1, means no adapter. Where `up` of an
            adapter that some row uses is not finite, no row's results are.
        steering: added to the output of each layer, for all tokens or for each one.
        interventions: an `Edit` or a function by hook point (models/hooks.py). An edit's arrays broadcast against the
            point's array, whose first axes are `[B, T]`. A function is given that array and int32 `[B, T]` positions,
            and returns an array of its shape. Both are differentiable. Under explicit axes a function is given arrays
            with auto axes.
        logits: the tokens whose logits are computed: "all" (R = T), the "last" of each row (R = 1), "none" (R = 0), or
            those at positions `[B, R]` from 0 to T-1, such as the end of each row's own text or a completion alone.
        first_layer: the forward begins with this layer, and `inputs_embeds` are the residual stream that goes into it,
            as captured at `("resid_pre", first_layer)`. An array may be traced: one program then serves all first
            layers, skips the layers before at run time, and captures zeros for them.
        attention: a backend that attends over a paged KV, as in serving, instead of over the tokens alone; only `xla`
            has gradients through a paged KV, and needs far more memory for them; `cpu` cannot be vmapped.
        remat: gradients recompute each layer instead of keeping its intermediates; `products` keeps the results of
            products with weights, so that little is recomputed. On a CPU JAX 0.10 needs an option: docs/research.md.

    Raises:
        InvalidParameterError: `cfg` is no `ModelConfig`, the parameters are not this model's, only one of `loras` and
            `adapters` is given, an array has a wrong shape, a token id is outside the vocabulary, a hook point is
            unknown or lies before `first_layer`, or `first_layer` does not exist, or is not the int 0 and there are no
            `inputs_embeds`.
        UnsupportedError: the model does not have a hook point, or `attention` cannot serve it.
    """
    params = as_plain(params)
    check_shapes(params, cfg)
    check_backend(attention, params, cfg)
    if not isinstance(remat, bool) and remat != "products":
        raise InvalidParameterError(f"remat is {safe_repr(remat)}, expected True, False or 'products'")
    first = _check_first_layer(first_layer, cfg, inputs_embeds)
    known = first if isinstance(first, int) else 0
    points = check_points(capture, cfg, known)
    tokens = as_integers("tokens", tokens)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise InvalidParameterError(f"tokens have shape {list(tokens.shape)}, expected [B, T] of at least 1 each")
    if inputs_embeds is None:
        check_range("tokens", tokens, 0, cfg.vocab_size - 1)
    batch, length = tokens.shape
    loras, adapters = checked_adapters(loras, adapters, cfg, batch)
    checked = check_interventions(interventions, cfg, known)
    if steering is not None:
        checked = steered(steering, checked, cfg, (batch, length, cfg.hidden_size))
    if inputs_embeds is not None:
        inputs_embeds = as_numbers("inputs_embeds", inputs_embeds).astype(activation_dtype(params))
        check_shape("inputs_embeds", inputs_embeds, "[B, T, D]", (batch, length, cfg.hidden_size))
    cfg = cfg.reaching(length)
    wanted = _logit_positions(logits, batch, length)
    traced = None if isinstance(first, int) else first
    given = _Arrays(params, tokens, inputs_embeds, loras, adapters, edits_of(checked), wanted, traced)

    def compute(given: _Arrays) -> tuple[jax.Array, dict[Point, jax.Array]]:
        return _compute(given, with_edits(checked, given.edits), cfg, points, first, attention, remat)

    row, position = (*partition_of(tokens), None, None)[:2]
    captured = {
        point: PartitionSpec(row, None, position) if point.name in ATTENTION else PartitionSpec(row, position)
        for point in points
    }
    return with_auto_axes(
        compute, given, out_specs=(PartitionSpec(row, position if wanted is None else None), captured)
    )


def _compute(
    given: _Arrays,
    interventions: Mapping[Point, Intervention],
    cfg: ModelConfig,
    points: tuple[Point, ...],
    first_layer: int | jax.Array,
    attention: str | None,
    remat: bool | str,
) -> tuple[jax.Array, dict[Point, jax.Array]]:
    params, (batch, length) = given.params, given.tokens.shape
    columns, kv = 0, cast(Any, None)
    if attention is not None:
        size, dtype = min(length, 128), activation_dtype(params).name
        if attention in ("xla", "cpu") and any(point.name in ATTENTION for point in interventions):
            size = length  # one block, so that scores to be changed are [T, T]
        columns = -(-length // size)
        kv = state.empty(cache_spec(cfg, num_blocks=batch * columns, block_size=size, dtype=dtype, attention=attention))
    rows = Rows(
        tokens=given.tokens.astype(jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        counts=jnp.full(batch, length, jnp.int32),
        tables=jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns),
        adapters=given.adapters,
    )
    embeds = given.inputs_embeds
    logits, _, captured = family(cfg).forward(
        params,
        kv,
        Batch(groups=(rows,), logit_rows=given.logits),
        cfg,
        inputs_embeds=None if embeds is None else embeds.reshape(batch * length, -1),
        loras=without_unused(given.loras, given.adapters),
        attention=attention or "xla",
        capture=points,
        interventions=rows_as_tokens(interventions, batch, length),
        remat=remat,
        first_layer=first_layer if given.first_layer is None else given.first_layer,
    )

    def by_row(found: Any) -> jax.Array:
        if isinstance(found, tuple):  # attention of the one group of rows
            return found[0][..., :length]
        return found.reshape(batch, length, *found.shape[1:])

    asked = length if given.logits is None else given.logits.shape[1]
    return logits.reshape(batch, asked, logits.shape[-1]), {point: by_row(found) for point, found in captured.items()}


@promoting_ranks
def log_probs(
    params: ParamTree,
    tokens: Int[Array, "B T"],
    cfg: ModelConfig,
    *,
    targets: Int[Array, "B T"] | None = None,
    temperature: float | Float[Array, ""] | Float[Array, " B"] = 1.0,
    block: int = BLOCK,
    **options: Any,
) -> Float[Array, "B R"]:
    """Returns float32 log-probabilities of each row's next tokens, `[B, T - 1]`, or of `targets`, `[B, T]`.

    Logits are computed in blocks of tokens, and again for gradients: with a large vocabulary, the logits of a whole
    batch would take most of a step's memory.

    Args:
        params: the model's, in any layout.
        tokens: token ids.
        cfg: the model's configuration.
        targets: at each position, the token whose log-probability is returned, given the row's tokens up to and with
            that position. Only ids of the vocabulary: mask padding in the result, not here with -100.
        temperature: divides the logits; a positive number for all rows or one for each. Arrays may be traced, and new
            values of them do not recompile.
        block: tokens, of all rows together, whose logits are in memory at once; at least one of each row.
        **options: those of `run` except `capture` and `logits`.

    Raises:
        InvalidParameterError: as `run`, `capture` or `logits` is given, `targets` have a wrong shape or an id outside
            the vocabulary, there is no next token, the temperature is not positive, or `block` is no integer of at
            least 1.
    """
    check_model_config(cfg)
    params = as_plain(params)
    tokens, is_next = as_integers("tokens", tokens), targets is None
    temperature = _check_temperature(temperature, tokens)
    if not is_integer(block) or block < 1:
        raise InvalidParameterError(f"block is {safe_repr(block)}, expected an integer of at least 1")
    for name in ("capture", "logits"):
        if name in options:
            raise InvalidParameterError(f"log_probs takes no {name}: give it to run")
    last = Point("resid_post", cfg.num_hidden_layers - 1)
    x = run(params, tokens, cfg, capture=(last,), logits="none", **options)[1][last]
    if is_next and tokens.shape[1] < 2:
        raise InvalidParameterError("rows of one token have no next token: give targets")
    wanted = tokens if targets is None else as_integers("targets", targets)
    check_shape("targets", wanted, "[B, T]", tokens.shape)
    if not is_next:
        check_range("targets", wanted, 0, cfg.vocab_size - 1, hint=": mask padding in what log_probs returns")

    number = temperature if isinstance(temperature, float) and temperature != 1 else None  # 1 divides nothing
    divisor = None if isinstance(temperature, float) else temperature

    def compute(params: ParamTree, x: jax.Array, wanted: jax.Array, divisor: Any) -> jax.Array:
        params, x, wanted, divisor = vary_alike(params, x, wanted.astype(jnp.int32), divisor)
        if is_next:
            x, wanted = x[:, :-1], wanted[:, 1:]
        return _log_probs(params, x, wanted, cfg, block, number if divisor is None else divisor)

    return with_auto_axes(compute, params, x, wanted, divisor, out_specs=PartitionSpec(*partition_of(tokens)[:1]))


@functools.partial(jax.jit, static_argnames=("cfg", "block"), inline=True)  # so that eager calls compile once
def _log_probs(
    params: ParamTree,
    x: jax.Array,
    targets: jax.Array,
    cfg: ModelConfig,
    block: int,
    temperature: float | jax.Array | None,
) -> jax.Array:
    """Returns log-probabilities of `targets` `[B, T]`, given the last layer's outputs `[B, T, D]`."""
    batch, length = targets.shape
    size = min(length, max(1, block // batch))  # positions of each row in a block, so that a mesh divides rows
    if temperature is not None:
        temperature = jnp.repeat(jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), batch), size)  # [B * size]

    @jax.checkpoint
    def of_block(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        states, targets = given
        logits = family(cfg).head(params, states.reshape(batch * size, -1), cfg).astype(jnp.float32)
        logits = logits if temperature is None else over_temperature(logits, temperature)
        return token_logprobs(logits, targets.reshape(-1)).reshape(batch, size)

    pad = -length % size
    x, targets = jnp.pad(x, ((0, 0), (0, pad), (0, 0))), jnp.pad(targets, ((0, 0), (0, pad)))
    blocks = [leaf.reshape(batch, -1, size, *leaf.shape[2:]).swapaxes(0, 1) for leaf in (x, targets)]
    found = jax.lax.map(of_block, tuple(blocks))  # [blocks, B, size]
    return found.swapaxes(0, 1).reshape(batch, -1)[:, :length]


def _check_temperature(given: Any, tokens: jax.Array) -> float | jax.Array:
    """Returns a temperature: a number as a float, an array `[]` or `[B]` in float32."""
    if is_real(given) and 0 < given < math.inf:
        return max(float(given), _LEAST_TEMPERATURE)
    if not isinstance(given, (jax.Array, np.ndarray)) or given.shape not in ((), tokens.shape[:1]):
        raise InvalidParameterError(f"temperature is {safe_repr(given)}, expected a positive number, or [B] of them")
    if not isinstance(given, Tracer) and not np.all((np.asarray(given) > 0) & (np.asarray(given) < math.inf)):
        raise InvalidParameterError(f"temperature is {safe_repr(given)}, expected positive numbers")
    return jnp.maximum(jnp.asarray(given).astype(jnp.float32), _LEAST_TEMPERATURE)


def checked_adapters(
    loras: ParamTree | None, adapters: object, cfg: ModelConfig, batch: int
) -> tuple[ParamTree | None, jax.Array | None]:
    """Returns stacks of every projection, and the adapter of each row, int32 `[B]`; None if none are given.

    Raises:
        InvalidParameterError: only one of `loras` and `adapters` is given, or one has a wrong shape or type.
    """
    if (loras is None) != (adapters is None):
        raise InvalidParameterError("give both `loras` and `adapters` or neither: only one of them is given")
    if loras is None:
        return None, None
    loras, adapters = checked_stacks(loras, cfg), as_integers("adapters", adapters)
    check_shape("adapters", adapters, "[B]", (batch,))
    narrow = adapters.astype(jnp.int32)
    return loras, jnp.where(narrow.astype(adapters.dtype) == adapters, narrow, -1)  # beyond int32: no adapter


def _check_first_layer(given: Any, cfg: ModelConfig, inputs_embeds: object) -> int | jax.Array:
    """Returns the first layer that runs, an integer or a scalar of the array type.

    Raises:
        InvalidParameterError: the layer does not exist, or is not the int 0 and there are no `inputs_embeds`.
    """
    last = cfg.num_hidden_layers - 1
    if isinstance(given, (jax.Array, np.ndarray)):
        first = as_integers("values of first_layer", given)
        if first.shape:
            raise InvalidParameterError(f"first_layer is {first.dtype}{list(first.shape)}, expected one integer")
        is_known = not isinstance(first, Tracer) and first.is_fully_addressable
        if is_known and not 0 <= int(first) <= last:
            raise InvalidParameterError(f"first_layer is {int(first)}, expected a layer from 0 to {last}")
        first = first.astype(jnp.int32)
    else:
        is_number = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
        if not is_number or not 0 <= given <= last:
            raise InvalidParameterError(f"first_layer is {safe_repr(given)}, expected a layer from 0 to {last}")
        first = int(given)
    if inputs_embeds is None and not (isinstance(first, int) and first == 0):
        raise InvalidParameterError("first_layer needs inputs_embeds: the residual stream that goes into that layer")
    return first


def _logit_positions(given: object, batch: int, length: int) -> jax.Array | None:
    """Returns the positions `[B, R]` in each row whose logits are asked for; None for all."""
    if isinstance(given, str) and given in ("all", "last", "none"):
        if given == "all":
            return None
        return jnp.full((batch, 1 if given == "last" else 0), length - 1, jnp.int32)
    if not isinstance(given, (jax.Array, np.ndarray)):
        raise InvalidParameterError(f"logits is {safe_repr(given)}, expected 'all', 'last', 'none' or positions [B, R]")
    positions = as_integers("logits", given)
    if positions.ndim != 2 or len(positions) != batch:
        raise InvalidParameterError(
            f"logits are {positions.dtype}{list(positions.shape)}, expected integers [B, R] of {batch} rows"
        )
    check_range("positions of logits", positions, 0, length - 1)
    return positions.astype(jnp.int32)


@promoting_ranks
def logits_of(params: ParamTree, x: Float[Array, "*B D"], cfg: ModelConfig) -> Float[Array, "*B V"]:
    """Returns float32 logits of hidden states: the final norm, then the product with the output embeddings.

    Raises:
        InvalidParameterError: the states are no numbers, or have another width than the model's; `cfg` is no
            `ModelConfig`.
    """
    check_model_config(cfg)
    params, x = as_plain(params), as_numbers("x", x)
    if not x.ndim or x.shape[-1] != cfg.hidden_size:
        raise InvalidParameterError(f"x has shape {list(x.shape)}, expected [..., D] of D = {cfg.hidden_size}")

    def compute(params: ParamTree, x: jax.Array) -> jax.Array:
        *rows, width = x.shape  # of which one may be 0
        logits = family(cfg).head(params, x.reshape(math.prod(rows), width), cfg)
        return logits.reshape(*rows, logits.shape[-1])

    return with_auto_axes(compute, params, x, out_specs=PartitionSpec(*partition_of(x)[: x.ndim - 1]))
