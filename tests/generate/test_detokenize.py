from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.generate.detokenize import Detokenizer
from ferrum_jax.generate.tokenizer import Tokenizer, load_tokenizer
from tests.fake import CountingLLM, SummingLLM
from tests.long import SEED

PIECES: dict[str, Any] = {"data": st.data()}
LONG_RUNS = {"data": st.binary(min_size=60, max_size=140), "characters": st.sampled_from(["€", "🙂é", "🙂\u07ff€"])}
SPM_PIECES = ["▁", "▁▁", "▁a", "a", "b", "▁b", "ab", "\ufffd", "é", "中", ""]


def make_byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("â", "Ĥ"), ("Ĥ", "¬"), ("a", "â"), ("Ġ", "a")]
    vocabulary = [*alphabet, *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<tool>", "\u00a0x"])
    return Tokenizer(backend=backend)


def make_sentencepiece(*, prefixed: bool = True, runs: bool = False) -> Tokenizer:
    vocabulary = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[], byte_fallback=True)
    )
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefixed else undo)
    backend.add_special_tokens(["<unk>", "<s>"])
    if runs:
        backend.add_tokens(["<tool>"])
    return Tokenizer(backend=backend, prefixes_runs=runs)


TOKENIZERS = {
    "byte level": make_byte_level(),
    "sentencepiece": make_sentencepiece(),
    "sentencepiece of a GGUF file": make_sentencepiece(runs=True),
    "sentencepiece without prefix": make_sentencepiece(prefixed=False),
    "no decoder": Tokenizer(backend=tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "\ufffd": 2}, merges=[]))),
}


def byte_token(byte: int) -> str:
    """A byte from 0x80 on as byte-level vocabularies spell it."""
    printable = [*range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in printable and not 0x21 <= b <= 0x7E]
    return chr(byte) if byte in printable else chr(256 + shifted.index(byte))


def stream(tokenizer: Tokenizer, ids: list[int], *, prompt: Sequence[int] = (), skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    size = tokenizer.vocab_size
    anything = st.integers(0, size + 2)
    # The bytes of two characters, a space and specials, so that half-made characters and their joints are common.
    euro = [i for b in "€🙂 ".encode() for t in (f"<0x{b:02X}>",) if (i := tokenizer.token_to_id(t)) is not None]
    spelled = tokenizer.encode("€🙂 a", add_special_tokens=False)
    likely = st.sampled_from(sorted({*euro, *spelled, *range(max(0, size - 12), size)}))
    return st.lists(st.one_of(likely, anything), max_size=150)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(**PIECES)
def test_the_pieces_concatenate_to_the_decoding_of_all(name: str, data: st.DataObject):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(**PIECES)
def test_after_a_prompt_the_pieces_are_what_follows_its_text(name: str, data: st.DataObject):
    tokenizer = TOKENIZERS[name]
    prompt, ids, skip = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer)), data.draw(st.booleans())
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)[len(before.rstrip("\ufffd")) :]
    for _ in range(len(before) - len(before.rstrip("\ufffd"))):  # unless they were completed
        after = after.removeprefix("\ufffd")
    assert "".join(stream(tokenizer, ids, prompt=prompt, skip=skip)) == after


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (["<s>", "▁a", "b"], " b"), (["▁a"], " b"), (["▁a", "<s>", "<s>"], " b"), (["▁a", *["b"] * 100], " b"),
        (["<s>"], "b"), (["<s>"] * 9, "b"), ([], "b"),
    ],
)  # fmt: skip
def test_an_answer_keeps_the_space_after_its_prompt(prompt: list[str], text: str):
    tokenizer = make_sentencepiece()
    ids = [token_id for token in prompt if (token_id := tokenizer.token_to_id(token)) is not None]
    answer = tokenizer.token_to_id("▁b")
    assert answer is not None
    assert "".join(stream(tokenizer, [answer], prompt=ids)) == text


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_character_that_the_prompt_begins_comes_out_whole(name: str, count: int):
    tokenizer = TOKENIZERS[name]
    spelled = [byte_token(b) if name == "byte level" else f"<0x{b:02X}>" for b in "🙂".encode()]
    ids = [token_id for token in ("a", *spelled, "b") if (token_id := tokenizer.token_to_id(token)) is not None]
    assert "".join(stream(tokenizer, ids[1 + count :], prompt=ids[: 1 + count])) == "🙂b"
    assert "".join(stream(tokenizer, ids[-1:], prompt=ids[: 1 + count])) == "b"


@pytest.mark.parametrize("prompt", [["▁a", "<s>"], ["<s>"] * 9, ["▁a", "<s>", "<s>"]])
def test_an_answer_after_an_added_token_loses_its_prefix_where_each_run_has_one(prompt: list[str]):
    tokenizer = make_sentencepiece(runs=True)
    a, b, end = (tokenizer.token_to_id(token) or 0 for token in ("▁a", "▁b", "<s>"))
    ids = [tokenizer.token_to_id(token) or 0 for token in prompt]
    assert "".join(stream(tokenizer, [b, a, end, end, b], prompt=ids)) == "b ab"


def test_an_llm_goes_on_from_the_text_of_the_prompt():
    tokenizer = make_sentencepiece()
    size = tokenizer.vocab_size
    a, b, end = (tokenizer.token_to_id(token) or 0 for token in ("▁a", "▁b", "<s>"))
    model = CountingLLM(vocab_size=size)
    model.next_token = lambda last, position: b
    llm = LLM.from_model(model, tokenizer)
    for prompt, text in (([a], " b b"), ([end, a, end], " b b"), ([end], "b b")):
        outs = llm.generate([prompt], SamplingParams(temperature=1.0, top_k=1, max_tokens=2, n=2))
        assert [out.text for out in outs] == [text, text]
        (first,) = llm.generate([prompt], SamplingParams(max_tokens=1))
        (continued,) = llm.generate([first], SamplingParams(max_tokens=2))
        assert continued.text == text


@pytest.mark.parametrize("runs", [True, False])
def test_a_text_that_continues_ids_has_its_first_space_as_the_prefix(runs: bool):
    tokenizer = make_sentencepiece(runs=runs)
    if runs:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.backend.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    llm = LLM.from_model(SummingLLM(vocab_size=tokenizer.vocab_size), tokenizer)
    prompt = tokenizer.encode("a")
    for text, expected in ((" b", ["▁", "b"]), ("b", ["▁", "b"]), ("  b", ["▁", "▁", "b"])):
        (score,) = llm.score([prompt], [text])
        assert [tokenizer.id_to_token(token_id) for token_id in score.token_ids] == expected


@settings(max_examples=50, deadline=None)
@given(**LONG_RUNS)
def test_long_runs_of_broken_characters_stream_as_they_decode(data: bytes, characters: str):
    tokenizer = make_byte_level()
    spelled = sorted({*characters.encode(), 0xFF})
    ids = [i for b in data if (i := tokenizer.token_to_id(byte_token(spelled[b % len(spelled)]))) is not None]
    ids = [*tokenizer.encode("ab"), *ids, *tokenizer.encode("b€")]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("count", range(55, 70))
def test_a_character_after_many_broken_ones_comes_out_whole(count: int):
    tokenizer = make_byte_level()
    ids = [tokenizer.token_to_id(byte_token(byte)) for byte in [0xFF] * count + [*"🙂".encode()]]
    assert "".join(stream(tokenizer, [i for i in ids if i is not None])) == "\ufffd" * count + "🙂"


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
@given(text=st.text())
def test_the_pieces_of_real_text_hold_whole_characters(name: str, text: str):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    position = 0
    for piece in stream(tokenizer, ids, skip=False):
        assert whole.startswith(piece, position)
        position += len(piece)
    assert position == len(whole)


def test_a_character_in_several_tokens_comes_out_whole():
    tokenizer = make_byte_level()
    ids = [tokenizer.token_to_id(token) for token in ("a", "â", "Ĥ", "¬", "b")]
    assert stream(tokenizer, [i for i in ids if i is not None]) == ["a", "", "", "€", "b", ""]


def test_invalid_bytes_do_not_hold_back_what_is_final():
    tokenizer = make_byte_level()
    byte = tokenizer.token_to_id("ÿ")
    assert byte is not None
    assert stream(tokenizer, [byte] * 4) == ["", *["\ufffd"] * 4]


def test_byte_tokens_wait_for_the_end_of_their_run():
    tokenizer = make_sentencepiece()
    ids = [tokenizer.token_to_id(token) for token in ("a", "<0xE2>", "<0x82>", "<0xAC>", "b", "<0xE2>")]
    assert stream(tokenizer, [i for i in ids if i is not None]) == ["a", "", "", "", "€b", "", "\ufffd"]


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped():
    tokenizer = make_sentencepiece()
    ids = [tokenizer.token_to_id(token) for token in ("▁a", "▁a", "▁", "▁b", "<s>", "▁b")]
    assert stream(tokenizer, [i for i in ids if i is not None]) == ["a", " a", " ", " b", "", " b", ""]


def test_a_flushed_detokenizer_is_as_new():
    detokenizer = Detokenizer(make_sentencepiece())
    prefixed = detokenizer._tokenizer.token_to_id("▁a")
    assert prefixed is not None
    assert [detokenizer.push(prefixed), detokenizer.flush(), detokenizer.push(prefixed)] == ["a", "", "a"]


@pytest.mark.parametrize("token", ["a", "ÿ", "Ĥ", "€"])
def test_the_work_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch, token: str):
    tokenizer = make_byte_level()
    ids = tokenizer.encode("€") if token == "€" else [tokenizer.token_to_id(token) or 0]
    sizes: list[int] = []
    decode = Detokenizer._decode

    def count(self: Detokenizer, ids: list[int]) -> str:
        sizes.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(Detokenizer, "_decode", count)
    stream(tokenizer, ids * (2000 // len(ids)))
    assert max(sizes) < 70
    assert len(sizes) < 3 * 2000


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=60))
def test_the_real_vocabulary_streams_as_it_decodes(smollm2: Tokenizer, ids: list[int]):
    assert "".join(stream(smollm2, ids)) == smollm2.decode(ids)


@pytest.mark.slow
def test_many_more_broken_characters_stream_as_they_decode():
    print(f"seed {SEED}")
    _check_many(test_long_runs_of_broken_characters_stream_as_they_decode, LONG_RUNS)
    for name in TOKENIZERS:
        _check_many(test_the_pieces_concatenate_to_the_decoding_of_all, PIECES, name=name)
        _check_many(test_after_a_prompt_the_pieces_are_what_follows_its_text, PIECES, name=name)


def _check_many(test: Any, strategies: dict[str, Any], **others: str) -> None:
    """Runs the body of a test of Hypothesis on many more examples."""
    seed(SEED)(settings(max_examples=3000, deadline=None)(given(**strategies)(test.hypothesis.inner_test)))(**others)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)
