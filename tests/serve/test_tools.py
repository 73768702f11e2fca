"""Calls in what models write: what is found, and that it does not depend on how the text is cut."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.contract.errors import ConfigError
from ferrum_jax.serve.tools.choice import FORMATS, choose_format
from ferrum_jax.serve.tools.events import Arguments, Call, CallBegin, Content, Parsed
from ferrum_jax.serve.tools.json_call import is_complete

NAMES = {"get_weather", "f"}
ARGUMENTS = '{"city": "Zü}ri\\"ch", "days": [1, {"a": null}]}'
WEATHER = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
OTHER = '{"name": "f", "arguments": {}}'


def parse(name: str, *pieces: str) -> Parsed:
    parser, parsed = FORMATS[name].make(NAMES, False), Parsed()
    for piece in pieces:
        parsed.take(parser.push(piece))
    parsed.take(parser.finish())
    return parsed


FOUND = [
    ("hermes", "Hello <b> </tool_call> there", "Hello <b> </tool_call> there", []),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("get_weather", ARGUMENTS)]),
    ("hermes", f"Let me see.\n\n<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n", "Let me see.",
     [("get_weather", ARGUMENTS), ("f", "{}")]),
    ("hermes", f"<tool_call>{OTHER}</tool_call> and more ", "and more ", [("f", "{}")]),
    ("hermes", f"<tool_call>{OTHER}<tool_call>{OTHER}", "", [("f", "{}"), ("f", "{}")]),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", f"Well.<tool_call>{OTHER}\n</tool_ca", "Well.", [("f", "{}")]),
    ("hermes", f"<tool_call>{OTHER}</tool_call>\n<too", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", f"<tool_call>{OTHER[:-1]}\n<tool_call>{OTHER}</tool_call>", "", [("f", "{}"), ("f", "{}")]),
    ("hermes", f"<tool_call>\n<tool_call>{OTHER}</tool_call>", "<tool_call>\n", [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": 3, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", "ends in spaces \n", "ends in spaces \n", []),
    ("hermes", "ends in <tool_ca", "ends in <tool_ca", []),
    ("llama3", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', "", [("get_weather", ARGUMENTS)]),
    ("llama3", f"<|python_tag|>{OTHER}; {OTHER}", "", [("f", "{}"), ("f", "{}")]),
    ("llama3", f" \n{OTHER}\n", "", [("f", "{}")]),
    ("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3", '{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
    ("llama3", f"Call {OTHER}", f"Call {OTHER}", []),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {OTHER}]", "", [("get_weather", ARGUMENTS), ("f", "{}")]),
    ("mistral", f"Well. [TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{{}}", "Well.",
     [("get_weather", ARGUMENTS), ("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f{}", "", [("f", "{}")]),
    ("mistral", f"[TOOL_CALLS]{OTHER}", "", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("mistral", "a [TOOL_C", "a [TOOL_C", []),
    ("mistral", "[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), FOUND)
def test_calls_are_found(name: str, text: str, content: str, calls: list[tuple[str, str]]):
    parsed = parse(name, text)
    assert parsed.calls == [Call(*one) for one in calls]
    assert parsed.content == content
    assert parsed == parse(name, *text)


def test_harmonys_channels_are_told_apart():
    text = (
        "<|channel|>analysis<|message|>They ask for <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>One "
        f"moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>"
    )
    parsed = parse("gpt_oss", text)
    assert parsed == Parsed("One moment.", "They ask for <b>.", [Call("get_weather", ARGUMENTS)])
    assert parse("gpt_oss", *text) == parsed
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    assert parse("gpt_oss", final) == Parsed("Four.", "Hm.")
    assert parse("gpt_oss", final.removesuffix("<|return|>")) == Parsed("Four.", "Hm.")
    assert parse("gpt_oss", "<|channel|>final<|message|>Cut <|re") == Parsed("Cut <|re")
    assert parse("gpt_oss", "<|channel|>fin") == Parsed()
    assert parse("gpt_oss", "no marks") == Parsed("no marks")
    assert parse("gpt_oss", "<|channel|>commentary to=functions.<|message|>{}") == Parsed("{}")  # to nobody
    assert parse("gpt_oss", "<|channel|>commentary to=assistant<|message|>x<|end|>") == Parsed("x")
    assert parse("gpt_oss", "<|channel|>analysis to=python<|message|>1<|call|>") == Parsed("", "1")
    twice = "to=functions. to=python<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert parse("gpt_oss", f"<|start|>assistant {twice}") == Parsed(calls=[Call("f", "{}")])
    by_role = " to=functions.f<|channel|>commentary json<|message|><|call|>"
    assert parse("gpt_oss", by_role) == Parsed(calls=[Call("f", "{}")])
    for mark in ("<|channel|>", "<|constrain|>", "<|end|>"):  # a mark ends the name
        text = f"commentary to=functions.f{mark}json<|message|>{{}}<|call|>"
        assert parse("gpt_oss", f"<|channel|>{text}") == Parsed(calls=[Call("f", "{}")])
        assert parse("gpt_oss", f" to=functions.f{mark}<|channel|>{text}") == Parsed(calls=[Call("f", "{}")])


def test_marks_inside_a_string_of_harmonys_arguments_are_text():
    head, given = (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        json.dumps(
            {"text": '\\"<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}', "n": [{}]}
        ),
    )
    for end in ("<|call|>", "<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"):
        expected = Parsed("Done." if "final" in end else "", calls=[Call("f", given)])
        assert parse("gpt_oss", head + given + end) == expected
        assert parse("gpt_oss", *(head + given + end)) == expected
    assert parse("gpt_oss", f'{head}{{"a": <|call|>') == Parsed(calls=[Call("f", '{"a": ')])


def test_a_continued_message_of_harmony_is_content_from_its_first_letter():
    parser = FORMATS["gpt_oss"].make(NAMES, True)
    assert parser.push("and mo") == [Content("and mo")]
    assert parser.push("re.<|end|>") == [Content("re.")]
    call = "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert parser.push(call) == [CallBegin("f"), Arguments("{}")]
    assert parser.finish() == []


MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>", "<|message|>", "<|end|>",
    "<|start|>", "<|call|>", "assistant", "final", "analysis", " to=functions.f", "{", "}", '"name"',
    '"arguments"', ":", '"f"', WEATHER, OTHER, "[", "]", ",", ";", " ", "\n", '"', "\\", "é", "<", "x",
]  # fmt: skip
texts = st.lists(st.sampled_from(MARKS), max_size=14).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(text=texts, data=st.data())
def test_what_is_found_does_not_depend_on_how_the_text_is_cut(name: str, text: str, data: st.DataObject):
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert parse(name, *pieces) == parse(name, text)


@pytest.mark.parametrize("name", ["hermes", "mistral"])
@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.text("abc_", min_size=1),
            st.dictionaries(
                st.text(max_size=5), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=4)
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    indent=st.sampled_from([None, 2]),
)
def test_whatever_the_arguments_are_they_come_whole(
    name: str, calls: list[tuple[str, dict[str, object]]], indent: int | None
):
    objects = [json.dumps({"name": one, "arguments": arguments}, indent=indent) for one, arguments in calls]
    text = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    parsed = parse(name, text if name == "hermes" else f"[TOOL_CALLS][{','.join(objects)}]")
    assert [(one.name, json.loads(one.arguments)) for one in parsed.calls] == calls
    assert parsed.content == ""


def test_arguments_come_before_the_call_is_complete():
    parser = FORMATS["hermes"].make(NAMES, False)
    found = Parsed()
    found.take(parser.push('<tool_call>{"name": "f", "arguments": {"city": "Zü'))
    assert found.calls == [Call("f", '{"city": "Zü')]


def test_complete_arguments_end_in_their_last_bracket_however_deep():
    for text in ('{"a": "}"}', "[1]", '{"a": ' + "[" * 30_000 + "]" * 30_000 + "}"):
        assert is_complete(text)
        assert is_complete(f"\n {text}\n")
        assert not any(is_complete(f" {text[:end]}") for end in {0, 1, len(text) // 2, len(text) - 1})
    assert not is_complete(' {"city": "Ber')
    assert all(map(is_complete, ("5", "print(1")))  # nothing shows where they end


TEMPLATES: list[tuple[str, str | None]] = [
    ("{% if tools %}<tool_call>{% endif %}", "hermes"),
    ("<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>", None),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
    ("<|python_tag|> <|start_header_id|>", "llama3"),
    ('<|start_header_id|> {{ tools }} {"name": x, "parameters": y}', "llama3"),
    ("<|channel|>final<|message|>", "gpt_oss"),
    ("<|im_start|>user", None),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_the_template_tells_the_format(template: str, name: str | None):
    found = choose_format("auto", template)
    assert (None if found is None else found.name) == name
    assert choose_format("none", template) is None


def test_an_unknown_format_is_refused_and_ids_differ():
    with pytest.raises(ConfigError, match="expected auto, none or one of hermes"):
        choose_format("pythonic", None)
    make: Callable[[], str] = FORMATS["mistral"].new_id
    assert len({make() for _ in range(9)}) == 9
    assert len(make()) == 9
