"""Schemas of requests. An unknown field is an error, so that no option is silently ignored; in messages it is none."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ferrum_jax.compile.sampler import MAX_BIAS
from ferrum_jax.contract.decoding import Sampling
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.structured import Structured
from ferrum_jax.generate.updates import LivePolicy
from ferrum_jax.serve.errors import ApiError, bad_request

MAX_CHOICES = 128  # answers of one request
MAX_PROMPTS = 2048  # of one request
MAX_STOPS = 64  # texts; each is searched for after every token
MAX_BAD_WORDS = 1024  # each is compared with the answer's end for every token
MAX_STOP_IDS = 1024
MAX_ALLOWED_IDS = 1 << 19  # more than any vocabulary has
MANY = 100  # more bad words and allowed ids are slow: with many prompts they take seconds
LONGEST_TEXT = 256  # characters of a stop text or bad word
T = TypeVar("T")
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # one spelling of each
Items: TypeAlias = Annotated[list[T], Field(fail_fast=True)]  # reports one error, as a million elements may be wrong
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
Count = Annotated[int, Field(ge=0)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


class FieldError(ValueError):
    """A field that contradicts other fields."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


class Body(BaseModel):
    """A JSON object whose fields have exactly these names and types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _name_few(cls, given: Any) -> Any:
        """Keeps at most three unknown fields, which are then refused: a body may have a million."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        named = known | set(itertools.islice((name for name in given if name not in known), 3))
        return {name: value for name, value in given.items() if name in named}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is added either way.")


class Ignored(Body):
    """Fields that clients send but that change no answer: OpenAI's, for billing, storage and caches."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class StructuredOutputs(Body):
    """The form of the answer, in vLLM's names: exactly one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="In Lark's syntax or GBNF.")

    def form(self) -> Structured:
        """Returns the form as the engine's `Structured`."""
        try:
            return Structured(**self.model_dump(by_alias=True, exclude_none=True))
        except InvalidParameterError as problem:
            raise bad_request(str(problem), "structured_outputs") from None


def _check_bias(given: Any) -> Any:
    """Raises FieldError for too many biases, before each is validated."""
    if isinstance(given, dict) and len(given) > MAX_BIAS:
        raise FieldError("logit_bias", f"logit_bias has {len(given)} token ids, at most {MAX_BIAS} are taken")
    return given


class SamplingBody(Ignored):
    """How answers are sampled and when they end; names are OpenAI's or, where it has none, vLLM's."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Counts modulo 2^32.")
    temperature: float | None = Field(None, ge=0, description="1.0 unless the model recommends another.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_bias)] | None = None
    allowed_token_ids: Annotated[Items[TokenId], Field(max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: Annotated[Items[Text], Field(max_length=MAX_BAD_WORDS)] | None = None
    stop: Text | Annotated[Items[Text], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count | None = 0
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_time: float | None = Field(None, gt=0, description="Seconds after which the request ends with a 408.")
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(0, description="Lower ones are served first.")

    @model_validator(mode="after")
    def _check_together(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options go with stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "prompt_logprobs do not go with stream=true")
        return self

    def form(self) -> Structured | None:
        """Returns the form of the answer; None if it is free."""
        return None if self.structured_outputs is None else self.structured_outputs.form()

    @property
    def is_slow(self) -> bool:
        """Whether making the engine's requests may take seconds, to compile a form or to read long lists."""
        return self.form() is not None or len(self.bad_words or ()) + len(self.allowed_token_ids or ()) > MANY

    def sampling(
        self,
        defaults: Mapping[str, float],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Returns the engine's parameters of one answer; `defaults` are the fields of `Sampling` that it may omit."""
        if wrong := [key for key in self.logit_bias or () if not _TOKEN_ID.fullmatch(key)]:
            raise bad_request(f"logit_bias has the keys {wrong[:5]}, expected token ids", "logit_bias")
        bias = None if self.logit_bias is None else {int(key): value for key, value in self.logit_bias.items()}
        fields = SamplingBody.model_fields
        shared = [one.name for one in dataclasses.fields(SamplingParams) if one.name in fields]
        asked = {name: value for name in shared if (value := getattr(self, name)) is not None}
        of_model = {one.name for one in dataclasses.fields(Sampling)}
        given: dict[str, Any] = {name: fields[name].default for name in shared if name not in of_model}
        given |= dict(defaults) | asked
        given |= {"logit_bias": bias, "seed": None if self.seed is None else self.seed % 2**32}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        given["structured"] = self.form()
        return SamplingParams(**given)


def _check_prompts(given: Any) -> Any:
    """Raises FieldError for too many prompts, before each is validated."""
    if isinstance(given, list) and len(given) > MAX_PROMPTS and not isinstance(given[0], int):
        raise FieldError("prompt", f"prompt has {len(given)} prompts, at most {MAX_PROMPTS} go into one request")
    return given


class CompletionBody(SamplingBody):
    """`/v1/completions`."""

    prompt: Annotated[str | Items[TokenId] | Items[str] | Items[Items[TokenId]], BeforeValidator(_check_prompts)]
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    add_special_tokens: bool = True
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionBody":
        if self.suffix:
            raise FieldError("suffix", "suffix is not supported: this model continues a prompt and cannot fill a gap")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError(
                "best_of", f"best_of is {self.best_of}, only n ({self.n or 1}) is possible: every answer is returned"
            )
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "max_tokens is 0, which needs echo=true")
        if self.max_tokens == 0 and (self.n or 1) > 1:
            raise FieldError("n", f"n is {self.n}, but max_tokens 0 has one answer")
        if not isinstance(self.prompt, str) and len(self.prompt) == 0:
            raise FieldError("prompt", "prompt is an empty list")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, a single one as a list of one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)  # type: ignore[list-item]


class TokenizeBody(Body):
    """`/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected `prompt` or `messages`, one of them")
        if self.prompt is not None:
            given = self.model_fields_set & {"tools", "add_generation_prompt", "continue_final_message",
                                             "chat_template_kwargs"}  # fmt: skip
            if given:
                raise ValueError(f"{', '.join(sorted(given))} goes with `messages`, not with `prompt`")
        return self


class DetokenizeBody(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: Items[TokenId]
    skip_special_tokens: bool = False


class LoadAdapterBody(Body):
    """`/v1/load_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadAdapterBody(Body):
    """`/v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1)]


class PauseBody(Body):
    """`/pause`."""

    mode: Literal["wait", "abort"] = "wait"


class UpdateWeightsBody(Body):
    """`/update_weights`."""

    path: Annotated[str, Field(min_length=1)]
    live: LivePolicy = "wait"


Read = TypeVar("Read", bound=BaseModel)


def read(kind: type[Read], body: bytes) -> Read:
    """Returns a request's body as `kind`; raises a 400 that names the wrong field."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as problem:
        raise describe(problem) from None


def describe(problem: ValidationError) -> ApiError:
    """Returns the 400 for a body that failed validation."""
    found = problem.errors(include_url=False, include_input=False)
    param = str(found[0]["loc"][0]) if found[0]["loc"] else None
    told = []
    for one in found[:3]:
        place = ".".join(map(str, one["loc"]))
        if one["type"] == "extra_forbidden":
            told.append(f"unknown field `{place}`: it is not served")
        elif one["type"] == "json_invalid":
            told.append(f"the body is no JSON: {one['msg'].removeprefix('Invalid JSON: ')}")
        else:
            said = one["msg"].removeprefix("Value error, ")
            told.append(f"{place}: {said}" if place else said)
    told_of = found[0].get("ctx", {}).get("error")
    if isinstance(told_of, FieldError):
        param = told_of.param
    return bad_request("; ".join(told), param, "unknown_field" if found[0]["type"] == "extra_forbidden" else None)


def finite(value: float) -> float:
    """Returns a log-probability that JSON can hold: -9999 for minus infinity, as vLLM does."""
    return value if math.isfinite(value) else -9999.0
