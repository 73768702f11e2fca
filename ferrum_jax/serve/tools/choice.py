"""The choice of the parser that reads a model's answers."""

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ferrum_jax.contract.errors import ConfigError
from ferrum_jax.serve.tools.events import ToolParser
from ferrum_jax.serve.tools.harmony import CHANNEL, MESSAGE, HarmonyMessages
from ferrum_jax.serve.tools.llama3 import PYTHON_TAG, LlamaCalls
from ferrum_jax.serve.tools.mistral import MARK, MistralCalls
from ferrum_jax.serve.tools.tagged import OPEN, TaggedCalls

FUNCTION = "<function="


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        name: its name in `--tool-parser`.
        make: returns a parser of one answer, given the names of the tools and whether it continues a message.
        mark: the text at the start of a call; if it is a special token, answers are decoded with special tokens.
        is_always_on: answers have this format even without tools.
        id_length: characters of a call's id, which templates may check; None: any number.
    """

    name: str
    make: Callable[[Collection[str], bool], ToolParser]
    mark: str
    is_always_on: bool = False
    id_length: int | None = None

    def new_id(self) -> str:
        """Returns a new id of a call."""
        return f"call_{secrets.token_hex(12)}" if self.id_length is None else secrets.token_hex(8)[: self.id_length]


FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", lambda *_: TaggedCalls(), OPEN),
        ToolFormat("llama3", lambda names, _: LlamaCalls(names), PYTHON_TAG),
        ToolFormat("mistral", lambda *_: MistralCalls(), MARK, id_length=9),
        ToolFormat("gpt_oss", HarmonyMessages, CHANNEL, is_always_on=True),
    )
}


def choose_format(name: str, template: str | None) -> ToolFormat | None:
    """Returns a format by name; for `auto`, the format whose marks the chat template has, None if there is none.

    Raises:
        ConfigError: no format has this name.
    """
    if name == "none":
        return None
    if name != "auto":
        if name not in FORMATS:
            raise ConfigError(f"tool_parser is {name!r}, expected auto, none or one of {', '.join(FORMATS)}")
        return FORMATS[name]
    text = template or ""
    if CHANNEL in text and MESSAGE in text:
        return FORMATS["gpt_oss"]
    if OPEN in text and FUNCTION in text:  # Qwen3-Coder: no JSON stands between the tags
        return None
    for mark, found in ((MARK, "mistral"), (OPEN, "hermes"), (PYTHON_TAG, "llama3")):
        if mark in text:
            return FORMATS[found]
    is_llama = "<|start_header_id|>" in text and "tools" in text and '"parameters"' in text
    return FORMATS["llama3"] if is_llama else None
