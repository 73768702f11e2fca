"""Schema of the requests of `/v1/chat/completions`."""

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, model_validator

from ferrum_jax.generate.chat import TEMPLATE_OWN
from ferrum_jax.generate.structured import Structured
from ferrum_jax.serve.schema import Body, Count, FieldError, Items, SamplingBody

MAX_MESSAGES = 4096  # of one request
MAX_TOOLS = 1024
MAX_ARGUMENTS = 1 << 20  # characters of one call
MAX_TEMPLATE_VARIABLES = 128
NOT_SERVED = (
    "audio", "function_call", "functions", "prediction", "web_search_options", "verbosity", "moderation",
    "prompt_cache_options",
)  # fmt: skip
"""OpenAI's fields that are refused unless null."""


class MessageBody(Body):
    """A part of a message. Unknown fields are ignored: clients copy them from answers of all kinds of servers."""

    model_config = ConfigDict(extra="ignore")


class TextPart(MessageBody):
    """A text in a message."""

    type: Literal["text"]
    text: str


class RefusalPart(MessageBody):
    """The text with which the assistant refused to answer."""

    type: Literal["refusal"]
    refusal: str


Part: TypeAlias = Annotated[TextPart | RefusalPart, Discriminator("type")]


class CalledFunction(MessageBody):
    """The function of a call, with its arguments as JSON text."""

    name: str
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS)] = ""


class ToolCall(MessageBody):
    """A call in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(MessageBody):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and not self.tool_calls and self.role != "assistant":
            raise ValueError(f"content is missing in a message of the role {self.role}")
        return self

    @property
    def text(self) -> str | None:
        """The texts of the content and of a refusal, joined by newlines; None beside calls if there are none."""
        texts = [self.content] if isinstance(self.content, str) else []
        if isinstance(self.content, list):
            texts = [part.text if isinstance(part, TextPart) else part.refusal for part in self.content]
        if self.refusal and self.role == "assistant":
            texts = [*filter(None, texts), self.refusal]
        return "\n".join(texts) if texts or not self.tool_calls else None

    def rendered(self) -> dict[str, Any]:
        """Returns the message as chat templates expect it: content as one text, arguments of calls as objects.

        Arguments that are no JSON object, as of a call that was cut off, stay a text.
        """
        made: dict[str, Any] = {"role": self.role, "content": self.text}
        made |= {
            name: value
            for name in ("name", "tool_call_id", "reasoning_content", "reasoning")
            if (value := getattr(self, name)) is not None
        }
        if self.tool_calls:
            made["tool_calls"] = [
                {"type": "function", "function": {"name": one.function.name, "arguments": _arguments(one)}}
                | ({} if one.id is None else {"id": one.id})
                for one in self.tool_calls
            ]
        return made


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, which is a function."""

    type: Literal["function"] = "function"
    function: Function

    def rendered(self) -> dict[str, Any]:
        """Returns the tool as chat templates expect it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunction(Body):
    """The function that must be called."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Body):
    """A JSON schema and its name; the answer follows it, `strict` or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and only there")
        return self


class ChatBody(SamplingBody):
    """`/v1/chat/completions`."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[Count, Field(le=20)] | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    modalities: Items[Literal["text"]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    echo: Literal[False] | None = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in NOT_SERVED}

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs go with logprobs=true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise FieldError(
                "max_tokens",
                f"max_tokens is {self.max_tokens}, max_completion_tokens {self.max_completion_tokens}: give one",
            )
        is_formed = self.response_format is not None and self.response_format.type != "text"
        if is_formed and self.structured_outputs is not None:
            raise FieldError("response_format", "response_format and structured_outputs are the same: give one of them")
        if self.may_call and (is_formed or self.structured_outputs is not None):
            raise FieldError(
                "response_format" if is_formed else "structured_outputs",
                "an answer with a form calls no tools: give tool_choice none, or no tools",
            )
        if self.tool_choice not in (None, "none") and not self.tools:
            said = self.tool_choice if isinstance(self.tool_choice, str) else "a name"
            raise FieldError("tool_choice", f"tool_choice is {said}, but there are no tools")
        if isinstance(self.tool_choice, NamedTool) and not self.forced_tools:
            name = self.tool_choice.function.name
            raise FieldError("tool_choice", f"tool_choice is {name}, which is none of the tools")
        if self.continue_final_message and (self.forced_tools or self.strict_tools):
            raise FieldError(
                "continue_final_message",
                "a message that is continued cannot call forced or strict tools",
            )
        if own := TEMPLATE_OWN & (self.chat_template_kwargs or {}).keys():
            raise FieldError(
                "chat_template_kwargs",
                f"chat_template_kwargs has {', '.join(sorted(own))}, which are no variables to be given there",
            )
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens to generate; None: up to the KV capacity."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def form(self) -> Structured | None:
        """Returns the form of the answer, without that of calls; None if it is free."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return super().form()
        if wanted.json_schema is None:
            return Structured(json_object=True)
        return Structured(json=wanted.json_schema.json_schema)

    @property
    def is_slow(self) -> bool:
        """Whether making the engine's requests may take seconds, also because of the form of calls."""
        return super().is_slow or bool(self.forced_tools or self.strict_tools)

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which one must be called; empty if no call is forced."""
        if self.tool_choice == "required":
            return self.tools or []
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools or () if tool.function.name == self.tool_choice.function.name]
        return []

    @property
    def strict_tools(self) -> list[Tool]:
        """All tools that may be called, if at least one of them is `strict`; else empty."""
        tools = (self.tools or []) if self.may_call else []
        return tools if any(tool.function.strict for tool in tools) else []

    @property
    def may_call(self) -> bool:
        """True if the model is shown tools."""
        return bool(self.tools) and self.tool_choice != "none"


def _arguments(call: ToolCall) -> Any:
    text = call.function.arguments
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
