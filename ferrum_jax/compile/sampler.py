"""The sampler: programs that choose tokens from a step's logits, by settings that lie on the device in slots.

A request's settings are written to its slot once (`ConfigureKey`). Then `SampleKey` reads the logits of each step, or
`VerifyKey` where rows have drafted tokens, and 12 bytes per row are copied to the host. The same functions run inside a
multi-step program.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import NDArray

from ferrum_jax.compile.step import ProgramContext
from ferrum_jax.ops import sampling
from ferrum_jax.ops.sampling import MAX_TOP_LOGPROBS, SampleInputs
from ferrum_jax.sharding.mesh import WHOLE

Leaf = TypeVar("Leaf")
Way = Literal["branches", "draw", "filter"]
BRANCHES: Way = "branches"  # all, in branches that run only if a row needs them; on a GPU the host waits to read which
DRAW: Way = "draw"  # no filters, penalties, masks or alternatives; the log-probabilities of the token alone
FILTER: Way = "filter"  # everything but alternatives
WAYS = (DRAW, FILTER, BRANCHES)  # each can do what those before it can
MAX_STOP_IDS = 16  # of one slot
MAX_BIAS = 512  # tokens with a bias of their own, of one slot
_WORD = 32  # tokens per int32 of a set
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("top_k", "seed", "min_position", "is_adjusted", "is_masked", "num_logprobs", "is_processed")
_STOP = len(_FLOATS) + len(_INTS)
_BIAS = _STOP + MAX_STOP_IDS
_COLUMNS = _BIAS + 2 * MAX_BIAS


@dataclass(frozen=True, eq=False)
class SlotSettings:
    """The checked settings by which one slot's tokens are chosen. Greedy by default."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int = 0
    seed: int = 0  # 0 to 2^32 - 1
    min_position: int = 0  # stop ids are not chosen before this position of the sequence
    num_logprobs: int = -1  # alternatives that are reported; 0: log-probabilities of the token alone; -1: none
    is_processed: bool = False  # alternatives are reported under the distribution that the token is drawn from
    stop_ids: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)  # added to logits; -inf forbids
    allowed: NDArray[np.bool_] | None = None  # [V]; None: all tokens, unless there are `allowed_ids`
    allowed_ids: tuple[int, ...] | None = None
    has_masks: bool = False  # the allowed tokens are given with every token (`SampledToken.mask`)
    seen: NDArray[np.integer] | None = None  # token ids of the prompt, for the repetition penalty
    generated: NDArray[np.integer] | None = None  # token ids of the answer so far, for all three penalties

    @property
    def is_adjusted(self) -> bool:
        """True where something changes the logits before the temperature."""
        penalties = (self.repetition_penalty - 1.0, self.presence_penalty, self.frequency_penalty)
        masked = self.allowed is not None or self.allowed_ids is not None or self.has_masks
        return bool(any(penalties) or self.bias or masked or self.min_position)

    @functools.cached_property
    def way(self) -> Way:
        """The first of `WAYS` that suffices."""
        if self.num_logprobs > 0:
            return BRANCHES
        return FILTER if sampling.is_filtered(self) or self.is_adjusted else DRAW


@dataclass(frozen=True, kw_only=True)
class SamplerSpec:
    """Sizes of the sampler of one engine."""

    num_slots: int
    vocab_size: int
    capacity: int  # positions of a sequence

    @property
    def num_bytes(self) -> int:
        """Bytes of the state on the device."""
        return sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes(self)))


@flax.struct.dataclass
class SamplerState(Generic[Leaf]):
    """All that the choice of tokens needs beside logits, by slot. Donated to every program that writes it."""

    last_tokens: Leaf  # int32 [S]: the token chosen last
    settings: Leaf  # int32 [S, columns]: numbers, bits of floats, stop ids, and tokens with a bias
    sets: Leaf  # int32 [S, 2, V / 32]: bits of the allowed tokens, and of the prompt's
    counts: Leaf  # int32 [S, V]: how often the answer has each token


def shapes(spec: SamplerSpec) -> SamplerState[jax.ShapeDtypeStruct]:
    """Returns the shapes of the state."""
    words = _num_words(spec.vocab_size)
    sizes = ((), (_COLUMNS,), (2, words), (spec.vocab_size,))
    return SamplerState(*(jax.ShapeDtypeStruct((spec.num_slots, *size), jnp.int32) for size in sizes))


def initial(spec: SamplerSpec) -> SamplerState[NDArray[np.int32]]:
    """Returns the state in which every slot is greedy, on the host."""
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes(spec))
    state.settings[:] = _settings_row(SlotSettings(), spec.vocab_size)
    return state


def pack_settings(slot: int, settings: SlotSettings, spec: SamplerSpec) -> NDArray[np.int32]:
    """Packs one slot's settings into the buffer that `ConfigureKey` takes."""
    words = _num_words(spec.vocab_size)
    buffer = np.empty(1 + _COLUMNS + 2 * words + spec.capacity, np.int32)
    buffer[0] = slot
    buffer[1 : 1 + _COLUMNS] = _settings_row(settings, spec.vocab_size)
    sets = buffer[1 + _COLUMNS : 1 + _COLUMNS + 2 * words].reshape(2, words)
    allowed = settings.allowed
    if settings.allowed_ids is not None:
        allowed = np.zeros(spec.vocab_size, np.bool_)
        allowed[list(settings.allowed_ids)] = True
    sets[0] = -1 if allowed is None else _pack_set(allowed)
    sets[1] = 0
    if settings.seen is not None and len(settings.seen):
        seen = np.zeros(spec.vocab_size, np.bool_)
        seen[np.asarray(settings.seen)] = True
        sets[1] = _pack_set(seen)
    generated = buffer[1 + _COLUMNS + 2 * words :]
    generated[:] = spec.vocab_size
    if settings.generated is not None:
        generated[: len(settings.generated)] = settings.generated
    return buffer


def configure(
    state: SamplerState[jax.Array], buffer: Int[Array, " size"], *, vocab_size: int
) -> SamplerState[jax.Array]:
    """Writes the settings of one slot. `state` is donated."""
    words, slot = _num_words(vocab_size), buffer[0]
    sets = buffer[1 + _COLUMNS : 1 + _COLUMNS + 2 * words].reshape(2, words)
    generated = buffer[1 + _COLUMNS + 2 * words :]
    counts = jnp.zeros(vocab_size, jnp.int32).at[generated].add(1, mode="drop")
    return replace(
        state,
        settings=state.settings.at[slot].set(buffer[1 : 1 + _COLUMNS]),
        sets=state.sets.at[slot].set(sets),
        counts=state.counts.at[slot].set(counts),
    )


def write_masks(state: SamplerState[jax.Array], buffer: Int[Array, " size"], *, rows: int) -> SamplerState[jax.Array]:
    """Writes the allowed tokens of some slots; `buffer` is `[rows, 1 + V / 32]`: a slot and the words of its set.

    `state` is donated.
    """
    table = buffer.reshape(rows, -1)
    return replace(state, sets=state.sets.at[table[:, 0], 0].set(table[:, 1:], mode="drop"))


@flax.struct.dataclass
class Sampled(Generic[Leaf]):
    """Tokens that were chosen, R of them."""

    packed: Leaf  # int32 [R, 3]: token id, and the bits of its raw and its processed log-probability
    top_ids: Leaf  # int32 [R, MAX_TOP_LOGPROBS]: the likeliest tokens, where the slot wants any
    top_logprobs: Leaf  # float32 [R, MAX_TOP_LOGPROBS]


def choose_rows(
    state: SamplerState[jax.Array],
    logits: Float[Array, "R V"],
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    drafted: Int[Array, "R T"] | None = None,
    masks: Int[Array, "R W"] | None = None,
    way: Way = BRANCHES,
) -> Sampled[jax.Array]:
    """Chooses a token for each row of logits by its slot's settings.

    Args:
        state: the sampler's; it is not changed.
        logits: of the model.
        slots: whose settings each row uses; one past the last slot for padding.
        positions: of the tokens to be chosen, in their sequences.
        drafted: tokens of the answer that `state` does not count yet, V where there is none.
        masks: bits of the allowed tokens, in place of the slot's; a row of zeros leaves those of the slot.
        way: one that suffices for every row.
    """
    rows = state.settings[slots.clip(max=len(state.settings) - 1)[:, None], np.arange(_STOP)]
    has_slot = slots < len(state.settings)
    inputs = inputs_of(rows, has_slot, positions)
    wanted = jnp.where(has_slot, _number(rows, "num_logprobs"), -1)
    is_adjusted = (_number(rows, "is_adjusted") != 0) & has_slot
    count = min(MAX_TOP_LOGPROBS, logits.shape[1])
    no_alternatives = jnp.zeros((len(logits), count), jnp.int32), jnp.zeros((len(logits), count), jnp.float32)
    none = (*[jnp.zeros(len(logits), jnp.float32)] * 2, *no_alternatives)

    if way != BRANCHES:
        if way == FILTER:
            scores = adjusted(state, logits, slots, positions, drafted, masks)
            ids, threshold = sampling.filter_and_draw(scores, inputs)
        else:
            scores, threshold = logits, jnp.full(len(logits), -jnp.inf, jnp.float32)
            ids = sampling.draw(logits, inputs)
        processed = sampling.kept_logits(scores, inputs.temperature, threshold)
        raw, own = (sampling.token_logprobs(one, ids) for one in (logits, processed))
        return _sampled(logits.max(axis=-1), ids, raw, own, *no_alternatives)

    def choose_by_all() -> tuple[jax.Array, ...]:
        scores = lax.cond(
            jnp.any(is_adjusted), lambda: adjusted(state, logits, slots, positions, drafted, masks), lambda: logits
        )
        ids, threshold = sampling.choose(scores, inputs)

        def logprobs() -> tuple[jax.Array, ...]:
            processed = sampling.kept_logits(scores, inputs.temperature, threshold)
            reported = jnp.where((_number(rows, "is_processed") != 0)[:, None], processed, logits)
            alternatives = lax.cond(jnp.any(wanted > 0), lambda: sampling.likeliest(reported), lambda: no_alternatives)
            both = (sampling.token_logprobs(one, ids) for one in (logits, processed))
            return *both, *alternatives

        return ids, *lax.cond(jnp.any(wanted >= 0), logprobs, lambda: none)

    # Most steps only take the best token, or only draw: they compute nothing else but the largest logit.
    needs_all = jnp.any(is_adjusted | (wanted >= 0) | sampling.is_filtered(inputs))
    which = jnp.where(needs_all, 2, jnp.any(inputs.temperature > 0).astype(jnp.int32))
    largest, firsts = sampling.largest(logits)
    ways = (lambda: (firsts, *none), lambda: (sampling.draw(logits, inputs), *none), choose_by_all)
    return _sampled(largest, *lax.switch(which, ways))


def _sampled(
    largest: jax.Array, ids: jax.Array, raw: jax.Array, processed: jax.Array, top_ids: jax.Array, top: jax.Array
) -> Sampled[jax.Array]:
    """Packs what was chosen; NaN as a log-probability tells, whatever is wanted, that logits are not finite."""
    raw = jnp.where(jnp.isfinite(largest), raw, jnp.nan)
    bits = [lax.bitcast_convert_type(values, jnp.int32) for values in (raw, processed)]
    return Sampled(packed=jnp.stack([ids, *bits], axis=1), top_ids=top_ids, top_logprobs=top)


def _number(rows: jax.Array, name: str) -> jax.Array:
    """Reads one column of settings `[R, columns]`."""
    if name in _FLOATS:
        return lax.bitcast_convert_type(rows[:, _FLOATS.index(name)], jnp.float32)
    return rows[:, len(_FLOATS) + _INTS.index(name)]


def inputs_of(rows: jax.Array, has_slot: jax.Array, positions: jax.Array) -> SampleInputs[jax.Array]:
    """Reads the inputs of sampling from each row's settings `[R, columns]`; rows without a slot are greedy."""
    return SampleInputs(
        temperature=jnp.where(has_slot, _number(rows, "temperature"), 0.0),
        top_k=_number(rows, "top_k"),
        top_p=_number(rows, "top_p"),
        min_p=_number(rows, "min_p"),
        seed=lax.bitcast_convert_type(_number(rows, "seed"), jnp.uint32),
        position=positions,
    )


def adjusted(
    state: SamplerState[jax.Array],
    logits: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    drafted: jax.Array | None,
    masks: jax.Array | None = None,
) -> jax.Array:
    """Returns the scores after bias, masks and penalties."""
    rows, vocab_size = state.settings.at[slots].get(mode="clip"), logits.shape[1]
    at = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
    stop_ids, ids = rows[:, _STOP:_BIAS], rows[:, _BIAS : _BIAS + MAX_BIAS]
    bias = lax.bitcast_convert_type(rows[:, _BIAS + MAX_BIAS :], jnp.float32)
    sets = state.sets.at[slots].get(mode="clip")
    scores = logits.at[at, ids].add(bias, mode="drop")
    is_early = (positions < _number(rows, "min_position"))[:, None]
    scores = scores.at[at, stop_ids].add(jnp.where(is_early, jnp.float32(-jnp.inf), jnp.float32(0)), mode="drop")
    words = sets[:, 0] if masks is None else jnp.where(jnp.any(masks != 0, axis=1, keepdims=True), masks, sets[:, 0])
    allowed = _unpack_set(words, vocab_size) | (_number(rows, "is_masked") == 0)[:, None]
    scores = jnp.where(allowed, scores, -jnp.inf)
    counts = state.counts.at[slots].get(mode="clip")
    if drafted is not None:
        counts = counts.at[at, drafted].add(1, mode="drop")
    seen = _unpack_set(sets[:, 1], vocab_size) | (counts > 0)
    scores = sampling.penalise_repetition(scores, seen, _number(rows, "repetition_penalty"))
    presence, frequency = (_number(rows, name) for name in ("presence_penalty", "frequency_penalty"))
    return sampling.penalise_counts(scores, counts, presence, frequency)


def sample(
    state: SamplerState[jax.Array], logits: Float[Array, "R V"], rows: Int[Array, "R 2"], *, way: Way = BRANCHES
) -> tuple[SamplerState[jax.Array], Sampled[jax.Array]]:
    """Chooses a token for each row and counts it in its slot. `state` is donated."""
    slots = rows[:, 0]
    found = choose_rows(state, logits, slots, rows[:, 1], way=way)
    ids = found.packed[:, 0]
    counts = state.counts.at[slots, ids].add(1, mode="drop")
    return replace(state, last_tokens=state.last_tokens.at[slots].set(ids, mode="drop"), counts=counts), found


def verify(
    state: SamplerState[jax.Array],
    logits: Float[Array, "X V"],
    rows: Int[Array, "P W"],
    masks: Int[Array, " size"] | None = None,
) -> tuple[SamplerState[jax.Array], Sampled[jax.Array]]:
    """Chooses a token after each of a row's tokens, and counts the choices up to the first that was not drafted.

    A row of `rows` is its slot, the position of its first token, its number of tokens, and the tokens: the newest one
    and the drafted ones. A drafted token is accepted if it equals the choice made after the token before it. `masks`
    are those of `choose_rows` for each of a row's tokens, flattened, `[P * C * V / 32]`. `state` is donated.
    """
    slots, counts, tokens = rows[:, 0], rows[:, 2], rows[:, 3:]
    num_rows, width = tokens.shape
    table = None if masks is None else masks.reshape(len(logits), -1)
    found = choose_rows(state, logits, *each_token(rows, logits.shape[1]), table)
    at = jnp.arange(width, dtype=jnp.int32)
    chosen = found.packed[:, 0].reshape(num_rows, width)
    agrees = (chosen[:, :-1] == tokens[:, 1:]) & (at[1:] < counts[:, None])
    num_chosen = 1 + jnp.cumprod(agrees, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    is_counted = (at < num_chosen[:, None]) & (counts > 0)[:, None]
    counted = state.counts.at[slots[:, None], chosen].add(is_counted.astype(jnp.int32), mode="drop")
    last = jnp.take_along_axis(chosen, num_chosen[:, None] - 1, axis=1)[:, 0]
    return replace(state, counts=counted, last_tokens=state.last_tokens.at[slots].set(last, mode="drop")), found


def each_token(rows: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns slot, position and drafted tokens so far for the choice after each token; `rows` as for `verify`."""
    slots, starts, tokens = rows[:, 0], rows[:, 1], rows[:, 3:]
    width = tokens.shape[1]
    at = jnp.arange(width, dtype=jnp.int32)
    # Choice j of a row follows its drafted tokens 1 to j.
    before = (at[None, :, None] >= at[None, None, :]) & (at[None, None, :] >= 1)
    drafted = jnp.where(before, tokens[:, None, :], vocab_size).reshape(-1, width)
    return jnp.repeat(slots, width), (starts[:, None] + at + 1).ravel(), drafted


def read_only_slots(slots: NDArray[np.int32], num_slots: int) -> NDArray[np.int32]:
    """Returns numbers past the last slot: `distributions` maps them to the slots, and `verify` counts nothing there."""
    return slots + num_slots + 1


def distributions(
    state: SamplerState[jax.Array], logits: Float[Array, "R V"], rows: Int[Array, "P W"]
) -> Float[Array, "R V"]:
    """Returns the probabilities with which each row's token is drawn; temperature 0 counts as 1.

    `rows` are those of `sample`, or those of `verify` with `read_only_slots` in place of the slots.
    """
    if rows.shape[1] == 2:
        each = rows[:, 0], rows[:, 1], None
    else:
        each = each_token(rows.at[:, 0].add(-1 - len(state.settings)), logits.shape[1])
    slots, positions, _ = each
    settings = state.settings.at[slots].get(mode="clip")
    inputs = inputs_of(settings, slots < len(state.settings), positions)
    return sampling.distribution(adjusted(state, logits, *each), inputs)


@dataclass(frozen=True, order=True)
class SampleKey:
    """Chooses a token for each row of a step's logits."""

    logit_rows: int  # R
    way: Way = BRANCHES

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program; the sampler's state is donated."""
        rows = _placed(context, jnp.int32, self.logit_rows, 2)
        call = functools.partial(sample, way=self.way)
        return lower_writing(context, call, logits_of(context, self.logit_rows), rows)


@dataclass(frozen=True, order=True)
class VerifyKey:
    """Chooses a token after each token of P rows of up to C."""

    blocks: int  # P
    block_tokens: int  # C
    is_masked: bool = False  # whether masks of allowed tokens are an argument

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program; the sampler's state is donated."""
        rows = _placed(context, jnp.int32, self.blocks, 3 + self.block_tokens)
        count = self.blocks * self.block_tokens
        masks = jax.ShapeDtypeStruct((count * context.sampler.sets.shape[2],), jnp.int32)
        return lower_writing(context, verify, logits_of(context, count), rows, *([masks] if self.is_masked else []))


@dataclass(frozen=True, order=True)
class DistributionKey:
    """Returns the distribution that a token is drawn from after each token of P rows of up to C."""

    blocks: int  # P
    block_tokens: int  # C

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program."""
        logits = logits_of(context, self.blocks * self.block_tokens)
        rows = _placed(context, jnp.int32, self.blocks, 3 + self.block_tokens)
        whole = context.spread(distributions, (WHOLE, WHOLE, WHOLE), WHOLE)
        return jax.jit(whole).lower(context.sampler, logits, rows)


@dataclass(frozen=True, order=True)
class ConfigureKey:
    """Writes the settings of one slot."""

    capacity: int  # positions of a sequence

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program; the sampler's state is donated."""
        vocab_size = context.sampler.counts.shape[1]
        size = 1 + _COLUMNS + 2 * _num_words(vocab_size) + self.capacity
        buffer = jax.ShapeDtypeStruct((size,), jnp.int32)
        return lower_writing(context, functools.partial(configure, vocab_size=vocab_size), buffer)


@dataclass(frozen=True, order=True)
class MaskKey:
    """Writes the allowed tokens of some slots."""

    rows: int

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program; the sampler's state is donated."""
        buffer = jax.ShapeDtypeStruct((self.rows * (1 + context.sampler.sets.shape[2]),), jnp.int32)
        return lower_writing(context, functools.partial(write_masks, rows=self.rows), buffer)


def lower_writing(context: ProgramContext, function: Any, *inputs: Any) -> jax.stages.Lowered:
    """Lowers a function of the sampler's state, which is donated; every device of a mesh computes all of it."""
    whole = context.spread(function, (WHOLE,) * (1 + len(inputs)), WHOLE)
    return jax.jit(whole, donate_argnums=0).lower(context.sampler, *inputs)


def logits_of(context: ProgramContext, rows: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of a step's logits, with the sharding in which the step leaves them."""
    return _placed(context, jnp.float32, rows, context.sampler.counts.shape[1])


def _placed(context: ProgramContext, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that another program leaves with the sharding of the sampler's state."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=context.sampler.last_tokens.sharding)


def _num_words(vocab_size: int) -> int:
    return -(-vocab_size // _WORD)


def _pack_set(flags: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Packs `[V]` flags into words, the lowest bit first."""
    packed = np.packbits(flags, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view(np.int32)


def _unpack_set(words: Int[Array, "R W"], vocab_size: int) -> Bool[Array, "R V"]:
    bits = (words[:, :, None] >> jnp.arange(_WORD, dtype=jnp.int32)) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] == 1


def _settings_row(settings: SlotSettings, vocab_size: int) -> NDArray[np.int32]:
    row = np.full(_COLUMNS, vocab_size, np.int32)  # no stop id, no bias
    row[: len(_FLOATS)].view(np.float32)[:] = [getattr(settings, name) for name in _FLOATS]
    is_masked = settings.allowed is not None or settings.allowed_ids is not None or settings.has_masks
    numbers = {"is_masked": is_masked, "top_k": min(settings.top_k, vocab_size)}
    row[len(_FLOATS) : _STOP].view(np.uint32)[:] = [
        np.uint32(int(numbers.get(name, getattr(settings, name, 0))) & 0xFFFFFFFF) for name in _INTS
    ]
    row[_STOP : _STOP + len(settings.stop_ids)] = settings.stop_ids
    row[_BIAS + MAX_BIAS :] = 0
    row[_BIAS : _BIAS + len(settings.bias)] = list(settings.bias)
    values = row[_BIAS + MAX_BIAS :].view(np.float32)
    values[: len(settings.bias)] = list(settings.bias.values())
    return row
