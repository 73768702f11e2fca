"""Log-probabilities on the real model: a rollout's, a prompt's and scores are those of the forward."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import LLM, EngineConfig, SamplingParams, models

TOLERANCE = 1e-4  # float32 sums in another order, over thirty layers
PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):\n    "]


@pytest.mark.slow
def test_logprobs_on_smollm2_are_those_of_the_forward_alone_and_in_a_batch(smollm2_path: Path):
    engine = EngineConfig(
        decode_rows=(1, 8),
        query_blocks=(1,),
        block_tokens=16,
        max_step_tokens=16,
        verify_tokens=16,
        multi_step_tokens=4,
    )
    asked = [
        SamplingParams(max_tokens=12, temperature=0.8, seed=at, logprobs=True, prompt_logprobs=True) for at in range(8)
    ]
    with LLM(smollm2_path, max_seqs=8, kv_capacity=64, engine=engine, progress=False) as llm:
        cfg, weights = llm.runner.model_config, llm.runner.params
        run = jax.jit(lambda tokens: jax.nn.log_softmax(models.forward(weights, tokens, cfg)))
        outs = llm.generate([PROMPTS[at % 3] for at in range(8)], asked)
        (alone,) = llm.generate([PROMPTS[1]], asked[4])
        scores = llm.score([out.prompt_token_ids for out in outs], [out.token_ids for out in outs])
        for out, score in zip(outs, scores, strict=True):
            tokens = [*out.prompt_token_ids, *out.token_ids]
            logp = np.asarray(run(jnp.array([tokens + [0] * (32 - len(tokens))])))[0]
            expected = logp[np.arange(len(tokens) - 1), tokens[1:]]
            count = len(out.prompt_token_ids)
            assert out.prompt_logprobs is not None
            assert out.logprobs is not None
            found = [*out.prompt_logprobs[1:], *out.logprobs]
            np.testing.assert_allclose(np.array(found, float), expected, rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(score.logprobs, expected[count - 1 :], rtol=0, atol=TOLERANCE)
    assert alone.text == outs[4].text
