"""Activation steering: a direction between two kinds of text, added to one layer while the model generates.

Turner et al. 2023, "Activation Addition". The vector is an argument of the compiled generation: a new one compiles
nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.generate.tokenizer import load_tokenizer
from ferrum_jax.weights import hub

LAYER, TOKENS = 12, 16
path = hub.resolve(None)  # SmolLM2-135M-Instruct
params, cfg = ferrum_jax.load_params(path, dtype="float32", layout="scanned")
tokenizer = load_tokenizer(path)
capture = jax.jit(partial(models.capture, cfg=cfg, hidden=(LAYER + 1,)))


def state_of(text: str) -> jax.Array:
    """The layer's output for a text's last token, [D]."""
    ids = tokenizer.encode(text)
    padded = jnp.array([ids + [0] * (16 - len(ids))])  # causal: what follows does not matter
    return capture(params, padded)[1][LAYER + 1][0, len(ids) - 1]


direction = state_of("I love this, it is wonderful") - state_of("I hate this, it is terrible")
prompt = tokenizer.encode("My opinion about the new restaurant in town:")
inputs = (jnp.array([prompt]), jnp.array([len(prompt)]), jnp.zeros(1, jnp.uint32))


def vectors(strength: float) -> jax.Array:
    """Zeros for every layer but one, [L, D]."""
    return jnp.zeros((cfg.num_hidden_layers, cfg.hidden_size)).at[LAYER].set(strength * direction)


generate = jax.jit(partial(ferrum_jax.generate_fn, cfg=cfg, max_tokens=TOKENS))
compiled = generate.lower(params, None, *inputs, steering=vectors(0.0)).compile()  # cannot compile again
answers = {}
for strength in (-0.8, 0.0, 0.8):
    found, _ = compiled(params, None, *inputs, steering=vectors(strength))
    answers[strength] = tokenizer.decode(found.token_ids[0].tolist())
    print(f"{strength:+.1f} {answers[strength]!r}")
assert len(set(answers.values())) == 3
