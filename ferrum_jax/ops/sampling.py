"""Sampling: pure functions from logits to token ids and log-probabilities, for compiled steps and elsewhere.

The order is: forbidden tokens and bias, penalties, temperature, top-k, top-p, min-p, draw. The draw is the Gumbel-max
trick (Maddison et al. 2014, "A* Sampling", section 2) with noise that is a hash of (seed, position, token id) only. So
a row draws the same token in any batch and, except for the rounding of sums, in any program, and models that share a
seed tend to agree.

Nothing sorts the vocabulary. The `NUM_CANDIDATES` best tokens of a row decide its filters; if a filter keeps more
tokens, bisection finds its threshold. `filter_and_draw` has no branch, which on a GPU would make the host wait, and
finds every threshold digit by digit.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from ferrum_jax.ops import native
from ferrum_jax.ops.kernel_use import are_used
from ferrum_jax.sharding.types import vary_like

Leaf = TypeVar("Leaf")
MAX_TOP_LOGPROBS = 20  # alternatives reported beside each token
NUM_CANDIDATES = 256  # best tokens of a row; a filter that keeps fewer needs no others
DIGIT_BITS = 4  # bits of a threshold that one pass over the vocabulary finds, on a GPU
_SMALLEST = -(2**31)  # int32
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 2.0**-126, 1e37  # as in choose.h: temperatures are clipped to these


@flax.struct.dataclass
class SampleInputs(Generic[Leaf]):
    """How each row is sampled. If `repetition_penalty` or `seen` is None, no row is penalised."""

    temperature: Leaf  # float32 [B]; 0: greedy
    top_k: Leaf  # int32 [B]; 0: off
    top_p: Leaf  # float32 [B]; 1: off
    min_p: Leaf  # float32 [B]; 0: off
    seed: Leaf  # uint32 [B]
    position: Leaf  # int32 [B]: position of the token to be drawn in its sequence
    repetition_penalty: Leaf | None = None  # float32 [B]; 1: off
    seen: Leaf | None = None  # bool [B, V]: tokens of the sequence so far, for the repetition penalty


@flax.struct.dataclass
class Choice(Generic[Leaf]):
    """The token chosen for each row and its log-probabilities, float32."""

    token_ids: Leaf  # int32 [B]
    logprobs: Leaf  # [B]: under the model's own distribution
    processed_logprobs: Leaf  # [B]: under the distribution it was drawn from; greedy rows: after penalties and masks


def sample(logits: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> Choice[jax.Array]:
    """Chooses a token for each row; `Choice.logprobs`, of the model's own distribution, is differentiable."""
    scores = logits
    if inputs.repetition_penalty is not None and inputs.seen is not None:
        scores = penalise_repetition(logits, inputs.seen, inputs.repetition_penalty)
    token_ids, threshold = choose(scores, inputs)
    kept = kept_logits(scores, inputs.temperature, threshold)
    # If XLA recomputes the scores, they may be rounded differently: the drawn token is kept in any case.
    is_chosen = jnp.arange(scores.shape[-1], dtype=jnp.int32) == token_ids[:, None]
    kept = jnp.where(is_chosen, over_temperature(lax.stop_gradient(scores), inputs.temperature), kept)
    processed = token_logprobs(kept, token_ids)
    return Choice(token_ids=token_ids, logprobs=token_logprobs(logits, token_ids), processed_logprobs=processed)


def choose(scores: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Chooses a token for each row, given scores after penalties and masks.

    Returns the token ids, and each row's threshold: the score from which on tokens are kept, relative to the best and
    divided by the temperature; -inf without filters. If all rows are greedy, or no row is filtered, the other cases are
    not computed.
    """
    scores, inputs = vary_like((lax.stop_gradient(scores), inputs), scores, inputs)
    if _has_kernel(scores):
        filters = inputs.top_k, inputs.top_p, inputs.min_p
        return native.choose(scores, inputs.temperature, *filters, inputs.seed, inputs.position)
    is_drawn = inputs.temperature > 0
    unfiltered = vary_like(jnp.full(len(scores), -jnp.inf, jnp.float32), scores)

    def take_best() -> tuple[jax.Array, jax.Array]:
        return argmax(scores), unfiltered

    def draw_unfiltered() -> tuple[jax.Array, jax.Array]:
        return draw(scores, inputs), unfiltered

    def draw_filtered() -> tuple[jax.Array, jax.Array]:
        scaled = over_temperature(scores, inputs.temperature)
        among_best, threshold, is_among_best = _draw_from_best(scaled, inputs)
        threshold = jnp.where(is_filtered(inputs), threshold, -jnp.inf)
        is_among_best &= is_filtered(inputs)

        def draw_from_all() -> jax.Array:
            return jnp.where(is_among_best, among_best, _draw_from(scores, scaled, threshold, inputs))

        return lax.cond(jnp.all(is_among_best), lambda: among_best, draw_from_all), threshold

    which = jnp.any(is_drawn).astype(jnp.int32) + jnp.any(is_filtered(inputs)).astype(jnp.int32)
    return lax.switch(which, (take_best, draw_unfiltered, draw_filtered))


def filter_and_draw(
    scores: Float[Array, "B V"], inputs: SampleInputs[jax.Array]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Chooses as `choose`, without branches: computes for every row all that any row could need."""
    scaled = over_temperature(scores, inputs.temperature)
    threshold = filter_threshold(scaled, inputs.top_k, inputs.top_p, inputs.min_p, has_branches=False)
    threshold = jnp.where(is_filtered(inputs), threshold, -jnp.inf)
    return _draw_from(scores, scaled, threshold, inputs), threshold


def _draw_from(
    scores: jax.Array, scaled: jax.Array, threshold: jax.Array, inputs: SampleInputs[jax.Array]
) -> jax.Array:
    """Draws a token for each row from those at or above its threshold; a row of temperature 0 takes the best."""
    kept = jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)
    return argmax(jnp.where((inputs.temperature > 0)[:, None], kept + _noise(scores, inputs), scores))


def is_filtered(inputs: Any) -> Any:
    """Returns True for rows that sample from fewer than all tokens.

    `inputs` are `SampleInputs`, or an object with single numbers of the same names: bool `[B]`, or one bool.
    """
    return (inputs.temperature > 0) & ((inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0))


def draw(scores: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> Int[Array, " B"]:
    """Draws a token for each row from all tokens, without filters; a row of temperature 0 takes the best."""
    if _has_kernel(scores):
        off = jnp.zeros_like(inputs.top_k), jnp.ones_like(inputs.top_p), jnp.zeros_like(inputs.min_p)
        return native.choose(scores, inputs.temperature, *off, inputs.seed, inputs.position)[0]
    noisy = over_temperature(scores, inputs.temperature) + _noise(scores, inputs)
    return argmax(jnp.where((inputs.temperature > 0)[:, None], noisy, scores))


def kept_logits(
    scores: Float[Array, "B V"], temperature: Float[Array, " B"], threshold: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Returns the logits of the distribution drawn from, given the threshold of `choose`; temperature 0 counts as 1."""
    scaled = over_temperature(lax.stop_gradient(scores), temperature)
    return jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)


def distribution(scores: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> Float[Array, "B V"]:
    """Returns the probabilities with which `choose` draws each token; temperature 0 counts as 1."""
    scaled = over_temperature(scores, inputs.temperature)
    kept = scaled >= filter_threshold(scaled, inputs.top_k, inputs.top_p, inputs.min_p)[:, None]
    return jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)


def log_distribution(scores: Float[Array, "B V"], inputs: SampleInputs[jax.Array]) -> Float[Array, "B V"]:
    """Returns the log-probabilities with which `choose` draws, -inf for filtered tokens; temperature 0 counts as 1."""
    scaled = over_temperature(scores, inputs.temperature)
    threshold = filter_threshold(scaled, inputs.top_k, inputs.top_p, inputs.min_p)
    logits = kept_logits(scores, inputs.temperature, jnp.where(is_filtered(inputs), threshold, -jnp.inf))
    return logits - logsumexp(logits)[:, None]


def penalise_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Divides positive and multiplies negative logits of seen tokens by `penalty`; 1 changes nothing.

    Keskar et al. 2019, "CTRL", section 4.1. Finite logits stay finite, so above those of forbidden tokens, -inf.
    """
    factor = penalty[:, None]
    return jnp.where(seen, _finite(jnp.where(logits > 0, logits / factor, logits * factor), logits), logits)


def penalise_counts(
    logits: Float[Array, "B V"],
    counts: Int[Array, "B V"],
    presence: Float[Array, " B"],
    frequency: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """Subtracts `presence` from the logits of tokens in the answer, and `frequency` for each time they occur.

    As in OpenAI's API and vLLM, `counts` are counts of generated tokens. Finite logits stay finite.
    """
    present = (counts > 0).astype(logits.dtype)
    return _finite(logits - present * presence[:, None] - counts.astype(logits.dtype) * frequency[:, None], logits)


def _finite(changed: jax.Array, logits: jax.Array) -> jax.Array:
    """Clips changed logits to the dtype's finite range; logits of forbidden tokens stay -inf."""
    bounds = jnp.finfo(logits.dtype)
    return jnp.where(jnp.isneginf(logits), -jnp.inf, changed.clip(bounds.min, bounds.max))


def token_logprobs(logits: Float[Array, "*B V"], token_ids: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Returns each token's log-probability under its row's logits, in float32."""
    logits = logits.astype(jnp.float32)
    return jnp.take_along_axis(logits, token_ids[..., None], axis=-1)[..., 0] - logsumexp(logits)


def logsumexp(logits: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Returns the logarithm of each row's sum of exponentials, by the CPU kernel if it is in use."""
    if _has_kernel(logits):
        return native.logsumexp(logits)
    return jax.nn.logsumexp(logits, axis=-1)


def argmax(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Returns the index of each row's largest number, the first of equals: by the CPU kernel, or in two passes.

    XLA vectorises the two passes. A row with a NaN gives an arbitrary token.
    """
    if _has_kernel(x):
        return native.best(x, 1)[1][:, 0]
    for width in (128, 64, 32, 16):
        if x.shape[-1] % width == 0 and x.shape[-1] > width:
            blocks = x.reshape(len(x), -1, width)
            block = jnp.argmax(blocks.max(axis=-1), axis=-1)
            inside = jnp.argmax(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=-1)
            return (block * width + inside).astype(jnp.int32)
    every = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.where(x == x.max(axis=-1, keepdims=True), every, x.shape[-1] - 1).min(axis=-1)


def largest(x: Float[Array, "B V"]) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Returns each row's largest number, NaN if it has a NaN, and its index as `argmax` does."""
    if _has_kernel(x):
        numbers, indices = native.best(x, 1)
        return numbers[:, 0], indices[:, 0]
    return x.max(axis=-1), argmax(x)


def likeliest(logits: Float[Array, "R V"]) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """Returns the likeliest tokens of each row, best first, and their log-probabilities."""
    found, ids = best(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    return ids, found - logsumexp(logits)[:, None]


def score(
    logits: Float[Array, "R V"], given: Int[Array, " R"], wanted: Int[Array, ""]
) -> tuple[Int[Array, "R 2"], Int[Array, "R K"], Float[Array, "R K"]]:
    """Scores a given token for each row.

    Returns int32 `[R, 2]`, the row's best token and the bits of the given token's log-probability, then the likeliest
    tokens and their log-probabilities. `wanted` selects what is computed: nothing (0), the first (1), or all (2); the
    rest is 0.
    """
    rows, count = len(logits), min(MAX_TOP_LOGPROBS, logits.shape[1])

    def both() -> jax.Array:
        bits = lax.bitcast_convert_type(token_logprobs(logits, given), jnp.int32)
        return jnp.stack([argmax(logits), bits], axis=1)

    none = jnp.zeros((rows, count), jnp.int32), jnp.zeros((rows, count), jnp.float32)
    scores = lax.cond(wanted > 0, both, lambda: jnp.zeros((rows, 2), jnp.int32))
    return scores, *lax.cond(wanted > 1, lambda: likeliest(logits), lambda: none)


def gumbel(seed: UInt[Array, "*#B"], position: Int[Array, "*#B"], token_ids: Int[Array, "*#B"]) -> Float[Array, "*B"]:
    """Returns standard Gumbel noise that is a function of only these three numbers.

    The hash is Threefry-2x32 of 20 rounds with the key (seed, position) and the counter (token id, 0).
    """
    seed, position, token_ids = jnp.broadcast_arrays(seed, position.astype(jnp.uint32), token_ids.astype(jnp.uint32))
    bits = _threefry(seed, position, token_ids, jnp.zeros_like(token_ids))
    # Uniform in (0, 1), with exact smallest values, so that the tail of large noise has a fine resolution.
    share = jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), jnp.float32(1 - 2**-24))
    return -jnp.log(-jnp.log1p(-share))


def filter_threshold(
    scaled: Float[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    *,
    has_branches: bool = True,
) -> Float[Array, " B"]:
    """Returns the score from which on tokens are kept, float32 `[B]`: -inf if every filter is off.

    First the `top_k` best stay, of those the nucleus that reaches `top_p` (Holtzman et al. 2020, section 3.1), of those
    the tokens at least `min_p` times as likely as the best (Nguyen et al. 2024, section 3). Ties with the last kept
    token are kept, too, and at least one token is kept. `scaled` are relative to the best: at most 0. Without branches,
    all that any row could need is computed for every row.
    """
    if not has_branches:
        found = _kept_from(scaled, top_k, top_p, _by_digits)
        return jnp.minimum(jnp.maximum(found, _log_of(min_p)), 0.0)
    if _has_kernel(scaled):
        nothing = jnp.zeros_like(top_k)
        return native.choose(scaled, jnp.ones_like(top_p), top_k, top_p, min_p, nothing.astype(jnp.uint32), nothing)[1]
    return _threshold(scaled, best(scaled, NUM_CANDIDATES)[0], top_k, top_p, min_p)[0]


def best(x: Float[Array, "B V"], count: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Returns each row's `count` largest numbers, descending, and their columns; beyond V numbers, -inf and V or more.

    A CPU kernel finds up to 64, at most V. Otherwise the code makes XLA use its fast top-k in the place of a sort and a
    slice: it pads rows of at most `count` columns, and keeps later slices from being merged into it. A sort takes fifty
    times as long, and its program cannot be serialised once it has run.
    """
    if _has_kernel(x) and 1 <= count <= min(native.MOST_BEST, x.shape[-1]):
        return native.best(x, count)
    missing = count + 1 - x.shape[-1]
    if missing > 0:
        x = jnp.pad(x, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    found, ids = lax.top_k(x, count)  # a barrier around the pair crashes XLA's partitioner (jaxlib 0.10.2)
    return lax.optimization_barrier(found), lax.optimization_barrier(ids)


def _has_kernel(scores: jax.Array) -> bool:
    """Whether CPU kernels are in use and read such scores."""
    return are_used("cpu") and scores.ndim == 2 and scores.dtype == jnp.float32


def _threshold(
    scaled: jax.Array, ranked: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the threshold of `filter_threshold`, and which rows keep only tokens among the candidates."""
    num, size = ranked.shape[-1], scaled.shape[-1]
    has_k, has_p = (top_k > 0) & (top_k < size), top_p < 1
    last = ranked[:, -1]
    kth = jnp.take_along_axis(ranked, jnp.clip(top_k - 1, 0, num - 1)[:, None], axis=1)[:, 0]
    least = jnp.where(has_k, kth, -jnp.inf)
    mass = jnp.exp(ranked)
    in_top = ranked >= least[:, None]
    whole = jnp.exp(scaled).sum(axis=-1)
    total = jnp.where(has_k, jnp.where(in_top, mass, 0.0).sum(axis=-1), whole)
    before = jnp.cumsum(mass, axis=-1) - mass
    in_nucleus = in_top & ((before < (top_p * total)[:, None]) | (jnp.arange(num, dtype=jnp.int32) == 0))
    nucleus = jnp.min(jnp.where(in_nucleus, ranked, jnp.inf), axis=-1)
    found = jnp.where(has_p, nucleus, least)
    floor = _log_of(min_p)
    too_many = (has_k & ((top_k > num) | (least <= last))) | (has_p & (nucleus <= last))
    found = lax.cond(
        jnp.any(too_many), lambda: jnp.where(too_many, _kept_from(scaled, top_k, top_p, _bisect), found), lambda: found
    )
    is_inside = ((has_k | has_p) & ~too_many) | (floor > last)  # min-p alone may leave only candidates
    return jnp.minimum(jnp.maximum(found, floor), 0.0), is_inside


def _log_of(min_p: jax.Array) -> jax.Array:
    return jnp.where(min_p > 0, jnp.log(min_p), -jnp.inf)


def _kept_from(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, find: Callable[..., jax.Array]) -> jax.Array:
    """Finds the threshold of top-k and top-p, however many tokens they keep; -inf if both are off.

    `find` is given a mask of the rows that need a threshold, the keys of all scores, their weights, and a goal for each
    row. It returns the largest key for which the weights of all keys at least as large sum to the goal or more.
    """
    scaled, top_k, top_p = vary_like((scaled, top_k, top_p), scaled, top_k, top_p)
    order = _ordered(scaled)
    mass = jnp.exp(scaled)
    kth = find(top_k > 0, order, jnp.ones_like(mass), jnp.maximum(top_k, 1).astype(jnp.float32))
    kth = jnp.where(top_k > 0, kth, _SMALLEST)
    mass = jnp.where(order >= kth[:, None], mass, 0.0)
    nucleus = find(top_p < 1, order, mass, top_p * mass.sum(axis=-1))
    key = jnp.where(top_p < 1, nucleus, kth)
    return jnp.where(key == _SMALLEST, -jnp.inf, _unordered(key))


def _bisect(asked: jax.Array, order: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """Finds a key by bisection between the smallest key and 0, unless no row needs one."""

    def halve(_: int | jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)  # rounded up, without overflow
        reaches = jnp.where(order >= middle[:, None], weights, 0.0).sum(axis=-1) >= goal
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, middle - 1)

    smallest = vary_like(jnp.full(len(order), _SMALLEST, jnp.int32), order)
    bounds = smallest, jnp.zeros_like(smallest)
    return lax.cond(jnp.any(asked), lambda: lax.fori_loop(0, 32, halve, bounds)[0], lambda: smallest)


def _by_digits(asked: jax.Array, order: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """Finds a key for every row, `DIGIT_BITS` bits in each pass."""
    del asked
    biased = lax.bitcast_convert_type(order, jnp.uint32) ^ jnp.uint32(1 << 31)  # as unsigned numbers
    found = jnp.zeros(len(order), jnp.uint32)
    for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
        bounds = [found + jnp.uint32(digit << shift) for digit in range(1, 1 << DIGIT_BITS)]
        above = [jnp.where(biased >= bound[:, None], weights, 0.0) for bound in bounds]
        # One reduction for all sums, which a GPU computes in one kernel.
        sums = lax.reduce(above, [jnp.float32(0)] * len(above), _add_each, (1,))
        reached = sum((one >= goal).astype(jnp.uint32) for one in sums)
        found += reached << jnp.uint32(shift)
    found = jnp.minimum(found, jnp.uint32(1 << 31))  # keys are at most 0
    return lax.bitcast_convert_type(found ^ jnp.uint32(1 << 31), jnp.int32)


def _add_each(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    return [one + other for one, other in zip(a, b, strict=True)]


def _ordered(x: jax.Array) -> jax.Array:
    """Maps float32 numbers of at most 0 to int32 keys of the same order; -0 counts as 0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _unordered(keys: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32)


def over_temperature(scores: Float[Array, "B V"], temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
    """Divides scores, relative to the best, by the temperature, so that a tiny temperature cannot overflow.

    It multiplies by the reciprocal, as XLA mostly does for a broadcast divisor, so that scores have the same bits as
    those of the kernel that found a threshold. The bounds keep the reciprocal finite and out of the subnormal range.
    """
    factor = 1.0 / jnp.where(temperature > 0, temperature.clip(_LEAST_TEMPERATURE, _MOST_TEMPERATURE), 1.0)
    return (scores - scores.max(axis=-1, keepdims=True)) * factor[:, None]


def _noise(scores: jax.Array, inputs: SampleInputs[jax.Array]) -> jax.Array:
    every = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    return gumbel(inputs.seed[:, None], inputs.position[:, None], every[None])


def _draw_from_best(scaled: jax.Array, inputs: SampleInputs[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws from each row's candidates; returns also the threshold, and whether the row keeps only candidates."""
    ranked, candidates = best(scaled, NUM_CANDIDATES)
    threshold, is_inside = _threshold(scaled, ranked, inputs.top_k, inputs.top_p, inputs.min_p)
    kept = jnp.where(ranked >= threshold[:, None], ranked, -jnp.inf)
    noisy = kept + gumbel(inputs.seed[:, None], inputs.position[:, None], candidates)
    # Ties of the sum go to the smallest id, as they do among all tokens; NaN scores give some token, too.
    ids = jnp.where(noisy == noisy.max(axis=-1, keepdims=True), candidates, scaled.shape[-1]).min(axis=-1)
    return jnp.minimum(ids, scaled.shape[-1] - 1), threshold, is_inside


def _threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> jax.Array:
    """Returns the first word of Threefry-2x32-20 (Salmon et al. 2011), unrolled, so that XLA fuses it on a CPU."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for shift in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(shift)) | (x1 >> jnp.uint32(32 - shift))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0
