"""Latent attention: what the KV holds, every way through the runner, and what DeepSeek's settings may be."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.contract.errors import ConfigError, FerrumError, UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec, Layout
from ferrum_jax.models.backends import choose_attention
from ferrum_jax.ops.moe import choose_in_groups
from ferrum_jax.weights import orbax
from tests import tiny

TOLERANCE = 1e-4  # float32 sums in another order
CONFIG = tiny.CONFIGS["deepseek3"] | {"num_hidden_layers": 2}
CFG = ferrum_jax.ModelConfig.from_hf(CONFIG)
TOKENS = tiny.prompt("deepseek3")
ENGINE = ferrum_jax.EngineConfig(
    max_seqs=3, kv_capacity=64, block_size=8, decode_rows=(3,), query_blocks=(2,), block_tokens=16, verify_tokens=16
)


def test_chunks_batches_mixed_steps_and_truncation_give_the_logits_of_one_forward_in_a_kv_of_latents(tmp_path: Path):
    forward = jax.jit(models.forward, static_argnums=2)
    expected = np.asarray(forward(tiny.tiny_params(CONFIG), jnp.asarray([TOKENS]), CFG)[0])
    with ferrum_jax.load(tiny.write_folder(tmp_path, CONFIG), engine=ENGINE, progress=False) as runner:
        cache = runner.plan.cache
        assert cache.bytes_per_position == 2 * (18 + 6) * 4  # layers, latent and turning key, float32
        assert state.shapes(cache).v is None
        assert cache.num_bytes == sum(leaf.size * 4 for leaf in jax.tree.leaves(state.shapes(cache)))
        np.testing.assert_allclose(runner.forward_verify("a", TOKENS[:20]), expected[:20], atol=TOLERANCE)
        np.testing.assert_allclose(runner.forward_verify("b", TOKENS), expected, atol=TOLERANCE)
        runner.truncate_kv("b", 37)
        found = runner.decode_batch([("a", TOKENS[20], 20), ("b", TOKENS[37], 37)])
        np.testing.assert_allclose(found, expected[[20, 37]], atol=TOLERANCE)
        mixed = runner.unified_forward([("a", TOKENS[21:30], 21, True), ("b", [TOKENS[38]], 38, True)])
        for logits, position in zip(mixed, (29, 38), strict=True):
            assert logits is not None
            np.testing.assert_allclose(logits, expected[position], atol=TOLERANCE)


@pytest.mark.parametrize("layout", state.LATENTS)
def test_what_is_written_as_a_latent_is_read_as_key_and_value(layout: Layout):
    spec = CacheSpec(
        num_layers=2, num_blocks=3, block_size=4, num_kv_heads=1, head_dim=6, dtype="float32", layout=layout
    )
    latents = jnp.arange(1, 13, dtype=jnp.float32).reshape(2, 1, 6)
    kv = state.write(state.empty(spec), 1, jnp.array([2, 3]), jnp.array([1, 0]), latents)  # the second is dropped
    k, v = state.read(kv, 1, jnp.array([2]))
    assert (k.shape, v.shape) == ((1, 1, 6, 4), (1, 1, 4, 6))
    np.testing.assert_array_equal(k[0, 0, :, 1], latents[0, 0])
    np.testing.assert_array_equal(v[0, 0, 1], latents[0, 0])
    assert jnp.sum(kv.k) == jnp.sum(latents[0])
    assert (state.num_blocks(kv), state.block_size(kv), state.num_kv_heads(kv)) == (3, 4, 1)


def test_the_kernel_of_tpus_serves_no_latents():
    sizes = {"platform": "tpu", "dtype": "bfloat16", "kv_dtype": "bfloat16", "block_size": 128}
    assert choose_attention(None, CFG, **sizes) == "xla"
    with pytest.raises(UnsupportedError, match="the KV of this model holds latents"):
        choose_attention("tpu", CFG, **sizes)


def test_experts_are_chosen_within_the_best_groups():
    scores = np.random.default_rng(0).standard_normal((50, 12)).astype(np.float32)
    found = choose_in_groups(jnp.asarray(scores), 3, num_groups=4, num_kept=2, num_best=2)
    for row, mine in zip(scores, found, strict=True):
        of_group = np.sort(row.reshape(4, 3), axis=1)[:, -2:].sum(axis=1)
        kept = set(np.argsort(-of_group)[:2].tolist())
        allowed = [index for index in range(12) if index // 3 in kept]
        assert mine.tolist() == sorted(allowed, key=lambda index: -row[index])[:3]


def test_the_layers_that_guess_a_second_token_are_left_unread(tmp_path: Path):
    more = {"model.layers.2.eh_proj.weight": np.ones((4, 8), np.float32)}
    folder = tiny.write_folder(tmp_path, CONFIG, named=tiny.tensors(CONFIG) | more)
    tiny.assert_same_tree(ferrum_jax.load_params(folder)[0], tiny.tiny_params(CONFIG))


def test_the_bias_of_the_choice_stays_in_float32_and_a_checkpoint_of_it_comes_back(tmp_path: Path):
    params, cfg = ferrum_jax.load_params(tiny.write_folder(tmp_path / "model", CONFIG), dtype="bfloat16")
    gate = params["model"]["layers"][1]["mlp"]["gate"]
    assert (gate["e_score_correction_bias"].dtype, gate["weight"].dtype) == (jnp.float32, jnp.bfloat16)
    orbax.save(tmp_path / "made", params, cfg)
    found, again = ferrum_jax.load_params(tmp_path / "made", dtype="bfloat16")
    assert again == cfg
    tiny.assert_same_tree(found, params)


@pytest.mark.slow
def test_quantised_latent_attention_gives_the_logits_of_what_it_stands_for():
    config = CONFIG | {"num_hidden_layers": 1}  # a layer without experts
    cfg = ferrum_jax.ModelConfig.from_hf(config)
    kept = models.quantise(tiny.tiny_params(config), cfg, "int8")
    forward = jax.jit(models.forward, static_argnums=2)
    found, expected = (forward(tree, jnp.asarray([TOKENS[:9]]), cfg) for tree in (kept, models.dequantise(kept)))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


REFUSED: dict[str, tuple[str, dict[str, Any], type[FerrumError], str]] = {
    "an unknown choice": ("deepseek3", {"topk_method": "group_limited_greedy"}, UnsupportedError, "topk_method"),
    "shares that add up to one": ("deepseek2", {"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob"),
    "layers of experts now and then": ("deepseek3", {"moe_layer_freq": 2}, UnsupportedError, "moe_layer_freq 2"),
    "groups of different sizes": ("deepseek3", {"n_group": 3}, ConfigError, "2 of 3 groups of 8 experts"),
    "groups too few": ("deepseek3", {"topk_group": 1}, ConfigError, "1 groups have fewer than 3 experts"),
    "half a pair": ("deepseek3", {"qk_rope_head_dim": 5}, ConfigError, "qk_rope_head_dim is 5"),
    "no latent": ("deepseek2", {"kv_lora_rank": 0}, ConfigError, "kv_lora_rank is 0"),
}


def test_what_is_not_implemented_or_cannot_be_is_refused():
    for name, change, kind, message in REFUSED.values():
        with pytest.raises(kind, match=message):
            ferrum_jax.ModelConfig.from_hf(tiny.CONFIGS[name] | change)
