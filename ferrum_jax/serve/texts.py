"""`/tokenize` and `/detokenize`."""

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ferrum_jax.serve.body import read_json
from ferrum_jax.serve.chat_schema import ChatBody
from ferrum_jax.serve.errors import JsonAnswer
from ferrum_jax.serve.prompting import chat_ids, tokenizer_of
from ferrum_jax.serve.schema import DetokenizeBody, TokenizeBody, describe
from ferrum_jax.serve.service import Service


async def tokenize(service: Service, http: HttpRequest) -> Response:
    """Returns the ids of a text or of a conversation."""
    body = await read_json(service, http, TokenizeBody)
    service.adapter_of(body.model)

    def answer() -> Response:
        ids = _ids(service, body)
        told = {"count": len(ids), "max_model_len": service.capacity, "tokens": ids}
        spelled = [service.vocabulary.text_of(one) for one in ids] if body.return_token_strs else None
        return JsonAnswer(told | {"token_strs": spelled})

    return await service.run(answer, slow=True)


async def detokenize(service: Service, http: HttpRequest) -> Response:
    """Returns the text of ids."""
    body = await read_json(service, http, DetokenizeBody)
    service.adapter_of(body.model)

    def answer() -> Response:
        text = tokenizer_of(service.llm).decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return JsonAnswer({"prompt": text})

    return await service.run(answer, slow=True)


def _ids(service: Service, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        tokenizer = tokenizer_of(service.llm)
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    try:
        names = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        conversation = ChatBody.model_validate({name: getattr(body, name) for name in names})
    except ValidationError as problem:
        raise describe(problem) from None
    conversation.add_special_tokens = bool(body.add_special_tokens)
    return chat_ids(service.llm, conversation, None)
