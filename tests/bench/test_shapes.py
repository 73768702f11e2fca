"""The shapes of large models have the number of parameters that their names say."""

import pytest

from bench.shapes import SHAPES
from ferrum_jax.config import ModelConfig
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import num_parameters


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_a_model_has_as_many_parameters_as_its_checkpoint(name: str, count: int):
    cfg = ModelConfig.from_hf(SHAPES[name])
    assert num_parameters(family(cfg).param_specs(cfg)) == count
