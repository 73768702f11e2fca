"""Models as pure functions over parameter and KV pytrees."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.kvcache import state
from ferrum_jax.models import adapters as adapters
from ferrum_jax.models import specs as specs
from ferrum_jax.models.backends import cache_spec
from ferrum_jax.models.quantisation import Format as Format
from ferrum_jax.models.quantisation import choose_formats
from ferrum_jax.models.quantisation import dequantise as dequantise
from ferrum_jax.models.quantisation import quantise as quantise
from ferrum_jax.models.registry import family as family
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.models.watching import Seen as Seen
from ferrum_jax.models.watching import Watch as Watch
from ferrum_jax.models.watching import added, checked_watch, summed
from ferrum_jax.models.watching import steered as steered
from ferrum_jax.ops.batch import Batch as Batch
from ferrum_jax.ops.batch import Rows as Rows
from ferrum_jax.ops.quantised import QuantisedWeight as QuantisedWeight
from ferrum_jax.ops.quantised import activation_dtype, quantise_weight

config_from_hf = ModelConfig.from_hf


def init_params(cfg: ModelConfig, key: jax.Array, dtype: str = "float32", *, quantize: str | None = None) -> ParamTree:
    """Draws random weights in the tree that `load_params` gives.

    With `quantize`, a matrix is drawn in float32 and quantised before the next one, so that they never lie there all.
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


def forward(
    params: ParamTree,
    tokens: Int[Array, "B T"],
    cfg: ModelConfig,
    *,
    inputs_embeds: Float[Array, "B T D"] | None = None,
    loras: ParamTree | None = None,
    adapters: Int[Array, " B"] | None = None,
    steering: Float[Array, "L D"] | Float[Array, "L B T D"] | None = None,
    attention: str = "xla",
) -> Float[Array, "B T V"]:
    """Runs whole sequences from position 0 and gives the float32 logits of every token.

    It is the family's serving forward over a KV of its own, so it may be differentiated, vmapped, scanned and jitted
    (with `cfg` closed over or static). `inputs_embeds`, where given, take the place of the tokens' embeddings, after
    whatever a family multiplies those by. Every token counts: to batch sequences of different lengths, pad on the
    right and ignore the logits there.

    `loras` are stacks of adapters (models/adapters.py) in the parameters' dtype, differentiable like them, and
    `adapters` says which one each row uses; any index outside the stacks, such as -1, is none.

    `steering` is added to what each layer gives, for all tokens or for each one, beside what `steered` parameters add.

    `attention` is the backend; only `xla` has gradients.

    Raises:
        InvalidParameterError: only one of `loras` and `adapters` is given, or an array has another shape, or tokens are
            no integers. What ids outside the vocabulary give is undefined.
    """
    return _run(params, tokens, cfg, inputs_embeds, loras, adapters, steering, attention, None)[0]


def watch(
    params: ParamTree,
    tokens: Int[Array, "B T"],
    cfg: ModelConfig,
    *,
    hidden: Sequence[int] = (),
    attention_weights: Sequence[int] = (),
    inputs_embeds: Float[Array, "B T D"] | None = None,
    loras: ParamTree | None = None,
    adapters: Int[Array, " B"] | None = None,
    steering: Float[Array, "L D"] | Float[Array, "L B T D"] | None = None,
    attention: str = "xla",
) -> tuple[Float[Array, "B T V"], dict[int, Array], dict[int, Array]]:
    """As `forward`; gives also hidden states `[B, T, D]` and attention weights `[B, N, T, T]` of chosen layers.

    `hidden` counts layers: 0 are the embeddings, L what the last layer gives, before the final norm. The layers of
    `attention_weights` go from 0 to L-1. Both are static under `jit`.

    Raises:
        InvalidParameterError: as `forward`, or a layer is not there.
        UnsupportedError: the family cannot show its attention weights.
    """
    chosen = checked_watch(hidden, attention_weights, cfg)
    logits, seen = _run(params, tokens, cfg, inputs_embeds, loras, adapters, steering, attention, chosen)
    batch, length = jnp.shape(tokens)
    states = {at: x.reshape(batch, length, -1) for at, x in seen.hidden.items()}
    return logits, states, {at: weights[0][..., :length] for at, weights in seen.attention.items()}


def logits_of(params: ParamTree, x: Float[Array, "*B D"], cfg: ModelConfig) -> Float[Array, "*B V"]:
    """Gives the logits that a hidden state stands for: the final norm, and the product with the vocabulary."""
    return family(cfg).head(params, x.reshape(-1, x.shape[-1]), cfg).reshape(*x.shape[:-1], -1)


def _run(
    params: ParamTree,
    tokens: jax.Array,
    cfg: ModelConfig,
    inputs_embeds: jax.Array | None,
    loras: ParamTree | None,
    adapters: jax.Array | None,
    steering: jax.Array | None,
    attention: str,
    chosen: Watch | None,
) -> tuple[jax.Array, Any]:
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise InvalidParameterError(f"tokens have shape {list(tokens.shape)}, expected [B, T] of at least 1 each")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InvalidParameterError(f"tokens are {tokens.dtype}, expected integers")
    if (loras is None) != (adapters is None):
        raise InvalidParameterError("`loras` and `adapters` are given together or not at all, only one of them is")
    batch, length = tokens.shape
    layers, width = cfg.num_hidden_layers, cfg.hidden_size
    each = (batch, length, width)
    if adapters is not None:
        adapters = jnp.asarray(adapters)
        _refuse_other_shape("adapters", adapters, "[B]", (batch,))
        if not jnp.issubdtype(adapters.dtype, jnp.integer):
            raise InvalidParameterError(f"adapters are {adapters.dtype}, expected integers")
    if inputs_embeds is not None:
        inputs_embeds = jnp.asarray(inputs_embeds)
        _refuse_other_shape("inputs_embeds", inputs_embeds, "[B, T, D]", each)
    if steering is not None:
        steering = jnp.asarray(steering)
        _refuse_other_shape("steering", steering, "[L, D] or [L, B, T, D]", (layers, width), (layers, *each))
    cfg = cfg.reaching(length)
    dtype = activation_dtype(params)
    block_size = min(length, 128)
    columns = -(-length // block_size)
    spec = cache_spec(cfg, num_blocks=batch * columns, block_size=block_size, dtype=dtype.name, attention=attention)
    rows = Rows(
        tokens=tokens.astype(jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        counts=jnp.full(batch, length, jnp.int32),
        tables=jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns),
        adapters=None if adapters is None else adapters.astype(jnp.int32),
    )
    step = Batch(groups=(rows,), logit_rows=jnp.arange(batch * length, dtype=jnp.int32))
    flat = None if inputs_embeds is None else inputs_embeds.reshape(batch * length, -1)
    if steering is not None:
        given = steering[:, None] if steering.ndim == 2 else steering.reshape(layers, batch * length, width)
        params = steered(params, summed(given, added(params, cfg, batch * length)))
    options = {} if chosen is None else {"watch": chosen}
    logits, _, *seen = family(cfg).forward(params, state.empty(spec), step, cfg, flat, loras, attention, **options)
    return logits.reshape(batch, length, -1), seen[0] if seen else None


def _refuse_other_shape(name: str, given: jax.Array, meant: str, *shapes: tuple[int, ...]) -> None:
    """Raises InvalidParameter for an array of another shape, which a reshape might take."""
    if given.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidParameterError(f"{name} has shape {list(given.shape)}, expected {meant}: {expected}")
