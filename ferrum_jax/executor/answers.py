"""What steps have answered: from arrays on the device to one answer per row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.planner import Piece
from ferrum_jax.compile.sampler import Sampled, SlotSettings
from ferrum_jax.compile.step import StepKey, StepOutputs
from ferrum_jax.contract.answers import Captured
from ferrum_jax.executor.batch import (
    AllLogits,
    Capture,
    Distributions,
    LastLogits,
    SampledToken,
    Scores,
    TargetScores,
    TokenChoice,
    VerifiedTokens,
)
from ferrum_jax.executor.device import DeviceState
from ferrum_jax.kvcache.sequences import CachedSequence, SequenceTable
from ferrum_jax.models.capture import CaptureSpec

Answer = Any  # what a row's output says: None, logits, TokenChoice, a list of them, Scores or Captured


@dataclass(slots=True, eq=False)
class ActiveRow:
    """A scheduled row on its way: what is left of it to compute, and where it lies."""

    index: int  # in the batch
    output: Any
    tokens: NDArray[np.int32]  # [n], those that are computed
    start: int  # position of the first of them
    live: CachedSequence
    adapter: int  # row of the stacks


Wanted: TypeAlias = list[tuple[int, ActiveRow, Piece]]  # by row of the logits, or block of those of all tokens


class StepPart(NamedTuple):
    """One step that was begun, and what is wanted of it."""

    key: StepKey
    outputs: StepOutputs
    wanted: Wanted
    sampled: Sampled[jax.Array] | None = None
    probabilities: jax.Array | None = None  # of `Distributions`
    scores: tuple[jax.Array, ...] | None = None  # of `TargetScores`


def read_part(part: StepPart, answers: list[Answer], device: DeviceState, table: SequenceTable) -> None:
    """Copies what is wanted of one step to the host, and enters what the device has chosen in the table."""
    fetch = device.fetch
    kinds = {type(row.output) for _, row, _ in part.wanted}
    if not kinds:
        device.wait(part.outputs.rows)
        return
    logits = fetch(part.outputs.logits) if kinds & {LastLogits, AllLogits, Capture} else None
    chosen = None if part.sampled is None else _Choices(part.sampled, part.wanted, fetch)
    probabilities = None if part.probabilities is None else fetch(part.probabilities)
    scores = _scores(part, fetch)
    captured = jax.tree.map(fetch, part.outputs.captured)
    captured = replace(
        captured,
        attention={
            layer: tuple(device.of_heads(one, 1, "heads") for one in groups)
            for layer, groups in captured.attention.items()
        },
    )
    width = part.key.block_tokens
    for at, row, piece in part.wanted:
        run = slice(at * width, at * width + piece.size)
        match row.output:
            case SampledToken(settings):
                assert chosen is not None
                answers[row.index] = choice = chosen.at(at, settings)
                table.resolve(row.live, row.start + len(row.tokens), choice.token_id)
            case LastLogits():
                assert logits is not None
                answers[row.index] = logits[at].copy()
            case AllLogits():
                assert logits is not None
                _add(answers, row.index, _Logits(logits[run].copy()))
            case VerifiedTokens(settings):
                assert chosen is not None
                each = [chosen.at(index, settings) for index in range(run.start, run.stop)]
                _add(answers, row.index, _ChoicePiece(each))
            case Distributions():
                assert probabilities is not None
                rows = probabilities[run] if part.key.outputs == "all" else probabilities[at : at + 1]
                _add(answers, row.index, _Logits(rows.copy()))
            case TargetScores(_, with_alternatives):
                packed, *tops = (array[run].copy() for array in scores)
                tops = tops if with_alternatives else (None, None)
                _add(answers, row.index, _ScorePiece(packed, *tops))
            case Capture(layers):
                assert logits is not None
                end = row.start + len(row.tokens)
                _add(answers, row.index, _capture_piece(logits[run], captured, layers, at, run, end))


class _Choices:
    """Tokens that were chosen in one step, read; the alternatives only where a row wants any."""

    def __init__(self, sampled: Sampled[jax.Array], wanted: Sequence[tuple[int, ActiveRow, Piece]], fetch: Any):
        packed = fetch(sampled.packed)
        self._ids = packed[:, 0].tolist()
        self._numbers = packed[:, 1:].view(np.float32).tolist()
        outputs = [row.output for _, row, _ in wanted]
        chosen = [one for one in outputs if isinstance(one, (SampledToken, VerifiedTokens))]
        if any(one.settings.num_logprobs > 0 for one in chosen):
            self._top_ids, self._top = fetch(sampled.top_ids).tolist(), fetch(sampled.top_logprobs).tolist()

    def at(self, index: int, settings: SlotSettings) -> TokenChoice:
        """Returns the choice of one row of logits."""
        if settings.num_logprobs < 0:  # whatever another row of the step wanted
            return TokenChoice(self._ids[index], 0.0, 0.0)
        raw, processed = self._numbers[index]
        if settings.num_logprobs == 0:
            return TokenChoice(self._ids[index], raw, processed)
        most = settings.num_logprobs
        pairs = zip(self._top_ids[index][:most], self._top[index][:most], strict=True)
        return TokenChoice(self._ids[index], raw, processed, tuple(pairs))


def _scores(part: StepPart, fetch: Any) -> list[NDArray[Any]]:
    """Copies scores to the host; the alternatives only where a row wants any."""
    if part.scores is None:
        return []
    outputs = [row.output for _, row, _ in part.wanted]
    with_tops = any(isinstance(one, TargetScores) and one.with_alternatives for one in outputs)
    return [fetch(array) for array in (part.scores if with_tops else part.scores[:1])]


class _Logits(NamedTuple):
    rows: NDArray[np.float32]  # [n, V]


class _ChoicePiece(NamedTuple):
    choices: list[TokenChoice]


class _ScorePiece(NamedTuple):
    packed: NDArray[np.int32]  # [n, 2]
    top_ids: NDArray[np.int32] | None  # [n, k]
    top_logprobs: NDArray[np.float32] | None


class _CapturePiece(NamedTuple):
    logits: NDArray[np.float32]  # [n, V]
    hidden: dict[int, NDArray[np.float32]]  # [n, D] by layer
    attention: dict[int, NDArray[np.float32]]  # [N, n, S] by layer


def _add(answers: list[Answer], index: int, piece: Any) -> None:
    if answers[index] is None:
        answers[index] = []
    answers[index].append(piece)


def join_answer(answer: Answer) -> Answer:
    """Joins the pieces of a row that took several steps."""
    if not isinstance(answer, list):
        return answer
    match answer[0]:
        case _Logits():
            return np.concatenate([piece.rows for piece in answer])
        case _ChoicePiece():
            return [choice for piece in answer for choice in piece.choices]
        case _ScorePiece():
            packed = np.concatenate([piece.packed for piece in answer])
            top_ids = top_logprobs = None
            if answer[0].top_ids is not None:
                top_ids, top_logprobs = (np.concatenate([piece[at] for piece in answer]) for at in (1, 2))
            logprobs = packed[:, 1].copy().view(np.float32)
            return Scores(logprobs=logprobs, greedy_ids=packed[:, 0], top_ids=top_ids, top_logprobs=top_logprobs)
        case _CapturePiece():
            return _joined_capture(cast(list[_CapturePiece], answer))
    return answer


def _capture_piece(
    logits: NDArray[np.float32], captured: Any, layers: CaptureSpec, at: int, run: slice, end: int
) -> _CapturePiece:
    """Cuts one block's share out of what a step captured; attention is to the positions up to `end`."""
    size = run.stop - run.start
    return _CapturePiece(
        logits.copy(),
        {layer: captured.hidden[layer][run].astype(np.float32) for layer in layers.hidden},
        {layer: captured.attention[layer][0][at, :, :size, :end] for layer in layers.attention},
    )


def _joined_capture(pieces: Sequence[_CapturePiece]) -> Captured:
    """Joins what was captured of one sequence."""
    hidden, attention = pieces[0].hidden, pieces[0].attention
    return Captured(
        logits=np.concatenate([piece.logits for piece in pieces]),
        hidden={layer: np.concatenate([piece.hidden[layer] for piece in pieces]) for layer in hidden},
        attention_weights={
            layer: np.concatenate([piece.attention[layer] for piece in pieces], axis=1) for layer in attention
        },
    )
