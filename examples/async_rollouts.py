"""Asynchronous reinforcement learning: weights change while answers are being generated, and every token knows its own.

REINFORCE on batches in the order in which answers finish. A token that older weights have sampled counts with the ratio
of its probability now to the one it was sampled with, up to 2 (Espeholt et al. 2018, "IMPALA", section 4.1).
"""

import jax
import jax.numpy as jnp
import numpy as np

import ferrum_jax
from ferrum_jax import models

BATCH, TOKENS, ANSWERS = 16, 24, 400
config = {
    "model_type": "qwen2", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
cfg = models.config_from_hf(config)
params = models.init_params(cfg, jax.random.key(0))
prompt, zeros = [1, 2, 3, 4], [0] * TOKENS


@jax.jit
def update(params: models.specs.ParamTree, tokens: jax.Array, sampled: jax.Array, real: jax.Array, gain: jax.Array):
    """One step of gradient ascent on answers `[B, N]`, whose log-probabilities were `sampled`."""

    def objective(params: models.specs.ParamTree) -> jax.Array:
        logp = jax.nn.log_softmax(models.forward(params, tokens, cfg)[:, len(prompt) - 1 : -1])
        logp = jnp.take_along_axis(logp, tokens[:, len(prompt) :, None], axis=-1)[..., 0]
        ratio = jax.lax.stop_gradient(jnp.minimum(jnp.exp(logp - sampled), 2.0))
        return jnp.where(real, ratio * logp * gain[:, None], 0.0).sum() / len(tokens)

    return jax.tree.map(lambda x, g: x + 0.3 * g, params, jax.grad(objective)(params))


none, tokens = np.zeros((BATCH, TOKENS), "float32"), np.zeros((BATCH, len(prompt) + TOKENS), "int32")
tokens[:, : len(prompt)] = prompt
update(params, tokens, none, none > 0, none[:, 0])  # compiles, before anything is sampled
rewards, ages, batch = [], [], []
how = ferrum_jax.SamplingParams(temperature=1.0, max_tokens=TOKENS, n=ANSWERS, logprobs=True, stop_token_ids=[0])
with ferrum_jax.from_params(params, cfg, max_seqs=8, kv_capacity=32) as runner:
    llm = ferrum_jax.LLM.from_model(runner)
    for _, out in llm.as_completed([prompt], how):  # all the while, the engine's thread goes on with the others
        batch.append(out)
        if len(batch) < BATCH:
            continue
        ids = np.array([(one.token_ids + zeros)[:TOKENS] for one in batch])  # zeros after their ends
        sampled = np.array([(one.logprobs + zeros)[:TOKENS] for one in batch], "float32")
        real = np.arange(TOKENS) < np.array([len(one.token_ids) for one in batch])[:, None]
        reward = ((ids % 2 == 0) & real).sum(axis=1) / real.sum(axis=1)
        tokens[:, len(prompt) :] = ids
        params = update(params, tokens, sampled, real, np.float32(reward - reward.mean()))
        version = llm.set_params(params, live="keep")  # between two steps; answers go on
        rewards.append(float(reward.mean()))
        ages += [version - 1 - at for one in batch for at in one.weight_versions]
        print(f"weights {version}: reward {rewards[-1]:.2f}, tokens up to {max(ages[-BATCH * TOKENS :])} updates old")
        batch = []
assert max(ages) > 0, "some tokens are of older weights than those that they trained"
assert np.mean(rewards[-3:]) > np.mean(rewards[:3])
