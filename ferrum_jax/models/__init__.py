"""Models as pure functions over parameter and KV pytrees."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.kvcache import state
from ferrum_jax.models import adapters as adapters
from ferrum_jax.models import specs as specs
from ferrum_jax.models.backends import cache_spec
from ferrum_jax.models.capture import Captured as Captured
from ferrum_jax.models.capture import CaptureSpec as CaptureSpec
from ferrum_jax.models.capture import check_capture, check_shape
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
    """Runs whole sequences from position 0 and returns the logits of every token, float32.

    It is the family's serving forward over a KV of its own, so it may be differentiated, vmapped, scanned and jitted
    (with `cfg` closed over or static). There is no padding: to batch sequences of different lengths, pad on the right
    and ignore the logits there.

    Args:
        params: the model's, in any layout.
        tokens: token ids; the logits of ids outside the vocabulary are undefined.
        cfg: the model's.
        inputs_embeds: used instead of the tokens' embeddings, after any factor that the family multiplies those by.
        loras: adapter stacks (models/adapters.py) in the parameters' dtype, differentiable like them.
        adapters: the adapter of each row; an index outside the stacks, such as -1, is none.
        steering: added to the output of each layer, for all tokens or for each one.
        attention: the backend; only `xla` has gradients.

    Raises:
        InvalidParameterError: only one of `loras` and `adapters` is given, an array has another shape, or tokens are
            not integers.
    """
    return capture(
        params,
        tokens,
        cfg,
        inputs_embeds=inputs_embeds,
        loras=loras,
        adapters=adapters,
        steering=steering,
        attention=attention,
    )[0]


def capture(
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
    """As `forward`; returns also hidden states `[B, T, D]` and attention weights `[B, N, T, T]` of chosen layers.

    `hidden` counts layers: 0 is the embeddings, L the output of the last layer, before the final norm. Layers of
    `attention_weights` go from 0 to L-1. Both are static under `jit`; the other arguments are those of `forward`.

    Raises:
        InvalidParameterError: as `forward`, or a layer does not exist.
        UnsupportedError: the family's attention weights cannot be captured.
    """
    spec = check_capture(hidden, attention_weights, cfg)
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
        check_shape("adapters", adapters, "[B]", (batch,))
        if not jnp.issubdtype(adapters.dtype, jnp.integer):
            raise InvalidParameterError(f"adapters are {adapters.dtype}, expected integers")
    if inputs_embeds is not None:
        inputs_embeds = jnp.asarray(inputs_embeds)
        check_shape("inputs_embeds", inputs_embeds, "[B, T, D]", each)
        inputs_embeds = inputs_embeds.reshape(batch * length, width)
    if steering is not None:
        steering = jnp.asarray(steering)
        check_shape("steering", steering, "[L, D] or [L, B, T, D]", (layers, width), (layers, *each))
        steering = steering if steering.ndim == 2 else steering.reshape(layers, batch * length, width)
    cfg = cfg.reaching(length)
    dtype = activation_dtype(params)
    block_size = min(length, 128)
    columns = -(-length // block_size)
    cache = cache_spec(cfg, num_blocks=batch * columns, block_size=block_size, dtype=dtype.name, attention=attention)
    rows = Rows(
        tokens=tokens.astype(jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        counts=jnp.full(batch, length, jnp.int32),
        tables=jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns),
        adapters=None if adapters is None else adapters.astype(jnp.int32),
    )
    logits, _, captured = family(cfg).forward(
        params,
        state.empty(cache),
        Batch(groups=(rows,), logit_rows=jnp.arange(batch * length, dtype=jnp.int32)),
        cfg,
        inputs_embeds=inputs_embeds,
        loras=loras,
        attention=attention,
        steering=steering,
        capture=spec,
    )
    states = {at: x.reshape(batch, length, -1) for at, x in captured.hidden.items()}
    weights = {at: groups[0][..., :length] for at, groups in captured.attention.items()}
    return logits.reshape(batch, length, -1), states, weights


def logits_of(params: ParamTree, x: Float[Array, "*B D"], cfg: ModelConfig) -> Float[Array, "*B V"]:
    """Logits of hidden states, float32: the final norm, then the product with the vocabulary."""
    return family(cfg).head(params, x.reshape(-1, x.shape[-1]), cfg).reshape(*x.shape[:-1], -1)
