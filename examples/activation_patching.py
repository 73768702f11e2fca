"""Activation patching: which layer and position carry the answer's subject?

Meng et al. 2022, "Locating and Editing Factual Associations in GPT", section 2.1. The residual stream of a run on
"France" takes the place of that of a run on "Italy", one layer and position at a time; what counts is how much of the
difference between the two answers comes back. All positions of a layer are rows of one call, which begins at that
layer: what lies before it is the run on "Italy". The layer is an argument, so one program serves all patches.
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
prompts = ["The capital of France is the city of", "The capital of Italy is the city of"]
clean, corrupt = (tokenizer.encode(one) for one in prompts)
paris, rome = (tokenizer.encode(one)[-1] for one in (" Paris", " Rome"))
assert len(clean) == len(corrupt)
length, layers = len(clean), cfg.num_hidden_layers


def score(logits: jax.Array) -> jax.Array:
    """How much likelier Paris is than Rome after the last token."""
    return logits[:, -1, paris] - logits[:, -1, rome]


run = jax.jit(lambda tokens: models.run(params, tokens, cfg, capture=[("resid_pre", None)], logits="last"))
logits, seen = run(jnp.array([clean, corrupt]))
best, worst = score(logits)
states = jnp.stack([seen["resid_pre", layer] for layer in range(layers)])  # [L, 2, T, D]


@jax.jit
def patched(layer: jax.Array) -> jax.Array:
    """The share of the difference that each position of a layer restores, [T]."""
    of_france, of_italy = states[layer]
    patches = jnp.where(jnp.eye(length, dtype=bool)[:, :, None], of_france, of_italy)  # one position in each row
    rows = jnp.tile(jnp.array([corrupt]), (length, 1))
    logits = models.forward(params, rows, cfg, inputs_embeds=patches, first_layer=layer, logits="last")
    return (score(logits) - worst) / (best - worst)


table = jnp.stack([patched(jnp.int32(layer)) for layer in range(0, layers, 6)])
print("layer ", *(f"{tokenizer.decode([token]):>9}" for token in corrupt))
for row, layer in zip(table, range(0, layers, 6), strict=True):
    print(f"{layer:>5} ", *(f"{float(share):9.2f}" for share in row))
subject = next(at for at, (one, other) in enumerate(zip(clean, corrupt, strict=True)) if one != other)
assert table[0, subject] > 0.99, "before the first layer, the subject's embedding is all the difference"
assert jnp.abs(jnp.delete(table[0], subject)).max() < 1e-3
