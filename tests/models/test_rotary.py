"""Rotary frequencies of published models, whose bands of kept, blended and divided pairs no tiny model has.

A scaling divides the frequency of each pair by a number: 1 in the first band, the factor in the last. Those between are
what transformers 5.24 computes; tests/reference compares all of them live.
"""

from typing import Any

import numpy as np
import pytest

from ferrum_jax.config import ModelConfig
from ferrum_jax.models.rotary import frequencies, frequencies_of_layers
from tests import tiny

YARN: dict[str, Any] = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# By model: a tiny one of its family, settings, pairs that are kept, divisors of the next ones, and the magnitude.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int, list[float], float]] = {
    "Qwen2.5 7B": (
        "qwen25_yarn",
        {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1e6,
         "max_position_embeddings": 32768,
         "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        24,
        [1.04615, 1.09677, 1.15254, 1.21429, 1.28302, 1.36, 1.44681, 1.54545, 1.65854, 1.78947, 1.94286, 2.125, 2.34483,
         2.61538, 2.95652, 3.4],
        1.138629436,
    ),
    "GPT-OSS 20B": (
        "gpt_oss",
        {"head_dim": 64, "rope_theta": 150000.0, "max_position_embeddings": 131072,
         "rope_scaling": YARN | {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}},
        9,
        [1.1043, 1.24775, 1.43403, 1.68569, 2.04449, 2.59733, 3.55994, 5.65625, 13.7575],
        1.34657359,
    ),
    "OLMo 3 7B": (
        "olmo3",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
         "rope_theta": 500000.0, "max_position_embeddings": 65536,
         "rope_scaling": YARN | {"factor": 8.0, "original_max_position_embeddings": 8192,
                                 "attention_factor": 1.2079441541679836}},
        19,
        [1.05426, 1.11475, 1.18261, 1.25926, 1.34653, 1.44681, 1.56322, 1.7, 1.86301, 2.06061, 2.30508, 2.61538,
         3.02222, 3.57895, 4.3871, 5.66667],
        1.207944154,
    ),
    "DeepSeek V3": (
        "deepseek3",
        {"qk_rope_head_dim": 64, "rope_theta": 10000.0, "max_position_embeddings": 163840,
         "rope_scaling": YARN | {"factor": 40.0, "original_max_position_embeddings": 4096,
                                 "mscale": 1.0, "mscale_all_dim": 1.0}},
        11,
        [1.08108, 1.17647, 1.29032, 1.42857, 1.6, 1.81818, 2.10526, 2.5, 3.07692, 4.0, 5.71429, 10.0],
        1.0,
    ),
    "Llama 3.1 8B": (
        "llama31",
        {"head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072,
         "rope_scaling": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192}},
        29,
        [1.20748, 1.55341, 2.02631, 2.69453, 3.68425, 5.25733],
        1.0,
    ),
    "Llama 3.2 1B": (
        "llama31",
        {"head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072,
         "rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}},
        15,
        [1.65133, 3.29226, 9.66673],
        1.0,
    ),
}  # fmt: skip


def settings_of(name: str) -> dict[str, Any]:
    """Returns a `config.json` with the rotary settings of a published model."""
    family, settings, *_ = PUBLISHED[name]
    return tiny.CONFIGS[family] | settings


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_of_a_published_model(name: str):
    _, settings, kept, blended, magnitude = PUBLISHED[name]
    cfg = ModelConfig.from_hf(settings_of(name))
    found, found_magnitude = frequencies(cfg)
    rest = len(found) - kept - len(blended)
    divisors = [1.0] * kept + blended + [settings["rope_scaling"]["factor"]] * rest
    pairs = np.arange(len(found)) / len(found)
    np.testing.assert_allclose(found, settings["rope_theta"] ** -pairs / divisors, rtol=1e-5)
    assert found_magnitude == pytest.approx(magnitude)


def test_layers_with_a_window_of_olmo_3_have_plain_frequencies():
    cfg = ModelConfig.from_hf(settings_of("OLMo 3 7B"))
    kinds, of_layer = frequencies_of_layers(cfg)
    plain, magnitude = kinds[of_layer[0]]
    np.testing.assert_allclose(plain, 500000.0 ** -(np.arange(64) / 64), rtol=1e-5)
    assert (magnitude, of_layer) == (1.0, [1, 1, 1, 0])
