"""Llama 2 to 3.2, and the families whose forward is the same up to a setting: Mistral, Qwen2, Qwen3.

Touvron et al. 2023, "Llama 2"; Jiang et al. 2023, "Mistral 7B" (sliding window); Qwen2 (biases of q, k and v); Qwen3
(RMSNorm of query and key heads). Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.batch import Batch, adapter_of_token, addresses, positions
from ferrum_jax.models.layers.attention import attend
from ferrum_jax.models.layers.linear import linear, vocabulary_logits
from ferrum_jax.models.layers.lora import low_rank, uses
from ferrum_jax.models.layers.norm import rms_norm
from ferrum_jax.models.layers.rope import rotate, rotations
from ferrum_jax.models.quantised import activation_dtype, rows_of
from ferrum_jax.models.rotary import frequencies
from ferrum_jax.models.specs import ParamSpec, ParamTree

Lora = tuple[ParamTree, jax.Array] | None  # stacks of one block, and bool [X, A]: which adapter each token uses
FUSED = {  # by block: products of one input, and what their weight is called where they share one
    "self_attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj")},
}
NO_WINDOW = 2**30  # as wide as any sequence, where layers of one loop differ in their windows


class _Shared(NamedTuple):
    """What all layers of one forward share."""

    batch: Batch[jax.Array]
    places: tuple[jax.Array, jax.Array]  # of each token in the KV: block and offset, [X] each
    turn: tuple[jax.Array, jax.Array]
    attention: str  # its backend


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Describes every parameter; weights of products are `[out, in]`."""
    specs: ParamTree = {
        "model": {
            "embed_tokens": {"weight": ParamSpec((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"))},
            "layers": [_layer_specs(cfg) for _ in range(cfg.num_hidden_layers)],
            "norm": _norm_spec(cfg.hidden_size),
        }
    }
    if not cfg.tie_word_embeddings:
        specs["lm_head"] = {"weight": ParamSpec((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"))}
    return specs


def _layer_specs(cfg: ModelConfig) -> ParamTree:
    model, wide = (cfg.hidden_size, "embed"), (cfg.intermediate_size, "mlp")
    queries = (cfg.num_attention_heads * cfg.head_dim, "heads")
    keys = (cfg.num_key_value_heads * cfg.head_dim, "kv_heads")
    attention = {
        "q_proj": _linear_specs(queries, model, cfg.attention_bias),
        "k_proj": _linear_specs(keys, model, cfg.attention_bias),
        "v_proj": _linear_specs(keys, model, cfg.attention_bias),
        "o_proj": _linear_specs(model, queries, cfg.attention_out_bias),
    }
    if cfg.qk_norm:
        attention |= {"q_norm": _norm_spec(cfg.head_dim, "head"), "k_norm": _norm_spec(cfg.head_dim, "head")}
    return {
        "input_layernorm": _norm_spec(cfg.hidden_size),
        "self_attn": attention,
        "post_attention_layernorm": _norm_spec(cfg.hidden_size),
        "mlp": {
            "gate_proj": _linear_specs(wide, model, cfg.mlp_bias),
            "up_proj": _linear_specs(wide, model, cfg.mlp_bias),
            "down_proj": _linear_specs(model, wide, cfg.mlp_bias),
        },
    }


def _linear_specs(out: tuple[int, str], into: tuple[int, str], bias: bool) -> ParamTree:
    specs: ParamTree = {"weight": ParamSpec((out[0], into[0]), (out[1], into[1]))}
    if bias:
        specs["bias"] = ParamSpec((out[0],), (out[1],), "zeros")
    return specs


def _norm_spec(size: int, axis: str = "embed") -> ParamTree:
    return {"weight": ParamSpec((size,), (axis,), "ones")}


def embed(params: ParamTree, tokens: jax.Array) -> jax.Array:
    """Looks up token embeddings: int32 `[X]` to `[X, D]`."""
    return rows_of(params["model"]["embed_tokens"]["weight"], tokens, activation_dtype(params))


def forward(
    params: ParamTree,
    kv: KvState[jax.Array],
    batch: Batch[jax.Array],
    cfg: ModelConfig,
    inputs_embeds: jax.Array | None = None,
    loras: ParamTree | None = None,
    attention: str = "xla",
) -> tuple[jax.Array, KvState[jax.Array]]:
    """Runs all new tokens of a batch; gives float32 logits `[R, V]` of the rows asked for, and the KV written.

    `params` may have any layout of models/layout.py. `inputs_embeds` `[X, D]`, where given, take the place of the
    tokens' embeddings. `loras` are the stacks of models/adapters.py, in the parameters' dtype; they count where rows of
    the batch have adapters. `attention` is the backend whose layout the KV has (models/layers/attention.py).

    Raises:
        InvalidParameterError: rows have adapters, but there are no `loras`.
    """
    tokens = jnp.concatenate([rows.tokens.ravel() for rows in batch.groups])
    at = jnp.concatenate([positions(rows).ravel() for rows in batch.groups])
    found = [addresses(rows, state.block_size(kv), state.num_blocks(kv)) for rows in batch.groups]
    block_ids, offsets = (jnp.concatenate([place[i].ravel() for place in found]) for i in (0, 1))
    x = embed(params, tokens) if inputs_embeds is None else inputs_embeds
    adapted = _adapted(loras, batch, cfg)
    shared = _Shared(batch, (block_ids, offsets), rotations(at, *frequencies(cfg)), attention)
    layers = params["model"]["layers"]
    if isinstance(layers, dict):
        x, kv = _scan(layers, adapted, x, kv, shared, cfg)
    else:
        for index, (layer, window) in enumerate(zip(layers, cfg.layer_windows, strict=True)):
            x, kv = _layer(layer, adapted[index], x, kv, index, window, shared, cfg)
    x = rms_norm(x[batch.logit_rows], params["model"]["norm"]["weight"], cfg.rms_norm_eps)
    head = params["model"]["embed_tokens"] if cfg.tie_word_embeddings else params["lm_head"]
    return vocabulary_logits(x, head["weight"]), kv


def _adapted(loras: ParamTree | None, batch: Batch[jax.Array], cfg: ModelConfig) -> list[dict[str, Lora]]:
    """Gives each layer what its two blocks add to their products: None where the step has no adapters."""
    adapters = adapter_of_token(batch)
    if adapters is None:
        return [{"self_attn": None, "mlp": None}] * cfg.num_hidden_layers
    if loras is None:
        raise InvalidParameterError("rows of the batch have adapters, but no stacks of adapters are given")
    layers = loras["model"]["layers"]
    used = uses(adapters, layers[0]["self_attn"]["q_proj"]["down"].shape[0])
    return [{name: (stacks, used) for name, stacks in layer.items()} for layer in layers]


def _scan(
    layers: ParamTree,  # leaves [L, ...]
    adapted: list[dict[str, Lora]],
    x: jax.Array,
    kv: KvState[jax.Array],
    shared: _Shared,
    cfg: ModelConfig,
) -> tuple[jax.Array, KvState[jax.Array]]:
    """Runs the layers in one loop. The KV is carried, so that it is written where it lies.

    Stacks of adapters, which keep a leaf for each layer, are stacked here: a copy of them in every step.
    """
    windows = set(cfg.layer_windows)
    differing = jnp.asarray([NO_WINDOW if window is None else window for window in cfg.layer_windows], jnp.int32)
    loras = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[_stacks(lora) for lora in adapted])

    def step(carry, xs):
        layer, stacks, window, index = xs
        lora = {name: lora and (stacks[name], lora[1]) for name, lora in adapted[0].items()}
        window = window if len(windows) > 1 else next(iter(windows))
        x, kv = carry
        return _layer(layer, lora, x, kv, index, window, shared, cfg), None

    indices = jnp.arange(cfg.num_hidden_layers, dtype=jnp.int32)
    (x, kv), _ = lax.scan(step, (x, kv), (layers, loras, differing, indices))
    return x, kv


def _stacks(adapted: dict[str, Lora]) -> ParamTree:
    return {name: lora[0] for name, lora in adapted.items() if lora is not None}


def _layer(
    layer: ParamTree,
    adapted: dict[str, Lora],
    x: jax.Array,  # [X, D]
    kv: KvState[jax.Array],
    index: int | jax.Array,
    window: int | jax.Array | None,
    shared: _Shared,
    cfg: ModelConfig,
) -> tuple[jax.Array, KvState[jax.Array]]:
    normed = rms_norm(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
    mixed, kv = _attention(layer["self_attn"], adapted["self_attn"], normed, kv, index, window, shared, cfg)
    x = x + mixed
    normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    return x + _mlp(layer["mlp"], adapted["mlp"], normed), kv


def _attention(
    layer: ParamTree,
    lora: Lora,
    x: jax.Array,  # [X, D]
    kv: KvState[jax.Array],
    index: int | jax.Array,
    window: int | jax.Array | None,
    shared: _Shared,
    cfg: ModelConfig,
) -> tuple[jax.Array, KvState[jax.Array]]:
    num_heads = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.num_key_value_heads
    projected = _project_all(x, layer, lora, "qkv_proj", FUSED["self_attn"]["qkv_proj"], num_heads)
    q, k, v = (y.reshape(len(x), -1, cfg.head_dim) for y in projected)  # [X, heads, H]
    if cfg.qk_norm:
        q = rms_norm(q, layer["q_norm"]["weight"], cfg.rms_norm_eps)
        k = rms_norm(k, layer["k_norm"]["weight"], cfg.rms_norm_eps)
    q, k = rotate(q, *shared.turn), rotate(k, *shared.turn)
    kv = state.write(kv, index, *shared.places, k, v)
    outs, start = [], 0
    for rows in shared.batch.groups:
        size = rows.tokens.size
        mine = q[start : start + size].reshape(*rows.tokens.shape, -1, cfg.head_dim)
        out = attend(mine, kv, index, rows, scale=cfg.head_dim**-0.5, window=window, backend=shared.attention)
        outs.append(out.reshape(size, -1))
        start += size
    return _project(jnp.concatenate(outs), layer, lora, "o_proj"), kv


def _mlp(layer: ParamTree, lora: Lora, x: jax.Array) -> jax.Array:
    gate, up = _project_all(x, layer, lora, "gate_up_proj", FUSED["mlp"]["gate_up_proj"], (1, 1))
    return _project(jax.nn.silu(gate) * up, layer, lora, "down_proj")


def _project(x: jax.Array, block: ParamTree, lora: Lora, name: str) -> jax.Array:
    """One product of a block, `[X, in]` to `[X, out]`, and what each token's adapter adds to it."""
    return _adapt(linear(x, block[name]["weight"], block[name].get("bias")), x, lora, name)


def _project_all(
    x: jax.Array, block: ParamTree, lora: Lora, fused: str, names: tuple[str, ...], shares: tuple[int, ...]
) -> list[jax.Array]:
    """Several products of one input, which are one product where their weight is: it is cut by `shares`."""
    if fused not in block:
        return [_project(x, block, lora, name) for name in names]
    y = linear(x, block[fused]["weight"], block[fused].get("bias"))
    share, parts, start = y.shape[1] // sum(shares), [], 0
    for name, count in zip(names, shares, strict=True):
        parts.append(_adapt(y[:, start * share : (start + count) * share], x, lora, name))
        start += count
    return parts


def _adapt(y: jax.Array, x: jax.Array, lora: Lora, name: str) -> jax.Array:
    """Adds what each token's adapter adds to a product of `x`."""
    if lora is None:
        return y
    stacks, used = lora
    return y + low_rank(x, stacks[name]["down"], stacks[name]["up"], used)
