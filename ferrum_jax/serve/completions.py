"""`/v1/completions`: texts or token ids in, texts and token ids out."""

import contextlib
import itertools
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.generate.request import Request
from ferrum_jax.serve.answers import AnswerProgress, Piece, make_group
from ferrum_jax.serve.body import read_json
from ferrum_jax.serve.errors import JsonAnswer
from ferrum_jax.serve.generation import LONG, EventStream, begin, check_room, chunks_of, new_head, note
from ferrum_jax.serve.logprobs import TextLogprobs, prompt_report
from ferrum_jax.serve.prompting import check_length, prompt_ids
from ferrum_jax.serve.schema import CompletionBody
from ferrum_jax.serve.service import Service


async def complete(service: Service, http: HttpRequest) -> ASGIApp:
    """Answers a request."""
    body = await read_json(service, http, CompletionBody)
    head = new_head(service, "cmpl", "text_completion", body.model)
    n = body.n or 1
    async with contextlib.AsyncExitStack() as stack:

        def make(adapter: ActiveLoraAdapter | None) -> list[list[Request]]:
            return [_group(service, body, prompt, n, adapter) for prompt in body.prompts]

        answers = await begin(service, http, body, len(body.prompts) * n, stack, make)
        writers = [_Writer(service, body, choice, body.prompts[choice.index // n]) for choice in answers.choices]
        if not body.stream:
            while not answers.is_over:
                for piece in await answers.next():
                    if piece.finish_reason is not None:
                        service.count_answer(piece.choice, piece.finish_reason)
            usage = answers.usage()
            note(http, completion_tokens=usage["completion_tokens"])

            def whole() -> JsonAnswer:
                return JsonAnswer(head | {"choices": [one.whole() for one in writers], "usage": usage})

            return await service.run(whole) if usage["total_tokens"] > LONG else whole()

        async def parts(piece: Piece) -> list[dict[str, Any]]:
            if piece.finish_reason is not None:
                service.count_answer(piece.choice, piece.finish_reason)
            part = writers[piece.choice.index].part
            has_prompt = piece.is_first and body.echo and len(piece.choice.request.prompt) > LONG
            told = await service.run(part, piece) if has_prompt else part(piece)
            return [] if told is None else [told]

        chunks = chunks_of(service, http, body, head, answers, parts)
        return EventStream(http, stack.pop_all(), chunks, answers.caller.deadline)


def _group(
    service: Service, body: CompletionBody, prompt: str | list[int], n: int, adapter: ActiveLoraAdapter | None
) -> list[Request]:
    """Returns the requests of one prompt."""
    if isinstance(prompt, str):
        ids = prompt_ids(service, prompt, add_special_tokens=body.add_special_tokens)
    else:
        ids = check_length(prompt, service.most_prompt_tokens)
    check_room(service, ids, body.max_tokens)
    with_prompt = body.prompt_logprobs if body.prompt_logprobs is not None else -1
    if body.echo and body.logprobs is not None:
        with_prompt = max(with_prompt, body.logprobs)
    params = body.sampling(
        service.sampling_defaults,
        max_tokens=body.max_tokens or (1 if body.max_tokens == 0 else None),
        logprobs=body.logprobs,
        prompt_logprobs=None if with_prompt < 0 else with_prompt,
    )
    group = make_group(service.llm, ids, params, n, adapter, body.priority or 0)
    if body.max_tokens == 0:  # nothing is generated; without tokens to score the request is done
        group[0].limit = 0
        if group[0].num_unscored == 0:
            group[0].finish_reason = "length"
    return group


class _Writer:
    """Writes the JSON of one answer, whole or in parts."""

    def __init__(self, service: Service, body: CompletionBody, choice: AnswerProgress, prompt: str | list[int]):
        self._service, self._body, self._choice, self._prompt = service, body, choice, prompt
        self._logprobs = TextLogprobs(
            service.vocabulary, by_id=body.return_tokens_as_token_ids, has_special=not body.skip_special_tokens
        )

    def whole(self) -> dict[str, Any]:
        """Returns the whole answer."""
        request = self._choice.request
        told = self.part(Piece(self._choice, True, "".join(request.text), request.choices, request.finish_reason))
        assert told is not None
        if self._body.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_report(
                self._service.vocabulary, request.prompt, request.scores, self._top(self._body.prompt_logprobs)
            )
        return told

    def part(self, piece: Piece) -> dict[str, Any] | None:
        """Returns the new part of the answer; None if it would be empty for the client."""
        body, request = self._body, self._choice.request
        _, is_first, text, tokens, reason = piece
        echo = self._echo() if is_first and body.echo else None
        if echo is not None:
            text = echo + text
        elif not text and reason is None and body.logprobs is None and not body.return_token_ids:
            return None
        told: dict[str, Any] = {"index": self._choice.index, "text": text, "logprobs": None, "finish_reason": reason}
        if reason is not None:
            told["stop_reason"] = request.stop_reason
        if body.logprobs is not None:
            entries: list[Any] = []
            if echo is not None:
                top = self._top(body.logprobs)
                entries.append((request.prompt[0], None, None))
                # An answer that ended early lacks some scores.
                entries += itertools.zip_longest(request.prompt[1:], request.scores, top)
            entries += [(one.token_id, one.logprob, dict(one.alternatives)) for one in tokens]
            told["logprobs"] = self._logprobs.report(
                entries,
                with_top=body.logprobs > 0,
                echo=echo or "",
                num_echoed=0 if echo is None else len(request.prompt),
            )
        if body.return_token_ids:
            told["token_ids"] = [one.token_id for one in tokens]
            if is_first:
                told["prompt_token_ids"] = request.prompt
        return told

    def _echo(self) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        tokenizer = self._service.llm.tokenizer
        if tokenizer is None:  # the answer has no text either
            return ""
        return tokenizer.decode(self._prompt, skip_special_tokens=self._body.skip_special_tokens)

    def _top(self, most: int) -> list[dict[int, float]]:
        """Returns the `most` likeliest tokens at each place of the prompt except the first."""
        return [dict(list(one.items())[:most]) for one in self._choice.request.top_scores] if most else []
