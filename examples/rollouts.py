"""Reinforcement learning: rollouts by the engine, an update of the weights, and the engine goes on with the new ones.

REINFORCE (Williams 1992) with the batch's mean as baseline; the reward is the share of even tokens. One tree of
parameters serves and is trained, nothing is copied between the two, and after the first round nothing compiles.
"""

import jax
import jax.numpy as jnp

import ferrum_jax
from ferrum_jax import models

ROUNDS, SAMPLES, TOKENS = 8, 8, 12
config = {
    "model_type": "qwen2", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
cfg = models.config_from_hf(config)
params = models.init_params(cfg, jax.random.key(0))
prompt = [1, 2, 3, 4]


def logprobs_of(params: models.specs.ParamTree, sequences: jax.Array) -> jax.Array:
    """Log-probability of every generated token, [B, N]."""
    logp = jax.nn.log_softmax(models.forward(params, sequences, cfg)[:, len(prompt) - 1 : -1])
    return jnp.take_along_axis(logp, sequences[:, len(prompt) :, None], axis=-1)[..., 0]


@jax.jit
def update(params: models.specs.ParamTree, sequences: jax.Array, advantages: jax.Array):
    """One step of gradient ascent; gives also the log-probabilities before it."""

    def objective(params: models.specs.ParamTree):
        logprobs = logprobs_of(params, sequences)
        return (logprobs * advantages[:, None]).sum(axis=1).mean(), logprobs

    (_, logprobs), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    return jax.tree.map(lambda x, g: x + 0.2 * g, params, gradient), logprobs


rewards, compiled = [], 0
with ferrum_jax.from_params(params, cfg, max_seqs=SAMPLES, kv_capacity=32) as runner:
    llm = ferrum_jax.LLM.from_model(runner, max_rows=SAMPLES)
    for at in range(ROUNDS):
        how = ferrum_jax.SamplingParams(temperature=1.0, max_tokens=TOKENS, n=SAMPLES, seed=at * SAMPLES, logprobs=True)
        outs = llm.generate([prompt], how)  # the prompt is read once
        runner.free_kv()  # its memory is the optimiser's now
        sequences = jnp.array([prompt + out.token_ids for out in outs])
        reward = (sequences[:, len(prompt) :] % 2 == 0).mean(axis=1)
        params, logprobs = update(params, sequences, reward - reward.mean())
        served = jnp.array([out.logprobs for out in outs])
        assert jnp.allclose(served, logprobs, atol=1e-5), "what was served is what is trained"
        runner.set_params(params)
        runner.allocate_kv()
        rewards.append(float(reward.mean()))
        compiled = compiled or runner.compile_stats()["compiled"]
        print(f"round {at}: reward {rewards[-1]:.2f}")
    assert runner.compile_stats()["compiled"] == compiled
assert sum(rewards[-3:]) > sum(rewards[:3])
