"""One request, fed token by token."""

import string
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from ferrum_jax import SamplingParams
from ferrum_jax.contract.errors import ModelError
from ferrum_jax.executor.batch import TokenChoice
from ferrum_jax.generate.detokenize import Detokenizer
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.stops import StopWatcher
from ferrum_jax.generate.tokenizer import Tokenizer

LETTERS = string.ascii_lowercase[:23]


def letters(*, eos: tuple[int, ...] = ()) -> Tokenizer:
    """A vocabulary of 23 letters: token 0 is `a`."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(LETTERS)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend=backend, eos_token_ids=eos)


def spell(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def make(limit: int = 100, stop_ids: frozenset[int] = frozenset(), *, textless: bool = False, **params: Any) -> Request:
    asked = SamplingParams(**params)
    return Request(
        cache_id="r",
        prompt=[7, 8],
        params=asked,
        seed=0,
        stop_ids=stop_ids,
        limit=limit,
        detokenizer=None if textless else Detokenizer(letters()),
        watcher=StopWatcher(asked.stop_texts),
    )


def feed(request: Request, text: str) -> list[str]:
    """Appends letters until the request is done; gives the text taken after each."""
    taken = []
    for token in spell(text):
        if request.is_done:
            break
        request.append(TokenChoice(token, 0.0, 0.0))
        taken.append(request.take_text())
    return taken


def test_pieces_are_taken_once_and_concatenate_to_the_text():
    request = make(limit=4)
    assert feed(request, "cab") == ["c", "a", "b"]
    assert request.take_text() == ""
    assert feed(request, "dab") == ["d"]
    output = request.output()
    assert (output.text, output.token_ids, output.finish_reason) == ("cabd", spell("cabd"), "length")
    assert output.prompt_token_ids == [7, 8]


def test_the_stop_text_is_left_out_and_its_token_kept():
    request = make(stop="bad")
    assert feed(request, "abbadcc") == ["a", "", "b", "", ""]
    output = request.output()
    assert (output.text, output.token_ids, output.finish_reason) == ("ab", spell("abbad"), "stop")


def test_what_was_held_back_comes_out_at_the_limit():
    request = make(limit=3, stop="bad")
    assert feed(request, "aba") == ["a", "", "ba"]
    assert request.output().finish_reason == "length"


def test_a_stop_id_ends_the_answer_and_lets_out_what_was_held_back():
    request = make(stop="bad", stop_ids=frozenset(spell("e")))
    assert feed(request, "abecc") == ["a", "", "b"]
    output = request.output()
    assert (output.text, output.token_ids, output.finish_reason) == ("ab", spell("abe"), "stop")


def test_a_stop_on_the_last_token_is_a_stop():
    request = make(limit=3, stop="bad")
    feed(request, "bad")
    assert (request.output().finish_reason, request.output().text) == ("stop", "")


def test_a_stop_in_what_the_detokenizer_held_back_is_a_stop():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"x": 0, "<0x61>": 1}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    request = make(limit=2, stop="a")
    request.detokenizer = Detokenizer(Tokenizer(backend=backend))
    request.append(TokenChoice(0, 0.0, 0.0))
    request.append(TokenChoice(1, 0.0, 0.0))  # the byte of an `a`, which may be part of a longer character
    output = request.output()
    assert (output.text, output.finish_reason) == ("x", "stop")


def test_without_a_tokenizer_the_text_stays_empty():
    request = make(limit=2, textless=True)
    assert feed(request, "ab") == ["", ""]
    assert request.output().text == ""
    assert request.output().token_ids == [0, 1]


def test_logprobs_are_there_where_they_were_asked_for():
    request = make(limit=2, logprobs=True)
    request.append(TokenChoice(1, -0.5, -0.25))
    request.append(TokenChoice(2, -1.5, -1.0))
    assert request.output().logprobs == [-0.5, -1.5]
    assert request.output().processed_logprobs == [-0.25, -1.0]
    plain = make(limit=1)
    plain.append(TokenChoice(1, 0.0, 0.0))
    assert plain.output().logprobs is None


def test_an_error_is_raised_by_whoever_asks_for_the_output():
    request = make()
    assert not request.is_done
    request.error = ModelError("broken")
    assert request.is_done
    with pytest.raises(ModelError, match="broken"):
        request.output()


def test_the_time_to_the_first_token_is_that_of_the_first():
    request = make()
    request.append(TokenChoice(0, 0.0, 0.0))
    first = request.first_token_after
    assert 0 < first < 60
    request.append(TokenChoice(0, 0.0, 0.0))
    assert request.first_token_after == first
