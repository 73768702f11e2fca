import re
from datetime import datetime
from enum import StrEnum
from typing import Any

import pytest

from ferrum_jax.contract.errors import RequestValidationError, TokenizerError
from ferrum_jax.generate.chat import compile_chat_template, render_chat
from ferrum_jax.generate.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def test_smollm2_speaks_as_it_was_trained(smollm2_path: Any):
    template = load_tokenizer(smollm2_path).chat_template
    assert template is not None
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert render_chat(template, HELLO) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat(template, [{"role": "system", "content": "S"}, *HELLO], add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    )


def test_a_compiled_template_renders_as_its_source():
    assert render_chat(compile_chat_template(CHATML), HELLO) == render_chat(CHATML, HELLO)


def test_a_conversation_may_be_empty():
    assert render_chat(CHATML, []) == "<|im_start|>assistant\n"


def test_variables_reach_the_template():
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ mood }}{{ documents is none }}"
    assert render_chat(template, HELLO, bos_token="<s>", eos_token="</s>", mood="!") == "<s>Hello</s>!True"


def test_lines_that_hold_only_tags_leave_no_trace():
    assert render_chat("  {% if true %}\na\n  {% endif %}\n b", HELLO) == "a\n b"


def test_loops_may_be_left():
    template = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render_chat(template, HELLO) == "02"


def test_json_is_neither_escaped_nor_sorted():
    tools = [{"name": "é<&'", "a": [1, None, True]}]
    assert render_chat("{{ tools[0] | tojson }}", HELLO, tools=tools) == '{"name": "é<&\'", "a": [1, null, true]}'
    assert render_chat("{{ tools | tojson(indent=1) }}", HELLO, tools=[{}]) == "[\n {}\n]"


def test_a_generation_tag_renders_as_its_body():
    template = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert render_chat(template, HELLO) == "[Hello]"


def test_the_time_is_told():
    before = datetime.now().strftime("%d %b %Y")
    told = render_chat("{{ strftime_now('%d %b %Y') }}", HELLO)
    assert told in (before, datetime.now().strftime("%d %b %Y"))


def test_namespaces_and_dictionaries_work():
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        "{{ dict(a=1)['a'] }}{{ dict.fromkeys(['b'], 2) }}{{ dict.update is defined }}"
    )
    assert render_chat(template, HELLO * 3) == "31{'b': 2}False"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_one_name_in_templates(key: str):
    messages = [{"role": "assistant", "content": "c", key: "why"}]
    assert render_chat("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", messages) == "whywhy"


def test_a_template_that_refuses_is_quoted():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TokenizerError, match=r"refused.*roles must alternate"):
        render_chat(template, HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{{ [1] | tojson(indent={}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_a_tokenizer_error(template: str):
    with pytest.raises(TokenizerError):
        render_chat(template, HELLO)


@pytest.mark.parametrize("template", ["{% if %}", "{{ a", "{% generation %}", "{% nothing %}"])
def test_a_malformed_template_names_the_line(template: str):
    with pytest.raises(TokenizerError, match="malformed at line 2"):
        render_chat("\n" + template, HELLO)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("Hello", "messages must be a list of mappings, found str"),
        ({"role": "user"}, "messages must be a list of mappings, found dict"),
        (["Hello"], "messages[0] must be a mapping, found str"),
        ([*HELLO, {"content": "x"}], "messages[1] must have a role of type str, found None"),
        ([{"role": 1, "content": "x"}], "messages[0] must have a role of type str, found 1"),
        ([{"role": "user"}], "messages[0] must have content, found only role"),
        ([{"role": "user", "content": 5}], "content must be a str, a list of parts or None, found int"),
        ([{"role": "user", "content": b"x"}], "found bytes"),
        ([{"role": "user", "content": "x", "image": object()}], "messages[0].image must be made of JSON values"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, complaint: str):
    with pytest.raises(RequestValidationError, match=re.escape(complaint)):
        render_chat(CHATML, messages)


def test_a_message_that_holds_itself_is_refused():
    message: dict[str, Any] = {"role": "user", "content": "x"}
    message["image"] = message
    with pytest.raises(RequestValidationError, match=re.escape("messages[0] is nested too deeply, or holds itself")):
        render_chat(CHATML, [message])


@pytest.mark.parametrize("tools", ["x", [1], [{"f": print}]])
def test_malformed_tools_are_refused(tools: Any):
    with pytest.raises(RequestValidationError, match="tools"):
        render_chat(CHATML, HELLO, tools=tools)


def test_variables_that_are_no_json_are_refused():
    with pytest.raises(RequestValidationError, match="mood must be made of JSON values, found object"):
        render_chat(CHATML, HELLO, mood=object())


def test_an_answer_with_tool_calls_needs_no_content():
    messages = [{"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": None}]
    assert render_chat("{{ messages[0].tool_calls[0].name }}", messages) == "f"


def test_the_callers_messages_stay_as_they_were():
    messages = [{"role": "user", "content": [{"type": "text"}], "reasoning": "r"}]
    render_chat("{{ messages[0].content[0].update({'type': 1}) if false }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text"}], "reasoning": "r"}]


def test_enumerations_are_plain_strings_to_a_template():
    class Role(StrEnum):
        USER = "user"

    messages = [{"role": Role.USER, "content": ""}]
    assert render_chat("{{ messages[0].role }}{{ messages[0].role.name is defined }}", messages) == "userFalse"
