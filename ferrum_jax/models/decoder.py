"""What every family shares: embeddings, positions, the loop over the layers, and logits.

A family defines its layer: `layer(params, adapted, x, kv, context, cfg)` returns the new x `[X, D]`, the KV written and
the attention weights. `adapted` maps each block of the layer, such as `mlp`, to the adapters of its projections. Most
families are `pre_norm_layer` with blocks of their own.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError, UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.attention import LayerContext, LayerOutput, Norm, attention_specs, self_attention
from ferrum_jax.models.capture import Captured, CaptureSpec, check_capture, check_steering, check_weights, steer
from ferrum_jax.models.feed_forward import gated_mlp
from ferrum_jax.models.projections import Lora
from ferrum_jax.models.rotary import frequencies_of_layers
from ferrum_jax.models.sliding_window import split_tables, window_slot_mapping, window_tables
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs
from ferrum_jax.ops.batch import Batch, adapter_of_token, positions, slot_mapping
from ferrum_jax.ops.linear import uses, vocabulary_logits
from ferrum_jax.ops.norm import rms_norm
from ferrum_jax.ops.quantised import activation_dtype, rows_of
from ferrum_jax.ops.rope import rotations

Adapted = dict[str, Lora]  # by block
Layer = Callable[[ParamTree, Adapted, jax.Array, KvState[jax.Array], LayerContext, ModelConfig], LayerOutput]
FeedForward = Callable[[ParamTree, Adapted, jax.Array, ModelConfig], jax.Array]  # of the layer's parameters, [X, D]
NO_WINDOW = 2**30  # wider than any sequence; for layers without a window beside layers with one, in one loop


def decoder_specs(cfg: ModelConfig, layers: list[ParamTree], norm_init: str = "ones") -> ParamTree:
    """Specs of every parameter, given those of the layers."""
    specs: ParamTree = {
        "model": {
            "embed_tokens": {"weight": ParamSpec((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"))},
            "layers": layers,
            "norm": norm_specs(cfg.hidden_size, init=norm_init),
        }
    }
    if not cfg.tie_word_embeddings:
        specs["lm_head"] = {"weight": ParamSpec((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"))}
    return specs


def pre_norm_specs(cfg: ModelConfig, attention: ParamTree | None = None, **feed_forward: ParamTree) -> ParamTree:
    """Specs of a `pre_norm_layer`: norms, attention (`attention_specs` if None) and feed-forward block by name."""
    return {
        "input_layernorm": norm_specs(cfg.hidden_size),
        "self_attn": attention_specs(cfg) if attention is None else attention,
        "post_attention_layernorm": norm_specs(cfg.hidden_size),
        **feed_forward,
    }


def dense(layer: ParamTree, adapted: Adapted, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """The gated MLP with SiLU, under the name `mlp`."""
    return gated_mlp(layer["mlp"], adapted["mlp"], x)


def pre_norm_layer(
    layer: ParamTree,
    adapted: Adapted,
    x: jax.Array,
    kv: KvState[jax.Array],
    context: LayerContext,
    cfg: ModelConfig,
    *,
    attention: Callable[..., LayerOutput] = self_attention,
    feed_forward: FeedForward = dense,
) -> LayerOutput:
    """Computes `x + attention(norm(x))`, then the same with the feed-forward block, as in Llama.

    `cfg.residual_multiplier` scales what each block adds, in float32, so that the factor is not rounded.
    """

    def scaled(y: jax.Array) -> jax.Array:
        factor = cfg.residual_multiplier
        return y if factor == 1.0 else (y.astype(jnp.float32) * factor).astype(y.dtype)

    normed = rms_norm(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
    mixed, kv, weights = attention(layer["self_attn"], adapted["self_attn"], normed, kv, context, cfg)
    x = x + scaled(mixed)
    normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    return x + scaled(feed_forward(layer, adapted, normed, cfg)), kv, weights


def embed(params: ParamTree, tokens: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Looks up token embeddings, int32 `[X]` to `[X, D]`; a factor on them is rounded to their dtype first."""
    x = rows_of(params["model"]["embed_tokens"]["weight"], tokens, activation_dtype(params))
    return x if cfg.embedding_multiplier == 1.0 else x * jnp.asarray(cfg.embedding_multiplier, x.dtype)


@jax.named_scope("head")
def head(params: ParamTree, x: jax.Array, cfg: ModelConfig, *, norm: Norm = rms_norm) -> jax.Array:
    """Logits, float32 `[R, V]`, of the last layer's output `[R, D]`, after the family's norm."""
    x = norm(x, params["model"]["norm"]["weight"], cfg.rms_norm_eps)
    table = params["model"]["embed_tokens"] if cfg.tie_word_embeddings else params["lm_head"]
    logits = vocabulary_logits(x, table["weight"])
    if cfg.logits_scaling != 1.0:
        logits = logits / cfg.logits_scaling
    cap = cfg.final_logit_softcapping
    return logits if cap is None else cap * jnp.tanh(logits / cap)


class _Step(NamedTuple):
    """What the loop over the layers needs beside the layers' parameters, activations and KV."""

    layer: Layer
    cfg: ModelConfig
    context: LayerContext  # of layers whose cache keeps all positions
    window_context: LayerContext | None  # of layers with a sliding-window cache
    ropes: list[tuple[jax.Array, jax.Array]]  # the different rotations
    rope_of_layer: list[int]
    adapted: list[Adapted]  # by layer
    steering: jax.Array | None  # [L, 1 or X, D]
    capture: CaptureSpec

    def run(
        self,
        name: str,
        params: ParamTree,
        adapted: Adapted,
        x: jax.Array,
        kv: KvState[jax.Array],
        context: LayerContext,
        vector: jax.Array | None,
    ) -> LayerOutput:
        """Runs one layer and adds its steering vector."""
        with jax.named_scope(name):
            x, kv, weights = self.layer(params, adapted, x, kv, context, self.cfg)
        return steer(x, vector), kv, weights


def forward(
    layer: Layer,
    params: ParamTree,
    kv: KvState[jax.Array],
    batch: Batch[jax.Array],
    cfg: ModelConfig,
    *,
    inputs_embeds: jax.Array | None = None,
    loras: ParamTree | None = None,
    attention: str = "xla",
    steering: jax.Array | None = None,
    capture: CaptureSpec | None = None,
    norm: Norm = rms_norm,
) -> tuple[jax.Array, KvState[jax.Array], Captured[jax.Array]]:
    """Runs all new tokens of a batch.

    Args:
        layer: the family's.
        params: in any layout of models/layout.py.
        kv: keys and values so far; donate it to have them written in place.
        batch: X new tokens, and the R of them whose logits are returned.
        cfg: the model's.
        inputs_embeds: `[X, D]`, used instead of the tokens' embeddings and their factor.
        loras: adapter stacks of models/adapters.py, in the parameters' dtype; used by rows that have adapters.
        attention: the backend whose layout the KV has (ops/attention.py).
        steering: `[L, D]` or, for each token, `[L, X, D]`: added to the output of each layer.
        capture: layers whose hidden states or attention weights are returned.
        norm: the family's last norm.

    Returns:
        Logits, float32 `[R, V]`; the KV written; and what was captured.

    Raises:
        InvalidParameterError: rows have adapters but there are no `loras`, `steering` has another shape, or a layer of
            `capture` does not exist.
        UnsupportedError: attention weights that cannot be captured, or a sliding-window cache with stacked layers.
    """
    tokens = jnp.concatenate([rows.tokens.ravel() for rows in batch.groups])
    at = jnp.concatenate([positions(rows).ravel() for rows in batch.groups])
    spec = CaptureSpec() if capture is None else check_capture(capture.hidden, capture.attention, cfg)
    check_weights(spec, cfg, has_window_cache=kv.rings is not None)
    vectors = check_steering(steering, cfg, len(tokens))
    kinds, rope_of_layer = frequencies_of_layers(cfg)
    ropes = [rotations(at, *kind) for kind in kinds]
    adapted = _adapted(loras, batch, cfg)
    x = embed(params, tokens, cfg) if inputs_embeds is None else inputs_embeds
    windowed = None
    if kv.rings is not None:
        batch, windowed_batch = split_tables(batch, kv.ring_blocks)
        windowed = _window_context(windowed_batch, kv.rings, cfg, ropes[0], attention)
    slots = _slots([slot_mapping(rows, state.block_size(kv), state.num_blocks(kv)) for rows in batch.groups])
    context = LayerContext(0, cfg.layer_windows[0], ropes[0], slots, batch, attention)
    step = _Step(layer, cfg, context, windowed, ropes, rope_of_layer, adapted, vectors, spec)
    layers = params["model"]["layers"]
    hidden = {0: x} if 0 in spec.hidden else {}
    x, kv, captured = (_scan if isinstance(layers, dict) else _unroll)(step, layers, x, kv)
    logits = head(params, x[batch.logit_rows], cfg, norm=norm)
    return logits, kv, replace(captured, hidden=hidden | captured.hidden)


def _unroll(
    step: _Step, layers: Any, x: jax.Array, kv: KvState[jax.Array]
) -> tuple[jax.Array, KvState[jax.Array], Captured[jax.Array]]:
    """Runs the layers one after another; each has an index of its own in the cache of its kind."""
    hidden, attention = {}, {}
    full_index, window_index = count(), count()
    for index, (params, adapted, window) in enumerate(zip(layers, step.adapted, step.cfg.layer_windows, strict=True)):
        windowed = step.window_context if window is not None else None
        context = (windowed or step.context)._replace(
            layer=next(window_index if windowed else full_index),
            window=window,
            rope=step.ropes[step.rope_of_layer[index]],
            captures_weights=index in step.capture.attention,
        )
        cache = kv.rings if windowed else kv
        assert cache is not None
        vector = None if step.steering is None else step.steering[index]
        x, written, weights = step.run(f"layer_{index}", params, adapted, x, cache, context, vector)
        kv = replace(kv, rings=written) if windowed else written
        if index + 1 in step.capture.hidden:
            hidden[index + 1] = x
        if index in step.capture.attention:
            attention[index] = weights
    return x, kv, Captured(hidden=hidden, attention=attention)


def _scan(
    step: _Step, layers: Any, x: jax.Array, kv: KvState[jax.Array]
) -> tuple[jax.Array, KvState[jax.Array], Captured[jax.Array]]:
    """Runs stacked layers, leaves `[L, ...]`, in one loop. The KV is carried, so that it is written in place.

    Adapter stacks have a leaf for each layer and are stacked here, a copy in every step. What is captured of one layer
    is computed for all.
    """
    if step.window_context is not None:
        raise UnsupportedError("stacked layers share one cache, this KV has a sliding-window cache for some of them")
    cfg, capture = step.cfg, step.capture
    has_one_window = len(set(cfg.layer_windows)) == 1
    windows = jnp.asarray([NO_WINDOW if window is None else window for window in cfg.layer_windows], jnp.int32)
    stacks = [{name: lora[0] for name, lora in adapted.items() if lora is not None} for adapted in step.adapted]
    ropes = jax.tree.map(lambda *kinds: jnp.stack(kinds), *step.ropes) if len(step.ropes) > 1 else None

    def body(carry, xs):
        params, own, window, kind, index, vector = xs
        adapted = {name: lora and (own[name], lora[1]) for name, lora in step.adapted[0].items()}
        context = step.context._replace(
            layer=index,
            window=step.context.window if has_one_window else window,
            rope=step.ropes[0] if ropes is None else jax.tree.map(lambda table: table[kind], ropes),
            captures_weights=bool(capture.attention),
        )
        x, kv = carry
        x, kv, weights = step.run("layer", params, adapted, x, kv, context, vector)
        return (x, kv), (x if capture.hidden else (), weights)

    indices = jnp.arange(cfg.num_hidden_layers, dtype=jnp.int32)
    kinds = jnp.asarray(step.rope_of_layer, jnp.int32)
    loras = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stacks)
    (x, kv), (hidden, weights) = lax.scan(body, (x, kv), (layers, loras, windows, kinds, indices, step.steering))
    captured = Captured(
        hidden={after: hidden[after - 1] for after in capture.hidden if after},
        attention={index: tuple(group[index] for group in weights) for index in capture.attention},
    )
    return x, kv, captured


def _window_context(
    batch: Batch[jax.Array],
    cache: KvState[jax.Array],
    cfg: ModelConfig,
    rope: tuple[jax.Array, jax.Array],
    backend: str,
) -> LayerContext:
    """Returns the context of layers with a sliding-window cache, which is as wide as the widest window."""
    widest = max(window for window in cfg.layer_windows if window is not None)
    size = state.block_size(cache)
    slots = _slots([window_slot_mapping(rows, size, state.num_blocks(cache)) for rows in batch.groups])
    return LayerContext(0, widest, rope, slots, window_tables(batch, widest, size), backend)


def _slots(groups: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Concatenates blocks and offsets of the groups of rows to those of all tokens, `[X]` each."""
    block_ids, offsets = (jnp.concatenate([slots[i].ravel() for slots in groups]) for i in (0, 1))
    return block_ids, offsets


def _adapted(loras: ParamTree | None, batch: Batch[jax.Array], cfg: ModelConfig) -> list[Adapted]:
    """Returns each layer's adapters by block, None where no row of the step has an adapter."""
    adapters = adapter_of_token(batch)
    if adapters is None:
        return [{"self_attn": None, "mlp": None}] * cfg.num_hidden_layers
    if loras is None:
        raise InvalidParameterError("rows of the batch have adapters, but no stacks of adapters are given")
    layers = loras["model"]["layers"]
    first = next(iter(layers[0]["self_attn"].values()))
    used = uses(adapters, first["down"].shape[0])
    return [{name: (stacks, used) for name, stacks in layer.items()} for layer in layers]
