"""One token per row: greedy or drawn, with its log-probability."""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from ferrum_jax.sampling.filters import filter_logits
from ferrum_jax.sampling.penalty import penalise_repetition


@flax.struct.dataclass
class SampleInputs:
    """How each row is to be sampled."""

    temperature: Float[Array, " B"]  # 0: greedy
    top_k: Int[Array, " B"]  # 0: off
    top_p: Float[Array, " B"]  # 1: off
    min_p: Float[Array, " B"]  # 0: off
    repetition_penalty: Float[Array, " B"]  # 1: off
    seed: UInt32[Array, " B"]
    position: Int[Array, " B"]  # of the token to be drawn, in its sequence
    seen: Bool[Array, "B V"]  # tokens of the sequence so far


@flax.struct.dataclass
class Choice:
    """The token chosen for each row, and its log-probability under the model's own distribution."""

    token_ids: Int[Array, " B"]
    logprobs: Float[Array, " B"]


def sample(logits: Float[Array, "B V"], inputs: SampleInputs) -> Choice:
    """Chooses a token for each row.

    The order is: repetition penalty, temperature, top-k, top-p, min-p, draw. The draw of a row depends on its seed and
    position alone, never on the rows beside it. `logprobs` are those of the unchanged logits: what `forward` gives.
    """
    scores = lax.cond(
        jnp.any(inputs.repetition_penalty != 1.0),
        lambda: penalise_repetition(logits, inputs.seen, inputs.repetition_penalty),
        lambda: logits,
    )
    greedy = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    drawn = lax.cond(jnp.any(inputs.temperature > 0), lambda: _draw(scores, inputs), lambda: greedy)
    token_ids = jnp.where(inputs.temperature > 0, drawn, greedy)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    return Choice(token_ids=token_ids, logprobs=chosen - jax.nn.logsumexp(logits, axis=-1))


def _draw(scores: Float[Array, "B V"], inputs: SampleInputs) -> Int[Array, " B"]:
    warm = inputs.temperature > 0
    scaled = scores / jnp.where(warm, inputs.temperature, 1.0)[:, None]
    filtered = warm & ((inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0))
    scaled = lax.cond(
        jnp.any(filtered),
        lambda: filter_logits(scaled, inputs.top_k, inputs.top_p, inputs.min_p),
        lambda: scaled,
    )
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(
        inputs.seed, inputs.position
    )
    return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
