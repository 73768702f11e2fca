"""GRPO (Shao et al. 2024) with tunix, and this engine for its rollouts: needs `pip install "ferrum-jax[tunix]"`.

tunix keeps model, optimiser and loss; `rollout_engine` says who generates. Letters such as a, c and e are rewarded.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
import functools

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from ferrum_jax.integrations.tunix import FerrumRollout

rewards = []
STEPS, SAMPLES, PROMPTS = 10, 8, ["abc", "b", "cab", "dcba"]


class Letters:
    """A tokenizer: 0 pads, 1 begins a text, 2 ends it, then come the letters."""

    pad_id, bos_id, eos_id = (lambda self: 0), (lambda self: 1), (lambda self: 2)
    encode = staticmethod(lambda text: [ord(letter) - ord("a") + 3 for letter in text])
    decode = staticmethod(lambda ids: "".join(chr(token + ord("a") - 3) for token in ids if token > 2))


def reward(completions, **_):
    found = [sum(ord(letter) % 2 for letter in text) / max(len(text), 1) for text in completions]
    rewards.append(np.mean(found))
    print(f"step {len(rewards)}: reward {rewards[-1]:.2f}")
    return found


config = qwen2.ModelConfig(
    num_layers=2, vocab_size=29, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8, num_kv_heads=2,
    rope_theta=10_000, norm_eps=1e-6, dtype=np.float32, param_dtype=np.float32,
)  # fmt: skip
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
cluster = RLCluster(
    actor=qwen2.Qwen2(config, rngs=nnx.Rngs(0)),
    tokenizer=Letters(),
    cluster_config=ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        rollout_engine=functools.partial(FerrumRollout, max_seqs=len(PROMPTS) * SAMPLES),
        rollout_config=RolloutConfig(max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=16, temperature=0.9),
        training_config=RLTrainingConfig(
            actor_optimizer=optax.adam(0.02), mini_batch_size=len(PROMPTS), max_steps=STEPS, eval_every_n_steps=1000
        ),
    ),
)
GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, beta=0.0), reward_fns=reward).train(
    [{"prompts": np.array(PROMPTS)} for _ in range(STEPS)]
)
cluster.rollout.close()
assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
