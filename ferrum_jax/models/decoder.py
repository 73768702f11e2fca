"""The decoder that all families share: embeddings, positions, the layer, the loop over the layers, and logits."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.config import ExpertsConfig, ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError, UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.attention import Cache, Held, LayerContext, LayerOutput, Norm, attention_specs, self_attention
from ferrum_jax.models.feed_forward import BlockOutput, gated_mlp, mlp_specs
from ferrum_jax.models.hooks import Captured, Intervention, Point, Taps, check_supported, edits_of, with_edits
from ferrum_jax.models.projections import Lora
from ferrum_jax.models.rotary import frequencies_of_layers
from ferrum_jax.models.sliding_window import split_tables, window_tables
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs
from ferrum_jax.ops.batch import Batch, adapter_of_token, positions, slot_mapping
from ferrum_jax.ops.kernel_use import are_used, kernels
from ferrum_jax.ops.linear import StackedWeight, uses, vocabulary_logits
from ferrum_jax.ops.norm import rms_norm
from ferrum_jax.ops.quantised import activation_dtype, is_quantised, rows_of
from ferrum_jax.ops.rope import rotations
from ferrum_jax.ops.shards import WHOLE, Shards, add_parts, join_columns, own_rows
from ferrum_jax.sharding.types import vary_alike, vary_like

Adapted = dict[str, Lora]  # adapters of each block of a layer: `self_attn` and `mlp`
NO_WINDOW = 2**30  # wider than any sequence; stands for no window where one loop runs layers with and without windows


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's decoder differs from Llama's."""

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
    mix_experts: Callable[[ParamTree, jax.Array, ExpertsConfig, Shards, Taps], BlockOutput] | None = None

    def param_specs(self, cfg: ModelConfig) -> ParamTree:
        """Returns the spec of every parameter, in a tree whose paths are the checkpoint's names."""
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
        kv: Cache,
        context: LayerContext,
        cfg: ModelConfig,
    ) -> LayerOutput:
        """Adds the output of attention to x `[X, D]`, then that of the feed-forward block.

        `cfg.residual_multiplier` scales what each block adds, in float32, so that the factor is not rounded.
        """

        def normed(y: jax.Array, name: str | None) -> jax.Array:
            return y if name is None else self.norm(y, layer[name]["weight"], cfg.rms_norm_eps)

        def scaled(y: jax.Array) -> jax.Array:
            factor = cfg.residual_multiplier
            return y if factor == 1.0 else (y.astype(jnp.float32) * factor).astype(y.dtype)

        before_attention, after_attention, before_mlp, after_mlp = self.norms
        taps = context.taps
        x = before = taps.changed("resid_pre", x)
        y, block = normed(x, before_attention), layer["self_attn"]
        y, kv, of_attention = self.attention(block, adapted["self_attn"], y, kv, context, cfg, self.norm)
        y = add_parts(y, context.shards)
        attn_out = taps.changed("attn_out", scaled(normed(y, after_attention)))
        x = middle = taps.changed("resid_mid", x + attn_out)
        y, block = normed(x, before_mlp), layer[self.mlp]
        if "experts" in block:
            assert self.mix_experts is not None
            assert cfg.experts is not None
            y, of_mlp = self.mix_experts(block, y, cfg.experts, context.shards, taps)
        else:
            y, of_mlp = gated_mlp(block, adapted["mlp"], y, self.activation, taps)
        y = add_parts(y, context.shards)
        mlp_out = taps.changed("mlp_out", scaled(normed(y, after_mlp)))
        x = taps.changed("resid_post", x + mlp_out)
        stream = {"resid_pre": before, "attn_out": attn_out, "resid_mid": middle, "mlp_out": mlp_out, "resid_post": x}
        return x, kv, taps.captured(**stream) | of_attention | of_mlp

    @jax.named_scope("head")
    def head(self, params: ParamTree, x: jax.Array, cfg: ModelConfig, shards: Shards = WHOLE) -> jax.Array:
        """Applies the final norm to the last layer's output `[R, D]` and returns its logits, float32 `[R, V]`."""
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
        kv: Held,
        batch: Batch[jax.Array],
        cfg: ModelConfig,
        *,
        inputs_embeds: jax.Array | None = None,
        loras: ParamTree | None = None,
        attention: str = "xla",
        capture: tuple[Point, ...] = (),
        interventions: Mapping[Point, Intervention] = MappingProxyType({}),
        remat: bool | str = False,
        first_layer: int | jax.Array = 0,
        shards: Shards = WHOLE,
        read: Callable[[Callable[[jax.Array], jax.Array], jax.Array], Any] | None = None,
    ) -> tuple[Any, Held, Captured]:
        """Runs all new tokens of a batch.

        Args:
            params: parameters in any layout of models/layout.py.
            kv: the KV cache; donate it to have new keys and values written in place. None if every row begins in this
                call and is never continued: then no KV is kept, and gradients need the memory of one block's scores.
            batch: X new tokens, and the R of them whose logits are returned.
            cfg: the model's configuration.
            inputs_embeds: `[X, D]`, used instead of the tokens' embeddings, without the family's factor.
            loras: adapter stacks of models/adapters.py, in the parameters' dtype; used by rows that have adapters.
            attention: the backend for whose layout the KV was made (ops/attention.py).
            capture: points of models/hooks.py to return, as from `check_points`; static under `jit`.
            interventions: changes at such points, as from `check_interventions`.
            remat: gradients recompute each layer instead of keeping its intermediates; `products`: all of them except
                the results of products with weights.
            first_layer: the forward begins with this layer, whose input is `inputs_embeds`. If it is traced, the layers
                before are skipped at run time, and their captures are 0.
            shards: inside a `shard_map`, the mesh axes that divide the model: parameters, KV and captured attention
                weights are then this device's parts, and `cfg` counts this device's heads.
            read: computes the result in the place of logits. Its arguments are the function from states `[R, D]` to
                logits, float32 `[R, V]`, and the states of all X tokens.

        Returns:
            Logits, float32 `[R, V]`, or the result of `read`; the KV with the new tokens; and the captures, by point.

        Raises:
            InvalidParameterError: rows have adapters but there are no `loras`, or an intervention has a wrong shape.
            UnsupportedError: a sliding-window cache or a divided model lacks a point, or a sliding-window cache is used
                with stacked layers and without CPU kernels.
        """
        params, kv, batch, inputs_embeds, loras, first_layer, *edits = vary_alike(
            params, kv, batch, inputs_embeds, loras, first_layer, *edits_of(interventions)
        )
        interventions = with_edits(interventions, edits)
        tokens = jnp.concatenate([rows.tokens.ravel() for rows in batch.groups])
        at = jnp.concatenate([positions(rows).ravel() for rows in batch.groups])
        has_window_cache = kv is not None and kv.windowed is not None
        every = (*capture, *interventions)
        check_supported(every, cfg, has_window_cache=has_window_cache, is_divided=bool(shards))
        kinds, rope_of_layer = frequencies_of_layers(cfg)
        ropes = [rotations(at, *kind) for kind in kinds]
        adapted = _adapted(loras, batch, cfg)
        x = _embed(params, tokens, cfg, shards) if inputs_embeds is None else inputs_embeds
        window_context = None
        if kv is not None and kv.windowed is not None:
            batch, windowed = split_tables(batch, kv.window_blocks)
            widest = max(window for window in cfg.layer_windows if window is not None)
            slots = _slots(windowed, kv.windowed, is_cyclic=True)
            windowed = window_tables(windowed, widest, state.block_size(kv.windowed))
            window_context = LayerContext(0, widest, ropes[0], slots, windowed, attention, shards=shards)
        slots = (tokens, tokens) if kv is None else _slots(batch, kv)  # placeholders where there is no KV to write
        context = LayerContext(0, cfg.layer_windows[0], ropes[0], slots, batch, attention, shards=shards)
        taps = Taps(interventions=tuple(interventions.items()), positions=at)
        step = _Step(
            self, cfg, context, window_context, ropes, rope_of_layer, adapted, capture, taps, remat, first_layer
        )
        layers = params["model"]["layers"]
        with kernels(attention):
            has_adapters = any(lora is not None for lora in adapted[0].values())
            is_special = bool(every) or has_adapters or window_context is not None
            if are_used("cpu") and isinstance(layers, dict) and is_special:  # a loop treats all layers alike
                layers = [_layer_of(layers, jnp.int32(index)) for index in range(cfg.num_hidden_layers)]
            x, written, captured = (_scan if isinstance(layers, dict) else _unroll)(step, layers, x, kv)
            head = functools.partial(self.head, params, cfg=cfg, shards=shards)
            found = head(_rows_with_logits(x, batch)) if read is None else read(head, x)
        return found, cast(Any, written), captured


def _rows_with_logits(x: jax.Array, batch: Batch[jax.Array]) -> jax.Array:
    """Selects the states whose logits are returned, `[X, D]` to `[R, D]`."""
    rows = batch.logit_rows
    if rows is None:
        return x
    if rows.ndim == 1:
        return x[rows]
    own = x.reshape(len(rows), -1, x.shape[-1])  # by row, so that a mesh that shards rows needs no communication
    return jnp.take_along_axis(own, rows[..., None], axis=1).reshape(-1, x.shape[-1])


def _embed(params: ParamTree, tokens: jax.Array, cfg: ModelConfig, shards: Shards) -> jax.Array:
    """Looks up token embeddings, int32 `[X]` to `[X, D]`; the family's factor is first rounded to their dtype."""
    table = params["model"]["embed_tokens"]["weight"]
    rows, is_here = own_rows(tokens, table.shape[0], shards)
    x = rows_of(table, rows, activation_dtype(params))
    if is_here is not None:
        x = add_parts(jnp.where(is_here[:, None], x, jnp.zeros((), x.dtype)), shards)
    return x if cfg.embedding_multiplier == 1.0 else x * jnp.asarray(cfg.embedding_multiplier, x.dtype)


class _Step(NamedTuple):
    """Arguments of the loop over the layers, beside parameters, activations and KV."""

    family: Family
    cfg: ModelConfig
    context: LayerContext  # of layers whose cache keeps all positions
    window_context: LayerContext | None  # of layers with a sliding-window cache
    ropes: list[tuple[jax.Array, jax.Array]]  # cosines and sines of each distinct rotation
    rope_of_layer: list[int]  # index into `ropes`
    adapted: list[Adapted]  # by layer
    capture: tuple[Point, ...]
    taps: Taps  # interventions of all layers
    remat: bool | str
    first: int | jax.Array  # the first layer that runs

    def run(
        self, name: str, params: ParamTree, adapted: Adapted, x: jax.Array, kv: Cache, context: LayerContext
    ) -> LayerOutput:
        """Runs one layer."""

        def layer(params: ParamTree, adapters: list[Any], x: jax.Array, kv: Cache) -> LayerOutput:
            own = jax.tree.unflatten(jax.tree.structure(adapted), adapters)
            return self.family.layer(params, own, x, kv, context, self.cfg)

        run = layer
        if self.remat:
            keeps = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.remat == "products" else None
            run = jax.checkpoint(layer, policy=keeps)
        given = params, jax.tree.leaves(adapted), x, kv
        with jax.named_scope(name):
            if isinstance(self.first, int):
                return run(*given)
            captured: Any = {}
            if context.taps.wanted or self.taps.interventions:  # functions may close over what varies over more axes
                *shapes, captured = jax.eval_shape(layer, *given)
                x, kv = vary_like((x, kv), shapes)
            zeros = jax.tree.map(lambda leaf: vary_like(jnp.zeros(leaf.shape, leaf.dtype), leaf), captured)
            is_run = context.taps.layer >= self.first
            return lax.cond(is_run, run, lambda params, _, x, kv: (x, kv, zeros), *given[:2], x, kv)


def _unroll(step: _Step, layers: Any, x: jax.Array, kv: Cache) -> tuple[jax.Array, Cache, Captured]:
    """Runs the layers one after another; each has its own index in the full or the sliding-window cache."""
    captured: Captured = {}
    full_index, window_index = count(), count()
    for index, (params, adapted, window) in enumerate(zip(layers, step.adapted, step.cfg.layer_windows, strict=True)):
        windowed = step.window_context if window is not None else None
        context = (windowed or step.context)._replace(
            layer=next(window_index if windowed else full_index),
            window=window,
            rope=step.ropes[step.rope_of_layer[index]],
            taps=step.taps._replace(
                layer=index, wanted=frozenset(point.name for point in step.capture if point.layer == index)
            ),
        )
        if isinstance(step.first, int) and index < step.first:
            continue
        cache = kv.windowed if windowed and kv is not None else kv
        x, written, found = step.run(f"layer_{index}", params, adapted, x, cache, context)
        kv = replace(kv, windowed=written) if windowed and kv is not None else written
        captured |= {Point(name, index): array for name, array in found.items()}
    return x, kv, captured


def _scan(step: _Step, layers: Any, x: jax.Array, kv: Cache) -> tuple[jax.Array, Cache, Captured]:
    """Runs stacked layers, leaves `[L, ...]`, in one loop. The KV is a carry of the scan, so it is written in place.

    CPU kernels read matrices in the stacks; without them XLA copies each layer's out. Adapter stacks have a leaf for
    each layer and are stacked here, a copy in every step. A point captured in one layer is computed in all.
    """
    if step.window_context is not None:
        raise UnsupportedError("a loop over stacked layers needs one cache, this KV has two: full and sliding-window")
    cfg, capture, by_kernels = step.cfg, step.capture, are_used("cpu")
    has_one_window = len(set(cfg.layer_windows)) == 1
    windows = jnp.asarray([NO_WINDOW if window is None else window for window in cfg.layer_windows], jnp.int32)
    stacks = [{name: lora[0] for name, lora in adapted.items() if lora is not None} for adapted in step.adapted]
    ropes = jax.tree.map(lambda *kinds: jnp.stack(kinds), *step.ropes) if len(step.ropes) > 1 else None

    def body(carry, xs):
        params, own, window, kind, index = xs
        if by_kernels:
            params = _layer_of(layers, index)
        adapted = {name: lora and (own[name], lora[1]) for name, lora in step.adapted[0].items()}
        context = step.context._replace(
            layer=index,
            window=step.context.window if has_one_window else window,
            rope=step.ropes[0] if ropes is None else jax.tree.map(lambda table: table[kind], ropes),
            taps=step.taps._replace(layer=index, wanted=frozenset(point.name for point in capture)),
        )
        x, kv = carry
        x, kv, found = step.run("layer", params, adapted, x, kv, context)
        return (x, kv), found

    indices = jnp.arange(cfg.num_hidden_layers, dtype=jnp.int32)
    kinds = jnp.asarray(step.rope_of_layer, jnp.int32)
    loras = jax.tree.map(_stacked, *stacks)
    first, xs = 0, ({} if by_kernels else layers, loras, windows, kinds, indices)
    if isinstance(step.first, int) and step.first:
        first = step.first
        xs = jax.tree.map(lambda leaf: leaf[first:], xs)
    carry = x, kv
    if not all(edits_of(dict(step.taps.interventions))):  # what a function closes over may vary over more mesh axes
        one = jax.tree.map(lambda leaf: leaf[0], xs)
        carry = vary_like(carry, jax.eval_shape(body, carry, one)[0])
    (x, kv), found = lax.scan(body, carry, xs)
    captured = {
        point: jax.tree.map(lambda leaf, at=point.layer - first: leaf[at], found[point.name])
        for point in capture
        if point.layer is not None
    }
    return x, kv, captured


def _stacked(*leaves: jax.Array) -> jax.Array:
    """Stacks the adapters of all layers, whose ranks may differ: zeros change no result."""
    shape = [max(sizes) for sizes in zip(*(leaf.shape for leaf in leaves), strict=True)]
    if any(list(leaf.shape) != shape for leaf in leaves):
        widths = [[(0, most - size) for size, most in zip(leaf.shape, shape, strict=True)] for leaf in leaves]
        leaves = tuple(map(jnp.pad, leaves, widths))
    return jnp.stack(leaves)


def _layer_of(stacks: ParamTree, index: jax.Array) -> ParamTree:
    """Copies one layer's vectors out of stacks; matrices become views, which kernels read in the stacks."""

    def take(stack: Any) -> Any:
        weight = StackedWeight(stack, index)
        return weight if len(weight.shape) > 1 else weight.copy()

    return jax.tree.map(take, stacks, is_leaf=is_quantised)


def _slots(batch: Batch[jax.Array], kv: KvState[jax.Array], *, is_cyclic: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the block and the offset to which each of the X tokens is written, `[X]` each."""
    size, blocks = state.block_size(kv), state.num_blocks(kv)
    groups = [slot_mapping(rows, size, blocks, is_cyclic=is_cyclic) for rows in batch.groups]
    block_ids, offsets = (jnp.concatenate([side.ravel() for side in sides]) for sides in zip(*groups, strict=True))
    return block_ids, offsets


def _adapted(loras: ParamTree | None, batch: Batch[jax.Array], cfg: ModelConfig) -> list[Adapted]:
    """Returns each layer's adapters by block; None for each block if no row of the step can have an adapter."""
    adapters = adapter_of_token(batch)
    if adapters is None:
        return [{"self_attn": None, "mlp": None}] * cfg.num_hidden_layers
    if loras is None:
        raise InvalidParameterError("rows of the batch have adapters, but no stacks of adapters are given")
    layers = loras["model"]["layers"]
    first = next(iter(layers[0]["self_attn"].values()))
    used = uses(adapters, first["down"].shape[0])
    return [{name: (stacks, used) for name, stacks in layer.items()} for layer in layers]
