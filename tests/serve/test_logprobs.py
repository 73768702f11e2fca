"""Tokens as texts and bytes: they concatenate to the text, whatever way a vocabulary spells them."""

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ferrum_jax.executor.batch import TokenChoice
from ferrum_jax.generate.detokenize import Detokenizer
from ferrum_jax.generate.token_bytes import TokenBytes
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.serve.logprobs import TextLogprobs, chat_logprobs

TEXT = "Grüße, 世界! \U0001f600 two  spaces"


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return Tokenizer(backend=backend)


def sentencepiece() -> Tokenizer:
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz,!", "\u2581"]
    model = models.BPE(
        vocab={one: at for at, one in enumerate(letters)}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend=backend)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_bytes_of_tokens_concatenate_to_the_text(make: Any):
    tokenizer = make()
    ids = tokenizer.encode(TEXT)
    vocabulary = TokenBytes(tokenizer)
    assert b"".join(map(vocabulary.of, ids)).decode() == TEXT == tokenizer.decode(ids)
    assert vocabulary.text_of(ids[2]) == "\ufffd"  # a half of ü
    assert vocabulary.text_of(ids[0], by_id=True) == f"token_id:{ids[0]}"
    assert vocabulary.of(10_000) == b""


def test_a_space_is_part_of_a_token_where_a_text_would_lose_it():
    tokenizer = sentencepiece()
    space = tokenizer.encode(" ")
    tokenizer.backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)])
    assert tokenizer.decode(space) == ""
    assert [TokenBytes(tokenizer).text_of(one) for one in space] == [" "]


def test_special_tokens_are_spelled_out_and_no_tokenizer_spells_nothing():
    tokenizer = byte_level()
    (end,) = tokenizer.encode("<end>")
    assert TokenBytes(tokenizer).of(end) == b"<end>"
    assert TokenBytes(None).text_of(3) == ""


def test_offsets_are_places_in_the_text_also_where_a_character_takes_several_tokens():
    tokenizer = byte_level()
    vocabulary, text = TokenBytes(tokenizer), "aü世b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    (end,) = tokenizer.encode("<end>")
    entries: Any = [(one, None, None) for one in (end, *ids, end, ids[0])]
    found = TextLogprobs(vocabulary, by_id=False, has_special=False).report(
        entries, with_top=False, echo=text, num_echoed=1 + len(ids)
    )
    starts = [0, 0, 1, 1, 2, 2, 2, 3]  # of the end's mark, which no text shows, a, ü, 世 and b
    assert found["text_offset"] == [*starts, 4, 4]
    assert len(ids) == 7


@pytest.mark.parametrize("answer", ["b", "rest", "mark rest", "mark b", "first b", "first mark b"])
@pytest.mark.parametrize("begin", ["b first", "b first mark", "mark first mark mark"])
def test_offsets_end_where_the_text_does_after_incomplete_characters(begin: str, answer: str):
    """After a prompt that ends inside a character, and after marks that the text does not show."""
    tokenizer = byte_level()
    (end,), (b,) = tokenizer.encode("<end>"), tokenizer.encode("b", add_special_tokens=False)
    first, *rest = tokenizer.encode("世", add_special_tokens=False)
    parts = {"b": [b], "rest": rest, "mark": [end], "first": [first]}
    prompt, ids = ([token for part in text.split() for token in parts[part]] for text in (begin, answer))
    detokenizer = Detokenizer(tokenizer, prompt)
    text = "".join(map(detokenizer.push, ids))
    assert text + detokenizer.flush() == text
    echo = tokenizer.decode(prompt)
    entries: Any = [(one, None, None) for one in (*prompt, *ids, b)]
    found = TextLogprobs(TokenBytes(tokenizer), by_id=False, has_special=False).report(
        entries, with_top=False, echo=echo, num_echoed=len(prompt)
    )
    assert found["text_offset"][len(prompt)] == len(echo)
    assert found["text_offset"][-1] == len(echo + text)


def test_minus_infinity_is_told_as_a_number_and_the_likeliest_of_one_text():
    vocabulary = TokenBytes(byte_level())
    half, other = (byte_level().encode(one)[0] for one in ("ü", "世"))
    inf = float("inf")
    told = TextLogprobs(vocabulary, by_id=False).report(
        [(half, None, None), (half, -inf, {other: -0.5, half: -2.0})], with_top=True
    )
    assert told["token_logprobs"] == [None, -9999.0]
    assert told["top_logprobs"] == [None, {"\ufffd": -0.5}]
    found = chat_logprobs(vocabulary, [TokenChoice(half, -1.0, -1.0, ((other, -inf),))], 1, by_id=False)
    assert found["content"][0]["bytes"] == list("ü".encode())[:1]
    assert found["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
