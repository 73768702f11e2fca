"""LoRA: an adapter is trained through the serving forward, and served from the arrays that were trained.

Hu et al. 2021, "LoRA". The optimiser is Adam by hand; any other that takes a tree of gradients does as well. To keep
the adapter on disk in PEFT's format, there is `weights.peft.write_adapter(folder, stacks, cfg)`.
"""

from functools import partial

import jax
import jax.numpy as jnp

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.models.adapters import LoraSpec, stack_specs

config = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
cfg = models.config_from_hf(config)
params = models.specs.initialise(models.family(cfg).param_specs(cfg), jax.random.key(0), "float32", scale=0.2)
lesson = jnp.array([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46]])  # to be known by heart
stacks = models.specs.initialise(stack_specs(cfg, LoraSpec(max_loras=1, max_rank=4)), jax.random.key(1), "float32", 0.2)


def loss(stacks: models.specs.ParamTree) -> jax.Array:
    """Cross entropy of the lesson under the adapter; the model's own parameters stay as they are."""
    logits = models.forward(params, lesson[:, :-1], cfg, loras=stacks, adapters=jnp.zeros(1, jnp.int32))
    logp = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logp, lesson[:, 1:, None], axis=-1).mean()


@partial(jax.jit, donate_argnums=(0, 1, 2))
def train(stacks, mean, square, at):  # one step of Adam (Kingma and Ba 2014)
    value, gradient = jax.value_and_grad(loss)(stacks)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)
    scale = 0.02 * jnp.sqrt(1 - 0.99**at) / (1 - 0.9**at)
    return jax.tree.map(lambda x, m, s: x - scale * m / (jnp.sqrt(s) + 1e-8), stacks, mean, square), mean, square, value


mean, square = jax.tree.map(jnp.zeros_like, (stacks, stacks))
for at in range(1, 151):
    stacks, mean, square, value = train(stacks, mean, square, jnp.float32(at))
    if at % 50 == 0:
        print(f"step {at}: loss {value:.4f}")

start, how = lesson[0, :1].tolist(), ferrum_jax.SamplingParams(max_tokens=lesson.shape[1] - 1)
with ferrum_jax.from_params(params, cfg, max_seqs=2, kv_capacity=32, max_loras=1, max_lora_rank=4) as runner:
    llm = ferrum_jax.LLM.from_model(runner)
    llm.set_lora("lesson", stacks)  # again after more training: other arrays, the same name
    tuned, plain = llm.generate([start, start], how, lora_request=["lesson", None])
print("recited:", start + tuned.token_ids)
print("without the adapter:", start + plain.token_ids)
assert start + tuned.token_ids == lesson[0].tolist() != start + plain.token_ids
