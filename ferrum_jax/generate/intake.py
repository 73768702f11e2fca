"""Makes requests from prompts and parameters, and checks both before anything starts."""

import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ferrum_jax.contract.checks import check_flag, check_not_forked
from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError, safe_repr
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.interventions import Interventions, check_each
from ferrum_jax.executor.rows import check_settings
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.chat import TEMPLATE_OWN
from ferrum_jax.generate.detokenize import Detokenizer
from ferrum_jax.generate.params import RequestOutput, SamplingParams, check_fits
from ferrum_jax.generate.prompts import as_adapters, as_ids, as_priorities
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.stops import StopWatcher
from ferrum_jax.generate.structured import FormCompiler
from ferrum_jax.generate.tokenizer import Tokenizer
from ferrum_jax.models.hooks import ATTENTION, Point, check_points, check_supported

RAISE = "load with a larger one (kv_capacity=, --kv-capacity or FERRUM_KV_CAPACITY; more kv_blocks, if it was set)"


class RequestOptions(NamedTuple):
    """Options of one prompt beside its sampling parameters."""

    adapter: ActiveLoraAdapter | None = None
    interventions: Interventions | None = None
    capture: tuple[Point, ...] = ()
    priority: int = 0


@dataclass(frozen=True, eq=False)
class Intake:
    """Makes the requests of one `LLM`."""

    model: DecoderOnlyLLM
    tokenizer: Tokenizer | None
    new_cache_id: Callable[[], str]
    forms: FormCompiler
    pid: int = field(default_factory=os.getpid)

    def options(
        self,
        count: int,
        lora_request: Any = None,
        interventions: Any = None,
        capture: Iterable[Any] | None = (),
        priority: Any = None,
    ) -> list[RequestOptions]:
        """Returns the options of each of `count` prompts.

        Adapters, interventions and priorities are one for all prompts or one for each; `capture` is for all prompts.

        Raises:
            RequestValidationError, InvalidParameterError: their number is not `count`, or one is malformed.
            UnsupportedError: hook points are given and the model is not a `ModelRunner`, attention weights are to be
                captured, a model that is divided over devices lacks a point, or this is a forked child.
        """
        if isinstance(self.model, ModelRunner):
            check_not_forked("LLM", self.pid)
        pairs = zip(as_adapters(lora_request, count), as_priorities(priority, count), strict=True)
        plain = [RequestOptions(adapter, priority=urgency) for adapter, urgency in pairs]
        given = () if capture is None else capture
        if interventions is None and isinstance(given, Sized) and not len(given):
            return plain
        if not isinstance(self.model, ModelRunner):
            raise UnsupportedError(f"hook points need a ModelRunner, this LLM runs a {type(self.model).__name__}")
        cfg = self.model.model_config
        points = check_points(given, cfg)
        if wide := [point for point in points if point.name in ATTENTION]:
            raise UnsupportedError(
                f"{wide[0].name!r} cannot be captured while generating: ModelRunner.capture and models.run return it"
            )
        edits = check_each(interventions, count, cfg)
        changed = [point for one in edits if one is not None for point in one.edits]
        is_divided = self.model.placed.division is not None
        check_supported({*points, *changed}, cfg, has_window_cache=False, is_divided=is_divided)
        return [one._replace(interventions=own, capture=points) for one, own in zip(plain, edits, strict=True)]

    def need_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer; raises UnsupportedError if there is none."""
        if self.tokenizer is None:
            raise UnsupportedError("this LLM has no tokenizer: pass token ids")
        return self.tokenizer

    @property
    def kv_capacity(self) -> int:
        """Positions that a sequence can reach."""
        return capacity_of(self.model)

    @property
    def _hint(self) -> str:
        """End of a message about length: how to allow longer sequences, if the model can have them."""
        return f": {RAISE}" if self.kv_capacity < self.model.config.max_seq_len else ", as long as the model allows"

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation, rendered with the options of `render_chat`."""
        tokenizer, variables = self.need_tokenizer(), {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            given = safe_repr(variables)
            raise RequestValidationError(f"chat_template_kwargs is {given}, expected variables of the template by name")
        prompts = check_flag("add_generation_prompt", add_generation_prompt)
        goes_on = check_flag("continue_final_message", continue_final_message)
        if tokenizer.template_for(tools=tools is not None) is None:
            raise UnsupportedError("this model has no chat template: pass a prompt instead of messages")
        if own := ", ".join(sorted(TEMPLATE_OWN & variables.keys())):
            raise RequestValidationError(f"chat_template_kwargs has {own}, which are no variables to be given there")
        text = tokenizer.render(
            messages, tools=tools, add_generation_prompt=prompts, continue_final_message=goes_on, **variables
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def ids(self, prompt: Any, *, is_first: bool = True) -> list[int]:
        """Returns a prompt's token ids, checked; only the first text of a sequence gets special tokens."""
        if isinstance(prompt, str):
            tokenizer = self.need_tokenizer()
            if tokenizer.prefixes_runs and not is_first:
                prompt = prompt.removeprefix(" ")  # `encode` adds this space as the prefix
            prompt = tokenizer.encode(prompt, add_special_tokens=is_first)
        return as_ids(prompt, self.model.config.vocab_size)

    def group(self, prompt: Any, params: SamplingParams, options: RequestOptions) -> list[Request]:
        """Returns the `n` requests of one prompt; the others are `copies` of the first."""
        first = self.request(prompt, params, options)
        if params.n > 1 and isinstance(prompt, RequestOutput):
            raise RequestValidationError(f"n is {params.n}, an answer that is continued takes n=1")
        for at in range(1, params.n):
            seed = None if params.seed is None else (int(params.seed) + at) % 2**32
            first.copies.append(self.request(first.prompt, replace(params, seed=seed), options, first))
        return [first, *first.copies]

    def request(
        self,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions = RequestOptions(),
        first: Request | None = None,
    ) -> Request:
        """Returns the request of one answer; `prompt` is a text, token ids, or an output to continue.

        `first` is the request of another answer to the same prompt, with the same parameters except the seed.
        """
        if first is not None:
            form = None if first.form is None else first.form.copy()
        else:
            form = None if params.structured is None else self.forms.compile(params.structured)
        former = prompt if isinstance(prompt, RequestOutput) else None
        if former is not None:
            prompt = former.prompt_token_ids
        ids, capacity = self.ids(prompt), self.kv_capacity
        if not ids:
            raise RequestValidationError("a prompt needs at least one token, this one has none")
        if len(ids) > capacity:
            raise RequestValidationError(f"the prompt has {len(ids)} tokens, the KV capacity is {capacity}{self._hint}")
        stop_ids, bad_words = self._forbidden(params) if first is None else (first.stop_ids, first.bad_words)
        room = capacity - len(ids) + 1  # the last token takes no position
        if params.min_tokens > room:
            raise RequestValidationError(
                f"min_tokens is {params.min_tokens}, a KV capacity of {capacity} leaves {room} after {len(ids)} tokens"
            )
        if params.num_prompt_logprobs > 0 and not isinstance(self.model, ModelRunner):
            raise UnsupportedError(
                f"the likeliest tokens of a prompt need a ModelRunner, not a {type(self.model).__name__}: "
                "prompt_logprobs=True reports the log-probabilities of the prompt's own tokens"
            )
        skip = params.skip_special_tokens
        request = Request(
            cache_id=self.new_cache_id(),
            prompt=ids,
            params=params,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            stop_ids=stop_ids,
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            detokenizer=None if self.tokenizer is None else Detokenizer(self.tokenizer, ids, skip_special_tokens=skip),
            watcher=StopWatcher(params.stop_texts, includes_stop=params.include_stop_str_in_output),
            **options._asdict(),
            form=form,
            bad_words=bad_words,
            text_prompt=prompt if isinstance(prompt, str) else None if first is None else first.text_prompt,
            score_from=1 if params.num_prompt_logprobs >= 0 else None,
        )
        if former is not None:
            request.text_prompt = former.prompt
            ids = as_ids(former.token_ids, self.model.config.vocab_size)
            request.resume(replace(former, token_ids=ids))
        check_settings(request.cache_id, request.settings(), len(request.tokens), self.model.config.vocab_size)
        if form is not None:
            request.mask_of_next(form)
            if request.refusal is not None:
                raise request.refusal
        return request

    def scored(
        self,
        prompt: Any,
        continuation: Any,
        options: RequestOptions = RequestOptions(),
        params: SamplingParams | None = None,
    ) -> Request:
        """Returns a request that scores a continuation and generates nothing; with `params`, also under these."""
        before, note = self.ids(prompt), ""
        if isinstance(prompt, str) and isinstance(continuation, str):
            joined, note = self.ids(prompt + continuation), ", both texts being tokenised as one"
            pairs = zip(before, joined, strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            before, after = joined[:shared], joined[shared:]
        else:
            after = self.ids(continuation, is_first=False)
        if not before or not after:
            raise RequestValidationError(
                f"scoring needs a prompt token and a token to score: {len(before)} and {len(after)} are there{note}"
            )
        needed, capacity = len(before) + len(after) - 1, self.kv_capacity  # the last token takes no position
        if needed > capacity:
            raise RequestValidationError(f"scoring needs {needed} positions, the KV capacity is {capacity}{self._hint}")
        if params is not None and not isinstance(self.model, ModelRunner):
            raise UnsupportedError(f"scores under parameters need a ModelRunner, not a {type(self.model).__name__}")
        given = SamplingParams() if params is None else params
        stop_ids, bad_words = self._forbidden(given)
        if given.structured is not None:
            raise UnsupportedError("scores under structured output: its masks change with every token")
        if any(len(words) > 1 for words in bad_words):
            raise UnsupportedError("scores under bad_words of several tokens, which depend on the tokens before")
        request = Request(
            cache_id=self.new_cache_id(),
            prompt=before + after,
            params=given,
            seed=0,
            stop_ids=stop_ids,
            limit=0,
            detokenizer=None,
            watcher=StopWatcher(()),
            **options._asdict(),
            bad_words=bad_words,
            score_from=len(before),
            is_scored_by_params=params is not None,
        )
        if params is not None:
            check_settings(request.cache_id, request.settings(), len(before), self.model.config.vocab_size)
        return request

    def _forbidden(self, params: SamplingParams) -> tuple[frozenset[int], list[list[int]]]:
        """Returns the stop ids and the bad words as tokens; checks the token ids in the parameters."""
        vocab_size = self.model.config.vocab_size
        if (params.stop_texts or params.bad_words) and self.tokenizer is None:
            raise UnsupportedError("texts in the parameters need a tokenizer, and this LLM has none")
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            wrong = [token for token in getattr(params, name) or () if token >= vocab_size]
            if wrong:
                raise RequestValidationError(f"{name} has {wrong[0]}, ids go from 0 to {vocab_size - 1}")
        own = self.tokenizer.eos_token_ids if self.tokenizer is not None and not params.ignore_eos else ()
        stop_ids = frozenset(params.stop_token_ids or ()) | {token for token in own if token < vocab_size}
        bad_words = self._bad_words(params)
        check_fits(params, stop_ids, bad_words)
        return stop_ids, bad_words

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Tokenises each bad word alone and after a space; drops those with ids beyond the model's vocabulary."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            for text in (word, f" {word.lstrip()}"):
                ids = self.need_tokenizer().encode(text, add_special_tokens=False)
                if ids and max(ids) < self.model.config.vocab_size:
                    found[tuple(ids)] = None
        return list(map(list, found))


def capacity_of(model: DecoderOnlyLLM) -> int:
    """Returns how many positions a sequence can have: at most those of the whole pool, where its size is known."""
    capacity = model.kv_capacity()
    if not isinstance(model, ModelRunner):
        return capacity
    cache = model.plan.cache
    return min(capacity, cache.num_blocks * cache.block_size)
