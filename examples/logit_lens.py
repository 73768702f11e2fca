"""The logit lens: what a model would say if it stopped after each layer (nostalgebraist 2020)."""

import jax
import jax.numpy as jnp

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.generate.tokenizer import load_tokenizer
from ferrum_jax.weights import hub

path = hub.resolve(None)  # SmolLM2-135M-Instruct
params, cfg = ferrum_jax.load_params(path, dtype="float32", layout="scanned")
tokenizer = load_tokenizer(path)
ids = jnp.array([tokenizer.encode("The capital of France is")])
every = tuple(range(cfg.num_hidden_layers + 1))  # 0 is the embeddings


@jax.jit
def lens(params: models.specs.ParamTree, ids: jax.Array) -> jax.Array:
    """Probabilities of the next token after each layer, [L + 1, V]."""
    _, hidden, _ = models.capture(params, ids, cfg, hidden=every)
    states = jnp.stack([hidden[layer][0, -1] for layer in every])  # [L + 1, D]
    return jax.nn.softmax(models.logits_of(params, states, cfg))


found = lens(params, ids)
for layer, probabilities in enumerate(found):
    best = int(probabilities.argmax())
    print(f"{layer:3} {tokenizer.decode([best])!r:>16} {'#' * round(40 * float(probabilities[best]))}")
assert tokenizer.decode([int(found[-1].argmax())]) == " Paris"
assert tokenizer.decode([int(found[0].argmax())]) != " Paris"
