"""Where a 16-bit model rounds: the bits of norms, and of the numbers that a family scales or routes by, in bfloat16.

Each statement is NumPy's, with bfloat16 of ml_dtypes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ferrum_jax import models
from ferrum_jax.config import ModelConfig
from ferrum_jax.models import family
from ferrum_jax.models.specs import ParamTree
from tests import tiny

BF16 = ml_dtypes.bfloat16
TOKENS = [3, 14, 15, 92, 65]
NORMS = {  # what a norm rounds first: the numbers before the weight, their product with it or with one more than it
    "llama31": "numbers", "qwen3_tied": "numbers", "phi3_beyond": "numbers", "granite": "numbers", "mixtral": "numbers",
    "qwen2_moe": "numbers", "qwen3_moe": "numbers", "deepseek3": "numbers", "smollm3": "numbers",
    "olmo2": "product", "olmo3": "product", "gpt_oss": "product",
    "gemma": "offset", "gemma2": "offset", "gemma3": "offset",
}  # fmt: skip


def narrow(config: dict[str, Any]) -> tuple[ParamTree, ModelConfig]:
    """Returns the parameters of a tiny model in bfloat16, except those that stay float32."""
    cfg = ModelConfig.from_hf(config)
    dtypes = models.specs.shapes(family(cfg).param_specs(cfg), "bfloat16")
    return jax.tree.map(lambda leaf, one: leaf.astype(one.dtype), tiny.tiny_params(config), dtypes), cfg


@functools.partial(jax.jit, static_argnames=("cfg", "name"))
def captured(params: ParamTree, cfg: ModelConfig, name: str) -> jax.Array:
    """Returns what the first layer has at a hook point."""
    found = models.run(params, jnp.asarray([TOKENS]), cfg, capture=[(name, 0)], logits="none")[1]
    return found[models.Point(name, 0)][0]


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_rounds_where_transformers_rounds(name: str):
    draw, cfg = np.random.default_rng(0), tiny.model_config(name)
    x, weight = (draw.normal(1.0, 0.5, shape).astype(BF16) for shape in ((9, 48), (48,)))
    found = family(cfg).norm(jnp.asarray(x), jnp.asarray(weight), 1e-5)
    wide, scale = x.astype(np.float32), weight.astype(np.float32)
    normed = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float32(1e-5))
    each = {
        "numbers": (normed.astype(BF16).astype(np.float32) * scale).astype(BF16),
        "product": (normed * scale).astype(BF16),
        "offset": (normed * (1 + scale)).astype(BF16),
    }
    assert found.dtype == BF16
    assert [kind for kind, expected in each.items() if np.array_equal(found, expected)] == [NORMS[name]]


def test_gemmas_factor_on_embeddings_is_rounded_first():
    params, cfg = narrow(tiny.CONFIGS["gemma"] | {"num_hidden_layers": 1})
    table = np.asarray(params["model"]["embed_tokens"]["weight"], np.float32)[TOKENS]
    rounded, exact = (table * np.float32(factor) for factor in (BF16(48**0.5), 48**0.5))
    found = captured(params, cfg, "resid_pre")
    np.testing.assert_array_equal(found, rounded.astype(BF16))
    assert not np.array_equal(found, exact.astype(BF16))


def test_granites_factor_on_a_block_is_not_rounded():
    config = tiny.CONFIGS["granite"] | {"num_hidden_layers": 1}
    params, cfg = narrow(config)
    whole = ModelConfig.from_hf(config | {"residual_multiplier": 1.0})
    with jax.disable_jit():  # within a program, XLA may not round the block's output before the factor
        before, found = (np.asarray(captured(params, one, "attn_out")) for one in (whole, cfg))
    exact, rounded = (before.astype(np.float32) * np.float32(factor) for factor in (0.7, BF16(0.7)))
    np.testing.assert_array_equal(found, exact.astype(BF16))
    assert not np.array_equal(found, rounded.astype(BF16))


def test_deepseeks_routers_compute_in_float32():
    params, cfg = narrow(tiny.CONFIGS["deepseek3"] | {"num_hidden_layers": 1, "first_k_dense_replace": 0})
    found = np.asarray(captured(params, cfg, "router_logits"))
    assert found.dtype == np.float32
    assert not np.array_equal(found, found.astype(BF16).astype(np.float32))
