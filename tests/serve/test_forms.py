"""Which answers the grammars of calls let through: what they do is read back by the parser of the same format."""

import json
import string
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.generate.structured import FormCompiler, Structured
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.serve.chat_schema import Tool
from ferrum_jax.serve.tools.choice import FORMATS
from ferrum_jax.serve.tools.events import Parsed
from ferrum_jax.serve.tools.forms import call_form, final_form, special_tokens

DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
LETTERS = [*string.ascii_letters, *string.digits, *string.punctuation, "\u0120", "\u010a"]  # and space, new line
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
MISTRAL = ("[TOOL_CALLS]", "[ARGS]")
ENDS = ("<end>", "<|call|>", "<|return|>")


def tokenizer(*special: str) -> Tokenizer:
    """One token for each letter, and for each of these marks."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(one, special=True) for one in ("<end>", *special)])
    ids = [backend.token_to_id(one) for one in ENDS]
    ends = tuple(one for one in ids if one is not None)
    return Tokenizer(backend=backend, eos_token_ids=ends)


def tools(*, strict: bool | None = None) -> list[Tool]:
    functions = [{"name": "weather", "parameters": DAYS, "strict": strict}, {"name": "stop"}]
    return [Tool.model_validate({"type": "function", "function": one}) for one in functions]


def is_allowed(by: Tokenizer, format_name: str, text: str, **how: Any) -> bool:
    """Whether the whole text may be an answer, which the model's end follows."""
    may = how.pop("tools", None) or tools(**how.pop("of", {}))
    return lets(by, call_form(format_name, may, by, **how), by.encode(text, add_special_tokens=False))


def lets(by: Tokenizer, written: Structured, ids: list[int]) -> bool:
    form = FormCompiler(by, by.vocab_size).compile(written)
    try:
        for token in ids:
            form.take(token)
    except RequestValidationError:
        return False
    return form.is_complete or all(form.mask[end // 32] >> end % 32 & 1 for end in by.eos_token_ids)


def calls_in(format_name: str, text: str, by: Tokenizer | None = None) -> list[tuple[str, str]]:
    """The calls of an answer, as the server reads it: special tokens are left out where it has none of the marks."""
    parser, parsed = FORMATS[format_name].make(["weather", "stop", "walk"], False), Parsed()
    if by is not None:
        keeps = FORMATS[format_name].mark in special_tokens(by)
        text = by.decode(by.encode(text, add_special_tokens=False), skip_special_tokens=not keeps)
    parsed.take(parser.push(text) + parser.finish())
    return [(one.name, one.arguments) for one in parsed.calls]


def hermes(*calls: tuple[str, str]) -> str:
    objects = [f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def llama3(name: str, given: str) -> str:
    return f'{{"name": "{name}", "parameters": {given}}}'


def mistral(*calls: tuple[str, str], new: bool) -> str:
    if new:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for name, given in calls)
    return f"[TOOL_CALLS][{', '.join(llama3(*one).replace('parameters', 'arguments') for one in calls)}]"


def gpt_oss(name: str, given: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{given}"


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
NOTE = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
RIGHT, WRONG, FREE = ("weather", '{"days": 3}'), ("weather", '{"days": 30}'), ("stop", '{"now": [1]}')
NOTHING = ("stop", "{}")  # a function that declares no parameters has none
UNKNOWN = ("other", "{}")
FORMS: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "hermes": ("hermes", (), hermes),
    "hermes, tags are special": ("hermes", ("<tool_call>", "</tool_call>"), hermes),
    "llama3": ("llama3", ("<|python_tag|>",), llama3),
    "llama3, its tag is a text": ("llama3", (), llama3),
    "mistral, a list": ("mistral", ("[TOOL_CALLS]",), lambda *calls: mistral(*calls, new=False)),
    "mistral, names": ("mistral", MISTRAL, lambda *calls: mistral(*calls, new=True)),
    "mistral, marks are texts": ("mistral", (), lambda *calls: mistral(*calls, new=False)),
    "gpt_oss": ("gpt_oss", HARMONY, gpt_oss),
}


def write(form: str, *calls: tuple[str, str]) -> str:
    name, _, make = FORMS[form]
    return make(*calls[0]) if name in ("llama3", "gpt_oss") else make(*calls)


@pytest.mark.parametrize("form", FORMS)
def test_a_forced_answer_is_a_call_with_arguments_as_declared(form: str):
    name, special, _ = FORMS[form]
    by, how = tokenizer(*special), {"is_forced": True, "several": False}
    for call in (RIGHT, NOTHING):
        text = write(form, call)
        assert is_allowed(by, name, text, **how), text
        assert calls_in(name, text, by) == [call]
        assert not is_allowed(by, name, text[:-1], **how)
    for wrong in (
        write(form, WRONG),
        write(form, FREE),
        write(form, ("stop", "{\n}")),
        write(form, UNKNOWN),
        "Sunny.",
        "",
        f"Well. {write(form, RIGHT)}",
    ):
        assert not is_allowed(by, name, wrong, **how), wrong


@pytest.mark.parametrize("form", FORMS)
def test_a_function_without_properties_has_no_spaces_either(form: str):
    name, special, _ = FORMS[form]
    by, how = tokenizer(*special), {"is_forced": True, "several": False}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [Tool.model_validate({"type": "function", "function": {"name": "stop", "parameters": nothing}})]
    assert is_allowed(by, name, write(form, NOTHING), tools=tools, **how)
    assert not is_allowed(by, name, write(form, ("stop", "{ }")), tools=tools, **how)


@pytest.mark.parametrize("form", FORMS)
def test_a_strict_function_keeps_its_declaration_where_a_text_may_come_as_well(form: str):
    name, special, _ = FORMS[form]
    by, how = tokenizer(*special), {"is_forced": False, "several": True, "of": {"strict": True}}
    said = "<|channel|>final<|message|>{}" if name == "gpt_oss" else "{}"
    for text in ("Sunny.", "It is { hot }.", "a <tool b", "[TOOL"):
        assert is_allowed(by, name, said.format(text), **how), text
        assert calls_in(name, said.format(text)) == []
    for call in (RIGHT, FREE):
        assert is_allowed(by, name, write(form, call), **how)
    for wrong in (WRONG, UNKNOWN):
        assert not is_allowed(by, name, write(form, wrong), **how)
    assert is_allowed(by, name, write(form, WRONG), **how | {"of": {"strict": False}})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_forced", [True, False])
def test_references_go_from_the_root_of_a_tools_own_schema(form: str, is_forced: bool):
    name, special, _ = FORMS[form]
    schema = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/Way"}, "then": {"$ref": "#"}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"Way": {"enum": ["north", "south"]}},
    }
    tool = {"type": "function", "function": {"name": "walk", "parameters": schema, "strict": True}}
    by, how = tokenizer(*special), {"is_forced": is_forced, "several": False, "tools": [Tool.model_validate(tool)]}
    assert is_allowed(by, name, write(form, ("walk", '{"to": "north", "then": {"to": "south"}}')), **how)
    assert not is_allowed(by, name, write(form, ("walk", '{"to": "north", "then": {"to": "west"}}')), **how)
    assert not is_allowed(by, name, write(form, ("walk", '{"to": "up"}')), **how)


@pytest.mark.parametrize("form", ["hermes", "hermes, tags are special", *(one for one in FORMS if "mistral" in one)])
@pytest.mark.parametrize("is_forced", [True, False])
def test_several_calls_come_only_where_they_may(form: str, is_forced: bool):
    name, special, _ = FORMS[form]
    by, text = tokenizer(*special), write(form, RIGHT, NOTHING)
    assert calls_in(name, text) == [RIGHT, NOTHING]
    of = {"strict": True}
    assert is_allowed(by, name, text, is_forced=is_forced, several=True, of=of)
    assert not is_allowed(by, name, text, is_forced=is_forced, several=False, of=of)


@pytest.mark.parametrize("form", ["hermes", "mistral, names", "mistral, marks are texts"])
def test_a_text_may_come_before_a_call(form: str):
    name, special, _ = FORMS[form]
    by, how = tokenizer(*special), {"is_forced": False, "several": True}
    assert is_allowed(by, name, f"Well.\n{write(form, RIGHT)}", **how, of={"strict": True})
    assert not is_allowed(by, name, f"Well.\n{write(form, WRONG)}", **how, of={"strict": True})


@pytest.mark.parametrize("form", FORMS)
def test_marks_in_letters_call_nothing_undeclared(form: str):
    name, special, _ = FORMS[form]
    by = tokenizer(*special)
    allowed = call_form(name, tools(strict=True), by, is_forced=False, several=True)
    begun = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
    mark = {"gpt_oss": "<|end|>", "llama3": "<|python_tag|>"}.get(name, "")  # the others write one before each call
    ids = by.encode(begun, add_special_tokens=False)
    for letter in mark + write(form, WRONG):
        ids += by.encode(letter, add_special_tokens=False)
    assert calls_in(name, by.decode(ids, skip_special_tokens=False)) == [WRONG]
    assert not lets(by, allowed, ids)


@pytest.mark.parametrize("form", ["hermes", "gpt_oss"])
def test_arguments_that_must_be_as_declared_are_an_object(form: str):
    name, special, _ = FORMS[form]
    by, how = tokenizer(*special), {"is_forced": True, "several": False}

    def declared(parameters: dict[str, Any]) -> list[Tool]:
        return [Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})]

    for parameters in ({"properties": {"x": {"type": "integer"}}}, {"type": ["object", "null"]}, {"title": "any"}):
        assert is_allowed(by, name, write(form, ("f", '{"x": 1}')), tools=declared(parameters), **how)
        for value in ("true", "null", '"a"', "[1]"):
            assert not is_allowed(by, name, write(form, ("f", value)), tools=declared(parameters), **how)
    with pytest.raises(RequestValidationError, match="the parameters of 'f' have the type 'array', expected 'object'"):
        call_form(name, declared({"type": "array"}), by, is_forced=True, several=False)


def test_references_with_another_base_are_refused():
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "x", "type": "object"}}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
    with pytest.raises(RequestValidationError, match="not supported together"):
        call_form("hermes", [tool], tokenizer(), is_forced=True, several=False)


def test_gpt_oss_thinks_before_it_calls():
    by = tokenizer(*HARMONY)
    for before in (THOUGHT, NOTE, THOUGHT + NOTE):
        assert is_allowed(by, "gpt_oss", before + gpt_oss(*RIGHT), is_forced=True, several=False)
        assert calls_in("gpt_oss", before + gpt_oss(*RIGHT)) == [RIGHT]
    final = f"{THOUGHT}<|channel|>final<|message|>Sunny."
    assert not is_allowed(by, "gpt_oss", final, is_forced=True, several=False)
    assert is_allowed(by, "gpt_oss", final, is_forced=False, several=False, of={"strict": True})


def test_a_form_is_that_of_gpt_oss_final_message():
    by, final = tokenizer(*HARMONY), "<|channel|>final<|message|>"
    forms = [
        (Structured(json=DAYS), '{"days": 3}', '{"days": 30}'),
        (Structured(json_object=True), '{"a": [1]}', "[1]"),
        (Structured(regex=r"a/b|c\/d"), "c/d", "cd"),
        (Structured(regex="a\nb|c\\\nd"), "c\nd", "cd"),
        (Structured(regex="(?x) a  b  # and no more"), "ab", "a  b"),
        (Structured(choice=["a b", 'say "a"']), 'say "a"', "a"),
    ]
    for form, right, wrong in forms:
        whole = final_form(form, by)
        for before in ("", THOUGHT, THOUGHT + NOTE):
            for header in (final, "<|channel|>final <|constrain|>json<|message|>"):
                text = before + header + right
                assert lets(by, whole, by.encode(text, add_special_tokens=False)), text
                parser, parsed = FORMATS["gpt_oss"].make([], False), Parsed()
                parsed.take(parser.push(text) + parser.finish())
                assert parsed.content == ("Wait." if NOTE in before else "") + right
        for text in (right, final + wrong, THOUGHT + final + wrong, THOUGHT, f"{final}{right}<|end|>"):
            assert not lets(by, whole, by.encode(text, add_special_tokens=False)), text
    own = Structured(grammar='start: "a"')
    assert final_form(own, by) is own
    with pytest.raises(RequestValidationError, match="cannot be read"):
        final_form(Structured(json="{"), by)
    for flags in ("(?x)", "(?ix: b)"):
        with pytest.raises(RequestValidationError, match="write it in one line"):
            final_form(Structured(regex=f"{flags} a # b\n c"), by)
    assert lets(by, final_form(Structured(regex="\\(?x\n"), by), by.encode(f"{final}(x\n", add_special_tokens=False))


def test_llama_may_begin_a_call_with_its_tag():
    how = {"is_forced": False, "several": True, "of": {"strict": True}}
    for special in (("<|python_tag|>",), ()):
        by, text = tokenizer(*special), f"<|python_tag|>{llama3(*RIGHT)}"
        assert is_allowed(by, "llama3", text, **how)
        assert json.loads(calls_in("llama3", text, by)[0][1]) == {"days": 3}
        assert not is_allowed(by, "llama3", f"<|python_tag|>{llama3(*WRONG)}", **how)
        two = f"{llama3(*RIGHT)}; {llama3(*FREE)}"
        assert is_allowed(by, "llama3", two, **how)
        assert calls_in("llama3", two, by) == [RIGHT, FREE]
