"""`LLM`: prompts in, text out."""

import itertools
import os
import queue
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from ferrum_jax.contract.errors import FerrumError, RequestValidationError, UnsupportedError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.rows import check_settings
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.chat import render_chat
from ferrum_jax.generate.detokenize import Detokenizer
from ferrum_jax.generate.drafts import DraftSource
from ferrum_jax.generate.engine import Engine
from ferrum_jax.generate.params import (
    RequestOutput,
    SamplingParams,
    Score,
    check_fits,
    one_of,
    params_of_each,
    params_of_one,
)
from ferrum_jax.generate.prompts import Prompt, as_adapters, as_ids, as_prompts
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.scheduler import Scheduler
from ferrum_jax.generate.speculation import DEFAULT_TOKENS, Speculation, make_drafts
from ferrum_jax.generate.stops import StopWatcher
from ferrum_jax.generate.stream import Stream
from ferrum_jax.generate.tokenizer import Tokenizer, load_tokenizer
from ferrum_jax.generate.updates import LivePolicy, lora_update, params_update
from ferrum_jax.loading import load, open_checkpoint
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.progress import Track
from ferrum_jax.weights.gguf import GgufSource
from ferrum_jax.weights.hub import resolve

Groups = Sequence[Sequence[Request]]  # that begin alike


class LLM:
    """A model with its tokenizer.

    Calls from several threads share the batch. Prompts are texts or lists of token ids.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        speculation: Speculation | None = None,
        **settings: Any,
    ):
        """Loads a model: a folder, a `.gguf` file, a Hugging Face id, or the default model for None.

        Args:
            path: the model.
            tokenizer: a folder or `.gguf` file with a tokenizer, where the model's own is missing or not implemented.
            speculation: draft several tokens at a time and verify them together; if None, prompt lookup drafts where
                the engine's `spec_tokens` or `FERRUM_SPEC_N` says how many, and nobody otherwise.
            **settings: as for `ferrum_jax.load`.
        """
        if speculation is not None:
            settings["engine"] = speculation.settle(settings.get("engine"))
        source = open_checkpoint(resolve(path, progress=settings.get("progress", True)))
        if tokenizer is not None:
            read = load_tokenizer(os.fspath(tokenizer))
        elif isinstance(source, GgufSource):
            read = Tokenizer.from_gguf(source.file)
        else:
            read = load_tokenizer(source.path)
        runner = load(source, **settings)
        plan = runner.plan
        try:
            drafts = make_drafts(speculation or Speculation(), runner, plan.spec_tokens, plan.max_seqs)
            chunk_tokens = plan.buckets.max_step_tokens * runner.num_replicas
            self._setup(runner, read, plan.max_seqs, chunk_tokens, drafts)
        except BaseException:
            runner.close()
            raise

    @classmethod
    def from_model(
        cls,
        model: DecoderOnlyLLM,
        tokenizer: Tokenizer | None = None,
        *,
        max_rows: int | None = None,
        chunk_tokens: int | None = None,
        speculation: Speculation | None = None,
    ) -> Self:
        """Generates with any `DecoderOnlyLLM`; without a tokenizer, prompts are token ids and texts stay empty.

        `max_rows` sequences run at a time, and `chunk_tokens` tokens of prompts go into one step: as many as a
        `ModelRunner` has slots and as its largest step takes, 8 and 512 of any other model. Two LLMs of one model take
        its slots and blocks from each other, and do not wait for each other.
        """
        runner = model if isinstance(model, ModelRunner) else None
        if max_rows is None:
            max_rows = 8 if runner is None else runner.plan.max_seqs
        if chunk_tokens is None:
            chunk_tokens = 512 if runner is None else runner.plan.buckets.max_step_tokens * runner.num_replicas
        made = cls.__new__(cls)
        tokens = 0 if speculation is None else speculation.asked_tokens or DEFAULT_TOKENS
        drafts = make_drafts(speculation or Speculation(), model, tokens, max_rows)
        made._setup(model, tokenizer, max_rows, chunk_tokens, drafts)
        return made

    def _setup(
        self,
        model: DecoderOnlyLLM,
        tokenizer: Tokenizer | None,
        max_rows: int,
        chunk_tokens: int,
        drafts: DraftSource | None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        try:
            scheduler = Scheduler(model, max_rows=max_rows, chunk_tokens=chunk_tokens, drafts=drafts)
        except FerrumError:
            if drafts is not None:
                drafts.close()
            raise
        self._engine = Engine(scheduler)

    def __enter__(self) -> Self:
        if isinstance(self.model, ModelRunner):
            self.model.__enter__()  # which refuses once it is closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine below, for those who submit requests themselves."""
        return self._engine

    @property
    def runner(self) -> ModelRunner:
        """The runner below, once what was aborted is freed.

        Raises:
            UnsupportedError: the model is none.
        """
        self._engine.settle()
        if not isinstance(self.model, ModelRunner):
            raise UnsupportedError(f"this LLM runs a {type(self.model).__name__}, not a ModelRunner")
        return self.model

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that came to stand in an answer; 0 before there were any."""
        speculator = self._engine.scheduler.speculator
        return speculator.accepted / speculator.drafted if speculator is not None and speculator.drafted else 0.0

    def warmup(self, *, progress: bool = True, load: bool = False) -> None:
        """Compiles everything that serving may need; `load` as for `ModelRunner.warmup`, which other models lack."""
        self._engine.settle()
        if isinstance(self.model, ModelRunner):
            self.model.warmup(progress=progress, load=load)
        else:
            self.model.warmup(progress=progress)
        self._engine.scheduler.warmup(progress=progress)

    def reset(self) -> None:
        """Drops every sequence of the model; also the way back after a step that failed on the device.

        Answers that are being generated are recomputed and stay the same. Those that the failure ended stay failed.
        """
        self._engine.call(self._engine.scheduler.reset)

    def set_params(self, params: ParamTree, *, live: LivePolicy = "wait") -> int:
        """Takes other weights as `ModelRunner.set_params` does, between two steps, also while requests run.

        Args:
            params: the weights; arrays are shared, not copied, and nothing is compiled.
            live: what becomes of requests that run. `wait`: they end under the old weights, others begin after the
                change. `abort`: they end with the reason `abort` and what they have; what is being scored, with a
                CancelledError. `keep`: they go on, the new weights over the keys and values of the old ones; who has
                sampled nothing yet begins again. `recompute`: they go on as well, and what they have is read again
                under the new weights. Log-probabilities of a prompt stay those of the weights that read it first.

        Returns:
            The version of these weights, which `RequestOutput.weight_versions` names.

        Raises:
            UnsupportedError: the model is no `ModelRunner`.
            RequestValidationError, InvalidParameterError: as of `ModelRunner.set_params`; nothing has changed.
        """
        return self._engine.update(params_update(self.model, params, live))

    def set_lora(self, name: str, tree: Any, *, scale: float = 1.0, index: int = 0, live: LivePolicy = "wait") -> int:
        """Takes an adapter's arrays as `ModelRunner.set_lora` does, between two steps, also while requests run.

        Requests name it: `lora_request=name`. `live` is what becomes of requests that run under the arrays that the
        name had before, as of `set_params`; others go on. Returns the version that `weight_versions` names. Raises as
        `set_params` and `ModelRunner.set_lora`.
        """
        return self._engine.update(lora_update(self.model, name, tree, live, scale=scale, index=index))

    def close(self) -> None:
        """Ends every request, and frees the model, and the draft model if it was loaded with it."""
        self._engine.close()
        if self._engine.scheduler.speculator is not None:
            self._engine.scheduler.speculator.source.close()
        if isinstance(self.model, ModelRunner):
            self.model.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        progress: bool = False,
        use_tqdm: bool = False,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Answers prompts together; outputs come in their order, the `n` of one prompt side by side.

        Args:
            prompts: one text or one list of ids, or several of either; `{"prompt_token_ids": …}` is such a list.
            params: for all prompts, or one for each; greedy if None.
            sampling_params: another name of `params`.
            lora_request: an adapter's name, an `ActiveLoraAdapter`, or what has `lora_name` and `lora_path`: for all
                prompts, or one each.
            progress: show a bar of finished prompts.
            use_tqdm: another name of `progress`.
            return_errors: a prompt that fails on the way ends with the reason `error` and the error in its output, and
                the others go on to their ends. Otherwise the error of the first that failed is raised, with a note of
                which it is, and the others are given up.

        Raises:
            RequestValidationError: a prompt is empty or longer than the KV capacity; nothing was started.
            FerrumError: a prompt failed, and errors are not to be returned.
        """
        listed = as_prompts(prompts)
        each = params_of_each(one_of(params, sampling_params), len(listed))
        adapters = as_adapters(lora_request, len(listed))
        groups = [self._requests(*one) for one in zip(listed, each, adapters, strict=True)]
        self._finish(groups, Track("generating") if progress or use_tqdm else None, return_errors=return_errors)
        return [request.output(return_error=return_errors) for group in groups for request in group]

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        lora_request: Any = None,
        progress: bool = False,
    ) -> list[Score]:
        """Returns the log-probability of every token of each continuation after its prompt; nothing is generated.

        Args:
            prompts: texts or lists of ids; one alone goes before every continuation. What several continuations in a
                row share is read once, and a known prefix not at all.
            continuations: as many. A text is scored from the first token that differs from those of the prompt alone,
                so that its beginning may be a token that the two share.
            lora_request: an adapter, as for `generate`: for all continuations, or one each.
            progress: show a bar of finished continuations.

        Raises:
            RequestValidationError: there are not as many of both, one is empty or is no token of its own, or both
                together exceed the KV capacity; nothing was started.
        """
        befores, afters = as_prompts(prompts), as_prompts(continuations)
        if len(befores) == 1:
            befores *= len(afters)
        if len(befores) != len(afters):
            raise RequestValidationError(f"{len(befores)} prompts, {len(afters)} continuations: give as many of both")
        adapters = as_adapters(lora_request, len(afters))
        requests = [self._scored(*one) for one in zip(befores, afters, adapters, strict=True)]

        def beginning(request: Request) -> tuple[list[int], ActiveLoraAdapter | None]:
            return request.prompt[: request.score_from], request.adapter

        groups = [list(group) for _, group in itertools.groupby(requests, beginning)]
        for first, *others in groups:
            first.copies = others
        self._finish(groups, Track("scoring") if progress else None, sort=True)
        return [
            Score(
                prompt_token_ids=request.prompt[: request.score_from],
                token_ids=request.prompt[request.score_from :],
                logprobs=request.scores,
                greedy_ids=request.greedy_ids,
            )
            for request in requests
        ]

    def _finish(self, groups: Groups, track: Track | None, *, return_errors: bool = False, sort: bool = False) -> None:
        """Runs groups of requests that begin alike, of which the first has the others as its copies."""
        if not groups:
            self.model.kv_capacity()  # which a closed model refuses
        events: queue.SimpleQueue[None] = queue.SimpleQueue()
        for request in itertools.chain.from_iterable(groups):
            request.notify = lambda one: events.put(None) if one.is_done else None
        try:
            firsts = [first for first, *_ in groups]
            if sort:  # the longest first, so that rows of like length share steps
                firsts.sort(key=lambda one: -len(one.prompt))
            self._engine.submit(*firsts)
            for at, group in enumerate(groups if track is None else track(groups)):
                for request in group:
                    while not request.is_done:
                        events.get()
                    if request.error is not None and not return_errors:
                        request.error.add_note(f"prompts[{at}] of {len(groups)}")
                        raise request.error
        except BaseException as problem:
            self._engine.abort(*itertools.chain.from_iterable(groups))
            if isinstance(problem, FerrumError):
                self._engine.settle()
            raise

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
    ) -> Stream:
        """Yields the answer piece by piece, as soon as a piece can no longer change.

        The request starts with the first piece; an abandoned stream frees what it holds when it is closed.
        """
        (adapter,) = as_adapters(lora_request, 1)
        return Stream(self._engine, self.request(prompt, one_of(params, sampling_params), adapter))

    def request(
        self, prompt: Prompt, params: SamplingParams | None = None, adapter: ActiveLoraAdapter | None = None
    ) -> Request:
        """Returns a request for the engine, checked."""
        (one,) = as_prompts([prompt] if not isinstance(prompt, (str, Mapping)) else prompt)
        return self._request(one, params_of_one(params), adapter)

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Compiles what answering this prompt once and alone will need, the sampler included; leaves no trace.

        Log-probabilities of the prompt, and several answers, compile what they need more when first asked for.
        """
        request = self.request(prompt, params)
        try:
            self.model.prepare(request.cache_id, len(request.prompt))
        finally:
            self.model.release(request.cache_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora_request: Any = None,
        use_tqdm: bool = False,
    ) -> Any:
        """Answers a conversation by the model's chat template with a `RequestOutput`; a list of them with a list."""
        params = one_of(params, sampling_params)
        is_batch = bool(messages) and all(isinstance(one, (list, tuple)) for one in messages)
        conversations: Any = messages if is_batch else [messages]
        prompts = [self.chat_prompt(one, tools=tools) for one in conversations]
        if not is_batch:
            params = params_of_one(params)  # pyright: ignore[reportArgumentType]
        outs = self.generate(prompts, params, lora_request=lora_request, use_tqdm=use_tqdm)
        return outs if is_batch else outs[0]

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Returns the token ids of a conversation up to where the assistant answers."""
        tokenizer = self._need_tokenizer()
        if tokenizer.chat_template is None:
            raise UnsupportedError("this model has no chat template: pass a prompt instead of messages")
        text = render_chat(
            tokenizer.chat_template,
            messages,
            tools=tools,
            bos_token=tokenizer.bos_token or "",
            eos_token=tokenizer.eos_token or "",
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UnsupportedError("this LLM has no tokenizer: pass token ids")
        return self.tokenizer

    def _ids(self, prompt: str | Sequence[int], *, is_first: bool = True) -> list[int]:
        if isinstance(prompt, str):
            prompt = self._need_tokenizer().encode(prompt, add_special_tokens=is_first)
        return as_ids(prompt, self.model.config.vocab_size)

    def _requests(
        self, prompt: str | Sequence[int], params: SamplingParams, adapter: ActiveLoraAdapter | None
    ) -> list[Request]:
        """Returns the requests of one prompt: the first has the others as its copies."""
        first = self._request(prompt, params, adapter)
        for at in range(1, params.n):
            seed = None if params.seed is None else (int(params.seed) + at) % 2**32
            first.copies.append(self._request(first.prompt, replace(params, seed=seed), adapter))
        return [first, *first.copies]

    def _request(
        self, prompt: str | Sequence[int], params: SamplingParams, adapter: ActiveLoraAdapter | None
    ) -> Request:
        ids, capacity, vocab_size = self._ids(prompt), self.model.kv_capacity(), self.model.config.vocab_size
        if not ids:
            raise RequestValidationError("a prompt needs at least one token, this one has none")
        if len(ids) > capacity:
            raise RequestValidationError(f"the prompt has {len(ids)} tokens, the KV capacity is {capacity}")
        if (params.stop_texts or params.bad_words) and self.tokenizer is None:
            raise UnsupportedError("texts in the parameters need a tokenizer, and this LLM has none")
        for name in ("allowed_token_ids", "logit_bias"):
            wrong = [token for token in getattr(params, name) or () if token >= vocab_size]
            if wrong:
                raise RequestValidationError(f"{name} has {wrong[0]}, ids go from 0 to {vocab_size - 1}")
        own = self.tokenizer.eos_token_ids if self.tokenizer is not None and not params.ignore_eos else ()
        stop_ids = frozenset(own) | frozenset(params.stop_token_ids or ())
        stop_ids = frozenset(token for token in stop_ids if token < vocab_size)
        bad_words = self._bad_words(params)
        check_fits(params, stop_ids, bad_words)
        room = capacity - len(ids) + 1  # the last token is never read
        if params.min_tokens > room:
            raise RequestValidationError(
                f"min_tokens is {params.min_tokens}, a KV capacity of {capacity} leaves {room} after {len(ids)} tokens"
            )
        skip = params.skip_special_tokens
        request = Request(
            cache_id=self._engine.scheduler.new_cache_id(),
            prompt=ids,
            params=params,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            stop_ids=stop_ids,
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            detokenizer=None if self.tokenizer is None else Detokenizer(self.tokenizer, skip_special_tokens=skip),
            watcher=StopWatcher(params.stop_texts, includes_stop=params.include_stop_str_in_output),
            adapter=adapter,
            bad_words=bad_words,
            text_prompt=prompt if isinstance(prompt, str) else None,
            score_from=1 if params.num_prompt_logprobs >= 0 else None,
        )
        check_settings(request.cache_id, request.settings(), len(ids), vocab_size)
        return request

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Returns each bad word as the tokens it is by itself and after a space, if the model can choose them all."""
        found: list[list[int]] = []
        for word in params.bad_words or ():
            for text in (word, f" {word.lstrip()}"):
                ids = self._need_tokenizer().encode(text, add_special_tokens=False)
                if ids and max(ids) < self.model.config.vocab_size and ids not in found:
                    found.append(ids)
        return found

    def _scored(
        self,
        prompt: str | Sequence[int],
        continuation: str | Sequence[int],
        adapter: ActiveLoraAdapter | None = None,
    ) -> Request:
        """Returns the request that scores a continuation and generates nothing."""
        before, note = self._ids(prompt), ""
        if isinstance(prompt, str) and isinstance(continuation, str):
            joined, note = self._ids(prompt + continuation), ", both texts being tokenised as one"
            pairs = zip(before, joined, strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            before, after = joined[:shared], joined[shared:]
        else:
            after = self._ids(continuation, is_first=False)
        if not before or not after:
            raise RequestValidationError(
                f"scoring needs a token before and one to score: {len(before)} and {len(after)} are there{note}"
            )
        needed, capacity = len(before) + len(after) - 1, self.model.kv_capacity()  # the last token is never read
        if needed > capacity:
            raise RequestValidationError(f"scoring needs {needed} positions, the KV capacity is {capacity}")
        return Request(
            cache_id=self._engine.scheduler.new_cache_id(),
            prompt=before + after,
            params=SamplingParams(),
            seed=0,
            stop_ids=frozenset(),
            limit=0,
            detokenizer=None,
            watcher=StopWatcher(()),
            adapter=adapter,
            score_from=len(before),
        )
