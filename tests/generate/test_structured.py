"""Answers of a given form: all have it, are drawn from the model's distribution within it, and disturb nobody."""

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import llguidance
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ferrum_jax import LLM, SamplingParams, Speculation, Structured
from ferrum_jax.contract.errors import InvalidParameterError, RequestValidationError, UnsupportedError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor import ModelRunner
from ferrum_jax.generate import structured
from ferrum_jax.generate.drafts import Draft, DraftSource, DraftWant
from ferrum_jax.generate.params import RequestOutput
from ferrum_jax.generate.structured import AnswerForm, FormCompiler
from ferrum_jax.generate.token_bytes import GrammarVocabulary
from ferrum_jax.generate.tokenizer import Tokenizer, load_tokenizer
from ferrum_jax.models import forward
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CAPACITY, CFG
from tests.fake import SummingLLM
from tests.generate.conftest import MakeRunner, is_empty
from tests.generate.drafting import RollingLLM

SIGNS = [*'{}[]":,-.Ġ0123456789abcdefghijklmnop', "<end>"]  # 37 with the last
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["pc", "nod"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
}
FORMS = {
    "json": Structured(json=SCHEMA),
    "regex": Structured(regex=r"[a-c]{3,5}-\d{2}"),
    "choice": Structured(choice=["pond", "pin", "kid"]),
    "lark": Structured(grammar='start: "[" item ("," item)* "]"\nitem: /[a-d]/'),
    "gbnf": Structured(grammar='root ::= "no" | "a" [0-9] "b"'),
}
DRAWN = SamplingParams(max_tokens=32, temperature=1.0, seed=0, logprobs=True)
PROMPTS = [[3, 1, 4, 1, 5], [30, 7], [8] * 17, [3, 1, 4, 1, 5]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    assert len(SIGNS) == CFG.vocab_size
    backend = tokenizers.Tokenizer(models.BPE(vocab={sign: at for at, sign in enumerate(SIGNS)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend=backend, eos_token_ids=(36,), eos_token="<end>")


@pytest.fixture
def llm(runner: ModelRunner, tokenizer: Tokenizer) -> LLM:
    return LLM.from_model(runner, tokenizer)


def check_form(name: str, text: str) -> None:
    """Fails unless a whole answer has its form."""
    if name == "json":
        found = json.loads(text)
        assert found.keys() == {"a", "b"}
        assert 0 <= found["a"] <= 99
        assert found["b"] in ("pc", "nod")
        return
    patterns = {"regex": r"[a-c]{3,5}-\d{2}", "choice": "pond|pin|kid", "gbnf": r"no|a\db"}
    assert re.fullmatch(patterns.get(name, r"\[[a-d](,[a-d])*\]"), text), text


def asked(**changes: Any) -> list[SamplingParams]:
    return [replace(DRAWN, structured=form, seed=at, **changes) for at, form in enumerate(FORMS.values())]


def test_a_form_is_compiled_once_and_each_answer_has_its_own_progress(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, make = [], llguidance.LLMatcher
    monkeypatch.setattr(llguidance, "LLMatcher", lambda *args, **kinds: compiled.append(args) or make(*args, **kinds))
    monkeypatch.setattr(structured, "MAX_CACHED_FORMS", 2)
    compiler = FormCompiler(tokenizer, CFG.vocab_size)
    a, b = SIGNS.index("a"), SIGNS.index("b")
    first, second = (compiler.compile(Structured(choice=["ab", "b"])) for _ in range(2))
    assert len(compiled) == 1
    first.take(a)
    later = compiler.compile(Structured(choice=["ab", "b"]))
    assert (first.count_fitting([b]), first.count_fitting([a])) == (1, 0)
    for one in (second, later):
        assert (one.count_fitting([a, b]), one.count_fitting([b])) == (2, 1)
    assert len(compiled) == 1
    for choice in ("c", "d"):  # the kept forms are then these
        compiler.compile(Structured(choice=[choice]))
    compiler.compile(Structured(choice=["ab", "b"]))
    assert len(compiled) == 4


def check(outs: Sequence[RequestOutput]) -> None:
    for name, out in zip(FORMS, outs, strict=True):
        if out.finish_reason == "stop":
            check_form(name, out.text)
        else:
            assert name == "lark"  # which need not end
            assert re.fullmatch(r"\[([a-d],?)*", out.text)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_every_answer_has_its_form_beside_answers_that_have_none(temperature: float, llm: LLM):
    plain = replace(DRAWN, max_tokens=9, ignore_eos=True)
    alone = llm.generate(PROMPTS[2], plain)[0].token_ids
    for seed in range(4):
        each = [replace(one, seed=10 * seed + at) for at, one in enumerate(asked(temperature=temperature))]
        outs = llm.generate([PROMPTS[at % 4] for at in range(5)] + [PROMPTS[2]], [*each, plain])
        check(outs[:5])
        assert outs[5].token_ids == alone


def test_a_text_that_no_tokens_spell_is_an_error_and_no_answer(llm: LLM, runner: ModelRunner):
    for count in (1, 3):
        with pytest.raises(RequestValidationError, match="cannot be followed: no token of the vocabulary fits"):
            llm.generate([PROMPTS[0]] * count, replace(DRAWN, structured=Structured(choice=["a<end>b"])))
    (out,) = llm.generate([PROMPTS[0]], replace(DRAWN, structured=Structured(regex="[a-p]{9}"), stop_token_ids=[20]))
    assert out.finish_reason == "stop"
    assert is_empty(runner)


def test_a_grammar_with_the_end_before_its_own_is_an_error_and_no_answer(llm: LLM, runner: ModelRunner):
    within = Structured(grammar='start: "a" <[36]> "b"')
    with pytest.raises(RequestValidationError, match="special token 36"):
        llm.generate([PROMPTS[0]], replace(DRAWN, structured=within))
    assert is_empty(runner)


def bytes_with_marks() -> Tokenizer:
    """A token for every byte, one special token, and marks that are texts though they are added, as Qwen's are."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "<tool_call>")])
    return Tokenizer(backend=backend, eos_token_ids=(256,), eos_token="<end>")


@pytest.mark.parametrize(
    ("text", "marks"), [("<think>x", [257]), ("a<end>b", []), ("é<tool_call><end>", [258]), ("<thin", [])]
)
def test_a_text_is_spelled_with_the_marks_that_are_texts_and_without_special_tokens(text: str, marks: list[int]):
    tokenizer = bytes_with_marks()
    form = FormCompiler(tokenizer, 260).compile(Structured(choice=[text]))
    taken: list[int] = []
    while not form.is_complete:
        allowed = np.flatnonzero(np.unpackbits(form.mask.view(np.uint8), bitorder="little"))
        assert 256 not in allowed or form.may_end
        form.take(int(allowed.max()) if allowed.max() != 256 else 256)
        taken.append(int(allowed.max()))
    taken = [token for token in taken if token != 256]
    assert tokenizer.decode(taken, skip_special_tokens=False) == text
    assert [token for token in taken if token > 256] == marks


def test_what_a_sentencepiece_model_must_write_has_no_space_in_front():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abc", "\u2581a", "ab"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = GrammarVocabulary(Tokenizer(backend=backend, eos_token_ids=(2,)), len(pieces))
    for text in ("abc", " a", "cab", "ü", "a\nb"):
        assert b"".join(vocabulary.tokens[at] for at in vocabulary(text.encode())) == text.encode()
    assert vocabulary(b"abc") == [vocab["ab"], vocab["c"]]
    assert b"".join(vocabulary.tokens[at] for at in vocabulary(b"\xff a")) == b"\xff a"


def test_tokens_are_drawn_from_the_models_distribution_within_the_form(
    llm: LLM, params: ParamTree, tokenizer: Tokenizer
):
    allowed = [*range(0, 37, 2), 1, 3, 5, 7, 9]
    for how in (*asked(), replace(asked()[3], allowed_token_ids=allowed), replace(asked()[3], repetition_penalty=1.5)):
        (out,) = llm.generate([PROMPTS[0]], how)
        assert how.structured is not None
        form = FormCompiler(tokenizer, CFG.vocab_size).compile(how.structured)
        padded = np.zeros((1, CAPACITY + 1), np.int32)
        tokens = PROMPTS[0] + out.token_ids
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(jax.jit(lambda ids: forward(params, ids, CFG))(padded))[0].astype(np.float64)
        for at, token in enumerate(out.token_ids):
            scores = logits[len(PROMPTS[0]) - 1 + at]
            if how.repetition_penalty != 1:
                seen = list({*tokens[: len(PROMPTS[0]) + at]})
                scores[seen] = np.where(scores[seen] > 0, scores[seen] / 1.5, scores[seen] * 1.5)
            bits = np.array([form.mask[one // 32] >> (one % 32) & 1 for one in range(37)], bool)
            if how.allowed_token_ids is not None:
                bits &= np.isin(np.arange(37), allowed)
            scores = np.where(bits, scores, -np.inf)
            assert out.processed_logprobs is not None
            expected = scores[token] - np.logaddexp.reduce(scores)
            assert out.processed_logprobs[at] == pytest.approx(expected, abs=1e-4)
            if token != 36:
                form.take(token)


@pytest.mark.parametrize("how", ["copies", "short", "loops", "host", "parts"])
def test_every_way_to_run_gives_the_same_answers(
    how: str, new_runner: MakeRunner, tokenizer: Tokenizer, runner: ModelRunner
):
    changes = {"short": {"kv_blocks": 8}, "loops": {"multi_step_tokens": 4}}
    prompts = [[at] * 17 for at in range(1, 6)]
    if how == "host":  # tokens are chosen on the host, of a model that gives logits alone
        check(LLM.from_model(SummingLLM(vocab_size=37), tokenizer).generate(prompts, asked()))
        return
    expected = LLM.from_model(runner, tokenizer).generate(prompts, asked())
    with new_runner(prefix_cache=True, **changes.get(how, {})) as other:
        llm = LLM.from_model(other, tokenizer, max_rows=4)
        if how == "copies":
            for at, prompt in enumerate(prompts):
                outs = llm.generate([prompt], replace(asked()[at], n=6))
                assert outs[0].token_ids == expected[at].token_ids
                for out in outs:
                    assert out.finish_reason == "length" or check_form(list(FORMS)[at], out.text) is None
            return
        if how == "parts":
            parts = llm.generate(prompts, [replace(one, max_tokens=2) for one in asked()])
            outs = [
                llm.generate(part, one)[0] if part.finish_reason == "length" else part
                for part, one in zip(parts, asked(), strict=True)
            ]
        else:
            outs = llm.generate(prompts, asked())
        assert any(out.preemptions for out in outs) == (how == "short")
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
        assert is_empty(other)


@pytest.fixture(scope="module")
def drafting(new_runner: MakeRunner, tokenizer: Tokenizer) -> Iterator[ModelRunner]:
    with new_runner(prefix_cache=True, strict=True, spec_tokens=3) as runner:
        LLM.from_model(runner, tokenizer, speculation=Speculation(num_tokens=3)).warmup(progress=False)
        yield runner


class Guessing(DraftSource):
    """Proposes any tokens: of the answers that it was told, or others."""

    num_tokens = 3

    def __init__(self, answers: Sequence[Sequence[int]] = ()):
        self.answers, self._draw = answers, random.Random(0)

    def propose(self, wants: Sequence[DraftWant]) -> list[Draft]:
        drafts = []
        for want in wants:
            so_far = [*want.tokens[want.num_prompt :]]
            known = [one for one in self.answers if [*one[: len(so_far)]] == so_far]
            tokens = [*known[0][len(so_far) :], 36][: want.count] if known else []
            if self._draw.random() < 0.3:  # wrong from some place on
                at = self._draw.randint(0, len(tokens))
                tokens = [*tokens[:at], *(self._draw.randrange(37) for _ in range(want.count - at))]
            drafts.append(Draft(tokens))
        return drafts


def drafted_by(source: DraftSource | None, runner: DecoderOnlyLLM, tokenizer: Tokenizer) -> LLM:
    """An LLM that verifies what a source proposes; nothing of its own, where it is None, but what must follow."""
    llm = LLM.from_model(runner, tokenizer, speculation=Speculation(num_tokens=3), max_rows=4)
    assert llm.engine.scheduler.speculator is not None
    if source is not None:
        llm.engine.scheduler.speculator.source = source
    return llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_drafts_are_verified_within_the_form(
    temperature: float, penalty: float, drafting: ModelRunner, llm: LLM, tokenizer: Tokenizer, compiles: list[str]
):
    plain = replace(DRAWN, max_tokens=12, ignore_eos=True, temperature=temperature)
    how = [*asked(temperature=temperature, repetition_penalty=penalty), plain]
    how.append(replace(how[3], allowed_token_ids=[0, 2, 4, 6, *range(20, 27)]))
    prompts = [[at] * 17 for at in range(1, 8)]
    expected = llm.generate(prompts, how)
    compiles.clear()
    for source in (None, Guessing([out.token_ids for out in expected])):
        outs = drafted_by(source, drafting, tokenizer).generate(prompts, how)
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
        for out, other in zip(outs, expected, strict=True):
            assert out.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert out.processed_logprobs == pytest.approx(other.processed_logprobs, abs=1e-4)
        assert outs[0].accepted > (1 if source is None else 4)  # of what must follow, as `{"a":`
        assert all(out.accepted for out in outs) or source is None
        assert is_empty(drafting)
    assert compiles == []


def test_drafts_within_a_form_are_verified_on_the_host(tokenizer: Tokenizer):
    prompts = [[at] * 17 for at in range(1, 6)]
    expected = LLM.from_model(RollingLLM(vocab_size=37), tokenizer).generate(prompts, asked())
    check(expected)
    source = Guessing([out.token_ids for out in expected])
    outs = drafted_by(source, RollingLLM(vocab_size=37), tokenizer).generate(prompts, asked())
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert all(out.accepted for out in outs)


def test_forms_after_warm_up_compile_nothing(new_runner: MakeRunner, tokenizer: Tokenizer, compiles: list[str]):
    with new_runner(prefix_cache=True, max_seqs=2, decode_rows=(2,), query_blocks=(1,), strict=True) as runner:
        llm = LLM.from_model(runner, tokenizer)
        llm.warmup(progress=False)
        compiles.clear()
        check(llm.generate(PROMPTS + PROMPTS[:1], asked()))
        assert compiles == []


def test_what_cannot_be_a_form_is_refused_and_nothing_starts(llm: LLM, runner: ModelRunner, tokenizer: Tokenizer):
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "nothing"),
        ({"regex": "a", "choice": ["b"]}, "expected one of"),
        ({"regex": ""}, "expected a text that is not empty"),
        ({"choice": []}, "expected texts, none of them empty"),
        ({"choice": "pond"}, "expected texts, none of them empty"),
        ({"json": 5}, "expected a JSON schema"),
        ({"json_object": 1}, "expected True or False"),
    ]
    for given, message in refused:
        with pytest.raises(InvalidParameterError, match=message):
            Structured(**given)
    for given in ({"min_tokens": 2}, {"ignore_eos": True}):
        with pytest.raises(InvalidParameterError, match="do not go with structured"):
            replace(asked()[0], **given)
    with pytest.raises(InvalidParameterError, match="structured is 'json', expected a Structured or None"):
        SamplingParams(structured="json")  # pyright: ignore[reportArgumentType]
    for form, message in (
        (Structured(regex="(a"), "this regex cannot be followed: .* unclosed group"),
        (Structured(json='{"type": '), "this json_schema cannot be"),
        (Structured(json={"type": "nope"}), "this json_schema cannot be followed"),
        (
            Structured(json={"$ref": "#/$defs/a", "$defs": {"a": {"$id": "x", "type": "null"}}}),
            r"an .id \('x'\) are not supported together",
        ),
        (Structured(grammar="start: other"), "this lark cannot be followed"),
        (Structured(grammar="root ::= ("), "this gbnf cannot be read"),
    ):
        with pytest.raises(RequestValidationError, match=message):
            llm.generate([[1], [2]], [DRAWN, replace(DRAWN, structured=form)])
    endless = LLM.from_model(SummingLLM(), replace(tokenizer, eos_token_ids=()))
    with pytest.raises(UnsupportedError, match="needs a token that ends answers, the tokenizer has none"):
        endless.generate([[1]], asked()[0])
    with pytest.raises(UnsupportedError, match="structured output needs a tokenizer"):
        LLM.from_model(runner).generate([1], asked()[0])
    letters = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    letters.decoder = decoders.Fuse()
    with pytest.raises(UnsupportedError, match="structured output with this tokenizer"):
        LLM.from_model(runner, Tokenizer(backend=letters)).generate([1], asked()[0])
    with pytest.raises(UnsupportedError, match="scores under structured output"):
        llm.score([[1]], [[2]], asked()[0])
    assert is_empty(runner)


def test_an_integer_that_would_be_rounded_is_refused(llm: LLM):
    compile_form = llm._intake.forms.compile
    for number in (2**53 + 1, -(2**53) - 1, 10**400):
        for schema in ({"const": [1, {"a": [number]}]}, {"properties": {"id": {"enum": [1, number]}}}):
            with pytest.raises(RequestValidationError, match=f"has {str(number)[:24]}, which float64 does not"):
                compile_form(Structured(json=schema))
    compile_form(Structured(json={"enum": [2**60, True, 1.5], "maximum": 2**63 - 1}))
    for name in ("const", "enum", "default"):
        compile_form(
            Structured(json=MappingProxyType({"properties": {name: {"type": "integer", "maximum": 2**63 - 1}}}))
        )
        with pytest.raises(RequestValidationError, match="const has 9007199254740993"):
            compile_form(Structured(json={"properties": {name: {"const": 2**53 + 1}}}))
    deep: dict[str, Any] = {}
    for _ in range(20_000):
        deep = {"items": deep}
    with pytest.raises(InvalidParameterError, match="structured output is not JSON"):
        compile_form(Structured(json=deep))


def test_schemas_with_a_property_or_a_value_named_id_are_followed(llm: LLM):
    inside = {"type": "object", "properties": {"id": {"const": 1}, "$id": {"$ref": "#/$defs/a"}}, "required": ["id"]}
    schema = {"$id": "http://x/y", **inside, "$defs": {"a": {"const": {"$id": "z"}}}, "additionalProperties": False}
    llm._intake.forms.compile(Structured(json=schema))


def test_a_form_that_the_allowed_tokens_cannot_have_fails_alone(llm: LLM, runner: ModelRunner):
    letters = [SIGNS.index(sign) for sign in "abcdefghijklmnop"]
    stuck = replace(asked()[1], allowed_token_ids=letters)  # three letters go, a dash does not
    outs = llm.generate([[1], [2]], [stuck, asked()[2]], return_errors=True)
    assert [out.finish_reason for out in outs] == ["error", "stop"]
    assert isinstance(outs[0].error, RequestValidationError)
    assert re.fullmatch("[a-c]{5}", outs[0].text)
    none = replace(asked()[2], logit_bias={SIGNS.index(sign): -np.inf for sign in "pk"})
    with pytest.raises(RequestValidationError, match="the parameters exclude all that fit the answer's form"):
        llm.generate([[1], [2]], [asked()[0], none])
    assert is_empty(runner)
    short = replace(stuck, max_tokens=5)
    assert llm.generate([1], short)[0].finish_reason == "length"  # at its end, nothing has to come


@pytest.mark.parametrize("on_host", [False, True])
def test_a_form_that_fails_or_allows_nothing_ends_its_own_answer(
    on_host: bool, llm: LLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    if on_host:
        llm = LLM.from_model(SummingLLM(vocab_size=37), tokenizer)
    whole = llm.generate([[1], [2]], [asked()[1], DRAWN])
    masks = AnswerForm.mask.fget
    assert masks is not None
    for wrong, message in ((None, "cannot be followed: broken"), (0, "exclude all that fit the answer's form")):
        calls = itertools.count()

        def mask(form: AnswerForm, calls: Iterator[int] = calls, wrong: int | None = wrong) -> Any:
            if next(calls) < 3:
                return masks(form)
            if wrong is None:
                raise ValueError("broken")
            return np.full_like(masks(form), wrong)

        monkeypatch.setattr(AnswerForm, "mask", property(mask))
        outs = llm.generate([[1], [2]], [asked()[1], DRAWN], return_errors=True)
        monkeypatch.setattr(AnswerForm, "mask", property(masks))
        assert isinstance(outs[0].error, RequestValidationError)
        assert message in str(outs[0].error)
        assert outs[0].token_ids == whole[0].token_ids[: len(outs[0].token_ids)]
        assert outs[1].token_ids == whole[1].token_ids
    assert llm.generate([[1]], asked()[1])[0].token_ids == whole[0].token_ids


@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_form_that_cannot_go_on_ends_in_an_error(is_drafted: bool, drafting: ModelRunner, tokenizer: Tokenizer):
    endless = Structured(regex=r"([a-z]{1,20} ?){1,2000}\.END")  # which these signs cannot spell to its end
    llm = drafted_by(None, drafting, tokenizer) if is_drafted else LLM.from_model(drafting, tokenizer)
    how = [replace(DRAWN, structured=endless, seed=seed, max_tokens=None) for seed in range(3)]
    outs = llm.generate([[1]] * 3, how, return_errors=True)
    assert {out.finish_reason for out in outs} == {"error", "length"}  # the capacity ends some before
    assert {type(out.error) for out in outs if out.finish_reason == "error"} == {RequestValidationError}
    assert is_empty(drafting)


def test_a_form_that_becomes_too_complex_is_never_complete(smollm2_path: Path):
    own = load_tokenizer(smollm2_path)
    form = FormCompiler(own, own.vocab_size).compile(Structured(regex=r"(\w+ ?){5,100}(a|e)(\w| ){15}"))

    def follow(draw: random.Random) -> None:
        while not form.is_complete:
            bits = np.unpackbits(form.mask.view(np.uint8), bitorder="little")
            form.take(draw.choice([*{*np.flatnonzero(bits).tolist()} - {*own.eos_token_ids}]))

    with pytest.raises(RequestValidationError, match="too many expressions"):
        follow(random.Random(0))
    assert not form.is_complete


def test_what_a_grammar_of_lark_quotes_is_no_gbnf():
    assert Structured(grammar='start: "a ::= b"').definition[0] == "lark"
    assert FORMS["gbnf"].definition[0] == "gbnf"
