"""Grammars of answers whose tool calls or final messages have a form, in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.generate.structured import Structured, check_schema
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.serve.chat_schema import Tool
from ferrum_jax.serve.tools.harmony import CHANNEL, CONSTRAIN, END, ENDS, MESSAGE, START
from ferrum_jax.serve.tools.llama3 import PYTHON_TAG
from ferrum_jax.serve.tools.mistral import ARGS, MARK
from ferrum_jax.serve.tools.tagged import CLOSE, OPEN

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_UNESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)  # in a regular expression, also what is escaped already
_ESCAPES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # between slashes
_SPACED = re.compile(r"\(\?[a-zA-Z]*x")  # turns on the flag by which spaces and comments count for nothing
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def call_form(
    format_name: str, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_forced: bool, several: bool
) -> Structured:
    """Returns the form of an answer that may call these tools, with calls in the format's usual spelling.

    Args:
        format_name: the model's format of calls, a name in `choice.FORMATS`.
        tools: the tools that may be called. Arguments follow the declaration if the call is forced or the tool is
            `strict`; otherwise they are any object.
        tokenizer: the model's tokenizer; marks may be special tokens of it.
        is_forced: the answer is only calls, except for GPT-OSS's reasoning before; otherwise it may also be text, with
            or without calls.
        several: the answer may have more than one call; GPT-OSS never has.

    Raises:
        RequestValidationError: a declaration has references that cannot be followed, or arguments that are no object.
    """
    marks = _Marks(special_tokens(tokenizer))
    schemas: dict[str, Any] = {}
    for function in (tool.function for tool in tools):
        declared = _NO_PARAMETERS if function.parameters is None else function.parameters or _ANY_OBJECT
        schemas[function.name] = _object(function.name, declared) if is_forced or function.strict else _ANY_OBJECT
    match format_name:
        case "hermes":
            rules = _hermes(schemas, marks, is_forced, several)
        case "llama3":
            rules = _llama3(schemas, marks, is_forced, several)
        case "mistral":
            rules = _mistral(schemas, marks, is_forced, several)
        case _:
            rules = _gpt_oss(schemas, marks, is_forced)
    for schema in schemas.values():
        check_schema(schema)
    # Each schema is a document of its own: its references start at its root.
    arguments = [f"args{at}: %json {json.dumps(schema)}" for at, schema in enumerate(schemas.values())]
    return Structured(grammar="\n".join([*rules, *arguments, ""]))


def final_form(form: Structured, tokenizer: Tokenizer) -> Structured:
    """Returns the form of GPT-OSS's whole answer whose final message has a form; reasoning may come before it.

    A grammar of the client's is returned as it is, and is that of the whole answer.

    Raises:
        RequestValidationError: a JSON schema has references that cannot be followed, or is no JSON; or a regular
            expression with the flag x has several lines.
    """
    kind, text = form.definition
    match kind:
        case "json_schema":
            try:
                check_schema(json.loads(text))
            except (ValueError, RecursionError) as problem:
                raise RequestValidationError(f"the JSON schema cannot be read: {problem}") from None
            answer = f"%json {text}"
        case "choice":
            answer = " | ".join(map(json.dumps, json.loads(text)))
        case "regex":
            bare = _UNESCAPED.sub(lambda found: found[0] if found[0] == "\n" else "", text)
            if "\n" in bare and _SPACED.search(bare):
                raise RequestValidationError("a regex with the flag x has ends of lines: write it in one line")
            answer = f"/{_UNESCAPED.sub(lambda found: _ESCAPES.get(found[0], found[0]), text)}/"
        case _:
            return form
    marks = _Marks(special_tokens(tokenizer))
    final = f'final: {marks.of(CHANNEL)} "final" (" " {marks.of(CONSTRAIN)} "json")? {marks.of(MESSAGE)} answer'
    return Structured(grammar="\n".join(["start: aside* final", *_aside(marks), final, f"answer: {answer}", ""]))


def _object(name: str, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a declaration of arguments that allows objects alone."""
    kind = declared.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise RequestValidationError(f"the parameters of {name!r} have the type {kind!r}, expected 'object'")
    declared = {**declared, "type": "object"}
    if not declared.get("properties") and declared.get("additionalProperties") is False:
        declared["x-guidance"] = {"whitespace_flexible": False}  # else a model may go on with spaces for ever
    return declared


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the ids of a vocabulary's special tokens by their spelling."""
    return {token.content: at for at, token in tokenizer.added.items() if token.special}


@dataclass(frozen=True)
class _Marks:
    """How a grammar writes marks, which are special tokens in some vocabularies and plain text in others."""

    special: Mapping[str, int]

    def has(self, mark: str) -> bool:
        """Whether a mark is a special token."""
        return mark in self.special

    def of(self, mark: str) -> str:
        """Returns a mark as a symbol of the grammar."""
        return f"<[{self.special[mark]}]>" if self.has(mark) else json.dumps(mark)

    def text_before(self, mark: str) -> list[str]:
        """Returns the rules `before`, for a text up to and with the first mark, and `rest`, for a text without it."""
        before = f"before: TEXT {self.of(mark)}" if self.has(mark) else f"before[lazy]: /(?s:.*){_escaped(mark)}/"
        return [before, "rest: TEXT", _text_without(mark)]


def _hermes(schemas: dict[str, Any], marks: _Marks, is_forced: bool, several: bool) -> list[str]:
    inside = [f'inside: "\\n" call "\\n" {marks.of(CLOSE)}', _call_objects(schemas, "arguments")]
    if is_forced:
        rest = f'("\\n" {marks.of(OPEN)} inside)*' if several else ""
        return [f"start: {marks.of(OPEN)} inside {rest}", *inside]
    return [f"start: (before inside){'*' if several else '?'} rest", *inside, *marks.text_before(OPEN)]


def _llama3(schemas: dict[str, Any], marks: _Marks, is_forced: bool, several: bool) -> list[str]:
    calls = 'call ("; " call)*' if several else "call"
    if is_forced:
        return [f"start: {calls}", _call_objects(schemas, "parameters")]
    text = rf"TEXT: /(\s*[^{{\s](?s:.*))?/ & ~/\s*{_escaped(PYTHON_TAG)}(?s:.*)/"
    return [f"start: {marks.of(PYTHON_TAG)}? {calls} | TEXT", _call_objects(schemas, "parameters"), text]


def _mistral(schemas: dict[str, Any], marks: _Marks, is_forced: bool, several: bool) -> list[str]:
    """Newer models, which have `[ARGS]`, write a mark before each call; older ones write one before a list of calls."""
    mark = marks.of(MARK)
    if marks.has(ARGS):
        calls = [f"{json.dumps(name)} {marks.of(ARGS)} args{at}" for at, name in enumerate(schemas)]
        inside, more = [f"inside: {' | '.join(calls)}"], f"({mark} inside)*" if several else ""
    else:
        others, more = '(", " call)*' if several else "", ""
        inside = [f'inside: "[" call {others} "]"', _call_objects(schemas, "arguments")]
    if is_forced:
        return [f"start: {mark} inside {more}", *inside]
    return [f"start: before inside {more} | rest", *inside, *marks.text_before(MARK)]


def _gpt_oss(schemas: dict[str, Any], marks: _Marks, is_forced: bool) -> list[str]:
    """The form ends after the arguments or the final text, where a special token of the model's stop ids follows."""
    channel, message = marks.of(CHANNEL), marks.of(MESSAGE)
    calls = [
        f'{channel} {json.dumps(f"commentary to=functions.{name} ")} {marks.of(CONSTRAIN)} "json" {message} args{at}'
        for at, name in enumerate(schemas)
    ]
    answer = ["start: aside* call"] if is_forced else ["start: aside* (call | final)"]
    final = [] if is_forced else [f'final: {channel} "final" {message} TEXT']
    return [*answer, f"call: {' | '.join(calls)}", *final, *_aside(marks)]


def _aside(marks: _Marks) -> list[str]:
    """Returns the rules `aside`, for a message of GPT-OSS before a call or the final one, and `TEXT`."""
    begins = f'{marks.of(END)} {marks.of(START)} "assistant"'
    aside = f'aside: {marks.of(CHANNEL)} ("analysis" | "commentary") {marks.of(MESSAGE)} TEXT {begins}'
    return [aside, _text_without(*ENDS, START)]


def _call_objects(schemas: dict[str, Any], arguments: str) -> str:
    """Returns the rule `call`, for a JSON object that calls one of the tools."""
    calls = [
        f'{json.dumps(f"""{{"name": {json.dumps(name)}, "{arguments}": """)} args{at} "}}"'
        for at, name in enumerate(schemas)
    ]
    return f"call: {' | '.join(calls)}"


def _text_without(*marks: str) -> str:
    """Returns the rule `TEXT`, for a text with these marks neither as special tokens nor spelled out.

    Regular expressions never match special tokens. Parsers read text, in which a mark spelled out looks the same.
    """
    return f"TEXT: /(?s:.*)/ & ~/(?s:.*)({'|'.join(map(_escaped, marks))})(?s:.*)/"


def _escaped(text: str) -> str:
    """Returns a regular expression, for use between slashes, that matches a text."""
    return re.escape(text).replace("/", r"\/")
