"""`/v1/chat/completions` by OpenAI's own client: conversations, log-probabilities, calls of tools."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.serve import chat_completions, prompting
from ferrum_jax.serve.chat_schema import Message, ToolCall
from ferrum_jax.serve.server import Server
from tests.serve.conftest import async_client
from tests.serve.models import Scripted, characters
from tests.serve.test_completions import TOLERANCE

HI: Any = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 12, "temperature": 0}
RENDERED = "system:be kind<end>user:hello<end>assistant:<go>"
Start = Callable[..., tuple[Scripted, Any, Server]]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<go>{% endif %}"
)
QUESTION: Any = [{"role": "user", "content": "weather?"}]


def reference(llm: LLM, text: str = RENDERED, **params: Any) -> str:
    assert llm.tokenizer is not None
    ids, asked = llm.tokenizer.encode(text, add_special_tokens=False), dict[str, Any](max_tokens=12) | params
    return llm.generate(ids, SamplingParams(**asked))[0].text


def test_a_conversation_is_answered_by_its_template(client: Any, llm: LLM):
    out = client.chat.completions.create(**ASK)
    (choice,) = out.choices
    assert (choice.message.role, choice.message.content) == ("assistant", reference(llm))
    assert choice.message.tool_calls is None
    assert (out.object, out.id[:9]) == ("chat.completion", "chatcmpl-")
    assert out.usage is not None
    assert out.usage.total_tokens == out.usage.prompt_tokens + out.usage.completion_tokens


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(client: Any):
    ask: Any = ASK | {"n": 2, "temperature": 1.0, "seed": 11}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert [one.choices[0].delta.role for one in chunks[:2]] == ["assistant", "assistant"]
    assert texts == [one.message.content for one in whole.choices]
    assert reasons == [one.finish_reason for one in whole.choices]
    assert chunks[-1].usage == whole.usage
    assert {one.object for one in chunks} == {"chat.completion.chunk"}


def test_log_probabilities_have_tokens_bytes_and_the_likeliest(client: Any, llm: LLM):
    (choice,) = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3).choices
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(RENDERED, add_special_tokens=False)
    out = llm.generate(ids, SamplingParams(max_tokens=12, logprobs=3))[0]
    assert choice.logprobs is not None
    told = choice.logprobs.content
    assert told is not None
    assert [one.logprob for one in told] == pytest.approx(out.logprobs, abs=TOLERANCE)
    assert out.top_logprobs is not None
    for one, top in zip(told, out.top_logprobs, strict=True):
        assert [best.logprob for best in one.top_logprobs] == pytest.approx(list(top.values()), abs=TOLERANCE)
        assert one.bytes == list(one.token.encode())
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [one.token for one in streamed] == [one.token for one in told]
    plain = client.chat.completions.create(**ASK, logprobs=True).choices[0].logprobs
    assert plain is not None
    assert [one.top_logprobs for one in plain.content or []] == [[]] * len(told)


def test_both_names_of_the_limit_and_content_in_parts(client: Any, llm: LLM):
    messages: Any = [HI[0], {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    ask: Any = {"model": "tiny", "messages": messages, "max_completion_tokens": 5, "temperature": 0}
    out = client.chat.completions.create(**ask)
    assert out.choices[0].message.content == reference(llm, max_tokens=5)
    unlimited = client.chat.completions.create(**ask | {"max_completion_tokens": None})
    assert unlimited.choices[0].message.content == reference(llm, max_tokens=None)


def test_the_template_gets_its_variables(client: Any, llm: LLM):
    more = {"chat_template_kwargs": {"prefix": "dear "}}
    (choice,) = client.chat.completions.create(**ASK, extra_body=more).choices
    assert choice.message.content == reference(llm, RENDERED.replace("assistant:", "dear assistant:"))


def test_the_final_message_is_continued(client: Any, llm: LLM):
    messages = [*HI, {"role": "assistant", "content": "well "}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    out: Any = client.chat.completions.create(**ASK | {"messages": messages}, extra_body=more)
    rendered = "system:be kind<end>user:hello<end>assistant:well "
    assert llm.tokenizer is not None
    assert out.prompt_token_ids == llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert out.choices[0].message.content == reference(llm, rendered)


def test_token_ids_and_prompt_logprobs_are_told(client: Any, llm: LLM):
    more = {"return_token_ids": True, "prompt_logprobs": 1}
    out: Any = client.chat.completions.create(**ASK, extra_body=more)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(RENDERED, add_special_tokens=False)
    expected = llm.generate(ids, SamplingParams(max_tokens=12, prompt_logprobs=True))[0]
    assert out.prompt_token_ids == ids
    assert out.choices[0].token_ids == expected.token_ids
    told = [one[str(token)]["logprob"] for token, one in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
    assert told == pytest.approx((expected.prompt_logprobs or [])[1:], abs=TOLERANCE)
    chunks: list[Any] = list(client.chat.completions.create(**ASK, extra_body={"return_token_ids": True}, stream=True))
    assert chunks[0].prompt_token_ids == ids
    assert [token for one in chunks for token in getattr(one.choices[0], "token_ids", None) or []] == expected.token_ids


def test_coroutines_are_answered_too(server: Server, client: Any, llm: LLM):
    async def main() -> tuple[str | None, str]:
        async with async_client(server) as many:
            whole = await many.chat.completions.create(**ASK)
            stream = await many.chat.completions.create(**ASK, stream=True)
            return whole.choices[0].message.content, "".join(
                [one.choices[0].delta.content or "" async for one in stream]
            )

    assert asyncio.run(main()) == (reference(llm), reference(llm))


def test_coroutines_are_answered_at_once_and_as_others_are(server: Server, client: Any):
    chats: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": 3},
        {"n": 3, "seed": 5, "temperature": 1.0, "stop": "a", "logit_bias": {"4": 2.5}},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9, "temperature": 1.0, "seed": 1},
        {"extra_body": {"top_k": 5, "min_p": 0.01, "min_tokens": 3, "repetition_penalty": 1.1, "priority": -1}},
    ]
    texts: list[dict[str, Any]] = [
        {"prompt": ["ab", "cd"], "echo": True, "logprobs": 2, "max_tokens": 5, "temperature": 0},
        {"prompt": [3, 4, 5], "n": 2, "seed": 3, "max_tokens": 7, "extra_body": {"return_token_ids": True}},
    ]
    asked = [("chat", one) for one in chats] + [("text", one) for one in texts]

    def ask(by: Any, kind: str, more: dict[str, Any]) -> Any:
        if kind == "chat":
            return by.chat.completions.create(**(ASK | more))
        return by.completions.create(model="tiny", **more)

    async def streamed(many: Any, kind: str, more: dict[str, Any]) -> list[tuple[str, list[float]]]:
        found: dict[int, tuple[str, list[float]]] = {}
        async for chunk in await ask(many, kind, more | {"stream": True}):
            for choice in chunk.choices:
                text, figures = found.get(choice.index, ("", []))
                more_text, more_figures = told(choice, choice.text if kind == "text" else choice.delta.content)
                found[choice.index] = text + more_text, figures + more_figures
        return [found[at] for at in sorted(found)]

    async def main() -> tuple[list[Any], list[Any]]:
        async with async_client(server) as many:
            wholes = asyncio.gather(*(ask(many, *one) for one in asked))
            return await wholes, await asyncio.gather(*(streamed(many, *one) for one in asked))

    wholes, streams = asyncio.run(main())
    for (kind, more), whole, stream in zip(asked, wholes, streams, strict=True):
        expected = [told_whole(choice) for choice in ask(client, kind, more).choices]
        for found in ([told_whole(choice) for choice in whole.choices], stream):
            assert [text for text, _ in found] == [text for text, _ in expected]
            for (_, one), (_, other) in zip(found, expected, strict=True):
                assert one == pytest.approx(other, abs=TOLERANCE)


def told(choice: Any, text: str | None) -> tuple[str, list[float]]:
    """The text of a choice or of a part of one, and the log-probabilities that it tells."""
    logprobs = choice.logprobs
    if logprobs is None:
        return text or "", []
    if hasattr(logprobs, "token_logprobs"):
        return text or "", [one for one in logprobs.token_logprobs if one is not None]
    return text or "", [one.logprob for one in logprobs.content]


def told_whole(choice: Any) -> tuple[str, list[float]]:
    return told(choice, choice.text if hasattr(choice, "text") else choice.message.content)


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "clown", "content": "x"}]}, "messages", "role"),
        ({"messages": [{"role": "user"}]}, "messages", "content is missing"),
        ({"messages": [{"role": "user", "content": None, "tool_calls": []}]}, "messages", "content is missing"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages", "audio"),
        ({"messages": HI, "mood": 1}, "mood", "unknown field"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema goes with the type json_schema"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, "tool_choice", "none of"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "calls no tools"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format", "give"),
        ({"tools": TOOLS}, "tools", "--tool-parser"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"temperature": 1e300}, None, "temperature is 1e+300, expected a number from 0 to 3.4e38"),
        ({"repetition_penalty": 1e300}, None, "expected a positive number of at most 3.4e38"),
        ({"max_completion_tokens": 5}, "max_tokens", "give one"),
        ({"max_tokens": 0}, "max_tokens", ""),
        ({"reasoning_effort": "high"}, "reasoning_effort", "knows no reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt=false"),
        ({"continue_final_message": True, "add_generation_prompt": False, "tools": TOOLS, "tool_choice": "required"},
         "continue_final_message", "forced or strict"),
        ({"continue_final_message": True, "add_generation_prompt": False, "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages", "content is text"),
        ({"modalities": ["audio"]}, "modalities", ""),
        ({"functions": []}, "functions", "unknown field"),
        ({"echo": True}, "echo", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_400_that_names_the_field(
    http: httpx.Client, wrong: dict[str, Any], param: str | None, says: str
):
    found = http.post("/v1/chat/completions", json=ASK | wrong)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == param
    assert says in found.json()["error"]["message"]


def test_what_clients_send_and_copy_is_accepted(client: Any, llm: LLM):
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [{"type": "thinking"}],
        "id": "chatcmpl-1",
    }
    more = {"functions": None, "modalities": ["text"], "tools": [], "response_format": {"type": "text"}, "user": "x",
            "verbosity": None, "prompt_cache_options": None, "top_logprobs": 0,
            "service_tier": "default", "parallel_tool_calls": True}  # fmt: skip
    out = client.chat.completions.create(**ASK | {"messages": [HI[1], answer, HI[1]]}, extra_body=more)
    assert out.choices[0].message.content == reference(
        llm, "user:hello<end>assistant:hi<end>user:hello<end>assistant:<go>"
    )


def test_options_of_a_stream_may_be_null(client: Any):
    options = {"include_usage": None, "continuous_usage_stats": None, "include_obfuscation": None}
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options=options))
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)


def test_unknown_fields_of_messages_do_not_reach_the_template():
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    call = {"id": "a", "mood": 1, "function": {"name": "f", "arguments": "{}", "mood": 1}}
    given = {"role": "assistant", "content": [part], "tool_calls": [call], "images": [], "thinking": "no", "mood": 1}
    assert Message.model_validate(given).rendered() == {
        "role": "assistant",
        "content": "hi",
        "tool_calls": [{"type": "function", "id": "a", "function": {"name": "f", "arguments": {}}}],
    }


REFUSAL = {"type": "refusal", "refusal": "no"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": "", "refusal": "no"}, "no"),
        ({"content": "Well,", "refusal": "no"}, "Well,\nno"),
        ({"content": [{"type": "text", "text": "Well,"}, REFUSAL]}, "Well,\nno"),
        ({"content": None}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"reasoning_content": "why"}, ""),
        ({"content": None, "tool_calls": [{"function": {"name": "f"}}]}, None),
    ],
)
def test_a_refusal_is_text_and_an_answer_may_be_empty(given: dict[str, Any], text: str | None):
    assert Message.model_validate({"role": "assistant"} | given).rendered()["content"] == text


CALLS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def merged(chunks: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    content, calls, reason = "", [], None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, [(name, arguments) for name, arguments in calls], reason


def test_calls_are_told_whole_and_in_parts(scripted: Start):
    model, client, _ = scripted(TOOL_TEMPLATE)
    model.says(f"Let me see.\n{CALLS}\n{CALLS}")
    ask: Any = {"model": "tiny", "messages": QUESTION, "tools": TOOLS}
    (choice,) = client.chat.completions.create(**ask).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls: Any = choice.message.tool_calls
    assert [one.function.name for one in calls] == ["get_weather"] * 2
    assert [json.loads(one.function.arguments) for one in calls] == [{"city": "Bern"}] * 2
    assert len({one.id for one in calls}) == 2
    chunks = list(client.chat.completions.create(**ask, stream=True, tool_choice="auto"))
    assert merged(chunks) == ("Let me see.", [("get_weather", '{"city": "Bern"}')] * 2, "tool_calls")
    pieces = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    assert len(pieces) > 4  # the arguments come as they are written, as far as the client keeps up
    alone = client.chat.completions.create(**ask, parallel_tool_calls=False).choices[0]
    assert len(alone.message.tool_calls or []) == 1
    assert alone.finish_reason == "tool_calls"
    only: Any = list(client.chat.completions.create(**ask, parallel_tool_calls=False, stream=True, logprobs=True))
    assert len(merged(only)[1]) == 1
    streamed = [
        one.token for part in only for choice in part.choices if choice.logprobs for one in choice.logprobs.content
    ]
    for _ in range(3):  # the tokens do not depend on how many had come
        extra: Any = {"return_token_ids": True}
        told: Any = client.chat.completions.create(**ask, parallel_tool_calls=False, logprobs=True, extra_body=extra)
        text = "".join(token.token for token in told.choices[0].logprobs.content)
        assert text == f"Let me see.\n{CALLS}\n" + CALLS[: CALLS.index(": {") + 3]
        assert text == "".join(streamed)
        assert told.usage.completion_tokens == len(told.choices[0].token_ids) == len(text)
    hidden = client.chat.completions.create(**ask, tool_choice="none", extra_body={"return_token_ids": True})
    assert hidden.choices[0].message.content == f"Let me see.\n{CALLS}\n{CALLS}"
    assert hidden.choices[0].finish_reason == "stop"
    shown: Any = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    assert len(shown.prompt_token_ids) > len(hidden.prompt_token_ids)


def test_an_answer_has_one_call_where_the_template_refuses_several(scripted: Start):
    refuses = "This model only supports single tool-calls at once!"
    model, client, _ = scripted(
        "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}"
        f"{{{{ raise_exception('{refuses}') }}}}{{% endfor %}}" + TOOL_TEMPLATE
    )
    model.says(f"{CALLS}\n{CALLS}")
    ask: Any = {"model": "tiny", "tools": TOOLS}
    (choice,) = client.chat.completions.create(messages=QUESTION, **ask).choices
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")
    chunks = client.chat.completions.create(messages=QUESTION, **ask, stream=True)
    assert merged(chunks) == ("", [("get_weather", '{"city": "Bern"}')], "tool_calls")
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"}
    assert client.chat.completions.create(messages=[*QUESTION, choice.message, result], **ask).choices


def test_the_grammar_of_calls_has_one_where_the_template_refuses_several(
    scripted: Start, monkeypatch: pytest.MonkeyPatch
):
    given: list[bool] = []

    def watched(*args: Any, several: bool, **more: Any) -> Any:
        given.append(several)
        return call_form(*args, several=several, **more)

    call_form = chat_completions.call_form
    monkeypatch.setattr(chat_completions, "call_form", watched)
    for refusal in ("", "{# single tool-calls at once #}"):
        _, client, _ = scripted(refusal + TOOL_TEMPLATE)
        with pytest.raises(openai.BadRequestError, match="structured output with this tokenizer"):
            client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS, tool_choice="required")
    assert given == [True, False]


def test_a_call_that_the_end_cuts_off_is_no_call_to_follow(scripted: Start):
    model, client, _ = scripted(TOOL_TEMPLATE)
    model.says(CALLS)
    ask: Any = {"model": "tiny", "messages": QUESTION, "tools": TOOLS}
    (cut,) = client.chat.completions.create(**ask, stop=["Bern", "never there"]).choices
    assert (cut.finish_reason, cut.model_extra) == ("stop", {"stop_reason": "Bern"})
    assert client.chat.completions.create(**ask, stop=["</tool"]).choices[0].finish_reason == "tool_calls"
    (letter,) = characters().encode("B")
    (cut,) = client.chat.completions.create(**ask, extra_body={"stop_token_ids": [letter]}).choices
    assert (cut.finish_reason, cut.model_extra) == ("stop", {"stop_reason": letter})
    assert cut.message.tool_calls[0].function.arguments == '{"city": "'
    model.says(CALLS[: CALLS.index("Bern")])
    assert client.chat.completions.create(**ask).choices[0].finish_reason == "stop"


def test_a_call_that_is_cut_off_ends_with_length(scripted: Start):
    model, client, _ = scripted(TOOL_TEMPLATE)
    model.says(CALLS)
    ask: Any = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "max_tokens": len(CALLS) - 20}
    (choice,) = client.chat.completions.create(**ask).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None


def test_the_result_of_a_call_goes_back_to_the_template(scripted: Start):
    model, client, server = scripted(TOOL_TEMPLATE)
    model.says("Rain.")
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    out: Any = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
    )
    assert out.choices[0].message.content == "Rain."
    assert "assistant:Bern" in model.tokenizer.decode(out.prompt_token_ids)
    for arguments, shown in (
        ("[1]", "[1]"),
        ('{"city": "Be', '{"city": "Be'),
        ("", "{}"),
    ):  # as of a call that was cut off
        call = ToolCall.model_validate({"function": {"name": "f", "arguments": arguments}})
        message = Message(role="assistant", tool_calls=[call])
        found = message.rendered()["tool_calls"][0]["function"]["arguments"]
        assert (found if isinstance(found, str) else json.dumps(found)) == shown
    assert server.service.tool_format is not None
    assert server.service.tool_format.name == "hermes"


def test_a_message_that_openais_client_has_parsed_goes_back(scripted: Start):
    model, client, _ = scripted(TOOL_TEMPLATE)
    call = {"name": "get_weather", "arguments": '{"city": "Bern"}', "parsed_arguments": {"city": "Bern"}}
    said = [
        {"role": "assistant", "content": "Bern", "parsed": {"city": "Bern"}},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": call}]},
    ]
    out: Any = client.chat.completions.create(
        model="tiny", messages=[*QUESTION, *said], tools=TOOLS, extra_body={"return_token_ids": True}
    )
    assert "assistant:Bernassistant:Bern" in model.tokenizer.decode(out.prompt_token_ids)


def test_harmony_is_read_without_tools_too(scripted: Start):
    template = "<|channel|><|message|>{{ messages[0].content }}{{ reasoning_effort }}<go>"
    model, client, _ = scripted(template)
    model.says("<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four.")
    out: Any = client.chat.completions.create(model="tiny", messages=QUESTION, reasoning_effort="high")
    assert out.choices[0].message.content == "Four."
    assert out.choices[0].message.reasoning_content == "Two and two."
    chunks: list[Any] = list(client.chat.completions.create(model="tiny", messages=QUESTION, stream=True))
    deltas = [one.choices[0].delta for one in chunks]
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in deltas) == "Two and two."
    assert "".join(one.content or "" for one in deltas) == "Four."
    model.says("<|channel|>commentary to=functions.rm<|message|>{}<|call|>")
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        out = client.chat.completions.create(model="tiny", messages=QUESTION, **more)
        assert (out.choices[0].message.content, out.choices[0].message.tool_calls) == ("{}", None)
        assert out.choices[0].finish_reason == "stop"


def test_harmonys_answer_goes_back_whole(scripted: Start):
    template = (
        "{{ tools }}<|channel|><|message|>{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}"
        "{% endif %}{{ m.content or m.thinking }};{% endfor %}<go>"
    )
    model, client, _ = scripted(template)
    begin = "<|end|><|start|>assistant<|channel|>commentary"
    call = f"{begin} to=functions.get_weather <|constrain|>json<|message|>{{}}<|call|>"
    model.says(f"<|channel|>analysis<|message|>Hm.{begin}<|message|>I look.{call}")
    ask: Any = {"model": "tiny", "tools": TOOLS, "extra_body": {"return_token_ids": True}}
    (choice,) = client.chat.completions.create(messages=QUESTION, **ask).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "I look.")
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"}
    out = client.chat.completions.create(messages=[*QUESTION, choice.message, result], **ask)
    assert model.tokenizer.decode(out.prompt_token_ids).endswith("weather?;Hm.\n\nI look.;rain;")


def test_harmony_goes_on_in_a_message_that_is_continued(scripted: Start):
    template = "{% for m in messages %}<go><|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    model, client, _ = scripted(template)
    begun = model.tokenizer.encode("<|channel|>final<|message|>One", add_special_tokens=False)
    model.says("x" * len(begun) + " and two.<|end|>")  # it counts from `<go>`
    more = {"continue_final_message": True, "add_generation_prompt": False}
    ask: Any = {"model": "tiny", "messages": [{"role": "assistant", "content": "One"}], "extra_body": more}
    assert client.chat.completions.create(**ask).choices[0].message.content == " and two."


def test_a_template_that_shows_no_tools_refuses_them(scripted: Start):
    _, client, _ = scripted("{{ messages[0].content }}<go>", tool_parser="hermes")
    with pytest.raises(openai.BadRequestError, match="shows no tools"):
        client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS)


def test_a_template_that_refuses_the_messages_is_a_400(scripted: Start):
    _, client, _ = scripted("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        client.chat.completions.create(model="tiny", messages=QUESTION)


def test_texts_and_conversations_are_tokenised(http: httpx.Client, llm: LLM):
    assert llm.tokenizer is not None
    found = http.post("/tokenize", json={"prompt": "a dog", "return_token_strs": True}).json()
    ids = llm.tokenizer.encode("a dog")
    assert found == {"count": 5, "max_model_len": 96, "tokens": ids, "token_strs": list("a dog")}
    rendered = llm.tokenizer.encode(RENDERED, add_special_tokens=False)
    assert http.post("/tokenize", json={"messages": HI}).json()["tokens"] == rendered
    short = http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False}).json()["tokens"]
    assert short == rendered[: len(short)]
    assert len(short) < len(rendered)
    assert http.post("/detokenize", json={"tokens": rendered}).json() == {"prompt": RENDERED}
    for wrong in ({}, {"prompt": "a", "messages": HI}, {"prompt": "a", "tools": []}, {"messages": [{"role": "x"}]}):
        assert http.post("/tokenize", json=wrong).status_code == 400
    assert http.post("/detokenize", json={"tokens": [2**32]}).status_code == 400
    own = http.post("/tokenize", json={"messages": HI, "chat_template_kwargs": {"messages": []}}).json()["error"]
    assert (own["param"], "no variables to be given there" in own["message"]) == ("chat_template_kwargs", True)


def test_tokens_are_told_in_a_thread_that_no_completion_needs(
    server: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    threads: list[str] = []
    text_of = server.service.vocabulary.text_of

    def watched(token: int) -> str:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return text_of(token)

    monkeypatch.setattr(server.service.vocabulary, "text_of", watched)
    assert http.post("/tokenize", json={"prompt": "a dog", "return_token_strs": True}).status_code == 200
    assert threads == ["serve-slow"] * 5


@pytest.mark.parametrize("is_chat", [False, True])
def test_long_prompts_become_tokens_in_a_thread_that_no_short_one_needs(
    is_chat: bool, server: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    threads: list[str] = []

    def watched(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return encode(tokenizer, text, **options)

    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", watched)
    monkeypatch.setattr(prompting, "_LEAST_LIMIT", 1 << 19)
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    for size, tokenised in ((1, ["serve"]), (1 << 18, ["serve-slow"]), (1 << 20, [])):
        text = "a" * size
        prompt: Any = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        answer = http.post(path, json=prompt | {"max_tokens": 1})
        assert threads == tokenised
        threads.clear()
        if size > 1:
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "at most 524,288 are read" in answer.json()["error"]["message"]
