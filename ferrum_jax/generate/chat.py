"""Chat templates: messages to the text a chat model was trained on.

The environment is that of `apply_chat_template` in transformers, so that templates made for it render the same.
Templates come with models, so they run in a sandbox and see nothing but JSON values.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from ferrum_jax.contract.errors import RequestValidationError, TokenizerError
from ferrum_jax.generate.chat_sandbox import LARGEST_SOURCE, ChatEnvironment, render_within_limits

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # older and newer names of one field


def render_chat(
    template: str | jinja2.Template,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    bos_token: str = "",
    eos_token: str = "",
    **extra: Any,
) -> str:
    """Renders messages through a chat template.

    The text holds the special tokens that the template writes, so it is to be encoded without adding any.

    Args:
        template: the Jinja source, or what `compile_chat_template` made of it, which saves compiling it again.
        messages: each a mapping with `role` and `content`; the content may be missing beside `tool_calls`.
        add_generation_prompt: end with what introduces the assistant's answer.
        tools: JSON schemas of the functions that the model may call.
        bos_token: what the template sees under this name.
        eos_token: the same.
        **extra: further variables of the template, such as `documents` or `enable_thinking`.

    Raises:
        RequestValidationError: the messages, tools or variables do not have their form.
        TokenizerError: the template is malformed, refuses these messages, or takes more time or memory than it may.
    """
    variables = {name: _copy_json(value, name) for name, value in extra.items()}
    variables |= {
        "messages": _copy_messages(messages),
        "tools": None if tools is None else _copy_tools(tools),
        "documents": variables.get("documents"),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    compiled = compile_chat_template(template) if isinstance(template, str) else template
    try:
        return render_within_limits(compiled, variables)
    except TokenizerError:
        raise
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TokenizerError(f"the chat template refused the messages: {error}") from error
    except RecursionError as error:
        raise TokenizerError("the chat template recurses without end") from error


def compile_chat_template(source: str) -> jinja2.Template:
    """Compiles a chat template.

    Raises:
        TokenizerError: the source is no valid template.
    """
    if len(source) > LARGEST_SOURCE:
        raise TokenizerError(f"the chat template has {len(source):,} characters, at most {LARGEST_SOURCE:,} are read")
    environment = ChatEnvironment(
        filters={"tojson": _dump_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"the chat template is malformed at line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError, SyntaxError):  # the latter two are of Python's own parser
        raise TokenizerError("the chat template is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise TokenizerError(f"the chat template is malformed: {error}") from error


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's words and renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Turns the tag into a call whose result is the rendered body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateDict:
    """What templates know as `dict`: it makes dictionaries and has no other attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """A new dictionary, as the builtin makes it."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A new dictionary of keys that have one value."""
        return dict.fromkeys(*args)


class TemplateNamespace(jinja2.utils.Namespace):
    """What templates know as `namespace`; names that begin with an underscore cannot be set on it."""

    def __repr__(self) -> str:
        return "<Namespace>"  # without its values, of which there may be many and itself among them

    def __init__(*args: Any, **kwargs: Any):  # `self` stays free as a name
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no attribute with an underscore first, as {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(layout: str) -> str:
    """What templates know by this name: the local time, written as `layout` says."""
    return datetime.now().strftime(layout)


def _dump_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
    copy = _copied(message, where)
    reasoning = next((copy[key] for key in _REASONING_KEYS if copy.get(key) is not None), None)
    return copy if reasoning is None else {"thinking": reasoning, **copy, "reasoning_content": reasoning}


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
