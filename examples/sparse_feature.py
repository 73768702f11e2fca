"""A feature of a sparse autoencoder, found in captured activations and turned up while the model is served.

Bricken et al. 2023, "Towards Monosemanticity": one layer's residual stream is taken apart into few of many directions.
Here they are learnt from some sentences, until one direction stands for a topic; adding it turns the talk to that.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.example_libraries import optimizers

import ferrum_jax
from ferrum_jax.models import Edit

POINT, FEATURES, SPARSITY, STEPS = ("resid_post", 14), 192, 0.03, 300
SEA = ["The ship sailed over the stormy sea.", "Waves broke over the deck.", "Sailors saw whales in the ocean.",
       "The harbour was full of fishing boats.", "A captain steers by the stars at sea."]  # fmt: skip
OTHER = ["The bank raised its interest rates.", "She plays the violin well.", "Computers sort numbers quickly.",
         "The teacher explained the lesson again.", "Bread needs flour, water and time."]  # fmt: skip
begin, change, weights_of = optimizers.adam(3e-3)


@jax.jit
def train(weights: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """Learns encoder and decoder; what is decoded is a sum of unit directions."""

    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        found = jax.nn.relu(x @ weights["encode"] + weights["bias"])
        decode = weights["decode"] / jnp.linalg.norm(weights["decode"], axis=1, keepdims=True)
        return jnp.mean((found @ decode - x) ** 2) + SPARSITY * jnp.mean(found)

    def step(at: Any, state: Any) -> Any:
        return change(at, jax.grad(loss)(weights_of(state)), state)

    return weights_of(jax.lax.fori_loop(0, STEPS, step, begin(weights)))


with ferrum_jax.LLM(max_seqs=5, kv_capacity=64) as llm:
    one = ferrum_jax.SamplingParams(max_tokens=1)
    outs = llm.generate(SEA + OTHER, one, capture=[POINT])
    x = np.concatenate([out.captured[POINT][1:] for out in outs])
    is_sea = np.repeat(np.arange(len(outs)) < len(SEA), [len(out.captured[POINT]) - 1 for out in outs])
    mean, scale = x.mean(axis=0), x.std()
    decode = jax.random.normal(jax.random.key(0), (FEATURES, x.shape[1])) / np.sqrt(x.shape[1])
    x = jnp.asarray((x - mean) / scale)
    weights = train({"encode": decode.T, "decode": decode, "bias": jnp.zeros(FEATURES)}, x)
    active = x @ weights["encode"] + weights["bias"] > 0
    feature = int(jnp.argmax(active[is_sea].mean(axis=0) - active[~is_sea].mean(axis=0)))
    direction = np.asarray(weights["decode"][feature] / jnp.linalg.norm(weights["decode"][feature])) * scale
    shares = [float(active[where, feature].mean()) for where in (is_sea, ~is_sea)]
    print(f"feature {feature} is active on {shares[0]:.0%} of the tokens about the sea, {shares[1]:.0%} of the others")
    assert shares[0] > 0.2 > 0.05 > shares[1]
    strengths = [0.0, 6.0, 12.0]
    prompts, how = ["Yesterday I went to"] * 3, ferrum_jax.SamplingParams(max_tokens=20)
    outs = llm.generate(prompts, how, interventions=[{POINT: Edit(add=strength * direction)} for strength in strengths])
    for strength, out in zip(strengths, outs, strict=True):
        print(f"{strength:4.0f} {out.text!r}")
    assert len({out.text for out in outs}) > 1
