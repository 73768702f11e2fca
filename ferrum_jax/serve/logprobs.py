"""Reports of log-probabilities, with the texts and bytes of tokens."""

import codecs
from collections.abc import Mapping
from typing import Any

from ferrum_jax.executor.batch import TokenChoice
from ferrum_jax.generate.detokenize import REPLACEMENT
from ferrum_jax.generate.token_bytes import TokenBytes
from ferrum_jax.serve.schema import finite


def prompt_report(
    vocabulary: TokenBytes,
    ids: list[int],
    scores: list[float],
    top: list[dict[int, float]],
) -> list[dict[str, Any] | None]:
    """Reports a prompt's log-probabilities as vLLM does: by id, with the rank if known; None for tokens without one."""
    told: list[dict[str, Any] | None] = [None] * len(ids)
    for at, (token, logprob) in enumerate(zip(ids[1:], scores, strict=False)):
        likeliest = top[at] if top else {}
        ranks = {one: rank for rank, one in enumerate(likeliest, start=1)}
        told[at + 1] = {
            str(one): {
                "logprob": finite(value),
                "rank": ranks.get(one),
                "decoded_token": vocabulary.text_of(one),
            }
            for one, value in ({token: logprob} | likeliest | {token: logprob}).items()
        }
    return told


class TextLogprobs:
    """Log-probabilities of `/v1/completions`: four lists, whose text offsets continue from piece to piece.

    A character of several tokens counts for the token that completes it. Special tokens count if `has_special`.
    """

    def __init__(self, vocabulary: TokenBytes, *, by_id: bool | None, has_special: bool = True):
        self._vocabulary, self._by_id, self._has_special = vocabulary, by_id, has_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._is_open = False  # the prompt ends inside a character, which its text shows as U+FFFD

    def report(
        self,
        entries: list[tuple[int, float | None, Mapping[int, float] | None]],
        *,
        with_top: bool,
        echo: str = "",
        num_echoed: int = 0,
    ) -> dict[str, Any]:
        """Reports tokens, their log-probabilities (None for the first) and the likeliest tokens in their places.

        The likeliest include the token itself, with the same number, unless another of them has the same text: of those
        the likeliest is reported. The first `num_echoed` tokens are those of the text `echo`.
        """
        told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for at, (token, logprob, top) in enumerate(entries):
            if at == num_echoed > 0:
                self._offset, self._is_open = len(echo), bool(self._decoder.getstate()[0])
            text = self._vocabulary.text_of(token, by_id=self._by_id)
            told["tokens"].append(text)
            told["token_logprobs"].append(None if logprob is None else finite(logprob))
            told["text_offset"].append(self._offset)
            self._offset += self._length(token, echo if at < num_echoed else None)
            if not with_top or logprob is None:
                told["top_logprobs"].append(None)
                continue
            likeliest: dict[str, float] = {}
            for one, value in (dict(top or {}) | {token: logprob}).items():
                name = self._vocabulary.text_of(one, by_id=self._by_id)
                likeliest[name] = max(finite(value), likeliest.get(name, -9999.0))
            told["top_logprobs"].append(likeliest)
        if not with_top:
            told["top_logprobs"] = None
        return told

    def _length(self, token: int, echo: str | None) -> int:
        """Returns how many characters a token completes in the text; for the prompt, in its text `echo`."""
        spelled = self._vocabulary.of(token)
        if self._vocabulary.is_special(token):
            place = self._offset + bool(self._decoder.getstate()[0])  # after an incomplete character
            if not (self._has_special if echo is None else echo.startswith(spelled.decode(), place)):
                return 0  # the text goes on as without it
        piece = self._decoder.decode(spelled)
        if echo is None:
            is_shown = self._is_open and piece.startswith(REPLACEMENT)  # the answer did not complete that character
            self._is_open = self._is_open and not piece
            return len(piece) - is_shown
        if echo.startswith(piece, self._offset):
            return len(piece)
        return len(piece) - (self._offset == 0 and piece.startswith(" "))  # the tokenizer puts this space before a text


def chat_logprobs(
    vocabulary: TokenBytes, tokens: list[TokenChoice], num_top: int, *, by_id: bool | None
) -> dict[str, Any]:
    """Reports log-probabilities as `/v1/chat/completions` does."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = vocabulary.text_of(token, by_id=by_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(vocabulary.of(token))}

    return {
        "content": [
            entry(one.token_id, one.logprob)
            | {"top_logprobs": [entry(token, value) for token, value in one.alternatives[:num_top]]}
            for one in tokens
        ]
    }
