"""Parameters of a generation, and its output."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from ferrum_jax.compile.sampler import MAX_BIAS, MAX_STOP_IDS
from ferrum_jax.contract.decoding import Sampling, check_setting, is_integer, is_real
from ferrum_jax.contract.errors import (
    FerrumError,
    InvalidParameterError,
    RequestValidationError,
    UnsupportedError,
    safe_repr,
)
from ferrum_jax.generate.structured import Structured
from ferrum_jax.ops.sampling import MAX_TOP_LOGPROBS

FinishReason = Literal["stop", "length", "abort", "error"]
_LARGEST = 3.4028234663852886e38  # of float32
_MAX_BAD_WORDS = 1024  # each is compared with the answer after every token


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Sampling):
    """How tokens are chosen and when to stop. The default is greedy; names are vLLM's where the meaning is the same.

    Logits go through bias, penalties, temperature, `top_k`, `top_p` and `min_p` in this order, as in transformers; vLLM
    has `min_p` before the other two.

    Args:
        temperature: 0 takes the likeliest token; above 0, logits are divided by it before sampling.
        top_k: sample among the k likeliest; 0 and -1 are off.
        top_p: sample among the fewest tokens whose probabilities reach this; 1 is off.
        min_p: sample among tokens at least this likely relative to the likeliest; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and answer.
        presence_penalty: subtracted from the logits of tokens that the answer has.
        frequency_penalty: subtracted from the logits of a token for each time the answer has it.
        logit_bias: added to the logits of token ids; -inf forbids a token. At most 512 ids, together with those that
            `bad_words` forbid at one time.
        allowed_token_ids: only these may be chosen; None allows all.
        bad_words: texts whose tokens the answer must not contain in a row, at most 1024, each tokenised alone and after
            a space; a text that is spelled with other tokens is not recognised. If no other token may come next, the
            answer ends with an error.
        min_tokens: number of tokens before which neither the model's end of sequence nor `stop_token_ids` is chosen,
            and no `stop` ends the answer; at most the KV capacity left after the prompt.
        seed: makes sampling repeatable, alone or in any batch; a random seed for each request if None.
        max_tokens: the most tokens to generate; None: up to the end of the KV capacity.
        stop: texts that end the answer and are left out of it; None: no stop texts.
        include_stop_str_in_output: the answer includes the stop text, or the text of the token that ends it (of a
            special token only without `skip_special_tokens`).
        stop_token_ids: ids that end the answer, besides the model's own.
        ignore_eos: go on past the model's own end of sequence.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: True or 0: report the log-probability of each chosen token; k, at most 20: also those of the k
            likeliest tokens. None and False: report none.
        logprobs_mode: the distribution for the likeliest tokens: `raw`, the model's own, or `processed`, after
            penalties, temperature and filters. Log-probabilities of chosen tokens are reported under both.
        prompt_logprobs: the same for the prompt's tokens, k above 0 only on a `ModelRunner`; the prefix cache is then
            not used for them.
        structured: the form of the answer: a JSON schema, a regular expression, a grammar or choices. The answer ends
            where nothing may follow, so `min_tokens` and `ignore_eos` are refused. Needs the extra `structured`.
        n: number of answers; above 1 only with a temperature above 0. The prompt is prefilled once if the KV has room.
            Answer i has the seed `seed + i`, modulo 2^32.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    min_tokens: int = 0
    seed: int | None = None
    max_tokens: int | None = 256
    stop: str | Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: bool | int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    prompt_logprobs: bool | int | None = None
    structured: Structured | None = None
    n: int = 1

    def __post_init__(self):
        if self.top_k == -1 and is_integer(self.top_k):
            object.__setattr__(self, "top_k", 0)
        super().__post_init__()

        def check(name: str, holds: Any, expected: str) -> None:
            check_setting(name, self, holds, expected)

        def are_ids(x: Any) -> bool:
            return isinstance(x, (tuple, list)) and all(is_integer(one) and one >= 0 for one in x)

        for name in ("presence_penalty", "frequency_penalty"):
            check(name, lambda x: is_real(x) and abs(x) <= _LARGEST, "a finite number")
        check("seed", lambda x: x is None or (is_integer(x) and 0 <= x < 2**32), "an integer from 0 to 2^32 - 1")
        check("max_tokens", lambda x: x is None or (is_integer(x) and x >= 1), "an integer of at least 1, or None")
        check("min_tokens", lambda x: is_integer(x) and x >= 0, "an integer of at least 0")
        check("structured", lambda x: isinstance(x, Structured | None), "a Structured or None")
        check("n", lambda x: is_integer(x) and x >= 1, "an integer of at least 1")
        if self.n > 1 and self.temperature == 0:
            raise InvalidParameterError(
                f"n is {self.n} and temperature is 0, which gives the same answer {self.n} times: give a temperature "
                "above 0, such as 1.0, or n=1"
            )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            check(name, lambda x: isinstance(x, bool), "True or False")
        for name in ("logprobs", "prompt_logprobs"):
            limit = f"True, False, None or a number from 0 to {MAX_TOP_LOGPROBS}"
            check(name, lambda x: isinstance(x, bool | None) or (is_integer(x) and 0 <= x <= MAX_TOP_LOGPROBS), limit)
        check("logprobs_mode", lambda x: x in ("raw", "processed"), "'raw' or 'processed'")
        for name in ("stop", "bad_words"):
            check(name, lambda x: x is None or all(isinstance(t, str) and t for t in _texts(x)), "texts, none empty")
        check("stop_token_ids", lambda x: x is None or are_ids(x), "token ids")
        check("allowed_token_ids", lambda x: x is None or (are_ids(x) and len(x) > 0), "token ids, at least one")
        check("logit_bias", lambda x: x is None or (isinstance(x, Mapping) and len(x) <= MAX_BIAS and all(
            is_integer(token) and token >= 0 and is_real(bias) and (abs(bias) <= _LARGEST or bias == -math.inf)
            for token, bias in x.items()
        )), f"at most {MAX_BIAS} token ids with a number each")  # fmt: skip
        if (count := len(_texts(self.bad_words))) > _MAX_BAD_WORDS:
            raise InvalidParameterError(f"bad_words has {count} texts, the limit is {_MAX_BAD_WORDS}")
        if self.structured is not None and (self.min_tokens or self.ignore_eos):
            raise InvalidParameterError(
                "min_tokens and ignore_eos do not go with structured, whose form decides where the answer ends"
            )
        if self.min_tokens and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}")
        # copies: the caller may change its own
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "stop", "bad_words"):
            if isinstance(given := getattr(self, name), (Mapping, list)):
                object.__setattr__(self, name, dict(given) if isinstance(given, Mapping) else list(given))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        return tuple(_texts(self.stop))

    @property
    def num_logprobs(self) -> int:
        """Number of alternatives to report for each token of the answer; -1: no log-probabilities at all."""
        return _count(self.logprobs)

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of alternatives to report for each token of the prompt; -1: no log-probabilities at all."""
        return _count(self.prompt_logprobs)


def _texts(given: Any) -> list[Any]:
    """Returns texts as a list, a single text as a list of one; `[None]`, which is refused, for any other type."""
    if given is None:
        return []
    if isinstance(given, str):
        return [given]
    return list(given) if isinstance(given, (tuple, list)) else [None]


def _count(given: bool | int | None) -> int:
    if given is None or given is False:
        return -1
    return 0 if given is True else int(given)


def one_of(params: Any, sampling_params: Any) -> Any:
    """Returns the parameters that were given, under either name."""
    if params is not None and sampling_params is not None:
        raise RequestValidationError("params and sampling_params are the same: give one of them")
    return sampling_params if params is None else params


def params_of_each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Returns the params of each of `count` prompts, given one for all or one for each; greedy if None.

    Raises:
        RequestValidationError: their number is not `count`, or one is not a SamplingParams.
    """
    each = list(given) if isinstance(given, Sequence) else [SamplingParams() if given is None else given] * count
    if len(each) != count:
        raise RequestValidationError(f"{count} prompts need as many SamplingParams, {len(each)} were given")
    for params in each:
        if not isinstance(params, SamplingParams):
            raise RequestValidationError(f"params are {safe_repr(params)}, expected SamplingParams")
    return each


def params_of_one(given: SamplingParams | None, hint: str = "`LLM.generate` gives several") -> SamplingParams:
    """Returns the params of a single answer; raises RequestValidationError if `n` is not 1."""
    (params,) = params_of_each([SamplingParams() if given is None else given], 1)
    if params.n != 1:
        raise RequestValidationError(f"n is {params.n}, but this call gives one answer: {hint}")
    return params


def check_fits(params: SamplingParams, stop_ids: Collection[int], bad_words: Sequence[Sequence[int]]) -> None:
    """Raises InvalidParameterError for more stop ids under `min_tokens`, or more biased tokens, than a slot holds.

    Bad words count by the most last tokens that they can forbid at one time.
    """
    if params.min_tokens and len(stop_ids) > MAX_STOP_IDS:
        raise InvalidParameterError(f"min_tokens goes with at most {MAX_STOP_IDS} stop ids, there are {len(stop_ids)}")
    ends: dict[tuple[int, ...], set[int]] = {(): set(params.logit_bias or ())}  # by the tokens before
    biased = len(ends[()])
    for *before, last in bad_words:
        ends.setdefault(tuple(before), set()).add(last)
    # A word forbids its last token while its other tokens are the end of the answer.
    lengths = {len(one) for one in ends}
    most = max(len(set().union(*(ends.get(one[len(one) - n :], ()) for n in lengths if n <= len(one)))) for one in ends)
    if most > MAX_BIAS:
        raise InvalidParameterError(
            f"logit_bias and bad_words put a bias on up to {most} tokens at one time ({biased} by logit_bias), a slot "
            f"holds {MAX_BIAS}"
        )


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One answer, finished or as far as it is generated.

    `token_ids` holds every generated token, a stop token included. `text` leaves out special tokens and the stop text;
    it follows the prompt's text, and includes the space between the two. `logprobs` has one figure per id under the
    model's own distribution, `processed_logprobs` one under the distribution it was sampled from, `top_logprobs` the
    likeliest ids at its position; they are None if not asked for. Log-probabilities of the prompt have None for the
    first id, which nothing predicts. `stop_reason` is the stop text, or the one of `stop_token_ids`, that ended the
    answer; None where neither did. `error` ended an answer whose `finish_reason` is
    `error`; the other fields then hold what was generated before. With speculation, `drafted` counts the tokens that
    were drafted and verified, and `accepted` those of them in the answer. `preemptions` counts how often the request
    lost its slot and blocks because the KV ran short, and was recomputed. `weight_versions` has for each generated
    token the version of the weights that chose it: the runner's `params_version`, which every `set_params` and
    `set_lora` increases. An answer that a change of weights ended has the reason `abort`. A finished answer has in
    `captured` the arrays at the hook points asked for, `[n, ...]`: n counts the tokens of prompt and answer except the
    last, which no step has computed. They are of the step that chose the next token, so of the weights of its version,
    even if the tokens were recomputed since; but those of tokens that a continued answer had before are of the weights
    that read them again. An answer that ended before its first token has fewer rows, or an empty
    `captured`.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[float] | None = None
    processed_logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    weight_versions: list[int] = field(default_factory=list)
    captured: Mapping[Any, NDArray[Any]] = field(default_factory=dict, repr=False, compare=False)
    time_to_first_token: float = 0.0  # seconds since the request was submitted
    error: FerrumError | None = None
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, that were in the KV already and were not computed again
    request_id: str = ""
    prompt: str | None = field(default=None, repr=False)  # the prompt's text, if it was given as text
    num_answers: int = 1  # `n` of its prompt

    @property
    def finished(self) -> bool:
        """True once the answer is complete."""
        return self.finish_reason is not None

    @property
    def outputs(self) -> list["RequestOutput"]:
        """A list of this answer alone, for code that was written for vLLM.

        Raises:
            UnsupportedError: the prompt has several answers, each an output of its own.
        """
        if self.num_answers > 1:
            n = self.num_answers
            raise UnsupportedError(f"`generate` returns n={n} outputs per prompt, in order: group them by {n}")
        return [self]


@dataclass(frozen=True, kw_only=True)
class Score:
    """How likely the model finds a continuation of a prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]  # of the continuation
    logprobs: list[float]  # natural logarithms, one for each of them
    greedy_ids: list[int]  # the likeliest token in the place of each of them
    processed_logprobs: list[float] | None = None  # in the distribution of the parameters; -inf for tokens they exclude

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation."""
        return sum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """True if greedy decoding would produce this continuation."""
        return self.token_ids == self.greedy_ids
