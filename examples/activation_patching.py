"""Activation patching of indirect object identification: where does a model keep who gives the drink?

Wang et al. 2022, "Interpretability in the Wild", section 3. Two prompts differ in the subject of their second clause;
measured is the logit of " Mary" minus that of " John" after the last token. One layer and position at a time, the clean
run's residual stream takes the place of the corrupted run's: how much of the difference comes back? All positions of a
layer are rows of one call, which begins at that layer; the layer is an argument, so one program serves all patches.
"""

from functools import partial

import jax
import jax.numpy as jnp

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.generate.tokenizer import load_tokenizer
from ferrum_jax.weights import hub

TEXT = "When Mary and John went to the store, {} gave a drink to"
path = hub.resolve(None)  # SmolLM2-135M-Instruct
params, cfg = ferrum_jax.load_params(path, dtype="float32", layout="scanned")
tokenizer = load_tokenizer(path)
clean, corrupted = (tokenizer.encode(TEXT.format(subject)) for subject in ("John", "Mary"))
mary, john = (tokenizer.encode(name)[-1] for name in (" Mary", " John"))
(second,) = (at for at, pair in enumerate(zip(clean, corrupted, strict=True)) if pair == (john, mary))
length, layers = len(clean), cfg.num_hidden_layers


def difference(logits: jax.Array) -> jax.Array:
    """The logit of Mary minus that of John after the last token."""
    return logits[:, -1, mary] - logits[:, -1, john]


run = jax.jit(partial(models.run, cfg=cfg, capture=[("resid_pre", None)], logits="last"))
logits, seen = run(params, jnp.array([clean, corrupted]))
best, worst = difference(logits)
print(f"Mary's logit minus John's: {best:.2f} after the clean prompt, {worst:.2f} after the corrupted one")
assert best > 0 > worst, "the model names the one who is not the subject"
states = jnp.stack([seen["resid_pre", layer] for layer in range(layers)])  # [L, 2, T, D]


@jax.jit
def restored(params: models.specs.ParamTree, layer: jax.Array) -> jax.Array:
    """The share of the difference that each position of a layer restores, [T]."""
    own, other = states[layer]
    patches = jnp.where(jnp.eye(length, dtype=bool)[..., None], own, other)  # one position in each row
    rows = jnp.array([corrupted] * length)
    logits = models.forward(params, rows, cfg, inputs_embeds=patches, first_layer=layer, logits="last")
    return (difference(logits) - worst) / (best - worst)


shares = jnp.stack([restored(params, jnp.int32(layer)) for layer in range(layers)])  # [L, T]
print("layer", *(f"{tokenizer.decode([token]):>6}" for token in corrupted))
for layer, row in enumerate(shares):
    print(f"{layer:>5}", *(f"{float(share):z6.2f}" for share in row))
largest = [int(at) for at in shares.argmax(axis=1)]  # by layer
turn, mover = largest.index(length - 1), int(jnp.diff(shares[:, -1]).argmax())
print(f"largest at the second subject before layer {turn}, then at the last token; layer {mover} moves most of it")
assert set(largest) == {second, length - 1}
assert jnp.allclose(shares[0], jnp.eye(length)[second], atol=1e-3), "at first it is all in the subject's embedding"
