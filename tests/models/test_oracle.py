"""The oracle of other tests: equal to the references of transformers, and to the serving forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import models
from tests import tiny
from tests.models.test_parity import REFERENCES, TOLERANCE
from tests.oracle import oracle
from tests.tiers import by_default

SAME = 5e-5  # float32 sums in another order; logits are of the order of one
NAMES = (
    "llama3", "llama_biases", "llama_long", "mistral", "mistral_long_tied", "qwen2_layer_types", "qwen3_tied",
    "qwen3_window_biases", "smollm3",
)  # fmt: skip


@pytest.mark.parametrize("name", by_default(NAMES, "qwen3_window_biases"))
def test_the_oracle_equals_the_reference_and_the_serving_forward(name: str):
    params, tokens, cfg = tiny.tiny_params(tiny.CONFIGS[name]), jnp.asarray(tiny.prompt(name)), tiny.model_config(name)
    found = oracle(params, tokens, cfg)
    with np.load(REFERENCES) as references:
        np.testing.assert_allclose(found, references[name], rtol=0, atol=TOLERANCE)
    served = jax.jit(models.forward, static_argnums=2)(params, tokens[None], cfg)[0]
    np.testing.assert_allclose(found, served, rtol=0, atol=SAME)
