"""Models with experts that transformers builds and saves, live against it: three seeds, one-shot, chunked, batched."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ferrum_jax
from ferrum_jax import models
from scripts.make_references import logits_of
from tests import tiny

pytestmark = pytest.mark.reference

TOLERANCE = 2e-4  # float32 sums in another order, over three layers; logits are of the order of one
ENGINE = ferrum_jax.EngineConfig(
    max_seqs=3,
    kv_capacity=160,
    block_size=8,
    decode_rows=(3,),
    query_blocks=(2,),
    block_tokens=16,
    verify_tokens=16,
)
WITH_EXPERTS = [
    name for name in tiny.CONFIGS if any(family in name for family in ("moe", "mixtral", "deepseek", "gpt_oss"))
]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_every_path_gives_the_logits_of_transformers(name: str, seed: int, tmp_path: Path):
    settings = {key: value for key, value in tiny.CONFIGS[name].items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(tiny.CONFIGS[name]["model_type"], **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = 0.2 if parameter.ndim == 1 else 1.2 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in parameter_name else 0.0))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    prompts = [np.random.default_rng([seed, length]).integers(97, size=length).tolist() for length in (45, 23, 31)]
    expected = [logits_of(model, tokens) for tokens in prompts]
    params, cfg = ferrum_jax.load_params(tmp_path, dtype="float32")
    logits = jax.jit(models.forward, static_argnums=2)(params, jnp.asarray(prompts[:1]), cfg)
    np.testing.assert_allclose(logits[0], expected[0], rtol=0, atol=TOLERANCE)
    with ferrum_jax.load(tmp_path, dtype="float32", engine=ENGINE, progress=False) as runner:
        for row, tokens in enumerate(prompts):
            found = runner.forward_verify(str(row), tokens[:-3])
            np.testing.assert_allclose(found, expected[row][:-3], rtol=0, atol=TOLERANCE)
        for back in (3, 2, 1):
            rows = [(str(row), tokens[-back], len(tokens) - back) for row, tokens in enumerate(prompts)]
            wanted = np.stack([logits[-back] for logits in expected])
            np.testing.assert_allclose(runner.decode_batch(rows), wanted, rtol=0, atol=TOLERANCE)
