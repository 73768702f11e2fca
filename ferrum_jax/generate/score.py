"""Scores of texts that were given: what `LLM.score` answers."""

import itertools
from dataclasses import dataclass

from ferrum_jax.generate.request import Request
from ferrum_jax.generate.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Score:
    """How likely the model finds a continuation of a prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]  # of the continuation
    logprobs: list[float]  # natural logarithms, one for each of them
    greedy_ids: list[int]  # the likeliest token at each of their places

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation."""
        return sum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """True if greedy decoding would have given this continuation."""
        return self.token_ids == self.greedy_ids


def score_of(request: Request) -> Score:
    """Returns the score of a request that is done."""
    start = request.score_from or 0
    return Score(
        prompt_token_ids=request.prompt[:start],
        token_ids=request.prompt[start:],
        logprobs=request.scores,
        greedy_ids=request.greedy_ids,
    )


def split_text(tokenizer: Tokenizer, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokenises two texts as one; the second part begins at the first token that the prompt alone does not have."""
    alone, joined = tokenizer.encode(prompt), tokenizer.encode(prompt + continuation)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(alone, joined, strict=False)))
    return joined[:shared], joined[shared:]
