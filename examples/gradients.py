"""Gradients through the serving forward: which prompt token does an answer lean on?

The gradient of the answer's log-probability with respect to each input embedding, its norm shown as a bar.
"""

import jax
import jax.numpy as jnp

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.generate.tokenizer import load_tokenizer
from ferrum_jax.weights import hub

path = hub.resolve(None)  # SmolLM2-135M-Instruct
params, cfg = ferrum_jax.load_params(path, dtype="float32")
tokenizer = load_tokenizer(path)
prompt, answer = "The capital of France is", " Paris"
ids = jnp.array([tokenizer.encode(prompt) + tokenizer.encode(answer)])


@jax.jit  # the parameters are an argument: closed over, they would be constants of the program
def logprob(embeddings: jax.Array, params: models.specs.ParamTree) -> jax.Array:
    """Log-probability of the last token, given the embeddings of all."""
    logits = models.forward(params, ids, cfg, inputs_embeds=embeddings)
    return jax.nn.log_softmax(logits[0, -2])[ids[0, -1]]


embeddings = params["model"]["embed_tokens"]["weight"][ids]  # [1, T, D]
value, gradient = jax.value_and_grad(logprob)(embeddings, params)
norms = jnp.linalg.norm(gradient[0], axis=-1)
print(f"log p({answer!r} | {prompt!r}) = {value:.3f}")
for token, norm in zip(ids[0, :-1].tolist(), norms.tolist(), strict=False):
    print(f"{tokenizer.decode([token]):>10} {'#' * round(40 * norm / float(norms.max()))}")
assert bool(jnp.isfinite(gradient).all())
assert float(norms[-1]) == 0.0, "the answer's own embedding cannot change its probability"
