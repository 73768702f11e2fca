"""What users run: XLA with LLVM's optimisations, which the suite compiles without, and the default model's sizes.

`.ci/run` runs the tests of what those optimisations decide with them.
"""

import os

import pytest

from ferrum_jax.config import ModelConfig

SMOLLM2 = ModelConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rope_theta=1e5,
    tie_word_embeddings=True,
    layer_windows=(None,) * 30,
)

needs_optimisations = pytest.mark.skipif(
    "--xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", ""),
    reason="XLA cannot write every step that LLVM has not optimised: run with --xla_backend_optimization_level=3",
)
