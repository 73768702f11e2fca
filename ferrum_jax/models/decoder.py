"""What every family shares: embeddings, positions, the layer and the loop over the layers, and logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.config import ExpertsConfig, ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError, UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.attention import LayerContext, LayerOutput, Norm, attention_specs, self_attention
from ferrum_jax.models.capture import Captured, CaptureSpec, check_capture, check_shape, check_weights
from ferrum_jax.models.feed_forward import gated_mlp, mlp_specs
from ferrum_jax.models.projections import Lora
from ferrum_jax.models.rotary import frequencies_of_layers
from ferrum_jax.models.sliding_window import split_tables, window_tables
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs
from ferrum_jax.ops import native
from ferrum_jax.ops.batch import Batch, adapter_of_token, positions, slot_mapping
from ferrum_jax.ops.linear import uses, vocabulary_logits
from ferrum_jax.ops.norm import rms_norm
from ferrum_jax.ops.quantised import activation_dtype, rows_of
from ferrum_jax.ops.rope import rotations
from ferrum_jax.ops.shards import WHOLE, Shards, add_parts, join_columns, own_rows

Adapted = dict[str, Lora]  # adapters of each block of a layer: `self_attn` and `mlp`
NO_WINDOW = 2**30  # wider than any sequence; for layers without a window beside layers with one, in one loop


@dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family's decoder apart from Llama's."""

    # Names of the norms before and after attention, then before and after the feed-forward block; None: there is none.
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    norm: Norm = rms_norm
    norm_init: str = "ones"  # of the norms' weights
    attention_specs: Callable[[ModelConfig, str], ParamTree] = attention_specs  # the string is `norm_init`
    attention: Callable[..., LayerOutput] = self_attention
    mlp: str = "mlp"  # name of the feed-forward block: a gated MLP or, if it has `experts`, a mixture of them
    mlp_specs: Callable[[ModelConfig], ParamTree] = mlp_specs
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
    expert_specs: Callable[[ModelConfig, ExpertsConfig], ParamTree] | None = None
    mix_experts: Callable[[ParamTree, jax.Array, ExpertsConfig, Shards], jax.Array] | None = None

    def param_specs(self, cfg: ModelConfig) -> ParamTree:
        """Specs of every parameter, in a tree whose paths are the checkpoint's names."""
        vocabulary = {"weight": ParamSpec((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"))}
        specs: ParamTree = {
            "model": {
                "embed_tokens": vocabulary,
                "layers": [self._layer_specs(cfg, index) for index in range(cfg.num_hidden_layers)],
                "norm": norm_specs(cfg.hidden_size, init=self.norm_init),
            }
        }
        return specs if cfg.tie_word_embeddings else specs | {"lm_head": vocabulary}

    def _layer_specs(self, cfg: ModelConfig, index: int) -> ParamTree:
        experts = cfg.experts
        if self.expert_specs is not None and experts is not None and experts.sparse_layers[index]:
            block = self.expert_specs(cfg, experts)
        else:
            block = self.mlp_specs(cfg)
        norms = {name: norm_specs(cfg.hidden_size, init=self.norm_init) for name in self.norms if name is not None}
        return {"self_attn": self.attention_specs(cfg, self.norm_init), self.mlp: block, **norms}

    def layer(
        self,
        layer: ParamTree,
        adapted: Adapted,
        x: jax.Array,
        kv: KvState[jax.Array],
        context: LayerContext,
        cfg: ModelConfig,
    ) -> LayerOutput:
        """Adds attention to x `[X, D]`, then the feed-forward block.

        `cfg.residual_multiplier` scales what each block adds, in float32, so that the factor is not rounded.
        """

        def normed(y: jax.Array, name: str | None) -> jax.Array:
            return y if name is None else self.norm(y, layer[name]["weight"], cfg.rms_norm_eps)

        def scaled(y: jax.Array) -> jax.Array:
            factor = cfg.residual_multiplier
            return y if factor == 1.0 else (y.astype(jnp.float32) * factor).astype(y.dtype)

        before_attention, after_attention, before_mlp, after_mlp = self.norms
        y, block = normed(x, before_attention), layer["self_attn"]
        y, kv, weights = self.attention(block, adapted["self_attn"], y, kv, context, cfg, self.norm)
        y = add_parts(y, context.shards)
        x = x + scaled(normed(y, after_attention))
        y, block = normed(x, before_mlp), layer[self.mlp]
        if "experts" in block:
            assert self.mix_experts is not None
            assert cfg.experts is not None
            y = self.mix_experts(block, y, cfg.experts, context.shards)
        else:
            y = gated_mlp(block, adapted["mlp"], y, self.activation)
        y = add_parts(y, context.shards)
        return x + scaled(normed(y, after_mlp)), kv, weights

    @jax.named_scope("head")
    def head(self, params: ParamTree, x: jax.Array, cfg: ModelConfig, shards: Shards = WHOLE) -> jax.Array:
        """Logits, float32 `[R, V]`, of the last layer's output `[R, D]`, after the last norm."""
        x = self.norm(x, params["model"]["norm"]["weight"], cfg.rms_norm_eps)
        table = params["model"]["embed_tokens"] if cfg.tie_word_embeddings else params["lm_head"]
        logits = vocabulary_logits(x, table["weight"])
        if cfg.logits_scaling != 1.0:
            logits = logits / cfg.logits_scaling
        if (cap := cfg.final_logit_softcapping) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return join_columns(logits, shards, cfg.vocab_size)

    def forward(
        self,
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
        shards: Shards = WHOLE,
    ) -> tuple[jax.Array, KvState[jax.Array], Captured[jax.Array]]:
        """Runs all new tokens of a batch.

        Args:
            params: in any layout of models/layout.py.
            kv: keys and values so far; donate it to have them written in place.
            batch: X new tokens, and the R of them whose logits are returned.
            cfg: the model's.
            inputs_embeds: `[X, D]`, used instead of the tokens' embeddings and their factor.
            loras: adapter stacks of models/adapters.py, in the parameters' dtype; used by rows that have adapters.
            attention: the backend whose layout the KV has (ops/attention.py).
            steering: `[L, D]` or, for each token, `[L, X, D]`: added to the output of each layer, in float32.
            capture: layers whose hidden states or attention weights are returned.
            shards: inside a `shard_map`, over which mesh axes the model is divided: parameters and KV are then one
                device's parts, and so are attention weights that are captured. `cfg` counts this device's heads.

        Returns:
            Logits, float32 `[R, V]`; the KV written; and what was captured.

        Raises:
            InvalidParameterError: rows have adapters but there are no `loras`, `steering` has another shape, or a
                layer of `capture` does not exist.
            UnsupportedError: attention weights that cannot be captured, or a sliding-window cache with stacked layers.
        """
        tokens = jnp.concatenate([rows.tokens.ravel() for rows in batch.groups])
        at = jnp.concatenate([positions(rows).ravel() for rows in batch.groups])
        spec = CaptureSpec() if capture is None else check_capture(capture.hidden, capture.attention, cfg)
        check_weights(spec, cfg, has_window_cache=kv.windowed is not None)
        if steering is not None:
            vectors = cfg.num_hidden_layers, cfg.hidden_size
            each = cfg.num_hidden_layers, len(tokens), cfg.hidden_size
            check_shape("steering", steering, "[L, D] or [L, X, D]", vectors, each)
            steering = steering[:, None] if steering.ndim == 2 else steering
        kinds, rope_of_layer = frequencies_of_layers(cfg)
        ropes = [rotations(at, *kind) for kind in kinds]
        adapted = _adapted(loras, batch, cfg)
        x = _embed(params, tokens, cfg, shards) if inputs_embeds is None else inputs_embeds
        window_context = None
        if kv.windowed is not None:
            batch, windowed = split_tables(batch, kv.window_blocks)
            widest = max(window for window in cfg.layer_windows if window is not None)
            slots = _slots(windowed, kv.windowed, is_cyclic=True)
            windowed = window_tables(windowed, widest, state.block_size(kv.windowed))
            window_context = LayerContext(0, widest, ropes[0], slots, windowed, attention, shards=shards)
        context = LayerContext(0, cfg.layer_windows[0], ropes[0], _slots(batch, kv), batch, attention, shards=shards)
        step = _Step(self, cfg, context, window_context, ropes, rope_of_layer, adapted, steering, spec)
        layers = params["model"]["layers"]
        hidden = {0: x} if 0 in spec.hidden else {}
        with native.kernels(attention == "cpu"):
            x, kv, captured = (_scan if isinstance(layers, dict) else _unroll)(step, layers, x, kv)
            logits = self.head(params, x[batch.logit_rows], cfg, shards)
        return logits, kv, replace(captured, hidden=hidden | captured.hidden)


def _embed(params: ParamTree, tokens: jax.Array, cfg: ModelConfig, shards: Shards) -> jax.Array:
    """Looks up token embeddings, int32 `[X]` to `[X, D]`; a factor on them is rounded to their dtype first."""
    table = params["model"]["embed_tokens"]["weight"]
    rows, is_here = own_rows(tokens, table.shape[0], shards)
    x = rows_of(table, rows, activation_dtype(params))
    if is_here is not None:
        x = add_parts(jnp.where(is_here[:, None], x, jnp.zeros((), x.dtype)), shards)
    return x if cfg.embedding_multiplier == 1.0 else x * jnp.asarray(cfg.embedding_multiplier, x.dtype)


class _Step(NamedTuple):
    """What the loop over the layers needs beside the layers' parameters, activations and KV."""

    family: Family
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
            x, kv, weights = self.family.layer(params, adapted, x, kv, context, self.cfg)
        if vector is not None:
            x = (x.astype(jnp.float32) + vector.astype(jnp.float32)).astype(x.dtype)
        return x, kv, weights


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
        cache = kv.windowed if windowed else kv
        assert cache is not None
        vector = None if step.steering is None else step.steering[index]
        x, written, weights = step.run(f"layer_{index}", params, adapted, x, cache, context, vector)
        kv = replace(kv, windowed=written) if windowed else written
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


def _slots(batch: Batch[jax.Array], kv: KvState[jax.Array], *, is_cyclic: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the block and offset that each of the concatenated tokens is written to, `[X]` each."""
    size, blocks = state.block_size(kv), state.num_blocks(kv)
    groups = [slot_mapping(rows, size, blocks, is_cyclic=is_cyclic) for rows in batch.groups]
    block_ids, offsets = (jnp.concatenate([side.ravel() for side in sides]) for sides in zip(*groups, strict=True))
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
