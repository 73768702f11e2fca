"""Answers of a form, and calls that have to come, by OpenAI's client."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ferrum_jax import LLM
from ferrum_jax.generate.tokenizer import Tokenizer
from tests.fake import SummingLLM
from tests.serve.conftest import Serve, openai_client
from tests.serve.models import SPECIAL
from tests.serve.test_chat import TOOL_TEMPLATE, merged
from tests.serve.test_forms import HARMONY, LETTERS

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 2.0, "max_tokens": 200}

FINAL: Any = {str(LETTERS.index("f")): 50}  # a bias by which the first channel is `final`


@pytest.fixture
def client(serve: Serve, request: pytest.FixtureRequest) -> Iterator[Any]:
    backend = tokenizers.Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(one, special=True) for one in (*SPECIAL, *HARMONY)])
    templates = {"default": TOOL_TEMPLATE}
    tokenizer = Tokenizer(backend=backend, eos_token_ids=(len(LETTERS),), chat_templates=templates)
    model = SummingLLM(vocab_size=tokenizer.vocab_size, capacity=1024)
    with openai_client(serve(LLM.from_model(model, tokenizer), tool_parser=getattr(request, "param", "auto"))) as one:
        yield one


def is_trip(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"city", "days"} and len(found["city"]) <= 6 and 1 <= found["days"] <= 9


def test_response_formats_and_structured_outputs_are_followed(client: Any):
    named = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        (choice,) = client.chat.completions.create(**ASK, seed=seed, response_format=named).choices
        assert choice.finish_reason == "stop"
        assert is_trip(choice.message.content)
        streamed = client.chat.completions.create(**ASK, seed=seed, response_format=named, stream=True)
        assert merged(streamed)[0] == choice.message.content
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": r"[a-c]{2}\d"}, r"[a-c]{2}\d"),
        ({"choice": ["red", "blue"]}, "red|blue"),
        ({"grammar": 'start: "<" /[xy]{3}/ ">"'}, "<[xy]{3}>"),
    ]
    for form, pattern in forms:
        (choice,) = client.chat.completions.create(**ASK, extra_body={"structured_outputs": form}).choices
        assert re.fullmatch(pattern, choice.message.content)
        asked: Any = {
            "model": "tiny",
            "prompt": "a",
            "max_tokens": 50,
            "n": 3,
            "extra_body": {"structured_outputs": form},
        }
        assert all(re.fullmatch(pattern, one.text) for one in client.completions.create(**asked).choices)
    cold = ASK | {"temperature": 0, "max_tokens": 40}
    (choice,) = client.chat.completions.create(**cold, response_format={"type": "json_object"}).choices
    assert choice.message.content.startswith("{")


@pytest.mark.parametrize("client", ["gpt_oss"], indirect=True)
def test_the_form_of_an_answer_is_that_of_gpt_oss_final_message(client: Any):
    named: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    for seed in range(3):
        asked = ASK | {"seed": seed, "response_format": named, "logit_bias": FINAL}
        (choice,) = client.chat.completions.create(**asked).choices
        assert choice.finish_reason == "stop"
        assert is_trip(choice.message.content)
        stream = list(client.chat.completions.create(**asked, stream=True))
        pieces = [one.choices[0].delta.content for one in stream if one.choices[0].delta.content]
        assert "".join(pieces) == choice.message.content
        assert len(pieces) > 1  # as they come, not at the end


@pytest.mark.parametrize("client", ["hermes", "llama3", "mistral", "gpt_oss"], indirect=True)
def test_calls_that_have_to_come_come(client: Any, request: pytest.FixtureRequest):
    may_say_more = "gpt_oss" in request.node.name  # in its channel `commentary`
    for choice, names in (
        ("required", {"weather", "stop"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ):
        for seed in range(3):
            asked = ASK | {"tools": TOOLS, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
            (answer,) = client.chat.completions.create(**asked).choices
            assert answer.finish_reason == "tool_calls"
            assert may_say_more or not answer.message.content
            (call,) = answer.message.tool_calls
            assert call.function.name in names
            assert (
                json.loads(call.function.arguments) == {}
                if call.function.name == "stop"
                else is_trip(call.function.arguments)
            )
            _, calls, reason = merged(client.chat.completions.create(**asked, stream=True))
            assert (calls, reason) == ([(call.function.name, call.function.arguments)], "tool_calls")


@pytest.mark.parametrize("client", ["llama3"], indirect=True)
def test_strict_functions_are_followed_where_a_text_may_come_as_well(client: Any):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
    brace = str(LETTERS.index("{"))
    for seed in range(3):
        asked = ASK | {"tools": tools, "seed": seed, "max_tokens": 120, "parallel_tool_calls": False}
        (call,) = client.chat.completions.create(**asked, logit_bias={brace: 60}).choices
        assert call.finish_reason == "tool_calls"
        assert is_trip(call.message.tool_calls[0].function.arguments)
        (text,) = client.chat.completions.create(**asked, logit_bias={brace: -100}).choices
        assert text.message.content
        assert not text.message.tool_calls


def test_what_cannot_be_followed_is_a_400(client: Any):
    refused: list[tuple[dict[str, Any], str]] = [
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "this regex cannot be followed"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "expected one of"),
        ({"extra_body": {"structured_outputs": {}}}, "expected one of"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "choice is"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "json",
        ),
    ]
    for given, message in refused:
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**ASK, **given)
