"""Grammars of answers that call tools with arguments as declared, for llguidance's dialect of Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrum_jax.generate.structured import Structured
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.serve.chat_schema import Tool
from ferrum_jax.serve.tools.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from ferrum_jax.serve.tools.llama3 import PYTHON_TAG
from ferrum_jax.serve.tools.mistral import ARGS, MARK
from ferrum_jax.serve.tools.tagged import CLOSE, OPEN

_TEXT = "TEXT: /(?s:.*)/\n"  # without special tokens, which no expression matches


def call_form(
    format_name: str, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_forced: bool, several: bool
) -> Structured:
    """Returns the form of an answer that may call these tools.

    Args:
        format_name: how the model writes calls, of `choice.FORMATS`.
        tools: those that may be called. Arguments follow the declaration where the call is forced or the tool is
            `strict`; otherwise they are any object.
        tokenizer: the model's, of which marks may be special tokens.
        is_forced: the answer is a call and nothing else, but for what GPT-OSS says to itself before; otherwise it may
            as well be a text, with calls or without.
        several: it may have more than one call, where the format can.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    marks = _Marks({token.content: at for at, token in added.items() if token.special})
    schemas = {
        tool.function.name: (tool.function.parameters if is_forced or tool.function.strict else None)
        or {"type": "object"}
        for tool in tools
    }
    match format_name:
        case "hermes":
            return _hermes(schemas, marks, is_forced, several)
        case "llama3":
            return _llama3(schemas, marks, is_forced)
        case "mistral":
            return _mistral(schemas, marks, is_forced, several)
    return _gpt_oss(schemas, marks, is_forced)


@dataclass(frozen=True)
class _Marks:
    """How a grammar writes marks, which are special tokens of some vocabularies and texts of others."""

    special: Mapping[str, int]

    def has(self, mark: str) -> bool:
        """Whether it is a special token."""
        return mark in self.special

    def of(self, mark: str) -> str:
        """Returns it as a symbol."""
        return f"<[{self.special[mark]}]>" if self.has(mark) else json.dumps(mark)

    def text_before(self, mark: str) -> str:
        """Returns the rules `before`, of a text that ends with the first such mark, and `rest`, of one without it."""
        if self.has(mark):
            return f"before: TEXT {self.of(mark)}\nrest: TEXT\n{_TEXT}"
        pattern = re.escape(mark).replace("/", r"\/")
        without = f"rest: REST\nREST: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/\n"
        return f"before[lazy]: /(?s:.*){pattern}/\n{without}"


def _hermes(schemas: dict[str, Any], marks: _Marks, is_forced: bool, several: bool) -> Structured:
    inside = f'inside: "\\n" object "\\n" {marks.of(CLOSE)}\nobject: %json {_any_call(schemas, "arguments")}\n'
    if is_forced:
        rest = f'("\\n" {marks.of(OPEN)} inside)*' if several else ""
        return Structured(grammar=f"start: {marks.of(OPEN)} inside {rest}\n{inside}")
    many = "*" if several else "?"
    return Structured(grammar=f"start: (before inside){many} rest\n{inside}{marks.text_before(OPEN)}")


def _llama3(schemas: dict[str, Any], marks: _Marks, is_forced: bool) -> Structured:
    call = _any_call(schemas, "parameters")
    if is_forced:
        return Structured(json=call)
    tag = f"{marks.of(PYTHON_TAG)}? " if marks.has(PYTHON_TAG) else ""
    return Structured(grammar=f"start: {tag}call | TEXT\ncall: %json {call}\nTEXT: /(\\s*[^{{\\s](?s:.*))?/\n")


def _mistral(schemas: dict[str, Any], marks: _Marks, is_forced: bool, several: bool) -> Structured:
    """Newer models, which know `[ARGS]`, write a mark before each call, older ones one before a list of calls."""
    mark = marks.of(MARK)
    if marks.has(ARGS):
        calls = [f"{json.dumps(name)} {marks.of(ARGS)} %json {json.dumps(own)}" for name, own in schemas.items()]
        inside, more = f"inside: {' | '.join(calls)}\n", f"({mark} inside)*" if several else ""
    else:
        counts = {"minItems": 1} if several else {"minItems": 1, "maxItems": 1}
        items = json.loads(_any_call(schemas, "arguments"))
        inside, more = f"inside: %json {json.dumps({'type': 'array', 'items': items} | counts)}\n", ""
    if is_forced:
        return Structured(grammar=f"start: {mark} inside {more}\n{inside}")
    return Structured(grammar=f"start: before inside {more} | rest\n{inside}{marks.text_before(MARK)}")


def _gpt_oss(schemas: dict[str, Any], marks: _Marks, is_forced: bool) -> Structured:
    """Ends after the arguments, or the final text: a special token that is one of the model's ends follows."""
    channel, message, begins = marks.of(CHANNEL), marks.of(MESSAGE), f'{marks.of(END)} {marks.of(START)} "assistant"'
    calls = [
        f'{channel} {json.dumps(f"commentary to=functions.{name} ")} {marks.of(CONSTRAIN)} "json" {message} '
        f"%json {json.dumps(schema)}"
        for name, schema in schemas.items()
    ]
    rules = [
        "start: thought? note? call" if is_forced else "start: (thought | note)* (call | final)",
        f'thought: {channel} "analysis" {message} TEXT {begins}',
        f'note: {channel} "commentary" {message} TEXT {begins}',
        f"call: {' | '.join(calls)}",
        f'final: {channel} "final" {message} TEXT',
    ]
    return Structured(grammar="\n".join(rules[: 4 if is_forced else 5]) + f"\n{_TEXT}")


def _any_call(schemas: dict[str, Any], arguments: str) -> str:
    """Returns the schema of an object that is a call of one of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: schema},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
    return json.dumps({"anyOf": calls})
