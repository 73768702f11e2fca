"""`/v1/chat/completions`: conversations, with calls of tools."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.batch import TokenChoice
from ferrum_jax.generate.detokenize import Detokenizer
from ferrum_jax.generate.request import Request
from ferrum_jax.serve.answers import AnswerProgress, Answers, Piece, make_group
from ferrum_jax.serve.body import read_json
from ferrum_jax.serve.chat_schema import ChatBody, NamedTool
from ferrum_jax.serve.errors import JsonAnswer, bad_request
from ferrum_jax.serve.generation import LONG, EventStream, begin, check_room, chunks_of, new_head, note
from ferrum_jax.serve.logprobs import chat_logprobs, prompt_report
from ferrum_jax.serve.prompting import chat_text, prompt_ids, tokenizer_of
from ferrum_jax.serve.service import Service
from ferrum_jax.serve.tools.choice import FORMATS, ToolFormat
from ferrum_jax.serve.tools.events import Arguments, CallBegin, Content, Event, Parsed, Reasoning, ToolParser
from ferrum_jax.serve.tools.forms import call_form, final_form, special_tokens
from ferrum_jax.serve.tools.json_call import is_complete


async def chat(service: Service, http: HttpRequest) -> ASGIApp:
    """Answers a request."""
    body = await read_json(service, http, ChatBody)
    tool_format = _format_of(service, body)
    head = new_head(service, "chatcmpl", "chat.completion", body.model)
    async with contextlib.AsyncExitStack() as stack:

        def make(adapter: ActiveLoraAdapter | None) -> list[list[Request]]:
            return [_group(service, body, tool_format, adapter)]

        answers = await begin(service, http, body, body.n or 1, stack, make)
        readers = [_Reader(service, body, tool_format, choice, answers) for choice in answers.choices]
        if not body.stream:
            while not answers.is_over:
                for piece in await answers.next():
                    readers[piece.choice.index].read(piece)
            usage = answers.usage()
            note(http, completion_tokens=usage["completion_tokens"])
            request = answers.choices[0].request

            def whole() -> JsonAnswer:
                told = head | {"choices": [reader.whole() for reader in readers], "usage": usage}
                if body.prompt_logprobs is not None:
                    told["prompt_logprobs"] = prompt_report(
                        service.vocabulary, request.prompt, request.scores, request.top_scores
                    )
                if body.return_token_ids:
                    told["prompt_token_ids"] = request.prompt
                return JsonAnswer(told)

            return await service.run(whole) if usage["total_tokens"] > LONG else whole()

        async def parts(piece: Piece) -> list[dict[str, Any]]:
            return readers[piece.choice.index].parts(piece)

        head["object"] = "chat.completion.chunk"
        chunks = chunks_of(service, http, body, head, answers, parts, [reader.first() for reader in readers])
        return EventStream(http, stack.pop_all(), chunks, answers.caller.deadline)


def _format_of(service: Service, body: ChatBody) -> ToolFormat | None:
    """Returns the format in which answers are read; raises a 400 if there are tools and no format of calls is known."""
    found = service.tool_format
    if body.may_call and found is None:
        raise bad_request(
            "tools need a parser of the model's calls, and none is known for this model: start the server with "
            "--tool-parser",
            "tools",
        )
    return found if found is not None and (body.may_call or found.is_always_on) else None


def _is_parallel(service: Service, body: ChatBody) -> bool:
    """Whether an answer may have several calls; not if the template would refuse them in the next turn."""
    return body.parallel_tool_calls is not False and service.has_parallel_calls


def _group(
    service: Service, body: ChatBody, tool_format: ToolFormat | None, adapter: ActiveLoraAdapter | None
) -> list[Request]:
    ids = prompt_ids(service, chat_text(service.llm, body), add_special_tokens=body.add_special_tokens)
    check_room(service, ids, body.limit)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling(
        service.sampling_defaults, max_tokens=body.limit, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs
    )
    if tool_format is not None and tool_format.mark in special_tokens(tokenizer_of(service.llm)):
        params = replace(params, skip_special_tokens=False)
    if tool_format is not None and (tools := body.forced_tools or body.strict_tools):
        form = call_form(
            tool_format.name,
            tools,
            tokenizer_of(service.llm),
            is_forced=bool(body.forced_tools),
            several=not isinstance(body.tool_choice, NamedTool) and _is_parallel(service, body),
        )
        params = replace(params, structured=form)
    elif params.structured is not None and tool_format is FORMATS["gpt_oss"] and not body.continue_final_message:
        params = replace(params, structured=final_form(params.structured, tokenizer_of(service.llm)))
    return make_group(service.llm, ids, params, body.n or 1, adapter, body.priority or 0)


class _Reader:
    """Reads content, reasoning and calls from one answer, and writes its JSON."""

    def __init__(
        self, service: Service, body: ChatBody, tool_format: ToolFormat | None, choice: AnswerProgress, answers: Answers
    ):
        self.choice = choice
        self._service, self._body, self._format, self._answers = service, body, tool_format, answers
        self._parser = self._new_parser()
        self._parsed = Parsed()
        self._ids: list[str] = []
        self._reason: str | None = None

    def _new_parser(self) -> ToolParser | None:
        body = self._body
        names = {tool.function.name for tool in body.tools or ()} if body.may_call else set()
        return None if self._format is None else self._format.make(names, body.continue_final_message)

    def read(self, piece: Piece) -> list[Event]:
        """Parses a new piece of the answer and returns its events.

        Without parallel calls, a second call ends the answer at the token with which it begins; later ones are dropped.
        """
        if self._parser is None:
            events: list[Event] = [Content(piece.text)] if piece.text else []
        else:
            events = self._parser.push(piece.text)
            if piece.finish_reason is not None:
                events += self._parser.finish()
        reason, told = piece.finish_reason, []
        for event in events:
            if isinstance(event, CallBegin) and self._parsed.calls and not _is_parallel(self._service, self._body):
                reason = "stop"
                sent = self.choice.num_taken - len(piece.tokens) if self._body.stream else 0
                self._answers.cut(self.choice, max(sent, self._count_to_second_call()))
                break
            self._parsed.take([event])
            told.append(event)
        if reason is not None:
            self._reason = "tool_calls" if reason == "stop" and self._has_whole_calls() else reason
            self._service.count_answer(self.choice, reason)
        return told

    def _count_to_second_call(self) -> int:
        """Returns how many tokens of the answer show that a second call begins."""
        request, parser, calls = self.choice.request, self._new_parser(), 0
        assert parser is not None
        skips = request.params.skip_special_tokens
        text = Detokenizer(tokenizer_of(self._service.llm), request.prompt, skip_special_tokens=skips)
        for count, token in enumerate(request.choices[: self.choice.num_taken], 1):
            calls += sum(isinstance(event, CallBegin) for event in parser.push(text.push(token.token_id)))
            if calls > 1:
                return count
        return self.choice.num_taken

    def _has_whole_calls(self) -> bool:
        """Whether there are calls, and the end of the answer has not cut off the last."""
        calls = self._parsed.calls
        return bool(calls) and is_complete(calls[-1].arguments)

    def whole(self) -> dict[str, Any]:
        """Returns the whole answer."""
        body, parsed, request = self._body, self._parsed, self.choice.request
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {"id": self._new_id(), "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in parsed.calls
            ]
        tokens = request.choices[: self.choice.num_taken]
        told: dict[str, Any] = {
            "index": self.choice.index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._reason,
            "stop_reason": request.stop_reason,
        }
        if body.return_token_ids:
            told["token_ids"] = [one.token_id for one in tokens]
        return told

    def first(self) -> dict[str, Any]:
        """Returns the fields of the chunk before all pieces."""
        choice = {"index": self.choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        ids = {"prompt_token_ids": self.choice.request.prompt} if self._body.return_token_ids else {}
        return {"choices": [choice | {"finish_reason": None}]} | ids

    def parts(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns a new piece as deltas; the first has the log-probabilities and ids of all."""
        body, before = self._body, self.choice.num_taken - len(piece.tokens)
        deltas = [self._delta(event) for event in self.read(piece)]
        tokens = piece.tokens[: max(0, self.choice.num_taken - before)]
        wants_tokens = tokens and (body.logprobs or body.return_token_ids)
        if not deltas and self._reason is None and not wants_tokens:
            return []
        told: list[dict[str, Any]] = [
            {"index": self.choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas or [{} if self._reason is not None else {"content": ""}]
        ]
        told[0]["logprobs"] = self._logprobs(tokens)
        if body.return_token_ids:
            told[0]["token_ids"] = [one.token_id for one in tokens]
        told[-1]["finish_reason"] = self._reason
        if self._reason is not None:
            told[-1]["stop_reason"] = self.choice.request.stop_reason
        return told

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallBegin(name):
                call = {"index": len(self._ids), "id": self._new_id(), "type": "function"}
                return {"tool_calls": [call | {"function": {"name": name, "arguments": ""}}]}
            case Arguments(text):
                return {"tool_calls": [{"index": len(self._ids) - 1, "function": {"arguments": text}}]}

    def _new_id(self) -> str:
        assert self._format is not None
        self._ids.append(self._format.new_id())
        return self._ids[-1]

    def _logprobs(self, tokens: Sequence[TokenChoice]) -> dict[str, Any] | None:
        body = self._body
        if not body.logprobs:
            return None
        by_id = body.return_tokens_as_token_ids
        return chat_logprobs(self._service.vocabulary, list(tokens), body.top_logprobs or 0, by_id=by_id)
