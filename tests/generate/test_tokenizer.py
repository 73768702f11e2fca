import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any, cast

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from ferrum_jax.contract.errors import (
    ConfigError,
    FerrumError,
    InvalidFormatError,
    NotFoundError,
    TokenizerError,
    UnsupportedError,
)
from ferrum_jax.generate.gguf_tokenizer import build_gguf_tokenizer, turn_end_ids
from ferrum_jax.generate.tokenizer import Tokenizer, load_tokenizer

# Made with transformers 5.23 from the same file.
SMOLLM2_PAIRS = [
    ("", []),
    ("Hello, world!", [19556, 28, 905, 17]),
    ("The capital of France is", [504, 3575, 282, 4649, 314]),
    ("2024-01-31 and 3.14", [34, 32, 34, 36, 29, 32, 33, 29, 35, 33, 284, 216, 35, 30, 33, 36]),
    ("def f(x):\n    return x + 1\n", [1604, 275, 24, 104, 727, 472, 1003, 1792, 1232, 216, 33, 198]),
    (" \t\n  trailing  ", [216, 197, 3805, 35079, 256]),
    ("don't I'LL we've", [12420, 982, 339, 23, 16421, 392, 3543]),
    ("привет 你好", [21339, 46879, 16464, 32547, 216, 18645, 250, 48392, 138]),
    ("👍🏽 e\u0301", [10813, 235, 231, 10813, 233, 138, 297, 151, 219]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("a<|endoftext|>b<repo_name>c", [81, 0, 82, 3, 83]),
]

# The text by which llama.cpp's converter recognises pre-tokenizers, and what the ids of "smollm" hash to.
CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ "
    "🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天\uff5e "
    "------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? "
    "I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
CHECK_HASH = "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACE, NEWLINE = "Ġ", "Ċ"
MERGES = [
    (SPACE, SPACE),
    ("a", "b"),
    (SPACE, "ab"),
    (SPACE, "1"),
    ("1", "2"),
    ("'", "s"),
    ("'", "S"),
    ("a", NEWLINE),
    ("a", "ä"),
]
BYTE_LEVEL_TOKENS = ["<bos>", "<eos>", "<tool>", *ALPHABET, *dict.fromkeys(a + b for a, b in MERGES), "abab"]

CONTROL, USER_DEFINED, NORMAL, UNKNOWN, BYTE = 3, 4, 1, 2, 6
SPM_PIECES = {
    "▁": -9.0,
    "d": -6.0,
    "cd": -4.0,
    "a": -8.0,
    "b": -7.0,
    "c": -6.5,
    "ab": -1.0,
    "bc": -2.0,
    "▁a": -3.0,
    "abc": -4.0,
    "▁▁": -5.0,
}
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]


def write_gguf(
    path: Path,
    *,
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    tokens: list[str] | None = None,
    types: list[int] | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    architecture: str = "llama",
    **extra: Any,
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = BYTE_LEVEL_TOKENS if tokens is None else tokens
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3) if types is None else types)
    if scores is not None:
        writer.add_token_scores(scores)
    elif merges is None:
        writer.add_token_merges([f"{left} {right}" for left, right in MERGES])
    else:
        writer.add_token_merges(merges)
    for name, value in extra.items():
        key = name if "." in name else "tokenizer." + name.replace("ggml_", "ggml.")
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_sentencepiece(path: Path, **extra: Any) -> Path:
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(SPM_PIECES)]
    scores = [0.0] * 259 + list(SPM_PIECES.values())
    ids: dict[str, Any] = {"ggml_bos_token_id": 1, "ggml_eos_token_id": 2, "ggml_unknown_token_id": 0}
    vocabulary: dict[str, Any] = {"model": "llama", "pre": None, "tokens": SPM_TOKENS, "types": types, "scores": scores}
    return write_gguf(path, **vocabulary | ids | extra)


def pieces(tokenizer: Tokenizer, text: str, **options: bool) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, **options)]


def make_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    return backend


def write_folder(folder: Path, **files: Any) -> Path:
    make_backend().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.mark.parametrize(("text", "ids"), SMOLLM2_PAIRS)
def test_smollm2_ids_are_those_of_transformers(smollm2: Tokenizer, text: str, ids: list[int]):
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_ids_of_the_check_text_have_the_fingerprint_of_llama_cpp(smollm2: Tokenizer):
    ids = smollm2.encode(CHECK_TEXT)
    assert hashlib.sha256(str(ids).encode()).hexdigest() == CHECK_HASH


def test_smollm2_splits_digits_before_words(smollm2: Tokenizer):
    assert pieces(smollm2, "x =   5") == ["x", "Ġ=", "ĠĠĠ", "5"]


def test_smollm2_names_its_special_tokens(smollm2: Tokenizer):
    assert (smollm2.vocab_size, smollm2.eos_token_ids) == (49152, (2, 0))  # 0: `<|endoftext|>`
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert smollm2.unk_token == "<|endoftext|>"
    assert smollm2.chat_template is not None
    assert "SmolLM" in smollm2.chat_template
    assert smollm2.decode([1, 19556, 2]) == "Hello"


# The vocabulary lacks the bytes of some control characters and of unassigned planes.
@given(text=st.text(st.characters(codec="utf-8", max_codepoint=0xFFFF, exclude_categories=["Cc"])))
def test_smollm2_gives_back_any_text_that_it_can_spell(smollm2: Tokenizer, text: str):
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "ab 12", ["ab", "Ġ1", "2"]),
        ("smollm", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("smollm", "  1", ["ĠĠ", "1"]),
        ("gpt-2", "  1", ["Ġ", "Ġ1"]),
        ("llama-bpe", "abab 12", ["abab", "Ġ", "12"]),
        ("gpt-2", "abab", ["ab", "ab"]),
        ("qwen2", "12", ["1", "2"]),
        ("qwen2", "'S", ["'S"]),
        ("gpt-2", "a\n", ["a", "Ċ"]),
        ("tekken", "12abab", ["1", "2", "abab"]),
        ("deepseek-v3", "12", ["12"]),
        ("deepseek-v3", "a\u4e00", ["a", "ä", "\u00b8", "Ģ"]),
        ("gpt-2", "a\u4e00", ["aä", "\u00b8", "Ģ"]),
    ],
)
def test_a_pre_tokenizer_cuts_as_its_name_says(tmp_path: Path, pre: str, text: str, expected: list[str]):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre, ggml_bos_token_id=0))
    assert pieces(tokenizer, text, add_special_tokens=False) == expected


def test_qwen2_composes_characters_and_gpt2_does_not(tmp_path: Path):
    qwen2 = load_tokenizer(write_gguf(tmp_path / "q.gguf", pre="qwen2"))
    gpt2 = load_tokenizer(write_gguf(tmp_path / "g.gguf", pre="gpt-2"))
    assert qwen2.encode("e\u0301") == qwen2.encode("\u00e9") == gpt2.encode("\u00e9") != gpt2.encode("e\u0301")


@pytest.mark.parametrize("pre", ["bloom", None])
def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path, pre: str | None):
    with pytest.raises(UnsupportedError, match=r"m\.gguf.*tokenizer\.ggml\.pre.*llama-bpe.*smollm"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre))


def test_an_unknown_vocabulary_model_is_refused(tmp_path: Path):
    with pytest.raises(UnsupportedError, match=r"'bert'.*'gpt2' and 'llama'"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", model="bert"))


def test_control_tokens_are_skipped_and_user_defined_ones_are_not(tmp_path: Path):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf"))
    ids = tokenizer.encode("a<eos><tool>b")
    assert [tokenizer.id_to_token(i) for i in ids] == ["a", "<eos>", "<tool>", "b"]
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<eos><tool>b"


def test_the_file_says_which_tokens_frame_a_text(tmp_path: Path):
    ids: dict[str, Any] = {"ggml_bos_token_id": 0, "ggml_eos_token_id": 1}
    plain = load_tokenizer(write_gguf(tmp_path / "a.gguf", **ids))
    both = load_tokenizer(write_gguf(tmp_path / "b.gguf", ggml_add_bos_token=True, ggml_add_eos_token=True, **ids))
    llama3 = load_tokenizer(write_gguf(tmp_path / "c.gguf", pre="llama-bpe", **ids))
    quiet = load_tokenizer(write_gguf(tmp_path / "d.gguf", pre="llama-bpe", ggml_add_bos_token=False, **ids))
    assert pieces(plain, "ab") == ["ab"]
    assert pieces(both, "ab") == ["<bos>", "ab", "<eos>"]
    assert pieces(both, "ab", add_special_tokens=False) == ["ab"]
    assert pieces(llama3, "ab") == ["<bos>", "ab"]
    assert pieces(quiet, "ab") == ["ab"]


def test_a_frame_without_a_token_is_refused(tmp_path: Path):
    with pytest.raises(InvalidFormatError, match="bos_token_id"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", ggml_add_bos_token=True))


@pytest.mark.parametrize("name", ["$A", "<s:1"])
def test_a_frame_whose_token_is_syntax_of_templates_is_refused(name: str, tmp_path: Path):
    path = write_gguf(
        tmp_path / "m.gguf", tokens=[name, *BYTE_LEVEL_TOKENS[1:]], ggml_bos_token_id=0, ggml_add_bos_token=True
    )
    with pytest.raises(UnsupportedError, match="tokenizers cannot put around a text"):
        load_tokenizer(path)


def test_every_end_that_a_gguf_names_is_an_eos_id(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", ggml_eos_token_id=1, ggml_eot_token_id=0, ggml_eom_token_id=1)
    assert load_tokenizer(path).eos_token_ids == (1, 0)


@pytest.mark.parametrize(
    ("specials", "ends"),
    [
        (["<|endoftext|>", "<|assistant|>", "<|end|>"], ["<|endoftext|>", "<|end|>"]),  # Phi-4
        (["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"], ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
        (  # GPT-OSS: `<|end|>` ends one of its messages
            ["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"],
            ["<|return|>", "<|call|>", "<|endoftext|>"],
        ),
        (["<|im_start|>", "<|im_end|>"], ["<|im_end|>"]),
    ],
)
def test_tokens_that_end_a_turn_are_found_by_their_text(specials: list[str], ends: list[str]):
    tokens = ["a", "<|im_end|>x", *specials]
    found = turn_end_ids({"tokenizer.ggml.tokens": tokens})
    assert sorted(tokens[at] for at in found) == sorted(ends)


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, NORMAL])
def test_a_token_that_ends_a_turn_is_special_whatever_its_type(kind: int, tmp_path: Path):
    tokens = [*BYTE_LEVEL_TOKENS, "<|im_end|>"]
    types = [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(tokens) - 4), kind]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", tokens=tokens, types=types, ggml_eos_token_id=1))
    assert tokenizer.eos_token_ids == (1, len(tokens) - 1)
    assert pieces(tokenizer, "a<|im_end|>b") == ["a", "<|im_end|>", "b"]
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "ab"
    tokenizer.save(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert (saved.eos_token_ids, saved.decode(tokenizer.encode("a<|im_end|>b"))) == (tokenizer.eos_token_ids, "ab")


def test_a_special_id_outside_the_vocabulary_is_refused(tmp_path: Path):
    with pytest.raises(InvalidFormatError, match="eos_token_id is 9999"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", ggml_eos_token_id=9999))


@pytest.mark.parametrize("merge", ["a zz", "z q"])  # "q" and "z" are tokens, "zq" is none
def test_merges_of_unknown_tokens_are_refused(tmp_path: Path, merge: str):
    with pytest.raises(InvalidFormatError, match=r"m\.gguf.*inconsistent"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", merges=[merge]))


def test_a_tokenizer_that_merges_into_no_token_is_refused(tmp_path: Path):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    names = "truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"
    whole = {"version": "1.0", "added_tokens": [], "model": model} | dict.fromkeys(names)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(InvalidFormatError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("tokens", [1, 2], "str"),
        ("merges", [1, 2], "str"),
        ("token_type", ["a", "b"], "int"),
        ("merges", [True], "str"),
        ("token_type", [True, True], "int"),
    ],
)
def test_an_array_of_another_kind_is_refused_by_name(name: str, values: list[Any], kind: str):
    metadata = {"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": ["a", "b"], "ggml.merges": []}
    metadata = {f"tokenizer.{key}": value for key, value in (metadata | {f"ggml.{name}": values}).items()}
    with pytest.raises(InvalidFormatError, match=rf"tokenizer\.ggml\.{name} holds {values[0]!r}, expected only {kind}"):
        build_gguf_tokenizer(metadata)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("bos_token_id", True, "True, expected an id from 0 to 2"),
        ("eos_token_id", 1.0, "1.0, expected an id"),
        ("add_bos_token", "false", "'false', expected true or false"),
        ("add_eos_token", 0, "0, expected true or false"),
        ("add_space_prefix", "no", "'no', expected true or false"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(name: str, value: Any, expected: str):
    metadata = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>"], "scores": [0.0] * 3, "bos_token_id": 1}
    metadata = {f"tokenizer.ggml.{key}": field for key, field in (metadata | {name: value}).items()}
    with pytest.raises(InvalidFormatError, match=rf"tokenizer\.ggml\.{name} is {expected}"):
        build_gguf_tokenizer(metadata)


def test_a_gguf_whose_merges_are_numbers_is_refused_by_name(tmp_path: Path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(BYTE_LEVEL_TOKENS)
    writer.add_array("tokenizer.ggml.merges", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InvalidFormatError, match=r"m\.gguf.*tokenizer\.ggml\.merges holds 1"):
        load_tokenizer(tmp_path / "m.gguf")


def test_a_chat_template_of_a_gguf_that_is_no_text_is_refused(tmp_path: Path):
    with pytest.raises(InvalidFormatError, match=r"m\.gguf.*tokenizer\.chat_template is 5"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", chat_template=5))


def test_a_repeated_token_is_refused(tmp_path: Path):
    with pytest.raises(InvalidFormatError, match="differ"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", tokens=[*BYTE_LEVEL_TOKENS, "ab"]))


def test_sentencepiece_merges_the_best_score_first(tmp_path: Path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", ggml_add_space_prefix=False))
    assert pieces(tokenizer, "abc") == ["<s>", "abc"]
    assert pieces(tokenizer, "bcb abb") == ["<s>", "bc", "b", "▁", "ab", "b"]
    assert pieces(tokenizer, " ac") == ["<s>", "▁a", "c"]


def test_sentencepiece_breaks_ties_for_the_longer_left_part(tmp_path: Path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", ggml_add_space_prefix=False))
    assert pieces(tokenizer, "abcd", add_special_tokens=False) == ["abc", "d"]


def test_sentencepiece_spells_unknown_characters_in_bytes(tmp_path: Path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf"))
    assert pieces(tokenizer, "a€", add_special_tokens=False) == ["▁a", "<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(tokenizer.encode("a€\n b")) == "a€\n b"


def test_the_unknown_token_is_special_in_the_file_and_in_a_folder_made_of_it(tmp_path: Path):
    read = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf"))
    read.save(tmp_path)
    for tokenizer in (read, load_tokenizer(tmp_path)):
        ids = tokenizer.encode("a<unk>b")
        assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "▁a", "<unk>", "▁", "b"]
        assert tokenizer.decode(ids) == "ab"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a<unk>b"


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("text", ["a", "", "x<s> a", "ab  c\n"])
def test_sentencepiece_gives_back_what_it_prefixed(tmp_path: Path, prefixed: bool, text: str):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", ggml_add_space_prefix=prefixed))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert text != "a" or tokenizer.id_to_token(ids[0]) == ("▁a" if prefixed else "a")


# The file's format is llama.cpp's. transformers converts it to a Metaspace, which skips the prefix where a text begins
# with a space; `convert_slow_tokenizer.py` says of itself that SentencePiece does not.
def test_the_prefix_stands_before_a_space_and_after_each_added_token_as_in_llama_cpp(tmp_path: Path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf"))
    assert pieces(tokenizer, "a") == ["<s>", "▁a"]
    assert pieces(tokenizer, " a") == ["<s>", "▁", "▁a"]
    assert pieces(tokenizer, " ") == ["<s>", "▁▁"]
    assert pieces(tokenizer, "") == ["<s>"]
    assert pieces(tokenizer, "a</s>b</s></s> ab") == ["<s>", "▁a", "</s>", "▁", "b", "</s>", "</s>", "▁▁", "ab"]


@pytest.mark.parametrize("text", [" ", "  a", " a</s>  b</s>c", "</s>", "\n a", "a ", "▁a"])
@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_gives_back_spaces_at_the_start(tmp_path: Path, prefixed: bool, text: str):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", ggml_add_space_prefix=prefixed))
    ids = tokenizer.encode(text)
    expected = text.replace("▁", " ")  # which the vocabulary cannot tell apart
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<s>{expected}"
    assert tokenizer.decode(ids) == expected.replace("</s>", "")
    tokenizer.save(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert saved.encode(text) == ids
    assert saved.decode(ids, skip_special_tokens=False) == f"<s>{expected}"


def test_without_a_prefix_a_space_at_the_start_stays(tmp_path: Path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", ggml_add_space_prefix=False))
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


@pytest.mark.parametrize("architecture", ["gemma2", "phi3"])
def test_sentencepiece_with_rules_of_its_own_is_refused(tmp_path: Path, architecture: str):
    with pytest.raises(UnsupportedError, match=architecture):
        load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", architecture=architecture))


@pytest.mark.parametrize("size", [0, 3, 20, 30, 400, 2000])
def test_a_gguf_cut_short_is_refused(tmp_path: Path, size: int):
    whole = write_gguf(tmp_path / "whole.gguf", chat_template="last").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:size])
    with pytest.raises(InvalidFormatError, match=r"cut\.gguf"):
        load_tokenizer(tmp_path / "cut.gguf")


def test_a_big_endian_gguf_is_refused(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(UnsupportedError, match="big-endian"):
        load_tokenizer(tmp_path / "m.gguf")


def test_a_gguf_without_a_vocabulary_is_refused():
    with pytest.raises(InvalidFormatError, match=r"tokenizer\.ggml\.tokens"):
        build_gguf_tokenizer({"tokenizer.ggml.model": "gpt2"})


def test_an_empty_path_is_not_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(write_folder(tmp_path))
    with pytest.raises(ConfigError, match="tokenizer is '', expected the path of one"):
        load_tokenizer("")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own").mkdir()
    write_folder(tmp_path / "own")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_tokenizer("~/own").vocab_size == load_tokenizer(tmp_path / "own").vocab_size


def test_a_folder_needs_only_tokenizer_json(tmp_path: Path):
    tokenizer = load_tokenizer(write_folder(tmp_path))
    assert tokenizer.encode("a<eos>") == [*make_backend().encode("a").ids, 257]
    assert (tokenizer.bos_token, tokenizer.eos_token_ids, tokenizer.chat_template) == (None, (), None)
    assert tokenizer.vocab_size == 258


def test_a_folder_forgets_padding_and_truncation(tmp_path: Path):
    backend = make_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("abc")) == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="which is a disk without space")
def test_a_full_disk_is_an_os_error(tmp_path: Path):
    tokenizer, full = load_tokenizer(write_folder(tmp_path)), tmp_path / "full"
    full.mkdir()
    (full / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        tokenizer.save(full)


def test_eos_ids_come_from_generation_config_before_config(tmp_path: Path):
    write_folder(tmp_path, generation_config={"eos_token_id": [7, 9]}, config={"eos_token_id": 8})
    assert load_tokenizer(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").unlink()
    assert load_tokenizer(tmp_path).eos_token_ids == (8,)
    write_folder(tmp_path, tokenizer_config={"eos_token": {"content": "<eos>", "lstrip": False}})
    assert load_tokenizer(tmp_path).eos_token_ids == (8, 257)
    write_folder(tmp_path, config={"eos_token_id": 257})
    assert load_tokenizer(tmp_path).eos_token_ids == (257,)


def test_the_sampling_that_the_files_recommend_is_read_saved_and_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "repetition_penalty": 1.05}
    write_folder(tmp_path, generation_config=stated | {"do_sample": True, "max_length": 9})
    recommended = {name: value for name, value in stated.items() if value is not None}
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.recommended == recommended
    (saved := tmp_path / "saved").mkdir()
    tokenizer.save(saved)
    assert load_tokenizer(saved).recommended == recommended
    stated = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "penalty_repeat": 1.25}
    found = write_gguf(tmp_path / "m.gguf", **{f"general.sampling.{name}": value for name, value in stated.items()})
    named = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.25}
    assert load_tokenizer(found).recommended == named
    assert json.loads((saved / "generation_config.json").read_text())["do_sample"] is True
    for top_k, taken in ((-1, 0), (0, 0), (20.0, 20)):
        write_folder(tmp_path, generation_config={"top_k": top_k})
        assert load_tokenizer(tmp_path).recommended == {"top_k": taken}
    assert not caplog.messages
    for wrong in ({"temperature": "warm"}, {"top_p": 1.5}, {"top_k": 2.5}, {"min_p": math.nan}, {"top_k": math.inf}):
        write_folder(tmp_path, generation_config=wrong | {"repetition_penalty": 1.5})
        caplog.clear()
        assert load_tokenizer(tmp_path).recommended == {"repetition_penalty": 1.5}
        assert f"generation_config.json recommends no sampling by {next(iter(wrong))}" in caplog.text


def test_special_tokens_come_from_either_file(tmp_path: Path):
    write_folder(
        tmp_path,
        special_tokens_map={"bos_token": "<old>", "pad_token": {"content": "<eos>"}},
        tokenizer_config={"bos_token": "<bos>", "pad_token": None},
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.pad_token) == ("<bos>", "<eos>")


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("fields", [{}, {"add_bos_token": False}, {"add_eos_token": False}, {"add_eos_token": True}])
def test_the_frame_of_a_folder_is_that_of_tokenizer_json_as_in_transformers(
    fields: dict[str, bool], framed: bool, tmp_path: Path
):
    write_folder(tmp_path, tokenizer_config={"bos_token": "<bos>", "eos_token": "<eos>"} | fields)
    backend = make_backend()
    if framed:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
        backend.save(str(tmp_path / "tokenizer.json"))
    assert pieces(load_tokenizer(tmp_path), "a") == (["<bos>", "a"] if framed else ["a"])


UNREADABLE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
)


@pytest.mark.parametrize("name", [*UNREADABLE, "chat_template.jinja", "tokenizer.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str):
    write_folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(FerrumError, match=re.escape(name)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", [*UNREADABLE, "chat_template.jinja"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str):
    write_folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidFormatError, match=f"{re.escape(name)} is no regular file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", UNREADABLE)
def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, name: str):
    write_folder(tmp_path)
    (tmp_path / name).write_text('{"a":' + "[" * 100_000)
    with pytest.raises(InvalidFormatError, match=re.escape(name)):
        load_tokenizer(tmp_path)


def test_tokens_beyond_tokenizer_json_are_added_in_order_of_id(tmp_path: Path):
    added = {"259": {"content": "<y>", "special": False}, "258": {"content": "<x>", "special": True}}
    tokenizer = load_tokenizer(write_folder(tmp_path, tokenizer_config={"added_tokens_decoder": added}))
    assert tokenizer.encode("<x><y>") == [258, 259]
    assert tokenizer.decode([258, 259]) == "<y>"


TOOL, KEPT = "<tool>", {"content": "<tool>", "lstrip": True, "special": False}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"additional_special_tokens": [TOOL]}},
        {"tokenizer_config": {"additional_special_tokens": [KEPT], "extra_special_tokens": []}},
        {"tokenizer_config": {"extra_special_tokens": [TOOL]}},
        {"tokenizer_config": {"extra_special_tokens": {"tool_token": TOOL}}},
        {"tokenizer_config": {"sep_token": TOOL}},
        {"tokenizer_config": {"mask_token": KEPT}},
        {"tokenizer_config": {"tool_token": TOOL, "add_bos_token": True}},
        {"special_tokens_map": {"additional_special_tokens": [TOOL]}},
        {"tokenizer_config": {"cls_token": TOOL, "added_tokens_decoder": {"258": KEPT}}},
        {"tokenizer_config": {"additional_special_tokens": [TOOL]}, "added_tokens": {TOOL: 258}},
    ],
)
def test_a_token_declared_special_is_one(files: dict[str, Any], tmp_path: Path):
    tokenizer = load_tokenizer(write_folder(tmp_path, **files))
    a, b = make_backend().encode("ab").ids
    assert tokenizer.encode("a<tool>b") == [a, 258, b]
    assert tokenizer.decode([a, 258, b]) == "ab"
    is_stripped = "lstrip" in str(files)
    assert (len(tokenizer.encode("a <tool>b")) == 3) == is_stripped
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).decode([a, 258, b]) == "ab"


def test_new_special_tokens_get_ids_in_the_order_of_transformers(tmp_path: Path):
    config = {
        "extra_special_tokens": {"x_token": "<x>"},
        "additional_special_tokens": ["<more>"],
        "own_token": "<own>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    tokenizer = load_tokenizer(write_folder(tmp_path, tokenizer_config=config, added_tokens={"<b>": 259, "<a>": 258}))
    names = ["<a>", "<b>", "<unk>", "<pad>", "<own>", "<x>", "<more>"]
    assert [tokenizer.token_to_id(name) for name in names] == list(range(258, 265))
    assert tokenizer.decode(list(range(258, 265))) == "<a><b>"


def test_older_files_do_not_count_beside_an_added_tokens_decoder(tmp_path: Path):
    older: dict[str, Any] = {"special_tokens_map": {"additional_special_tokens": ["<x>"]}, "added_tokens": {"<y>": 258}}
    write_folder(tmp_path, tokenizer_config={"added_tokens_decoder": {}}, **older)
    assert load_tokenizer(tmp_path).vocab_size == 258


def test_chat_templates_are_found_in_every_place(tmp_path: Path):
    write_folder(tmp_path, chat_template={"chat_template": "of the processor"})
    assert load_tokenizer(tmp_path).chat_template == "of the processor"
    (tmp_path / "config.json").write_text('{"eos_token_id": null, "text_config": {"eos_token_id": 7}}')
    assert 7 in load_tokenizer(tmp_path).eos_token_ids
    (tmp_path / "config.json").unlink()
    write_folder(tmp_path, tokenizer_config={"chat_template": "one"})
    assert load_tokenizer(tmp_path).chat_template == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert load_tokenizer(tmp_path).chat_templates == {"default": "two", "tool_use": "three"}
    write_folder(tmp_path, tokenizer_config={"chat_template": {one["name"]: one["template"] for one in named}})
    assert load_tokenizer(tmp_path).chat_templates == {"default": "two", "tool_use": "three"}
    tokenizer, said = load_tokenizer(tmp_path), [{"role": "user", "content": "hi"}]
    assert [tokenizer.render(said, tools=tools) for tools in (None, [{"type": "function"}])] == ["two", "three"]
    (tmp_path / "chat_template.jinja").write_text("four")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("five")
    assert load_tokenizer(tmp_path).chat_templates == {"default": "four", "tool_use": "three", "rag": "five"}


@pytest.mark.parametrize(
    "name", ["tokenizer_config", "special_tokens_map", "added_tokens", "generation_config", "tokenizer"]
)
@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_corrupt_file_is_named(tmp_path: Path, name: str, content: str):
    write_folder(tmp_path)
    (tmp_path / f"{name}.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidFormatError, match=rf"{name}\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config", {"chat_template": [{"name": "x"}]}),
        ("tokenizer_config", {"chat_template": 3}),
        ("tokenizer_config", {"chat_template": {"default": 3}}),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "<x>"}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"300": {}}}),
        ("added_tokens", {"<x>": "258"}),
        ("generation_config", {"eos_token_id": "2"}),
        ("config", {"eos_token_id": [True]}),
    ],
)
def test_a_value_of_the_wrong_form_is_refused(tmp_path: Path, file: str, content: Any):
    with pytest.raises(InvalidFormatError, match=rf"{file}\.json"):
        load_tokenizer(write_folder(tmp_path, **{file: content}))


@pytest.mark.parametrize("tokens", ["<x>", 5, [5], [{}], {"x_token": None}])
@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens"])
def test_declared_tokens_of_the_wrong_form_are_refused(tmp_path: Path, name: str, tokens: Any):
    with pytest.raises(InvalidFormatError, match=f"{re.escape(str(tmp_path))}: .*{name}"):
        load_tokenizer(write_folder(tmp_path, tokenizer_config={name: tokens}))


def test_a_folder_with_only_another_vocabulary_says_how_to_convert_it(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"tokenizer\.model.*convert.*save_pretrained"):
        load_tokenizer(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.gguf"):
        with pytest.raises(NotFoundError, match=path.name):
            load_tokenizer(path)
    for constructor in (Tokenizer.from_folder, Tokenizer.from_gguf):
        with pytest.raises(NotFoundError, match="none"):
            constructor(tmp_path / "none")


def test_another_kind_of_file_is_refused(tmp_path: Path):
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"m\.bin"):
        load_tokenizer(tmp_path / "m.bin")


def test_ids_and_text_out_of_range_are_refused(tmp_path: Path):
    tokenizer = load_tokenizer(write_folder(tmp_path))
    with pytest.raises(TokenizerError, match=r"valid Unicode, found 'b{20}.ud800c'"):
        tokenizer.encode("a" + "b" * 80 + "\ud800c")
    with pytest.raises(TokenizerError, match=r"\[-1\]"):
        tokenizer.decode([-1])
    with pytest.raises(TokenizerError, match="-1"):
        tokenizer.id_to_token(-1)
    assert tokenizer.id_to_token(9999) is None
    assert tokenizer.token_to_id("<eos>") == 257
    assert tokenizer.decode([9999]) == ""


def test_long_texts_have_the_ids_of_short_ones(smollm2: Tokenizer):
    piece = "".join(text for text, _ in SMOLLM2_PAIRS) + "\n"
    ids = smollm2.encode(piece)
    assert smollm2.encode(piece * 200) == ids * 200  # no token crosses the end of a line
    assert smollm2.decode(ids * 200) == smollm2.decode(ids) * 200
    with pytest.raises(TokenizerError, match=r"valid Unicode, found 'b{20}.ud800c'"):
        smollm2.encode("b" * 80_000 + "\ud800c")
    with pytest.raises(TokenizerError, match=r"\[-1, -1"):
        smollm2.decode([-1] * 80_000)


def test_long_texts_go_where_other_threads_run_meanwhile():
    """The tokenizer's calls for single texts hold the interpreter's lock until they are done."""

    class Batches:
        def get_added_tokens_decoder(self) -> dict[int, Any]:
            return {}

        def encode_batch_fast(self, texts: list[str], **_: Any) -> list[Any]:
            return [type("Encoding", (), {"ids": [len(text)]}) for text in texts]

        def decode_batch(self, ids: list[list[int]], **_: Any) -> list[str]:
            return [str(len(one)) for one in ids]

    for prefixes_runs in (False, True):
        tokenizer = Tokenizer(backend=cast(Any, Batches()), prefixes_runs=prefixes_runs)
        assert tokenizer.encode("a" * 20_000) == [20_000]
        assert tokenizer.decode([1] * 20_000) == "20000"


def test_templates_see_the_tokens_that_a_tokenizer_names(tmp_path: Path):
    template = "{{ bos_token }}{{ unk_token }}{{ pad_token }}{{ messages[0].content }}{{ eos_token }}"
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_folder(tmp_path, tokenizer_config=named | {"chat_template": template})
    tokenizer = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render(messages) == "<s><unk>hi</s>"
    assert tokenizer.render(messages, pad_token="<p>") == "<s><unk><p>hi</s>"
