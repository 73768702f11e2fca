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
from tests.generate.test_detokenize import make_sentencepiece

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


@pytest.mark.parametrize(
    ("min_tokens", "limit", "text", "reason"),
    [(0, 100, "", "stop"), (2, 100, "", "stop"), (3, 100, "badab", "stop"), (8, 8, "badabbad", "length")],
)
def test_a_stop_that_is_complete_within_the_least_tokens_ends_nothing(
    min_tokens: int, limit: int, text: str, reason: str
):
    request = make(limit=limit, min_tokens=min_tokens, stop="bad")
    feed(request, "badabbadcc")
    assert (request.output().text, request.output().finish_reason) == (text, reason)


@pytest.mark.parametrize(
    ("pieces", "min_tokens", "stop", "text"),
    [
        ("a b 0A a b a", 2, "\n", "ab"),
        ("a b 0A a b a", 3, "\n", "ab\naba"),
        ("a b 0A a b a", 4, "\n", "ab\naba"),
        ("a E2 82 AC b a", 3, "b", "a€"),
        ("a E2 82 AC 0A a", 3, "\n", "a€"),
        ("a E2 82 AC b a", 2, "€", "a"),
        ("a E2 82 AC b a", 4, "€", "a€ba"),
        ("a 0A E2 82 AC b", 3, "\n", "a\n€b"),
    ],
)
def test_a_stop_of_byte_tokens_ends_nothing_before_the_least_tokens(pieces: str, min_tokens: int, stop: str, text: str):
    """Text of bytes is held until the next token, which may be the first that ends an answer."""
    tokenizer = make_sentencepiece(prefixed=False)
    request = make(limit=6, min_tokens=min_tokens, stop=stop)
    request.detokenizer = Detokenizer(tokenizer)
    for piece in pieces.split():
        piece = piece if len(piece) == 1 else f"<0x{piece}>"
        token = tokenizer.token_to_id(piece)
        assert token is not None
        if not request.is_done:
            request.append(TokenChoice(token, 0.0, 0.0))
    assert request.output().text == text


def test_nothing_of_a_stop_that_begins_within_the_least_tokens_is_let_out():
    request = make(min_tokens=2, stop="bad")
    assert feed(request, "badcc") == ["", "", ""]


@pytest.mark.parametrize(("includes", "text"), [(True, "abe"), (False, "ab")])
def test_the_text_of_a_stop_token_is_in_the_answer_if_it_is_asked_for(includes: bool, text: str):
    request = make(stop="bad", stop_ids=frozenset(spell("e")), include_stop_str_in_output=includes)
    feed(request, "abecc")
    output = request.output()
    assert (output.text, output.token_ids, output.finish_reason) == (text, spell("abe"), "stop")


@pytest.mark.parametrize(("skips", "text"), [(True, "a"), (False, "a</s>")])
def test_a_special_stop_token_has_a_text_only_if_special_tokens_do(skips: bool, text: str):
    tokenizer = letters()
    tokenizer.backend.add_special_tokens(["</s>"])
    end = tokenizer.token_to_id("</s>")
    assert end is not None
    request = make(stop_ids=frozenset([end]), include_stop_str_in_output=True)
    request.detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips)
    for token in (0, end):
        request.append(TokenChoice(token, 0.0, 0.0))
    assert request.output().text == text


def test_an_output_stays_as_it_was_and_shares_what_never_changes_with_later_ones():
    request = make(logprobs=2)
    outputs = []
    for at, letter in enumerate("cabd"):
        choice = TokenChoice(spell(letter)[0], -at - 0.5, -at - 0.25, ((at, -0.5), (at + 1, -1.5)))
        request.append(choice, at)
        outputs.append(request.output())
        outputs[-1].token_ids.append(99)  # the caller's own list
    for count, one in enumerate(outputs, 1):
        assert (one.text, one.token_ids) == ("cabd"[:count], [*spell("cabd"[:count]), 99])
        assert one.logprobs == [-at - 0.5 for at in range(count)]
        assert one.processed_logprobs == [-at - 0.25 for at in range(count)]
        assert one.top_logprobs == [{at: -0.5, at + 1: -1.5} for at in range(count)]
        assert one.weight_versions == list(range(count))
        assert one.top_logprobs[0] is outputs[0].top_logprobs[0]
