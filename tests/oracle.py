"""The Llama family without a cache, in plain jnp: an oracle that shares no arithmetic with the serving forward."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ferrum_jax.config import ModelConfig
from ferrum_jax.models.specs import ParamTree


@partial(jax.jit, static_argnames="cfg")
@jax.default_matmul_precision("highest")
def oracle(params: ParamTree, tokens: Int[Array, " T"], cfg: ModelConfig) -> Float[Array, "T V"]:
    """Logits of one sequence in float32: parameters in the checkpoint's layout, RoPE without scaling, dense layers."""
    assert cfg.rope_scaling is None
    assert cfg.experts is cfg.latent is None
    x, at = params["model"]["embed_tokens"]["weight"][tokens], jnp.arange(len(tokens))
    frequencies = cfg.rope_theta ** -jnp.linspace(0, 1, cfg.head_dim // 2, endpoint=False)
    angles = at.astype(jnp.float32)[:, None, None] * frequencies  # [T, 1, H / 2]
    for index, layer in enumerate(params["model"]["layers"]):
        attention, mlp, window = layer["self_attn"], layer["mlp"], cfg.layer_windows[index]
        y = _norm(x, layer["input_layernorm"], cfg)
        q, k, v = (_linear(y, attention[f"{name}_proj"]).reshape(len(x), -1, cfg.head_dim) for name in "qkv")
        if cfg.qk_norm:
            q, k = _norm(q, attention["q_norm"], cfg), _norm(k, attention["k_norm"], cfg)
        if index not in cfg.layers_without_rope:
            q, k = _rotate(q, angles), _rotate(k, angles)
        k, v = (jnp.repeat(side, q.shape[1] // k.shape[1], axis=1) for side in (k, v))  # [T, N, H]
        distance = at[:, None] - at
        visible = (distance >= 0) & (distance < (len(x) if window is None else window))
        scores = jnp.einsum("TNH,SNH->NTS", q, k) * cfg.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        x = x + _linear(jnp.einsum("NTS,SNH->TNH", weights, v).reshape(len(x), -1), attention["o_proj"])
        y = _norm(x, layer["post_attention_layernorm"], cfg)
        x = x + _linear(jax.nn.silu(_linear(y, mlp["gate_proj"])) * _linear(y, mlp["up_proj"]), mlp["down_proj"])
    table = params["model"]["embed_tokens"] if cfg.tie_word_embeddings else params["lm_head"]
    return _norm(x, params["model"]["norm"], cfg) @ table["weight"].T


def _norm(x: jax.Array, scale: ParamTree, cfg: ModelConfig) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + cfg.rms_norm_eps) * scale["weight"]


def _linear(x: jax.Array, block: ParamTree) -> jax.Array:
    return x @ block["weight"].T + block.get("bias", jnp.float32(0))


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Multiplies the pairs (i, i + H / 2) of every head, as complex numbers, by those of the angles."""
    rotated = lax.complex(*jnp.split(x, 2, axis=-1)) * lax.complex(jnp.cos(angles), jnp.sin(angles))
    return jnp.concatenate([rotated.real, rotated.imag], axis=-1)
