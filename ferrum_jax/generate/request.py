"""`Request`: the state of one answer in the scheduler."""

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract.errors import CancelledError, FerrumError, ModelError, RequestValidationError, safe_repr
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.batch import NOT_FINITE, SampledToken, Scores, TokenChoice
from ferrum_jax.executor.interventions import Interventions
from ferrum_jax.generate.detokenize import REPLACEMENT, Detokenizer
from ferrum_jax.generate.params import FinishReason, RequestOutput, SamplingParams
from ferrum_jax.generate.stops import StopWatcher
from ferrum_jax.generate.structured import AnswerForm, Mask
from ferrum_jax.models.hooks import Point

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Request:
    """A prompt, the answer so far, and how much of both is in the KV.

    If prompt tokens are to be scored, the prompt is prefilled up to the first of them, then scored to its end.
    """

    cache_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int  # tokens to generate at most
    detokenizer: Detokenizer | None
    watcher: StopWatcher
    adapter: ActiveLoraAdapter | None = None
    interventions: Interventions | None = None
    capture: tuple[Point, ...] = ()
    priority: int = 0  # lower ones go first
    captured: list[dict[Point, NDArray[Any]]] = field(default_factory=list)  # [n, ...] of each step, in order
    num_captured: int = 0  # positions whose captures it has
    form: AnswerForm | None = None  # of the answer
    bad_words: list[list[int]] = field(default_factory=list)  # token sequences that the answer must not complete
    text_prompt: str | None = None
    tokens: list[int] = field(default_factory=list)  # prompt, and the answer as far as the host knows it
    num_read: int = 0  # positions of the KV that are filled once all steps begun so far are done
    num_cached: int = 0  # tokens of the prompt that were in the KV already and were not computed
    num_begun: int = 0  # tokens of the prompt for which this was counted
    num_in_flight: int = 0  # tokens that the device has chosen and the host has not read yet
    has_scores_in_flight: bool = False
    score_from: int | None = None  # index of the first prompt token to score; None: no scores
    scores: list[float] = field(default_factory=list)  # log-probabilities of the tokens from `score_from` on
    is_scored_by_params: bool = False  # also under the distribution that the parameters sample from
    processed_scores: list[float] = field(default_factory=list)
    greedy_ids: list[int] = field(default_factory=list)  # the likeliest tokens in the place of scored ones
    top_scores: list[dict[int, float]] = field(default_factory=list)
    copies: list["Request"] = field(default_factory=list)  # requests to fork from this one at `fork_position`
    group: str = ""  # id of the requests that share the beginning of a prompt; empty: not shared
    is_bound: bool = False  # adapter and interventions are bound to its sequence, which may be empty still
    kv_version: int = -1  # version of the weights that computed the beginning of its KV
    choices: list[TokenChoice] = field(default_factory=list)  # one for each token of the answer
    versions: list[int] = field(default_factory=list)  # versions of the weights that chose these tokens
    top_logprobs: list[dict[int, float]] = field(default_factory=list)  # of these tokens, if asked for
    text: list[str] = field(default_factory=list)  # pieces; only appended to, as another thread may be taking them
    num_taken: int = 0  # pieces of `text` that were taken
    drafted: int = 0  # tokens that were drafted and verified
    accepted: int = 0  # drafted tokens that are in the answer
    finish_reason: FinishReason | None = None
    error: FerrumError | None = None
    is_settled: bool = False  # it is done, and its slot and blocks are free: set before `notify` is called
    num_former: int = 0  # tokens of the answer that it continues
    num_before_loss: int = -1  # tokens that it had at the last call of `has_progressed`
    preemptions: int = 0  # times it lost its slot and blocks to others, and was recomputed
    submitted: float = field(default_factory=time.perf_counter)
    first_token_after: float = 0.0  # seconds
    notify: Callable[["Request"], None] | None = None  # called by the engine's thread when there is something new

    def __post_init__(self):
        self.tokens = list(self.prompt)
        self._told_prompt = list(self.prompt)  # of outputs, whose owner may change it
        self.request_id = self.cache_id  # stays the same if another request takes its sequence over
        self._num_exempt = 0  # characters that the first `min_tokens` tokens complete and that are not final yet
        self._joined = ("", 0)  # text of the last output, and its number of pieces; replaced as a whole
        self._settings: SlotSettings | None = None
        self._sampled: SampledToken | None = None
        self._banned: frozenset[int] = frozenset()
        self.refusal: RequestValidationError | None = None  # why no token may come next
        # Whether settings depend on the answer, and whether the host must read each token before the next is chosen.
        self.has_changing_settings = any(len(words) > 1 for words in self.bad_words)
        self.needs_every_token = self.form is not None or self.has_changing_settings

    @property
    def is_done(self) -> bool:
        """True once the request finished or failed."""
        return self.finish_reason is not None or self.error is not None

    @property
    def stop_reason(self) -> int | str | None:
        """The caller's stop text or stop id that ended the answer; None where neither did."""
        if self.finish_reason != "stop":
            return None
        is_own = self.tokens[-1] in (self.params.stop_token_ids or ())
        return self.watcher.found or (self.tokens[-1] if is_own else None)

    def count_cached(self, start: int, count: int, known: int) -> None:
        """Counts the prompt's tokens among the `known` first of `count` positions, unless they were begun before."""
        self.num_cached += max(0, min(start + known, len(self.prompt)) - max(start, self.num_begun))
        self.num_begun = max(self.num_begun, start + count)

    @property
    def is_begun(self) -> bool:
        """True once a token was chosen or scored."""
        return bool(self.choices or self.scores)

    @property
    def has_sampled_here(self) -> bool:
        """True once it has a token that is not of an answer that it continues."""
        return len(self.choices) > self.num_former

    @property
    def fork_position(self) -> int:
        """Positions shared with copies: all but the prompt's last; if nothing is generated, those before scoring."""
        return (self.score_from or 1) - 1 if self.limit == 0 else len(self.prompt) - 1

    def can_share(self, position: int) -> bool:
        """True once the positions before `position` are filled, so that others can fork there."""
        return self.num_read >= position and (not self.capture or self.num_captured >= position)

    @property
    def num_unscored(self) -> int:
        """Number of prompt tokens that are still to be scored."""
        return 0 if self.score_from is None else len(self.prompt) - self.score_from - len(self.scores)

    @property
    def unread(self) -> list[int]:
        """Known tokens that are not in the KV yet; before scoring, only those that no scoring step computes."""
        if self.score_from is None or self.num_unscored == 0:
            return self.tokens[self.num_read :]
        return self.tokens[self.num_read : self.score_from - 1]

    @property
    def is_scoring(self) -> bool:
        """True while the next tokens are to be scored."""
        return self.score_from is not None and self.num_unscored > 0 and not self.unread

    @property
    def answer(self) -> list[int]:
        """The ids generated so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be chosen, beside those in flight."""
        return self.limit - (len(self.tokens) - len(self.prompt)) - self.num_in_flight

    def output_wanted(self) -> SampledToken:
        """Returns the output for its next row: a token chosen by its settings."""
        if self.form is not None:
            return SampledToken(self.settings(), partial(self.mask_of_next, self.form))
        if self._sampled is None or self.bad_words:
            self._sampled = SampledToken(self.settings())
        return self._sampled

    def mask_of_next(self, form: AnswerForm) -> Mask:
        """Returns the tokens that the form and the parameters allow next, in the format of `SampledToken.mask`.

        Never raises, as a step waits for it: if no token is allowed, it sets `refusal`.
        """
        try:
            mask = self._within_params(form.mask)
        except Exception as problem:  # noqa: BLE001  of any kind: only this request fails
            self.refusal = RequestValidationError(f"the form of the answer cannot be followed: {problem}")
            return form.everything
        if not mask.any():
            self.refusal = RequestValidationError(
                "no token may come next: the parameters exclude all that fit the answer's form"
            )
        return mask

    def fit_draft(self, form: AnswerForm, drafted: Sequence[int], most: int) -> tuple[list[int], list[Mask]]:
        """Returns the drafted tokens that fit the form, with the masks that `VerifiedTokens` takes.

        If the form forces a text longer than the fitting part of the draft, that text becomes the draft. Returns empty
        lists if no token is allowed next: the ordinary step then reports why.
        """
        try:
            forced = form.forced[:most]
            longest = max(list(drafted[: form.count_fitting(drafted)]), forced[: form.count_fitting(forced)], key=len)
            masks = [self._within_params(mask) for mask in form.masks_along(longest)]
        except Exception:  # noqa: BLE001  of any kind: only this request fails
            return [], []
        count = next((at for at, mask in enumerate(masks) if not mask.any()), len(masks))
        return longest[: max(0, count - 1)], masks[:count]

    def _within_params(self, mask: Mask) -> Mask:
        """Removes the tokens from a mask that the parameters forbid."""
        if self.params.allowed_token_ids is not None:
            mask = mask & _bits_of(self.params.allowed_token_ids, len(mask))
        if never := [token for token, bias in self.settings().bias.items() if bias == -np.inf]:
            mask = mask & ~_bits_of(never, len(mask))
        return mask

    def settings(self) -> SlotSettings:
        """Returns how its next token is chosen; the same object until this changes."""
        if self._settings is not None and not self.bad_words:
            return self._settings
        banned = frozenset(
            words[-1]
            for words in self.bad_words
            if len(words) == 1
            or (self.tokens[-1] == words[-2] and self.tokens[len(self.tokens) - len(words) + 1 :] == words[:-1])
        )
        if self._settings is None or banned != self._banned:
            self._settings, self._banned = self._make_settings(banned), banned
        return self._settings

    def forget_settings(self) -> None:
        """Makes the next `settings` a new object with the answer so far, as a new slot has not counted it."""
        self._settings = self._sampled = None

    def _make_settings(self, banned: frozenset[int]) -> SlotSettings:
        params = self.params
        # If tokens are only scored, those before `score_from` count as the prompt.
        prompt = self.prompt if self.limit else self.prompt[: self.score_from]
        bias = dict(params.logit_bias or {}) | dict.fromkeys(banned, -np.inf)
        penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        return SlotSettings(
            temperature=float(params.temperature),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            repetition_penalty=float(params.repetition_penalty),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            top_k=min(int(params.top_k), 2**31 - 1),
            seed=int(self.seed),
            min_position=len(prompt) + int(params.min_tokens) if params.min_tokens else 0,
            num_logprobs=params.num_logprobs,
            is_processed=params.logprobs_mode == "processed",
            stop_ids=tuple(sorted(self.stop_ids)) if params.min_tokens else (),
            bias={int(token): float(value) for token, value in bias.items()},
            has_masks=self.form is not None,
            allowed_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
            seen=np.array(prompt, np.int64) if params.repetition_penalty != 1 else None,
            generated=np.array(self.answer, np.int64) if penalised else None,
        )

    def append(self, choice: TokenChoice, version: int = 0) -> None:
        """Appends a generated token, chosen by weights of this version, and decides whether it was the last."""
        if self.refusal is not None:  # no token was allowed, so this one means nothing
            self.error = self.refusal
            return
        if isinstance(choice.logprob, float) and math.isnan(choice.logprob):
            self.error = ModelError(NOT_FINITE)
            return
        if len(self.tokens) == len(self.prompt):
            self.first_token_after = time.perf_counter() - self.submitted
        token = choice.token_id
        self.tokens.append(token)
        self.versions.append(version)
        if self.params.num_logprobs > 0:
            self.top_logprobs.append(dict(choice.alternatives))
        self.choices.append(choice)  # last: a thread that counts `choices` finds the rest, too
        is_stop = token in self.stop_ids
        is_own = token in (self.params.stop_token_ids or ())  # the caller's stops may end an incomplete form
        if is_stop and self.form is not None and not is_own and not self.form.may_end:
            self.error = RequestValidationError(
                f"the form of the answer has the special token {token} before its end, and that token ends answers"
            )
            return
        if self.detokenizer is not None and (self.params.include_stop_str_in_output or not is_stop):
            self._watch(self.detokenizer.push(token))
        if is_stop:
            self._finish("stop")
            return
        if self.form is not None:
            try:
                self.form.take(token)
            except RequestValidationError as problem:
                self.error = problem
                return
        if self.watcher.found:
            self.finish_reason = "stop"
        elif self.form is not None and self.form.is_complete:
            self._finish("stop")
        elif len(self.tokens) - len(self.prompt) >= self.limit:
            self._finish("length")

    def take_scores(self, scores: Scores) -> None:
        """Appends the scores of the next prompt tokens; if nothing is generated, the last one ends the request."""
        self.has_scores_in_flight = False
        self.num_read += len(scores.logprobs)
        if np.isnan(scores.logprobs).any():
            self.error = ModelError(NOT_FINITE)
            return
        self.scores += scores.logprobs.tolist()
        self.processed_scores += [] if scores.processed is None else scores.processed.tolist()
        self.greedy_ids += scores.greedy_ids.tolist()
        if scores.top_ids is not None and scores.top_logprobs is not None:
            most = self.params.num_prompt_logprobs
            for ids, values in zip(scores.top_ids[:, :most], scores.top_logprobs[:, :most], strict=True):
                self.top_scores.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
        if self.num_unscored == 0 and self.limit == 0:
            self.finish_reason = "length"

    def share(self, other: "Request") -> None:
        """Takes positions, captures and scores before `fork_position` from a request whose KV it now has, too."""
        self.num_read, self.kv_version = self.fork_position, other.kv_version
        self.count_cached(0, self.fork_position, self.fork_position)
        if self.capture:
            joined = other.captured_points(self.num_read)
            self.captured, self.num_captured = [joined] if self.num_read else [], self.num_read
        if self.score_from is not None and self.num_unscored:
            count = max(0, self.fork_position + 1 - self.score_from)
            self.scores, self.greedy_ids = other.scores[:count], other.greedy_ids[:count]
            self.top_scores = [dict(one) for one in other.top_scores[:count]]  # the caller of either may change its own

    def interrupt(self) -> None:
        """Ends the request with the answer so far; if it generates nothing, with a CancelledError."""
        if self.limit:
            self._finish("abort")
        else:
            self.error = CancelledError(f"{self.request_id!r} was ended by a change of weights")

    def restart(self) -> None:
        """Begins again with an empty KV; keeps the generated tokens, their captures, and the prompt's scores.

        If no token was generated yet, the scores are dropped, too: new weights may sample the first one.
        """
        self.num_read, self.num_in_flight, self.has_scores_in_flight, self.is_bound = 0, 0, False, False
        if not self.has_sampled_here or self.num_captured < len(self.tokens) - 1:  # or one to be continued
            self.captured, self.num_captured = [], 0
        if self.has_sampled_here and (self.captured or self.scores):  # perhaps of other weights than the recomputed KV:
            self.group = ""  # nobody forks from it any more
        self.forget_settings()
        if self.num_unscored or not self.has_sampled_here:
            self.scores, self.greedy_ids, self.top_scores, self.processed_scores = [], [], [], []

    def has_progressed(self) -> bool:
        """Returns whether tokens were generated since the last call."""
        former, self.num_before_loss = self.num_before_loss, len(self.choices)
        return self.num_before_loss > former

    def resume(self, former: RequestOutput) -> None:
        """Appends the tokens of an earlier answer to the same prompt, which this request continues.

        Raises:
            RequestValidationError: that answer is complete, lacks log-probabilities that are asked for, or has another
                number of them, or of weight versions, than tokens.
        """
        count, tops = len(former.token_ids), former.top_logprobs
        for name in ("weight_versions", "logprobs", "processed_logprobs", "top_logprobs"):
            given = getattr(former, name)
            found = len(given) if isinstance(given, Sequence) else f"{safe_repr(given)}, which is no list, as"
            if found != count and not (given is None and name != "weight_versions"):
                raise RequestValidationError(f"the answer to be continued has {count} tokens, but {found} {name}")
        if not all(isinstance(one, Mapping) and all(str(key).isdecimal() for key in one) for one in tops or ()):
            raise RequestValidationError("the answer to be continued has top_logprobs that are no mappings of ids")
        for name, lacking in (
            ("logprobs", self.params.num_logprobs >= 0 and former.logprobs is None),
            ("processed_logprobs", self.params.num_logprobs >= 0 and former.processed_logprobs is None),
            ("top_logprobs", self.params.num_logprobs > 0 and tops is None),
        ):
            if lacking and count:
                raise RequestValidationError(f"the answer to be continued has no {name}, but they are asked for now")
        asked = self.params.num_logprobs
        if tops and asked > 0 and (fewest := min(map(len, tops))) < asked:
            raise RequestValidationError(
                f"the answer to be continued has {fewest} top_logprobs a token, its next are to have {asked}"
            )
        none = [0.0] * count
        raw, processed = former.logprobs or none, former.processed_logprobs or none
        for at, token in enumerate(former.token_ids):
            # JSON turns ids into texts
            alternatives = tuple((int(one), value) for one, value in tops[at].items()) if tops else ()
            if not self.is_done:
                self.append(TokenChoice(token, raw[at], processed[at], alternatives), former.weight_versions[at])
        if self.error is not None:
            raise self.error
        if self.is_done or former.finish_reason == "stop":
            reason = former.finish_reason if former.finish_reason == "stop" else self.finish_reason
            raise RequestValidationError(f"the answer to be continued is complete with {count} tokens: {reason}")
        self.first_token_after, self.num_former = former.time_to_first_token, count

    def tell(self) -> None:
        """Sets `is_settled` and calls `notify`; an exception in `notify` is logged and affects no other request."""
        self.is_settled = self.is_done
        try:
            if self.notify is not None:
                self.notify(self)
        except BaseException:  # noqa: BLE001  of any kind, such as a CancelledError: the function is the caller's
            _log.exception("notify of request %r failed", self.request_id)

    def take_captured(self, points: dict[Point, NDArray[Any]]) -> None:
        """Adds the captures of its next positions, `[n, ...]` by point."""
        self.captured.append(points)
        self.num_captured += len(next(iter(points.values())))

    def captured_points(self, count: int) -> dict[Point, NDArray[Any]]:
        """Returns the captures of its first `count` tokens, by point."""
        return {point: np.concatenate([one[point] for one in self.captured])[:count] for point in self.capture}

    def take_text(self) -> str:
        """Returns the text that became final since the last call."""
        taken = self.text[self.num_taken :]
        self.num_taken += len(taken)
        return "".join(taken)

    def output(self, *, return_error: bool = False) -> RequestOutput:
        """Returns the answer so far; raises the error of a failed request or, if asked, returns it in the output."""
        error = self.error  # once: the engine's thread may set it meanwhile
        if error is not None and not return_error:
            raise error
        reason = self.finish_reason if error is None else "error"  # read first: all that it promises is there then
        params, begin, count = self.params, len(self.prompt), len(self.choices)
        wanted, scored = params.num_logprobs, params.num_prompt_logprobs >= 0
        choices = self.choices[:count] if wanted >= 0 else []
        return RequestOutput(
            prompt_token_ids=self._told_prompt,
            token_ids=self.tokens[begin : begin + count],
            text=self._text_so_far(),
            finish_reason=reason,
            stop_reason=self.stop_reason if reason == "stop" else None,
            logprobs=[one.logprob for one in choices] if wanted >= 0 else None,
            processed_logprobs=[one.processed_logprob for one in choices] if wanted >= 0 else None,
            top_logprobs=self.top_logprobs[:count] if wanted > 0 else None,
            prompt_logprobs=[None, *self.scores] if scored else None,
            prompt_top_logprobs=[None, *self.top_scores] if params.num_prompt_logprobs > 0 else None,
            weight_versions=self.versions[:count],
            captured=self.captured_points(begin + count - 1) if self.captured and reason is not None else {},
            time_to_first_token=self.first_token_after,
            error=error,
            drafted=self.drafted,
            accepted=self.accepted,
            preemptions=self.preemptions,
            num_cached_tokens=self.num_cached,
            request_id=self.request_id,
            prompt=self.text_prompt,
            num_answers=params.n,
        )

    def _text_so_far(self) -> str:
        text, count = self._joined
        new = self.text[count:]
        text += "".join(new)
        self._joined = text, count + len(new)
        return text

    def _finish(self, reason: FinishReason) -> None:
        if self.detokenizer is not None:
            self._watch(self.detokenizer.flush())
            self._emit(self.watcher.flush())
        self.finish_reason = "stop" if self.watcher.found else reason

    def _watch(self, piece: str) -> None:
        """Takes text that has become final, and emits the text that is certainly not part of a stop text.

        None ends in a character that the first `min_tokens` tokens complete, though it may become final with later
        ones.
        """
        is_exempt = len(self.choices) <= self.params.min_tokens
        count = len(piece) if is_exempt else min(len(piece), self._num_exempt)
        self._num_exempt = max(0, self._num_exempt - len(piece))
        if is_exempt and self.params.stop and self.detokenizer is not None:
            held = self.detokenizer.held
            if REPLACEMENT not in held:  # half a character is held as one, and exempts nothing
                self._num_exempt = len(held)
        self._emit(self.watcher.push(piece[:count], is_exempt=True))
        self._emit(self.watcher.push(piece[count:]))

    def _emit(self, piece: str) -> None:
        if piece:
            self.text.append(piece)


def own_copy(problem: FerrumError) -> FerrumError:
    """Returns a copy of an error, with the original as its cause; the original if it cannot be copied."""
    try:
        mine = copy.copy(problem)
    except Exception:  # noqa: BLE001  its class takes other arguments than the message
        return problem
    mine.args = problem.args
    if notes := getattr(problem, "__notes__", ()):
        mine.__notes__ = list(notes)
    mine.__cause__ = problem
    return mine


def _bits_of(ids: Sequence[int], num_words: int) -> Mask:
    """Returns a set of tokens as a bit mask in int32 words, the lowest bit first."""
    flags = np.zeros(32 * num_words, np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
