"""Prompts: checks of their length, and token ids of conversations by the chat template."""

from ferrum_jax.contract.errors import RequestValidationError
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.serve.chat_schema import ChatBody
from ferrum_jax.serve.errors import bad_request

TOO_LONG = "context_length_exceeded"


def check_length(ids: list[int], most: int | None) -> list[int]:
    """Returns a prompt's ids; raises a 400 if there are more than `most`."""
    if most is not None and len(ids) > most:
        raise bad_request(f"the prompt has {len(ids)} tokens, at most {most} are taken", "prompt", TOO_LONG)
    return ids


def tokenizer_of(llm: LLM) -> Tokenizer:
    """Returns the tokenizer; raises a 400 if there is none."""
    if llm.tokenizer is None:
        raise bad_request("this model is served without a tokenizer: send token ids to /v1/completions")
    return llm.tokenizer


def chat_ids(llm: LLM, body: ChatBody, most: int | None) -> list[int]:
    """Returns the token ids of a request's conversation; raises a 400 if it cannot be rendered or is too long."""
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
        text = tokenizer.render(messages, tools=tools, **variables)
    except RequestValidationError as problem:  # the last message has no text, or the template leaves it out
        raise bad_request(str(problem), "messages") from None
    return check_length(tokenizer.encode(text, add_special_tokens=body.add_special_tokens), most)
