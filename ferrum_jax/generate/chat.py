"""Chat templates: render messages as the text that a chat model was trained on.

The environment is that of `apply_chat_template` in transformers, so that its templates render the same here. Templates
come with models and may be hostile: they see only JSON values, and `chat_sandbox` renders them in a process of its own,
with limits of time, memory and output.
"""

import atexit
import contextlib
import functools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.contract.checks import renew_after_fork
from ferrum_jax.contract.errors import RequestValidationError, ResourceExhaustedError, TokenizerError

SECONDS = 5.0  # of one rendering
MEMORY = 1 << 30  # bytes of the whole process
LARGEST_TEXT = 1 << 26  # characters
LARGEST_SOURCE = 1 << 20  # characters
# Ends the final message: no letters, which a template may change; one that trims the message removes the space.
_MARK = "\u27e6\u2026\u27e7 "
TEMPLATE_OWN = frozenset({
    "template", "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"
})  # fmt: skip
# DeepSeek's templates ask this of messages with calls.
_ASKS_FOR_NONE = re.compile(r"""(?<!\w)content['"]?\s?\]?\s{0,3}(is\s{1,3}(not\s{1,3})?none|[=!]=\s?[nN]one)\b""")
# As a role, not as the type of a call.
_HAS_FUNCTION_ROLE = re.compile(r"""role\b[^%}]{0,200}['"]function['"]""")
_ONE_TEXT_BESIDE_CALLS = "Cannot pass both content and thinking"  # GPT-OSS's template refuses both
_CONTENT = re.compile(r"""['".]content\b['"]?\]?(\[0\])?""")  # a use of it, perhaps of its first part
_LOOP_OVER = re.compile(r"""\bfor\s+\w+\s+in\s+\w+\[?$""")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # older and newer names of one field


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    bos_token: str = "",
    eos_token: str = "",
    **extra: Any,
) -> str:
    """Renders messages with a chat template.

    The text contains the special tokens that the template writes: encode it without adding any.

    Args:
        template: the Jinja source.
        messages: each a mapping with `role` and `content`; the content may be missing beside `tool_calls`. Keys whose
            value is None are left out, as transformers does: OpenAI's client writes `"content": null` beside calls, and
            templates fail there or write "None". Beside calls, a template that asks `content is none` has it. Unlike
            in transformers, newer and older roles get the name that the template knows: `developer` becomes `system`,
            `function` becomes `tool`; and content beside calls joins the reasoning for GPT-OSS, whose template shows
            one of them, and refuses both. A template that only loops over content gets a text as one part.
        add_generation_prompt: end with the header of the assistant's answer.
        continue_final_message: end with the content of the last message, so that the answer continues it. Text of the
            template after it is left out, and so are spaces at its end if the template trims them.
        tools: JSON schemas of the functions that the model may call.
        bos_token: the template's variable of this name.
        eos_token: the template's variable of this name.
        **extra: further variables of the template, such as `documents` or `enable_thinking`.

    Raises:
        RequestValidationError: messages, tools or variables are malformed, or the last message cannot be continued.
        TokenizerError: the template is malformed, refuses these messages, or exceeds a limit.
    """
    if len(template) > LARGEST_SOURCE:
        raise TokenizerError(f"the chat template has {len(template):,} characters, at most {LARGEST_SOURCE:,} are read")
    variables = {name: _copied(value, name) for name, value in extra.items()}
    copied = _copy_messages(messages)
    _fit(copied, template)
    if continue_final_message:
        if add_generation_prompt:
            raise RequestValidationError("continue_final_message needs add_generation_prompt=False")
        if not copied or not isinstance(copied[-1].get("content"), str):
            raise RequestValidationError("continue_final_message needs a last message whose content is text")
        copied[-1]["content"] += _MARK
    if _reads_only_parts(template):
        for message in copied:
            if isinstance(text := message.get("content"), str):
                message["content"] = [{"type": "text", "text": text}]
    variables |= {
        "messages": copied,
        "tools": None if tools is None else _copy_tools(tools),
        "documents": variables.get("documents"),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    answer = _RENDERER.answer(pickle.dumps((template, variables, SECONDS, MEMORY, LARGEST_TEXT)))
    if "error" in answer:
        raise TokenizerError(f"the chat template {answer['error']}")
    text = answer["text"]
    if not continue_final_message:
        return text
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise RequestValidationError("the chat template leaves out the last message, which cannot be continued")
    return text[:at] if text[at:].startswith(_MARK) else text[:at].rstrip()


_OUT_OF_TIME = (1,) if sys.platform == "win32" else (-signal.SIGALRM,)  # statuses of chat_sandbox.py's alarm


class _Renderer:
    """The process that renders; started with the first template, and again after a template that ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        renew_after_fork(self, "_lock", threading.Lock)
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # pid that started the process: after a fork, the child starts its own
        atexit.register(self._stop)

    def answer(self, question: bytes) -> dict[str, str]:
        """Sends a pickle to the process and returns its answer, or the error that ended it."""
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(question)
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:  # interrupted: the next question would get this answer
                self._stop()
                raise
            if line:
                return json.loads(line)
            status = self._stop()
            if status in _OUT_OF_TIME:
                return {"error": f"takes more than {SECONDS:g} seconds"}
            return {"error": f"ended the process that renders it with status {status}"}

    def _start(self) -> None:
        paths = [one for one in sys.path if isinstance(one, str) and one]  # jinja2 may be in one of the caller's own
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", Path(__file__).with_name("chat_sandbox.py"), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the terminal is for the caller
            )
        except OSError as problem:
            raise ResourceExhaustedError(f"the process that renders chats cannot be started: {problem}") from problem
        self._owner = os.getpid()

    def _stop(self) -> int:
        """Ends the process and returns its status."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return 0
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes its pipes, perhaps with an unsent question
            process.wait()
        return process.returncode


_RENDERER = _Renderer()


def _copy_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestValidationError(f"messages must be a list of mappings, found {type(messages).__name__}")
    return [_copy_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _copy_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestValidationError(f"{where} must be a mapping, found {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise RequestValidationError(f"{where} must have a role of type str, found {message.get('role')!r:.80}")
    if "content" not in message and "tool_calls" not in message:
        raise RequestValidationError(f"{where} must have content, found only {', '.join(map(str, message))}")
    if not isinstance(message.get("content"), str | Sequence | None):
        raise RequestValidationError(
            f"{where}: content must be a str, a list of parts or None, found {type(message['content']).__name__}"
        )
    copy = {key: value for key, value in _copied(message, where).items() if value is not None}
    reasoning = next((copy[key] for key in _REASONING_KEYS if key in copy), None)
    return copy if reasoning is None else {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def _fit(messages: list[dict[str, Any]], template: str) -> None:
    """Changes messages to what a template reads, by what its source says."""
    asks_for_none, roles = _ASKS_FOR_NONE.search(template) is not None, _roles_for(template)
    for message in messages:
        message["role"] = roles.get(message["role"], message["role"])
        if asks_for_none and "tool_calls" in message:
            message.setdefault("content", None)
        if _ONE_TEXT_BESIDE_CALLS in template and "tool_calls" in message:
            _join_content(message)


@functools.lru_cache(maxsize=16)
def _roles_for(template: str) -> dict[str, str]:
    """Names of roles that a template knows, by those that it does not."""
    roles = {} if "developer" in template else {"developer": "system"}
    if ("'tool'" in template or '"tool"' in template) and _HAS_FUNCTION_ROLE.search(template) is None:
        roles["function"] = "tool"
    return roles


@functools.lru_cache(maxsize=16)
def _reads_only_parts(template: str) -> bool:
    """Whether a template only loops over the parts of contents, so that it would leave out a content that is a text."""
    uses = list(_CONTENT.finditer(template))
    loops = [_LOOP_OVER.search(template[max(0, use.start() - 80) : use.start()]) is not None for use in uses]
    reads_parts = all(is_loop or use[1] for is_loop, use in zip(loops, uses, strict=True))
    return (
        any(loops)
        and reads_parts
        and not any(whole in template for whole in ("is string", "tojson", ".items"))  # nor prints whole messages
        and re.search(r"""['".]text\b""", template) is not None
    )


def _join_content(message: dict[str, Any]) -> None:
    """Moves a message's content to the end of its reasoning, if it has both."""
    reasoning, content = message.get("thinking"), message.get("content")
    if reasoning and content and isinstance(reasoning, str) and isinstance(content, str):
        message["thinking"] = message["reasoning_content"] = f"{reasoning}\n\n{content}"
        del message["content"]


def _copy_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestValidationError("tools must be a list of JSON schemas")
    return [_copied(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _copied(value: Any, where: str) -> Any:
    try:
        return _copy_json(value, where)
    except RecursionError:
        raise RequestValidationError(f"{where} is nested too deeply, or holds itself") from None


def _copy_json(value: Any, where: str) -> Any:
    # A template must not reach the methods of a caller's objects, nor change what the caller still holds.
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_copy_json(key, where): _copy_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        copies = (_copy_json(item, f"{where}[{index}]") for index, item in enumerate(value))
        return tuple(copies) if isinstance(value, tuple) else list(copies)
    raise RequestValidationError(f"{where} must be made of JSON values, found {type(value).__name__}")
