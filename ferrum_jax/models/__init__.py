"""Models as pure functions over parameter and KV pytrees."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.kvcache import state
from ferrum_jax.models import adapters as adapters
from ferrum_jax.models import specs as specs
from ferrum_jax.models.backends import cache_spec
from ferrum_jax.models.hooks import Captured as Captured
from ferrum_jax.models.hooks import Edit as Edit
from ferrum_jax.models.hooks import Intervention as Intervention
from ferrum_jax.models.hooks import Point as Point
from ferrum_jax.models.hooks import (
    check_interventions,
    check_points,
    check_shape,
    hidden_points,
    rows_as_tokens,
    state_number,
    steered,
)
from ferrum_jax.models.hooks import replace_with as replace_with
from ferrum_jax.models.quantisation import Format as Format
from ferrum_jax.models.quantisation import choose_formats
from ferrum_jax.models.quantisation import dequantise as dequantise
from ferrum_jax.models.quantisation import quantise as quantise
from ferrum_jax.models.registry import family as family
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops.batch import Batch as Batch
from ferrum_jax.ops.batch import Rows as Rows
from ferrum_jax.ops.quantised import QuantisedWeight as QuantisedWeight
from ferrum_jax.ops.quantised import activation_dtype, quantise_weight

config_from_hf = ModelConfig.from_hf


def init_params(cfg: ModelConfig, key: jax.Array, dtype: str = "float32", *, quantize: str | None = None) -> ParamTree:
    """Draws random weights in the tree that `load_params` returns.

    With `quantize`, a matrix is drawn in float32 and quantised before the next one is drawn: only one of them is in
    memory in float32.
    """
    plain = family(cfg).param_specs(cfg)
    if quantize is None:
        return specs.initialise(plain, key, dtype)
    formats = choose_formats(cfg, quantize)

    def draw(name: str, spec: specs.ParamSpec) -> jax.Array | QuantisedWeight:
        if name not in formats:
            return specs.draw(name, spec, key, dtype)
        return quantise_weight(specs.draw(name, spec, key, "float32"), formats[name].dtype, formats[name].groups)

    return specs.map_specs(draw, plain)


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
            returns its like. They are differentiable.
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
        inputs_embeds = inputs_embeds.reshape(batch * length, cfg.hidden_size)
    cfg = cfg.reaching(length)
    columns, kv = 0, cast(Any, None)
    if attention is not None:
        size, dtype = min(length, 128), activation_dtype(params).name
        columns = -(-length // size)
        kv = state.empty(cache_spec(cfg, num_blocks=batch * columns, block_size=size, dtype=dtype, attention=attention))
    rows = Rows(
        tokens=tokens.astype(jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        counts=jnp.full(batch, length, jnp.int32),
        tables=jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns),
        adapters=None if adapters is None else adapters.astype(jnp.int32),
    )
    logits, _, captured = family(cfg).forward(
        params,
        kv,
        Batch(groups=(rows,), logit_rows=jnp.arange(batch * length, dtype=jnp.int32)),
        cfg,
        inputs_embeds=inputs_embeds,
        loras=loras,
        attention=attention or "xla",
        capture=points,
        interventions=rows_as_tokens(changes, batch, length),
        remat=remat,
    )

    def by_row(found: Any) -> jax.Array:
        if isinstance(found, tuple):  # attention of the one group of rows
            return found[0][..., :length]
        return found.reshape(batch, length, *found.shape[1:])

    return logits.reshape(batch, length, -1), {point: by_row(found) for point, found in captured.items()}


def logits_of(params: ParamTree, x: Float[Array, "*B D"], cfg: ModelConfig) -> Float[Array, "*B V"]:
    """Logits of hidden states, float32: the final norm, then the product with the vocabulary."""
    return family(cfg).head(params, x.reshape(-1, x.shape[-1]), cfg).reshape(*x.shape[:-1], -1)
