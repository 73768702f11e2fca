"""Reads the outputs of steps: from arrays on the device to one answer per row."""

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.planner import StepPlan
from ferrum_jax.compile.sampler import Sampled, SlotSettings
from ferrum_jax.compile.step import StepOutputs
from ferrum_jax.executor.batch import (
    AllLogits,
    Distributions,
    LastLogits,
    Output,
    SampledToken,
    Scores,
    TargetScores,
    TokenChoice,
    VerifiedTokens,
)
from ferrum_jax.executor.device import DeviceState
from ferrum_jax.kvcache.sequences import CachedSequence, SequenceTable
from ferrum_jax.models.hooks import ATTENTION, Point

Answer = Any  # as a row's output asks: None, logits, TokenChoice, a list of them, or Scores; or WithCaptures
CapturedPiece = tuple[int, dict[Point, NDArray[Any]]]  # of one row in one step: first token's index, [n, ...] by point


@dataclass(eq=False)
class ActiveRows:
    """The rows of a batch that runs, by column: the tokens to compute of each, and their place in the KV."""

    outputs: Sequence[Output]
    tokens: Sequence[NDArray[np.int32]]  # [n] each, the tokens to compute
    first: InitVar[Sequence[int]]  # position of the first token of each
    lives: Sequence[CachedSequence]
    adapters: Sequence[int]  # index of each in the stacks of adapters
    edit_rows: Sequence[int] = ()  # index of each in the stacks of edits, where there are any
    captures: Sequence[tuple[Point, ...]] = ()  # hook points of each

    def __post_init__(self, first: Sequence[int]):
        self.slots = np.array([live.slot for live in self.lives], np.int32)
        self.starts = np.array(first, np.int32)
        self.ends = [start + len(new) for start, new in zip(first, self.tokens, strict=True)]


class StepPart(NamedTuple):
    """One step that was begun, and the outputs that its rows want."""

    plan: StepPlan
    outputs: StepOutputs
    rows: ActiveRows
    wanted: Sequence[int]  # the batch's row for each row of logits; for each query block, if all tokens have logits
    asked: Sequence[Output]  # the output of each of these rows
    sampled: Sampled[jax.Array] | None = None
    probabilities: jax.Array | None = None  # of `Distributions`
    processed: jax.Array | None = None  # float32 [X]: of `TargetScores` with settings


def read_part(
    part: StepPart,
    answers: list[Answer],
    captured: dict[int, list[CapturedPiece]],
    device: DeviceState,
    table: SequenceTable,
) -> None:
    """Copies the wanted outputs of one step to the host, and enters sampled tokens in the table."""
    fetch, rows, kinds = device.fetch, part.rows, set(map(type, part.asked))
    if part.plan.key.capture:
        _read_captured(part, captured, device)
    if not kinds:
        device.wait(part.outputs.rows)
        return
    logits = None
    if kinds & {LastLogits, AllLogits}:
        assert part.outputs.logits is not None
        logits = fetch(part.outputs.logits)
        if kinds == {LastLogits}:
            for at, row in enumerate(part.wanted):
                answers[row] = logits[at].copy()
            return
    chosen = None if part.sampled is None else _Choices(part.sampled, part.asked, fetch)
    probabilities = None if part.probabilities is None else fetch(part.probabilities)
    scores = _scores(part, fetch) if TargetScores in kinds else []
    processed = None if part.processed is None else fetch(part.processed)
    width, pieces, ends = part.plan.key.block_tokens, part.plan.blocks, rows.ends
    for at, (row, output) in enumerate(zip(part.wanted, part.asked, strict=True)):
        match output:
            case SampledToken(settings, _):
                assert chosen is not None
                answers[row] = choice = chosen.at(at, settings)
                table.resolve(rows.lives[row], ends[row], choice.token_id)
                continue
            case LastLogits():
                assert logits is not None
                answers[row] = logits[at].copy()
                continue
        run = slice(at * width, at * width + pieces[at].size)
        match output:
            case AllLogits():
                assert logits is not None
                _add(answers, row, logits[run].copy())
            case VerifiedTokens(settings):
                assert chosen is not None
                _add(answers, row, [chosen.at(index, settings) for index in range(run.start, run.stop)])
            case Distributions():
                assert probabilities is not None
                _add(answers, row, probabilities[run].copy())
            case TargetScores(_, with_alternatives, score_settings):
                packed, *tops = (array[run].copy() for array in scores)
                found = Scores(
                    logprobs=packed[:, 1].copy().view(np.float32),
                    greedy_ids=packed[:, 0],
                    top_ids=tops[0] if with_alternatives else None,
                    top_logprobs=tops[1] if with_alternatives else None,
                    processed=None if score_settings is None or processed is None else processed[run].copy(),
                )
                _add(answers, row, found)


class _Choices:
    """The tokens chosen in one step, on the host; the alternatives only if a row wants any."""

    def __init__(self, sampled: Sampled[jax.Array], asked: Sequence[Output], fetch: Any):
        packed = fetch(sampled.packed)
        self._ids = packed[:, 0].tolist()
        self._numbers = packed[:, 1:].view(np.float32).tolist()
        chosen = [one for one in asked if isinstance(one, (SampledToken, VerifiedTokens))]
        if any(one.settings.num_logprobs > 0 for one in chosen):
            self._top_ids, self._top = fetch(sampled.top_ids).tolist(), fetch(sampled.top_logprobs).tolist()

    def at(self, index: int, settings: SlotSettings) -> TokenChoice:
        """Returns the choice of one row of logits."""
        raw, processed = self._numbers[index]
        if settings.num_logprobs < 0:  # the step may have computed some for another row
            return TokenChoice(self._ids[index], raw if math.isnan(raw) else 0.0, 0.0)
        if settings.num_logprobs == 0:
            return TokenChoice(self._ids[index], raw, processed)
        most = settings.num_logprobs
        pairs = zip(self._top_ids[index][:most], self._top[index][:most], strict=True)
        return TokenChoice(self._ids[index], raw, processed, tuple(pairs))


def _scores(part: StepPart, fetch: Any) -> list[NDArray[Any]]:
    """Copies scores to the host; the alternatives only if a row wants any."""
    found = part.outputs.scores
    assert found is not None
    with_tops = any(isinstance(one, TargetScores) and one.with_alternatives for one in part.asked)
    return [fetch(array) for array in (found if with_tops else found[:1])]


def _add(answers: list[Answer], index: int, piece: Any) -> None:
    if answers[index] is None:
        answers[index] = []
    answers[index].append(piece)


def join_answer(pieces: list[Any]) -> Answer:
    """Joins the pieces of a row's answer, one from each of its steps."""
    match pieces[0]:
        case np.ndarray():
            return np.concatenate(pieces)
        case Scores():
            joined: dict[str, Any] = {}
            for name in (field.name for field in fields(Scores)):
                parts = [getattr(piece, name) for piece in pieces]
                joined[name] = None if parts[0] is None else np.concatenate(parts)
            return Scores(**joined)
    return [choice for piece in pieces for choice in piece]


def _read_captured(part: StepPart, captured: dict[int, list[CapturedPiece]], device: DeviceState) -> None:
    """Copies the captured arrays of a step to the host, and cuts out the part of each row."""
    key, rows = part.plan.key, part.rows
    found = jax.tree.map(device.fetch, part.outputs.captured)
    found = {
        point: tuple(device.of_heads(group, 1, "heads") for group in one) if isinstance(one, tuple) else one
        for point, one in found.items()
    }
    groups = []
    if key.decode_rows:
        groups.append((part.plan.decodes, 1, 0))
    if key.blocks:
        groups.append((part.plan.blocks, key.block_tokens, key.decode_rows))
    for number, (pieces, width, first) in enumerate(groups):
        for at, (row, start, size) in enumerate(pieces):
            if not (points := rows.captures[row]):
                continue
            cut = {}
            for point in points:
                array = found[point]
                if isinstance(array, tuple):  # attention, cut at the row's end
                    array = array[number][at, :, :size, : rows.ends[row]]
                else:
                    array = array[first + at * width : first + at * width + size]
                is_integer = np.issubdtype(array.dtype, np.integer)
                cut[point] = array.copy() if is_integer else array.astype(np.float32)
            captured.setdefault(row, []).append((start, cut))


def join_captured(pieces: list[CapturedPiece]) -> dict[Point, NDArray[Any]]:
    """Joins the captured pieces of one row in the order of its tokens: `[n, ...]`; of attention `[N, n, S]`."""
    ordered = [arrays for _, arrays in sorted(pieces, key=lambda piece: piece[0])]
    return {
        point: np.concatenate([arrays[point] for arrays in ordered], axis=int(point.name in ATTENTION))
        for point in ordered[0]
    }
