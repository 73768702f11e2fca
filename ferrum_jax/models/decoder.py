"""What every family shares: embeddings, positions, the loop over the layers, and logits.

A family says what a layer is: `layer(params, adapted, x, kv, site, cfg)` gives the new x `[X, D]` and the KV written.
`adapted` maps each block of the layer, such as `mlp`, to what adapters add to its products.
"""

import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.attention import Norm, Site
from ferrum_jax.models.batch import Batch, adapter_of_token, addresses, positions
from ferrum_jax.models.layers.linear import vocabulary_logits
from ferrum_jax.models.layers.lora import uses
from ferrum_jax.models.layers.norm import rms_norm
from ferrum_jax.models.layers.rope import rotations
from ferrum_jax.models.products import Lora
from ferrum_jax.models.quantised import activation_dtype, rows_of
from ferrum_jax.models.rotary import frequencies_of_layers
from ferrum_jax.models.specs import ParamSpec, ParamTree, norm_specs

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
) -> tuple[jax.Array, KvState[jax.Array]]:
    """Runs all new tokens of a batch; gives float32 logits `[R, V]` of the rows asked for, and the KV written.

    `params` may have any layout of models/layout.py. `inputs_embeds` `[X, D]`, where given, take the place of
    what `embed` gives. `loras` are the stacks of models/adapters.py, in the parameters' dtype; they count where rows of
    the batch have adapters. `attention` is the backend whose layout the KV has (models/layers/attention.py).
    `norm` is the family's, of what the last layer gives.

    Raises:
        InvalidParameterError: rows have adapters, but there are no `loras`.
    """
    tokens = jnp.concatenate([rows.tokens.ravel() for rows in batch.groups])
    at = jnp.concatenate([positions(rows).ravel() for rows in batch.groups])
    found = [addresses(rows, state.block_size(kv), state.num_blocks(kv)) for rows in batch.groups]
    block_ids, offsets = (jnp.concatenate([place[i].ravel() for place in found]) for i in (0, 1))
    x = embed(params, tokens, cfg) if inputs_embeds is None else inputs_embeds
    adapted = _adapted(loras, batch, cfg)
    kinds, kind_of_layer = frequencies_of_layers(cfg)
    turns = [rotations(at, *kind) for kind in kinds]
    site = Site(0, cfg.layer_windows[0], turns[0], (block_ids, offsets), batch, attention)
    layers = params["model"]["layers"]
    if isinstance(layers, dict):
        x, kv = _scan(layer, layers, adapted, x, kv, site, turns, kind_of_layer, cfg)
    else:
        for index, (own, lora) in enumerate(zip(layers, adapted, strict=True)):
            here = site._replace(layer=index, window=cfg.layer_windows[index], turn=turns[kind_of_layer[index]])
            x, kv = layer(own, lora, x, kv, here, cfg)
    x = norm(x[batch.logit_rows], params["model"]["norm"]["weight"], cfg.rms_norm_eps)
    head = params["model"]["embed_tokens"] if cfg.tie_word_embeddings else params["lm_head"]
    logits = vocabulary_logits(x, head["weight"])
    if (cap := cfg.final_logit_softcapping) is not None:
        logits = cap * jnp.tanh(logits / cap)
    return logits, kv


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
) -> tuple[jax.Array, KvState[jax.Array]]:
    """Runs the layers in one loop. The KV is carried, so that it is written where it lies.

    Stacks of adapters, which keep a leaf for each layer, are stacked here: a copy of them in every step.
    """
    windows = set(cfg.layer_windows)
    differing = jnp.asarray([NO_WINDOW if window is None else window for window in cfg.layer_windows], jnp.int32)
    loras = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[_stacks(lora) for lora in adapted])
    every_turn = jax.tree.map(lambda *kinds: jnp.stack(kinds), *turns) if len(turns) > 1 else None

    def step(carry, xs):
        own, stacks, window, kind, index = xs
        lora = {name: lora and (stacks[name], lora[1]) for name, lora in adapted[0].items()}
        here = site._replace(
            layer=index,
            window=window if len(windows) > 1 else site.window,
            turn=site.turn if every_turn is None else jax.tree.map(operator.itemgetter(kind), every_turn),
        )
        x, kv = carry
        return layer(own, lora, x, kv, here, cfg), None

    indices = jnp.arange(cfg.num_hidden_layers, dtype=jnp.int32)
    kinds = jnp.asarray(kind_of_layer, jnp.int32)
    (x, kv), _ = lax.scan(step, (x, kv), (layers, loras, differing, kinds, indices))
    return x, kv


def _stacks(adapted: Adapted) -> ParamTree:
    return {name: lora[0] for name, lora in adapted.items() if lora is not None}
