"""What every family shares: embeddings, positions, the loop over the layers, and logits.

A family says what a layer is: `layer(params, adapted, x, kv, site, cfg)` gives the new x `[X, D]` and the KV written.
`adapted` maps each block of the layer, such as `mlp`, to what adapters add to its products.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError, UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.attention import Norm, Site
from ferrum_jax.models.products import Lora
from ferrum_jax.models.rings import ring_addresses, shown_as_sequences, split_tables
from ferrum_jax.models.rotary import frequencies_of_layers
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs
from ferrum_jax.models.watching import Seen, Watch, add, added, checked_watch
from ferrum_jax.ops.batch import Batch, adapter_of_token, addresses, positions
from ferrum_jax.ops.linear import vocabulary_logits
from ferrum_jax.ops.lora import uses
from ferrum_jax.ops.norm import rms_norm
from ferrum_jax.ops.quantised import activation_dtype, rows_of
from ferrum_jax.ops.rope import rotations

Adapted = dict[str, Lora]  # by block
Layer = Callable[
    [ParamTree, Adapted, jax.Array, KvState[jax.Array], Site, ModelConfig], tuple[jax.Array, KvState[jax.Array]]
]
NO_WINDOW = 2**30  # as wide as any sequence, where layers of one loop differ in their windows


def decoder_specs(cfg: ModelConfig, layers: list[ParamTree], norm_init: str = "ones") -> ParamTree:
    """Describes every parameter, given those of the layers; weights of products are `[out, in]`."""
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


def embed(params: ParamTree, tokens: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Looks up token embeddings, int32 `[X]` to `[X, D]`; a factor on them is rounded to their dtype first."""
    x = rows_of(params["model"]["embed_tokens"]["weight"], tokens, activation_dtype(params))
    return x if cfg.embedding_multiplier == 1.0 else x * jnp.asarray(cfg.embedding_multiplier, x.dtype)


def forward(
    layer: Layer,
    params: ParamTree,
    kv: KvState[jax.Array],
    batch: Batch[jax.Array],
    cfg: ModelConfig,
    inputs_embeds: jax.Array | None = None,
    loras: ParamTree | None = None,
    attention: str = "xla",
    *,
    norm: Norm = rms_norm,
    watch: Watch | None = None,
) -> Any:
    """Runs all new tokens of a batch; gives float32 logits `[R, V]` of the rows asked for, and the KV written.

    `params` may have any layout of models/layout.py, and vectors to be added (models/watching.py). `inputs_embeds`
    `[X, D]`, where given, take the place of what `embed` gives. `loras` are the stacks of models/adapters.py, in the
    parameters' dtype; they count where rows of the batch have adapters. `attention` is the backend whose layout the KV
    has (ops/attention.py). `norm` is the family's, of what the last layer gives. With `watch`, a third thing
    is given: what was `Seen`.

    Raises:
        InvalidParameterError: rows have adapters, but there are no `loras`; or a layer to be watched is not there.
        UnsupportedError: the family cannot show its attention weights.
    """
    tokens = jnp.concatenate([rows.tokens.ravel() for rows in batch.groups])
    at = jnp.concatenate([positions(rows).ravel() for rows in batch.groups])
    x = embed(params, tokens, cfg) if inputs_embeds is None else inputs_embeds
    adapted = _adapted(loras, batch, cfg)
    kinds, kind_of_layer = frequencies_of_layers(cfg)
    turns = [rotations(at, *kind) for kind in kinds]
    ring = None
    if kv.rings is not None:
        batch, ring = _ring_site(batch, kv, cfg, turns[0], attention)
    places = _places([addresses(rows, state.block_size(kv), state.num_blocks(kv)) for rows in batch.groups])
    site = Site(0, cfg.layer_windows[0], turns[0], places, batch, attention)
    layers, steering = params["model"]["layers"], added(params, cfg, len(tokens))
    wanted = Watch() if watch is None else checked_watch(watch.hidden, watch.attention, cfg)
    seen = Seen(hidden={0: x} if 0 in wanted.hidden else {}, attention={})
    if isinstance(layers, dict):
        if ring is not None:
            raise UnsupportedError("layers in one loop share one KV, this one has rings for some of them")
        x, kv, seen = _scan(layer, layers, adapted, x, kv, site, turns, kind_of_layer, cfg, steering, wanted, seen)
    else:
        sites, seats = (site, ring or site), (count(), count())  # of layers that keep everything, and a ring
        for index, (own, lora, window) in enumerate(zip(layers, adapted, cfg.layer_windows, strict=True)):
            in_ring = ring is not None and window is not None
            here = sites[in_ring].at(next(seats[in_ring]), window, turns[kind_of_layer[index]])
            pool = kv.rings if in_ring else kv
            assert pool is not None
            if index in wanted.attention:
                _refuse_ring(index, in_ring)
                here = here._replace(weights=[])
            with jax.named_scope(f"layer_{index}"):
                x, written = layer(own, lora, x, pool, here, cfg)
            kv = replace(kv, rings=written) if in_ring else written
            x = add(x, steering, index)
            if index + 1 in wanted.hidden:
                seen.hidden[index + 1] = x
            if here.weights is not None:
                seen.attention[index] = _shown(here.weights, batch, cfg)
    logits = head(params, x[batch.logit_rows], cfg, norm=norm)
    return (logits, kv) if watch is None else (logits, kv, seen)


@jax.named_scope("head")
def head(params: ParamTree, x: jax.Array, cfg: ModelConfig, *, norm: Norm = rms_norm) -> jax.Array:
    """Gives the float32 logits `[R, V]` of what the last layer gives, `[R, D]`, after the family's norm."""
    x = norm(x, params["model"]["norm"]["weight"], cfg.rms_norm_eps)
    table = params["model"]["embed_tokens"] if cfg.tie_word_embeddings else params["lm_head"]
    logits = vocabulary_logits(x, table["weight"])
    if cfg.logits_scaling != 1.0:
        logits = logits / cfg.logits_scaling
    cap = cfg.final_logit_softcapping
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _refuse_ring(layer: int, in_ring: bool) -> None:
    if in_ring:
        raise UnsupportedError(
            f"layer {layer} keeps its window alone, its attention weights cannot be shown; window_kv=False keeps all"
        )


def _shown(weights: list[jax.Array], batch: Batch[jax.Array], cfg: ModelConfig) -> tuple[jax.Array, ...]:
    """Gives what a layer has shown, or raises UnsupportedError where it shows nothing."""
    if len(weights) != len(batch.groups):
        raise UnsupportedError(f"the attention of {cfg.model_type!r} does not show its weights")
    return tuple(weights)


def _ring_site(
    batch: Batch[jax.Array], kv: KvState[jax.Array], cfg: ModelConfig, turn: tuple[jax.Array, jax.Array], backend: str
) -> tuple[Batch[jax.Array], Site]:
    """Gives the batch without its rings, and where the layers that keep rings stand."""
    assert kv.rings is not None
    widest = max(window for window in cfg.layer_windows if window is not None)
    whole, rings = split_tables(batch, kv.ring_blocks)
    size = state.block_size(kv)
    places = _places([ring_addresses(rows, size, state.num_blocks(kv.rings)) for rows in rings.groups])
    return whole, Site(0, widest, turn, places, shown_as_sequences(rings, widest, size), backend)


def _places(found: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Joins the groups' blocks and offsets to those of all tokens, `[X]` each."""
    block_ids, offsets = (jnp.concatenate([place[i].ravel() for place in found]) for i in (0, 1))
    return block_ids, offsets


def _adapted(loras: ParamTree | None, batch: Batch[jax.Array], cfg: ModelConfig) -> list[Adapted]:
    """Gives each layer what its two blocks add to their products: None where the step has no adapters."""
    adapters = adapter_of_token(batch)
    if adapters is None:
        return [{"self_attn": None, "mlp": None}] * cfg.num_hidden_layers
    if loras is None:
        raise InvalidParameterError("rows of the batch have adapters, but no stacks of adapters are given")
    layers = loras["model"]["layers"]
    first = next(iter(layers[0]["self_attn"].values()))
    used = uses(adapters, first["down"].shape[0])
    return [{name: (stacks, used) for name, stacks in layer.items()} for layer in layers]


def _scan(
    layer: Layer,
    layers: ParamTree,  # leaves [L, ...]
    adapted: list[Adapted],
    x: jax.Array,
    kv: KvState[jax.Array],
    site: Site,  # the first layer's
    turns: list[tuple[jax.Array, jax.Array]],  # the different ones
    kind_of_layer: list[int],  # which of them each layer has
    cfg: ModelConfig,
    steering: jax.Array | None,  # [L, 1 or X, D]
    wanted: Watch,
    seen: Seen[jax.Array],
) -> tuple[jax.Array, KvState[jax.Array], Seen[jax.Array]]:
    """Runs the layers in one loop. The KV is carried, so that it is written where it lies.

    Stacks of adapters, which keep a leaf for each layer, are stacked here: a copy of them in every step. What one layer
    is to show, all show.
    """
    windows = set(cfg.layer_windows)
    differing = jnp.asarray([NO_WINDOW if window is None else window for window in cfg.layer_windows], jnp.int32)
    loras = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[_stacks(lora) for lora in adapted])
    every_turn = jax.tree.map(lambda *kinds: jnp.stack(kinds), *turns) if len(turns) > 1 else None

    def step(carry, xs):
        own, stacks, window, kind, index, vector = xs
        lora = {name: lora and (stacks[name], lora[1]) for name, lora in adapted[0].items()}
        here = site._replace(
            layer=index,
            window=window if len(windows) > 1 else site.window,
            turn=site.turn if every_turn is None else jax.tree.map(operator.itemgetter(kind), every_turn),
        )
        if wanted.attention:
            here = here._replace(weights=[])
        x, kv = carry
        with jax.named_scope("layer"):
            x, kv = layer(own, lora, x, kv, here, cfg)
        if vector is not None:
            x = add(x, vector[None], 0)
        shown = () if here.weights is None else _shown(here.weights, here.batch, cfg)
        return (x, kv), (x if wanted.hidden else (), shown)

    indices = jnp.arange(cfg.num_hidden_layers, dtype=jnp.int32)
    kinds = jnp.asarray(kind_of_layer, jnp.int32)
    (x, kv), (hidden, weights) = lax.scan(step, (x, kv), (layers, loras, differing, kinds, indices, steering))
    seen.hidden.update({count: hidden[count - 1] for count in wanted.hidden if count})
    seen.attention.update({index: tuple(group[index] for group in weights) for index in wanted.attention})
    return x, kv, seen


def _stacks(adapted: Adapted) -> ParamTree:
    return {name: lora[0] for name, lora in adapted.items() if lora is not None}
