"""Bodies that are too much: what a request may have at most, and that a million mistakes are told as a few."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from ferrum_jax.serve.chat_schema import MAX_MESSAGES, MAX_TOOLS, NOT_SERVED, ChatBody
from ferrum_jax.serve.errors import ApiError
from ferrum_jax.serve.generation import event
from ferrum_jax.serve.schema import (
    LONGEST_TEXT,
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_STOP_IDS,
    MAX_STOPS,
    Body,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read,
)

MESSAGE = {"role": "user", "content": "a"}
TOOL = {"function": {"name": "f"}}


def calls(size: int) -> list[dict[str, Any]]:
    """Messages with a call whose arguments are so many characters."""
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "a" * size}}]}]


LIMITS: list[tuple[type[Body], str, Any, Any, str]] = [  # what is taken, what is not, and what that says
    (CompletionBody, "stop", ["a"] * MAX_STOPS, ["a"] * (MAX_STOPS + 1), "at most 64 items"),
    (CompletionBody, "stop", "a" * LONGEST_TEXT, "a" * (LONGEST_TEXT + 1), "at most 256 characters"),
    (CompletionBody, "stop", ["a" * LONGEST_TEXT], ["a" * (LONGEST_TEXT + 1)], "at most 256 characters"),
    (CompletionBody, "bad_words", ["a"] * MAX_BAD_WORDS, ["a"] * (MAX_BAD_WORDS + 1), "at most 1024 items"),
    (CompletionBody, "bad_words", ["a" * LONGEST_TEXT], ["a" * (LONGEST_TEXT + 1)], "at most 256 characters"),
    (CompletionBody, "stop_token_ids", [1] * MAX_STOP_IDS, [1] * (MAX_STOP_IDS + 1), "at most 1024 items"),
    (CompletionBody, "allowed_token_ids", [1], [1] * (MAX_ALLOWED_IDS + 1), "at most 524288 items"),
    (CompletionBody, "logit_bias", dict.fromkeys(map(str, range(512)), 1),
     dict.fromkeys(map(str, range(513)), 1), "logit_bias has 513 token ids, at most 512 are taken"),
    (CompletionBody, "prompt", [[1]] * 2048, [[1]] * 2049, "prompt has 2049 prompts, at most 2048"),
    (CompletionBody, "prompt", [1] * 3000, ["a"] * 2049, "prompt has 2049 prompts, at most 2048"),
    (ChatBody, "messages", [MESSAGE] * MAX_MESSAGES, [MESSAGE] * (MAX_MESSAGES + 1), "at most 4096 items"),
    (ChatBody, "messages", calls(1 << 20), calls((1 << 20) + 1), "at most 1048576 characters"),
    (CompletionBody, "n", 128, 129, "less than or equal to 128"),
    (ChatBody, "n", 128, 129, "less than or equal to 128"),
    (ChatBody, "tools", [TOOL] * MAX_TOOLS, [TOOL] * (MAX_TOOLS + 1), "at most 1024 items"),
    (ChatBody, "chat_template_kwargs", dict.fromkeys(map(str, range(128)), 1),
     dict.fromkeys(map(str, range(129)), 1), "at most 128 items"),
]  # fmt: skip


def body_of(kind: type[Body], **more: Any) -> bytes:
    least = {CompletionBody: {"prompt": "a"}, ChatBody: {"messages": [MESSAGE]}}
    return json.dumps(least.get(kind, {}) | more).encode()


@pytest.mark.parametrize(("kind", "field", "taken", "refused", "says"), LIMITS)
def test_a_field_has_a_limit_that_the_refusal_says(kind: type[Body], field: str, taken: Any, refused: Any, says: str):
    assert getattr(read(kind, body_of(kind, **{field: taken})), field) is not None
    with pytest.raises(ApiError, match=says) as found:
        read(kind, body_of(kind, **{field: refused}))
    assert (found.value.status, found.value.param) == (400, field)


MANY = 20_000
WRONG: list[tuple[type[Body], dict[str, Any]]] = [
    (CompletionBody, {"prompt": [None] * MANY}),
    (CompletionBody, {"prompt": [[1], *[[None]] * MANY]}),
    (CompletionBody, {"prompt": [1, *[None] * MANY]}),
    (CompletionBody, {"stop": [1] * MANY}),
    (CompletionBody, {"bad_words": [1] * MANY}),
    (CompletionBody, {"allowed_token_ids": ["a"] * MANY}),
    (CompletionBody, {"stop_token_ids": ["a"] * MANY}),
    (CompletionBody, {"logit_bias": dict.fromkeys(map(str, range(MANY)), "a")}),
    (CompletionBody, {"structured_outputs": {"choice": [1] * MANY}}),
    (CompletionBody, {"stream": True, "stream_options": dict.fromkeys(map(str, range(MANY)), 1)}),
    (CompletionBody, dict.fromkeys(map(str, range(MANY)), 1)),
    (ChatBody, {"messages": [{}] * MANY}),
    (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatBody, {"messages": [MESSAGE | {"tool_calls": [{}] * MANY}]}),
    (ChatBody, {"tools": [{}] * MANY}),
    (ChatBody, {"modalities": ["audio"] * MANY}),
    (TokenizeBody, {"messages": [1] * MANY}),
    (TokenizeBody, {"messages": [], "tools": [1] * MANY}),
    (DetokenizeBody, {"tokens": [-1] * MANY}),
]


@pytest.mark.parametrize(("kind", "wrong"), WRONG)
def test_of_many_mistakes_few_are_kept(kind: type[Body], wrong: dict[str, Any]):
    with pytest.raises(ValidationError) as found:
        kind.model_validate_json(body_of(kind, **wrong))
    assert found.value.error_count() <= 5


def test_no_unknown_field_is_lost_among_many_known_ones():
    known = ChatBody(messages=[{"role": "user", "content": "a"}]).model_dump(mode="json")  # type: ignore[list-item]
    nulls = dict.fromkeys(NOT_SERVED)
    assert read(ChatBody, json.dumps(nulls | known).encode()).messages[0].content == "a"
    with pytest.raises(ApiError, match="unknown field `other`") as found:
        read(ChatBody, json.dumps(nulls | known | {"other": None}).encode())
    assert (found.value.param, found.value.code) == ("other", "unknown_field")


def test_requests_that_take_long_to_make_are_slow():
    def is_slow(**more: Any) -> bool:
        return read(CompletionBody, body_of(CompletionBody, **more)).is_slow

    assert not is_slow(bad_words=["a"] * 50, allowed_token_ids=[1] * 50)
    assert is_slow(bad_words=["a"] * 50, allowed_token_ids=[1] * 51)
    assert is_slow(structured_outputs={"regex": "a"})


def test_an_event_has_no_end_of_a_line_but_its_own():
    value = {"text": "a\u2028b\x85c\u2029d\r\n\x0b\x1c"}
    told = event(value)
    assert told.decode().splitlines() == [told[:-2].decode(), ""]
    assert json.loads(told.removeprefix(b"data: ")) == value
