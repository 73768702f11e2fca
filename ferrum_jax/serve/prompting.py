"""Prompts: their token ids, checks of their length, and conversations as text by the chat template."""

from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.serve.chat_schema import ChatBody
from ferrum_jax.serve.errors import bad_request
from ferrum_jax.serve.service import Service

TOO_LONG = "context_length_exceeded"
_LEAST_LIMIT = 1 << 16  # characters; any shorter text is tokenised
_MOST_JOINED = 4  # characters that a tokenizer's normalisation usually joins into one at most


def check_length(ids: list[int], most: int) -> list[int]:
    """Returns a prompt's ids; raises a 400 if there are more than `most`."""
    if len(ids) > most:
        raise bad_request(f"the prompt has {len(ids)} tokens, at most {most} are taken", "prompt", TOO_LONG)
    return ids


def prompt_ids(service: Service, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns the ids of a prompt's text; raises a 400 if there are more than the server takes.

    A text over the limit of characters is refused before it is tokenised, which would take seconds.
    """
    tokenizer, most = tokenizer_of(service.llm), service.most_prompt_tokens
    if len(text) > _LEAST_LIMIT:
        limit = max(_LEAST_LIMIT, _MOST_JOINED * most * service.vocabulary.longest)
        if len(text) > limit:
            said = f"the prompt has {len(text):,} characters, at most {limit:,} are read for {most:,} tokens"
            raise bad_request(said, "prompt", TOO_LONG)
    return check_length(tokenizer.encode(text, add_special_tokens=add_special_tokens), most)


def tokenizer_of(llm: LLM) -> Tokenizer:
    """Returns the tokenizer; raises a 400 if there is none."""
    if llm.tokenizer is None:
        raise bad_request("this model is served without a tokenizer: send token ids to /v1/completions")
    return llm.tokenizer


def chat_text(llm: LLM, body: ChatBody) -> str:
    """Returns a request's conversation as the chat template renders it; raises a 400 if it cannot be rendered."""
    tokenizer = tokenizer_of(llm)
    tools = [tool.rendered() for tool in body.tools or ()] if body.may_call else None
    template = tokenizer.template_for(tools=tools is not None)
    messages = [message.rendered() for message in body.messages]
    if template is None:
        raise bad_request("this model has no chat template: send the prompt to /v1/completions")
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in template:
            raise bad_request("the chat template of this model knows no reasoning_effort", "reasoning_effort")
        variables["reasoning_effort"] = body.reasoning_effort
    if tools and "tools" not in template:
        raise bad_request("the chat template of this model shows no tools to it", "tools")
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request("continue_final_message needs add_generation_prompt=false", "continue_final_message")
    for name in ("add_generation_prompt", "continue_final_message"):
        variables[name] = getattr(body, name)
    try:
        return tokenizer.render(messages, tools=tools, **variables)
    except RequestValidationError as problem:  # the last message has no text, or the template leaves it out
        raise bad_request(str(problem), "messages") from None
