"""What a caller asks of a generation, and what they get."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ferrum_jax.contract.decoding import Sampling, is_integer, refuse_unless
from ferrum_jax.contract.errors import FerrumError, RequestValidationError, shown

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Sampling):
    """How tokens are chosen and when to stop. The defaults are greedy.

    Args:
        temperature: 0 takes the best token; above, logits are divided by it before drawing.
        top_k: draw among the k best; 0 is off.
        top_p: draw among the fewest tokens whose probabilities reach this; 1 is off.
        min_p: draw among tokens at least this likely relative to the best; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and answer.
        seed: makes draws repeatable, alone or in any batch; drawn anew for each request if None.
        max_tokens: tokens to generate at most; None goes on to the end of the KV capacity.
        stop: texts that end the answer, which then ends before them.
        stop_token_ids: ids that end the answer, besides the model's own.
        ignore_eos: go on past the model's own end of sequence.
        logprobs: also give each token's log-probability under the model's own distribution.
        prompt_logprobs: the same for the prompt's tokens, all of which are then computed, known prefix or not.
        n: how many answers to draw; the prompt is read once, where there is room. Answer i has the seed `seed + i`,
            modulo 2^32.
    """

    seed: int | None = None
    max_tokens: int | None = 256
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    n: int = 1

    def __post_init__(self):
        super().__post_init__()
        refuse_unless(
            "seed", self, lambda x: x is None or (is_integer(x) and 0 <= x < 2**32), "an integer from 0 to 2^32 - 1"
        )
        refuse_unless(
            "max_tokens", self, lambda x: x is None or (is_integer(x) and x >= 1), "an integer of at least 1, or None"
        )
        refuse_unless("n", self, lambda x: is_integer(x) and x >= 1, "an integer of at least 1")
        for name in ("ignore_eos", "logprobs", "prompt_logprobs"):
            refuse_unless(name, self, lambda x: isinstance(x, bool), "True or False")
        refuse_unless(
            "stop",
            self,
            lambda x: isinstance(x, (str, tuple, list)) and all(isinstance(t, str) and t for t in self.stop_texts),
            "texts that are not empty",
        )
        refuse_unless(
            "stop_token_ids",
            self,
            lambda x: isinstance(x, (tuple, list)) and all(is_integer(i) and i >= 0 for i in x),
            "token ids",
        )

    @property
    def is_plain_greedy(self) -> bool:
        """True if each token is the arg-max of the model's logits and nothing else is wanted."""
        return self.temperature == 0 and self.repetition_penalty == 1.0 and not self.logprobs

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts, as a tuple whatever was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def params_of_each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Gives the params of each of so many prompts: one for all of them, or as many; greedy if None.

    Raises:
        RequestValidationError: there are not as many, or one is none.
    """
    each = list(given) if isinstance(given, Sequence) else [SamplingParams() if given is None else given] * count
    if len(each) != count:
        raise RequestValidationError(f"{count} prompts need as many SamplingParams, {len(each)} were given")
    for params in each:
        if not isinstance(params, SamplingParams):
            raise RequestValidationError(f"params are {shown(params)}, expected SamplingParams")
    return each


def params_of_one(given: SamplingParams | None) -> SamplingParams:
    """Gives the params of a single answer; raises RequestValidationError where they ask for several."""
    if not isinstance(given, SamplingParams | None):
        raise RequestValidationError(f"params are {shown(given)}, expected SamplingParams")
    params = SamplingParams() if given is None else given
    if params.n != 1:
        raise RequestValidationError(f"n is {params.n}: `generate` gives several answers, this call gives one")
    return params


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One finished generation.

    `token_ids` holds everything generated, the token that stopped it included; `text` leaves special tokens and the
    stop text out. `logprobs` has one figure per id, or is None where it was not asked for; `prompt_logprobs` likewise
    for the prompt's ids, the first of which, that nothing predicts, has None. `error` is what ended a generation whose
    `finish_reason` is `error`: the rest is then what there was before it. With speculation, `drafted` counts the tokens
    that were proposed and verified, and `accepted` those of them that stand in the answer.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float] | None = None
    prompt_logprobs: list[float | None] | None = None
    time_to_first_token: float = 0.0  # seconds since the request was submitted
    error: FerrumError | None = None
    drafted: int = 0
    accepted: int = 0
