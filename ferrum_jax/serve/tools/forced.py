"""Grammars of answers that have to call tools, for `tool_choice` `required` or a name."""

import json
from collections.abc import Sequence

from ferrum_jax.generate.structured import Structured
from ferrum_jax.serve.chat_schema import Tool
from ferrum_jax.serve.errors import bad_request

_NAMES = {"hermes": "arguments", "llama3": "parameters"}  # what a format calls the arguments of a call


def forced_calls(format_name: str, tools: Sequence[Tool], *, several: bool) -> Structured:
    """Returns the form of an answer that is one call of one of these tools, or `several`, with arguments as declared.

    Raises:
        ApiError: a 400, for a format whose calls begin with special tokens.
    """
    if format_name not in _NAMES:
        raise bad_request(f"only the tool_choice none and auto is served for calls of {format_name}", "tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                _NAMES[format_name]: tool.function.parameters or {"type": "object"},
            },
            "required": ["name", _NAMES[format_name]],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = json.dumps({"anyOf": calls})
    if format_name == "llama3":
        return Structured(json=schema)
    rest = '("\\n" call)*' if several else ""
    return Structured(
        grammar=f'start: call {rest}\ncall: "<tool_call>\\n" object "\\n</tool_call>"\nobject: %json {schema}\n'
    )
