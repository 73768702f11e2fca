import os
import pickle
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import pytest

from ferrum_jax.contract.errors import RequestValidationError, ResourceExhaustedError, TokenizerError
from ferrum_jax.generate import chat
from ferrum_jax.generate.chat import render_chat
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


def test_where_no_process_can_be_started_the_error_says_so(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(chat, "_RENDERER", chat._Renderer())
    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(ResourceExhaustedError, match="temporarily unavailable"):
        render_chat(CHATML, HELLO)


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
        "{{ dict(a=1)['a'] }}{{ dict.fromkeys(['b'], 2) }}"
    )
    assert render_chat(template, HELLO * 3) == "31{'b': 2}"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_one_name_in_templates(key: str):
    messages = [{"role": "assistant", "content": "c", key: "why"}]
    assert render_chat("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", messages) == "whywhy"


GPT_OSS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}"
    "{% endif %}[{{ m.content or m.thinking }}]{% else %}({{ m.thinking }})({{ m.content }}){% endif %}{% endfor %}"
)


def test_content_beside_calls_joins_the_reasoning_where_a_template_refuses_both():
    both, calls = {"role": "assistant", "content": "c", "reasoning_content": "why"}, {"tool_calls": [{"name": "f"}]}
    messages = [both, both | calls, both | calls | {"content": ""}, both | calls | {"reasoning_content": None}]
    assert render_chat(GPT_OSS, messages) == "(why)(c)[why\n\nc][why][c]"
    assert render_chat("{{ messages[0].thinking }}{{ messages[0].content }}", messages[1:]) == "whyc"


PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (PARTS, "Hello"),
        ("{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}{% endfor %}", "Hello"),
        ('{% for p in m["content"] | selectattr("type", "equalto", "text") %}{{ p.text }}{% endfor %}', "Hello"),
        ("{{ m['content'][0]['type'] }}:" + PARTS, "text:Hello"),
        ("{{ m.content }}", "Hello"),
        ("{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}", "Hello"),
        ("{% if m.content is not iterable %}" + PARTS + "{% else %}{{ m.content }}{% endif %}", "Hello"),
        ("{% set content = m['content'] %}{{ content }}" + PARTS, "Hello"),
        ("{{ m.get('content') }}" + PARTS, "Hello"),
        ("{% for letter in m.content %}{{ letter }}{% endfor %}", "Hello"),
    ],
)
def test_a_text_is_one_part_where_a_template_only_loops_over_parts(template: str, shown: str):
    template = "{% for m in messages %}" + template + "{% endfor %}"
    assert render_chat(template, HELLO) == shown
    continued = render_chat(template, HELLO, continue_final_message=True, add_generation_prompt=False)
    assert continued == shown


ROLES = "{% for m in messages %}{{ m.role }} {% endfor %}"


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        ("", "system user function "),
        ("{% if role == 'developer' %}{% endif %}", "developer user function "),
        ("{% if role == 'tool' %}{% endif %}", "system user tool "),
        ("{% if role == 'tool' %}{{ {'type': 'function'} if false }}{% endif %}", "system user tool "),
        ("{% if role == 'tool' or role == 'function' %}{% endif %}", "system user function "),
        ('{% if message["role"] in ["tool", "function"] %}{% endif %}', "system user function "),
    ],
)
def test_roles_have_the_names_that_the_template_knows(known: str, shown: str):
    messages = [{"role": role, "content": "a"} for role in ("developer", "user", "function")]
    known = "{% set role, message = '', {'role': ''} %}" + known
    assert render_chat(known + ROLES, messages) == shown
    assert [one["role"] for one in messages] == ["developer", "user", "function"]


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
        "{{ namespace().__init__.__globals__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_a_tokenizer_error(template: str):
    with pytest.raises(TokenizerError):
        render_chat(template, HELLO)


LIMITS = r"takes too much memory|takes more than 0\.3 seconds|refused the messages: Python int too large"
HOSTILE = [
    "{{ 'a' * 10**10 }}",
    "{% set ns = namespace(x=2) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ range(99999) | map('string') | join('b' * 10**6) }}",
    "{{ lipsum(100000) }}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]
MORE_HOSTILE = [
    "{% set x = [0] * 10**9 %}",
    "{{ ('a' | attr('rjust'))(10**10) }}",
    "{{ 'a\n' | indent(10**10) }}",
    "{{ 'a\t'.expandtabs(10**10) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ ('a' * 10**6) | replace(new='b' * 10**6, old='a') }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{{ 1 | round(999999999, 'ceil') }}",
    "{{ range(9) | batch(999999999, 1) | list }}",
    "{{ ('<!--' * 10**7) | striptags }}",
    "{% for i in range(99999) %}{{ 'a' * 10**5 }}{% endfor %}",
    "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% for a in range(99999) if range(99999) | sum %}{% endfor %}",
]


@pytest.mark.parametrize("template", HOSTILE + [pytest.param(one, marks=pytest.mark.slow) for one in MORE_HOSTILE])
def test_a_template_that_would_take_much_time_or_memory_is_refused(template: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat, "SECONDS", 0.3)
    monkeypatch.setattr(chat, "MEMORY", 1 << 28)
    with ThreadPoolExecutor(1) as pool, pytest.raises(TokenizerError, match=LIMITS):
        pool.submit(render_chat, template, HELLO).result()
    monkeypatch.undo()
    assert render_chat(CHATML, HELLO).endswith("assistant\n")  # the next one is rendered


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        (
            "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
            "recurses",
        ),
        ("{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f() }}", "recurses without end"),
        ("{% for i in [1] recursive %}{{ loop(range(3)) }}{% endfor %}", "recurses without end"),
        ("{{ '9' * 5000 | int }}{{ 1" + "0" * 5000 + " }}", "malformed: Exceeds the limit"),
        ("{{ 'a' * (2**26 + 1) }}", "makes a text of more than 67,108,864 characters"),
    ],
    ids=["list", "macro", "loop", "number", "text"],
)
def test_a_template_that_goes_too_deep_or_says_too_much_is_refused(template: str, limit: str):
    with pytest.raises(TokenizerError, match=limit):
        render_chat(template, HELLO)


def test_threads_get_each_its_own_text():
    with ThreadPoolExecutor(4) as pool:
        asked = [[{"role": "user", "content": str(at)}] for at in range(40)]
        found = list(pool.map(lambda messages: render_chat("{{ messages[0].content }}", messages), asked))
    assert found == [str(at) for at in range(40)]


FORKED = """
import os, sys
from ferrum_jax.generate.chat import render_chat
messages = [{"role": "user", "content": "parent"}]
assert render_chat("{{ messages[0].content }}", messages) == "parent"
if os.fork() == 0:
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": "child"}]) == "child"
    os._exit(0)
assert os.wait()[1] == 0
assert render_chat("{{ messages[0].content }}", messages) == "parent"
print("fine")
"""


def test_a_forked_child_renders_on_its_own():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_the_process_ends_with_the_one_that_began_it():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    script = f"""
import os, threading, time
from ferrum_jax.generate import chat
chat.SECONDS = 1
messages = [{{"role": "user", "content": ""}}]
chat.render_chat("", messages)
print(chat._RENDERER._process.pid, flush=True)
threading.Thread(target=chat.render_chat, args=({endless!r}, messages)).start()
time.sleep(0.1)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)
    for _ in range(600):  # its own second, or a minute where the machine is busy
        if not is_running(int(done.stdout)):
            return
        time.sleep(0.1)
    raise AssertionError("the process goes on")


def test_a_process_that_ended_before_it_was_asked_is_an_error_of_the_template():
    deaf = "import os, time; os.close(0); print('ready', flush=True); time.sleep(600)"
    renderer = chat._Renderer()
    renderer._process = subprocess.Popen([sys.executable, "-c", deaf], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    renderer._owner = os.getpid()
    assert renderer._process.stdout is not None
    assert renderer._process.stdout.readline() == b"ready\n"
    assert renderer.answer(b"question") == {"error": "ended the process that renders it with status -9"}
    assert renderer._process is None


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("opened", "inner", "closed"),
    [
        ("{% if 1 %}", "", "{% endif %}"),
        ("{% for i in [1] %}", "", "{% endfor %}"),
        ("{{ " + "(" * 5000, "1", ")" * 5000 + " }}"),
        ("{{ " + "not " * 5000, "1", " }}"),
        ("{{ " + "1+" * 5000, "1", " }}"),
        ("{{ a" + ".b" * 5000, "", " }}"),
    ],
    ids=["if", "for", "brackets", "not", "sum", "attributes"],
)
def test_a_source_that_is_nested_deeply_is_refused(opened: str, inner: str, closed: str):
    times = 1 if opened.startswith("{{") else 5000
    with pytest.raises(TokenizerError, match="nested too deeply"):
        render_chat(opened * times + inner + closed * times, HELLO)


def test_a_source_that_is_too_long_is_refused():
    with pytest.raises(TokenizerError, match="1,048,577 characters, at most 1,048,576"):
        render_chat("a" * ((1 << 20) + 1), HELLO)


def test_long_conversations_are_rendered():
    messages = [{"role": "user", "content": "word " * 100_000}] * 40  # 20 million characters
    content, appending = messages[0]["content"], "{% set n = namespace(x='') %}{% for m in messages %}"
    template = appending + "{% set n.x = n.x + '\\n' + m.content | upper %}{% endfor %}{{ n.x }}"
    assert render_chat(template, messages) == "\n".join(["", *[content.upper()] * 40])


def test_ordinary_operations_are_as_in_jinja():
    template = (
        "{{ 'a' ~ 1 ~ none }}|{{ [1, 'b'] }}|{{ ('x', 2) }}|{{ {'k': 1} }}|{{ 'abc'[1:] }}|{{ 2 ** 5 * 3 % 7 }}|"
        "{{ 'ab' * 2 }}|{{ '%s-%03d' % ('a', 7) }}|{{ '{}:{:>4}'.format('k', 'v') }}|{{ 'a\nb' | indent(2) }}|"
        "{{ 'x' | center(5) }}|{{ [3, 1] | sort | join('-') }}|{{ ', '.join(['p', 'q']) }}|"
        "{{ 'aXa'.replace('a', 'é') }}|"
        "{{ range(5) | select('odd') | map('string') | list }}|{{ 1.25 | round(1) }}|{{ range(4) | batch(3) | list }}|"
        "{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{{ loop.last }}{% endfor %}|{{ 'a b'.split() | length }}|"
        "{% set t = namespace(n=[]) %}{% for i in range(3) %}{% set t.n = t.n + [i] %}{% endfor %}{{ t.n }}"
    )
    assert render_chat(template, HELLO) == (
        "a1None|[1, 'b']|('x', 2)|{'k': 1}|bc|5|abab|a-007|k:   v|a\n  b|  x  |1-3|p, q|éXé|['1', '3']|1.2|"
        "[[0, 1, 2], [3]]|x1True|2|[0, 1, 2]"
    )


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


def test_a_key_without_a_value_is_left_out_unless_the_template_asks_for_none():
    """As transformers 5.24 leaves it out; DeepSeek's template asks for None beside calls."""
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}]
    in_message = "{{ 'content' in messages[0] }}{{ 'name' in messages[0] }}"  # as GPT-OSS' template asks
    assert render_chat(in_message, messages) == "FalseFalse"
    for asking in (
        "messages[0]['content'] is none",
        'messages[0]["content"] is not none',
        "messages[0].content == None",
    ):
        assert render_chat(f"{{{{ {asking} }}}}" + in_message, messages).endswith("TrueFalse")
    assert render_chat("{{ messages[0]['content'] is none }}", messages) == "True"
    assert render_chat("{{ messages[0].content != none }}", messages) == "False"
    for other in ("reasoning_content is not none", "tool_content is none"):
        assert render_chat(f"{{{{ messages[0].{other} }}}}{in_message}", messages).endswith("FalseFalse")
    messages = [{"role": "user", "content": None, "thinking": None, "reasoning_content": "r", 1: None}]
    asks = "{{ messages[0].content is none }}{{ 'content' in messages[0] }}{{ messages[0].thinking }}"
    assert render_chat(asks, messages) == "FalseFalser"


def test_the_callers_messages_stay_as_they_were():
    messages = [{"role": "user", "content": [{"type": "text"}], "reasoning": "r"}]
    render_chat("{{ messages[0].content[0].update({'type': 1}) if false }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text"}], "reasoning": "r"}]


def test_enumerations_are_plain_strings_to_a_template():
    class Role(StrEnum):
        USER = "user"

    messages = [{"role": Role.USER, "content": ""}]
    assert render_chat("{{ messages[0].role }}{{ messages[0].role.name is defined }}", messages) == "userFalse"


def test_templates_are_rendered_where_the_callers_own_modules_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[Any] = []

    class Recorded(subprocess.Popen):
        def __init__(self, command: Any, **more: Any):
            asked.extend(command)
            super().__init__(command, **more)

    (tmp_path / "resource.py").write_text("raise ImportError('not this one')")
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path, Path("/somewhere"), "", "/somewhere/else"])
    renderer = chat._Renderer()
    try:
        assert renderer.answer(pickle.dumps(("{{ a }}", {"a": "b"}, 5.0, 1 << 30, 100))) == {"text": "b"}
    finally:
        renderer._stop()
    assert "/somewhere/else" in asked


def test_the_last_message_is_continued_though_the_template_changes_its_letters():
    for source, expected in (
        ("{{ messages[0].content | upper }}!", "AB "),
        ("{{ messages[0].content | trim | replace('b', 'a') }}!", "aa"),
    ):
        messages = [{"role": "assistant", "content": "ab "}]
        assert render_chat(source, messages, continue_final_message=True, add_generation_prompt=False) == expected
