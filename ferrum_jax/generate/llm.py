"""`LLM`: prompts in, text out."""

import contextlib
import itertools
import os
import queue
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from ferrum_jax.contract.checks import check_int
from ferrum_jax.contract.errors import ConfigError, FerrumError, RequestValidationError, UnsupportedError, safe_repr
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.engine import Engine
from ferrum_jax.generate.intake import Intake
from ferrum_jax.generate.params import RequestOutput, SamplingParams, Score, one_of, params_of_each, params_of_one
from ferrum_jax.generate.prompts import Prompt, as_prompts
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.scheduler import Scheduler
from ferrum_jax.generate.speculation import Speculation, make_drafts
from ferrum_jax.generate.stream import Stream
from ferrum_jax.generate.structured import FormCompiler
from ferrum_jax.generate.tokenizer import Tokenizer, load_tokenizer
from ferrum_jax.generate.updates import LivePolicy, lora_update, params_update
from ferrum_jax.loading import check_settings, load, open_checkpoint
from ferrum_jax.models.specs import NewParams
from ferrum_jax.progress import Bar, track
from ferrum_jax.weights.gguf import GgufSource
from ferrum_jax.weights.hub import resolve

Requests = Sequence[Request]
Groups = Sequence[Requests]  # the requests of a group answer the same prompt


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
            tokenizer: a folder or `.gguf` file with a tokenizer, if the model's own is missing or not implemented.
            speculation: draft several tokens at a time and verify them together; if None, prompt lookup drafts if the
                engine's `spec_tokens` or `FERRUM_SPEC_N` is set, else there is no speculation.
            **settings: as for `ferrum_jax.load`.
        """
        check_settings(settings, "tokenizer", "speculation")
        if speculation is not None:
            _check_kind("speculation", speculation, Speculation)
            settings["engine"] = speculation.settle(settings.get("engine"))
        read = None if tokenizer is None else load_tokenizer(tokenizer)
        source = open_checkpoint(resolve(path, progress=settings.get("progress", True)))
        if read is None:
            is_gguf = isinstance(source, GgufSource)
            read = Tokenizer.from_gguf(source.file) if is_gguf else load_tokenizer(source.path)
        runner = load(source, **settings)
        try:
            self._setup(runner, read, speculation, runner.plan.spec_tokens, progress=settings.get("progress", True))
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

        Without a tokenizer no end of sequence is known either: give `SamplingParams.stop_token_ids`.

        At most `max_rows` sequences run at a time, and at most `chunk_tokens` prompt tokens go into one step. The
        defaults are a `ModelRunner`'s slots and the tokens of its largest step, and 8 and 512 for any other model. Two
        LLMs with one model compete for its slots and blocks, and do not wait for each other.

        Raises:
            ConfigError: an argument has a wrong type, a number is below 1, or draft and model do not go together.
        """
        if not callable(getattr(model, "prefill", None)):
            raise ConfigError(f"model is {safe_repr(model)}, expected a DecoderOnlyLLM")
        _check_kind("tokenizer", tokenizer, Tokenizer, may_lack=True)
        _check_kind("speculation", speculation, Speculation, may_lack=True)
        made = cls.__new__(cls)
        num_tokens = 0 if speculation is None else speculation.tokens_for(model)
        made._setup(model, tokenizer, speculation, num_tokens, max_rows, chunk_tokens)
        return made

    def _setup(
        self,
        model: DecoderOnlyLLM,
        tokenizer: Tokenizer | None,
        speculation: Speculation | None,
        num_tokens: int,
        max_rows: int | None = None,
        chunk_tokens: int | None = None,
        progress: bool = True,
    ) -> None:
        """Sets up an engine for a loaded model; `num_tokens` are drafted at a time."""
        runner = model if isinstance(model, ModelRunner) else None
        rows, tokens = 8, 512
        if runner is not None:
            rows, tokens = runner.plan.max_seqs, runner.plan.buckets.max_step_tokens * runner.num_replicas
        max_rows = check_int("max_rows", rows if max_rows is None else max_rows, 1, ConfigError)
        chunk_tokens = check_int("chunk_tokens", tokens if chunk_tokens is None else chunk_tokens, 1, ConfigError)
        drafts = make_drafts(speculation or Speculation(), model, num_tokens, max_rows, progress=progress)
        try:
            scheduler = Scheduler(model, max_rows=max_rows, chunk_tokens=chunk_tokens, drafts=drafts)
        except FerrumError:
            if drafts is not None:
                drafts.close()
            raise
        self.model, self.tokenizer = model, tokenizer
        self.engine = Engine(scheduler)  # public: callers may submit requests themselves
        forms = FormCompiler(tokenizer, model.config.vocab_size)
        self._intake = Intake(model, tokenizer, scheduler.new_cache_id, forms)

    def __enter__(self) -> Self:
        if isinstance(self.model, ModelRunner):
            self.model.__enter__()  # raises if it is closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def runner(self) -> ModelRunner:
        """The `ModelRunner` below, after aborted requests are freed.

        Raises:
            UnsupportedError: the model is not a `ModelRunner`.
        """
        self.engine.settle()
        if not isinstance(self.model, ModelRunner):
            raise UnsupportedError(f"this LLM runs a {type(self.model).__name__}, not a ModelRunner")
        return self.model

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that are in an answer; 0 if nothing was drafted."""
        speculator = self.engine.scheduler.speculator
        return speculator.accepted / speculator.drafted if speculator is not None and speculator.drafted else 0.0

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what the model's files recommend, as vLLM's method: temperature 1 where they name none."""
        return replace(SamplingParams(temperature=1.0), **(self.tokenizer.recommended if self.tokenizer else {}))

    def warmup(self, *, progress: bool = True, load: bool = False, scores: bool = False) -> None:
        """Compiles all programs that serving may need; options are `ModelRunner.warmup`'s, ignored for other models."""
        self.engine.settle()
        backend, speculator = self.engine.scheduler.backend, self.engine.scheduler.speculator
        more = {"masks": self.tokenizer is not None, "drafts": speculator is not None}
        backend.warmup(progress=progress, load=load, scores=scores, **more)
        if speculator is not None:
            speculator.source.warmup(progress=progress)

    def reset(self) -> None:
        """Drops every sequence of the model; also recovers from a step that failed on the device.

        Running requests are recomputed under the weights of now, and their answers stay the same unless weights have
        changed meanwhile. Requests that the failure ended stay failed.
        """
        self.engine.call(self.engine.scheduler.reset)

    def reset_prefix_cache(self) -> None:
        """Clears the prefix cache between two steps; running requests go on.

        Raises:
            UnsupportedError: the model is not a `ModelRunner`; whether it has a prefix cache is not known.
        """
        self.engine.call(self.runner.reset_prefix_cache)

    def set_params(self, params: NewParams, *, live: LivePolicy = "wait") -> int:
        """Sets new weights as `ModelRunner.set_params` does, between two steps, also while requests run.

        Args:
            params: the weights, or a function that computes them from the served ones, which it may donate; it is
                called in the engine's thread, and must not use this `LLM`. Arrays in the layout of the served ones are
                shared, not copied, and nothing is compiled.
            live: what happens to running requests. `wait`: they end under the old weights, others begin after the
                change. `abort`: they end with the reason `abort` and the answer so far; scoring ends with a
                CancelledError. `keep`: they go on with the KV of the old weights; requests without a token yet restart,
                and a request that is preempted or reset later is recomputed under the new weights. `recompute`: they go
                on, and their KV is recomputed under the new weights. Log-probabilities of a prompt are those of the
                weights that sampled its first token, or that continued a former answer.

        Returns:
            The version of these weights, as in `RequestOutput.weight_versions`.

        Raises:
            UnsupportedError: the model is not a `ModelRunner`.
            RequestValidationError, InvalidParameterError, ResourceExhaustedError: as `ModelRunner.set_params` raises;
                nothing has changed, unless a function has donated the served weights.
        """
        return self.engine.update(params_update(self.model, params, live))

    def set_lora(self, name: str, tree: Any, *, scale: float = 1.0, index: int = 0, live: LivePolicy = "wait") -> int:
        """Sets an adapter's arrays as `ModelRunner.set_lora` does, between two steps, also while requests run.

        Requests use it by `lora_request=name`. `live`, as for `set_params`, is what happens to requests that run under
        earlier arrays of this name; others go on. Returns the version for `weight_versions`. Raises as `set_params` and
        `ModelRunner.set_lora`.
        """
        return self.engine.update(lora_update(self.model, name, tree, live, scale=scale, index=index))

    def close(self) -> None:
        """Ends every request and frees the model, and a draft model that was loaded here."""
        self.engine.close()
        if self.engine.scheduler.speculator is not None:
            self.engine.scheduler.speculator.source.close()
        if isinstance(self.model, ModelRunner):
            self.model.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        interventions: Any = None,
        capture: Sequence[Any] | None = (),
        priority: int | Sequence[int] | None = None,
        progress: bool = False,
        use_tqdm: bool = False,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Answers prompts together; outputs are in the order of the prompts, the `n` outputs of a prompt side by side.

        Args:
            prompts: one text or list of token ids, or several; `{"prompt_token_ids": …}` counts as such a list. A
                `RequestOutput` with an incomplete answer is continued: its tokens stay, and count among `max_tokens`.
                Blocks of it that are still in the prefix cache are reused.
            params: one for all prompts or one for each; greedy if None.
            sampling_params: another name of `params`.
            lora_request: an adapter's name, an `ActiveLoraAdapter`, or an object with `lora_name` and `lora_path`; one
                for all prompts or one for each.
            interventions: changes at hook points (models/hooks.py): edits by point, or `Interventions`, which also give
                the positions; one for all prompts or one for each. New values do not recompile. Steps are compiled for
                the points of all prompts of a call together, when first needed, and each prompt with interventions has
                edits at all these points on the device. For a sweep over layers use `("resid_post", None)`.
            capture: hook points whose arrays `RequestOutput.captured` has, for every token that was computed. The
                prefix cache and speculation are then not used. Steps compile when they are first needed.
            priority: one for all prompts or one for each; 0 if None. Of waiting requests, lower numbers begin first;
                when the KV runs short, higher numbers are preempted first. A waiting request never takes the row of a
                running one.
            progress: show a bar of finished prompts.
            use_tqdm: another name of `progress`.
            return_errors: a prompt that fails ends with the reason `error` and the error in its output, and the others
                go on. Otherwise the error of the first prompt that failed is raised, with its index as a note, and the
                others are aborted.

        Raises:
            RequestValidationError: a prompt is empty or longer than the KV capacity, or an answer to be continued is
                complete; no request has started.
            UnsupportedError: there are hook points, and the model is not a `ModelRunner`.
            FerrumError: a prompt failed, and `return_errors` is False.
        """
        params = one_of(params, sampling_params)
        groups = self._groups(prompts, params, lora_request, interventions, capture, priority)
        self._finish(groups, track("generating") if progress or use_tqdm else None, return_errors=return_errors)
        return [request.output(return_error=return_errors) for group in groups for request in group]

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        interventions: Any = None,
        capture: Sequence[Any] | None = (),
        priority: int | Sequence[int] | None = None,
        return_errors: bool = False,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Answers prompts together as `generate`; yields each output, with its index, as soon as it is finished.

        The index is the output's index in the result of `generate`. Requests start when the first output is asked for;
        a loop that ends early, or an error, aborts the others.
        """
        params = one_of(params, sampling_params)
        groups = self._groups(prompts, params, lora_request, interventions, capture, priority)
        indices = {one: at for at, one in enumerate(itertools.chain.from_iterable(groups))}

        def outputs() -> Iterator[tuple[int, RequestOutput]]:
            with contextlib.closing(self._run([first for first, *_ in groups])) as settled:
                for request in settled:
                    yield indices[request], request.output(return_error=return_errors)

        return outputs()

    def _groups(self, prompts: Any, params: Any, *options: Any) -> Groups:
        """Checks prompts and options, and returns the requests of each prompt."""
        listed = as_prompts(prompts)
        each = params_of_each(params, len(listed))
        each_options = self._intake.options(len(listed), *options)
        return [self._intake.group(*one) for one in zip(listed, each, each_options, strict=True)]

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Any = None,
        interventions: Any = None,
        progress: bool = False,
    ) -> list[Score]:
        """Returns the log-probability of every token of each continuation after its prompt; nothing is generated.

        Args:
            prompts: texts or lists of token ids, one for each continuation or one for all. A beginning that successive
                continuations share is computed once, and a prefix in the prefix cache is not computed.
            continuations: texts or lists of token ids. A text after a text prompt is tokenised together with it, and
                scored from the first token that differs from the prompt's own tokens.
            params: one for all continuations or one for each. `Score.processed_logprobs` are then the figures that
                `generate` would report if it sampled the continuation with these parameters. Programs for this compile
                when they are first needed. Log-probabilities of the model's own distribution are always returned.
            lora_request: an adapter, as for `generate`; one for all continuations or one for each.
            interventions: as for `generate`; one for all continuations or one for each.
            progress: show a bar of finished continuations.

        Raises:
            RequestValidationError: the numbers of prompts and continuations differ, one of them is empty or has no
                token of its own, or both together exceed the KV capacity; no request has started.
        """
        befores, afters = as_prompts(prompts), as_prompts(continuations)
        if len(befores) == 1:
            befores *= len(afters)
        if len(befores) != len(afters):
            raise RequestValidationError(f"{len(befores)} prompts, {len(afters)} continuations: give as many of both")
        each_options = self._intake.options(len(afters), lora_request, interventions)
        each = [None] * len(afters) if params is None else params_of_each(params, len(afters))
        requests = [self._intake.scored(*one) for one in zip(befores, afters, each_options, each, strict=True)]

        def beginning(request: Request) -> tuple[Any, ...]:
            return request.prompt[: request.score_from], request.adapter, id(request.interventions)

        firsts: list[Request] = []
        for _, group in itertools.groupby(requests, beginning):
            first, *first.copies = group
            firsts.append(first)
        firsts.sort(key=lambda one: -len(one.prompt))  # the longest first: rows of similar length then share steps
        self._finish([[one] for one in requests], track("scoring") if progress else None, firsts=firsts)
        return [
            Score(
                prompt_token_ids=request.prompt[: request.score_from],
                token_ids=request.prompt[request.score_from :],
                logprobs=request.scores,
                greedy_ids=request.greedy_ids,
                processed_logprobs=request.processed_scores if request.is_scored_by_params else None,
            )
            for request in requests
        ]

    def _finish(self, groups: Groups, bar: Bar | None, *, firsts: Requests = (), return_errors: bool = False) -> None:
        """Runs all requests to their end; raises the error of the first that failed unless `return_errors`.

        `firsts` are the requests to begin with, whose `copies` are the others; the first of each group if not given.
        """
        if not groups:
            self.model.kv_capacity()  # raises if the model is closed
        try:
            tracked = contextlib.nullcontext(groups) if bar is None else bar(groups)
            with contextlib.closing(self._run(firsts or [first for first, *_ in groups])) as settled, tracked as each:
                for at, group in enumerate(each):
                    for request in group:
                        while not request.is_settled:
                            next(settled)
                        if request.error is not None and not return_errors:
                            request.error.add_note(f"prompts[{at}] of {len(groups)}")
                            raise request.error
        except FerrumError:
            self.engine.settle()
            raise

    def _run(self, firsts: Requests) -> Generator[Request]:
        """Runs requests and their `copies`; yields each once it is settled, and aborts the others when it is closed."""
        events: queue.SimpleQueue[Request] = queue.SimpleQueue()
        left = {one for first in firsts for one in (first, *first.copies)}
        for request in left:
            request.notify = lambda one: events.put(one) if one.is_settled else None
        try:
            self.engine.submit(*firsts)
            while left:
                if (request := events.get()) in left:
                    left.discard(request)
                    yield request
        finally:
            self.engine.abort(*left)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        interventions: Any = None,
        capture: Sequence[Any] | None = (),
        priority: int = 0,
    ) -> Stream:
        """Yields the answer piece by piece, as soon as a piece can no longer change.

        The request starts when the first piece is asked for; closing an unfinished stream aborts it.
        """
        params = one_of(params, sampling_params)
        return Stream(self.engine, self.request(prompt, params, lora_request, interventions, capture, priority))

    def request(self, prompt: Prompt, params: SamplingParams | None = None, *options: Any, **named: Any) -> Request:
        """Returns a checked request for the engine; the other arguments are those of `group`."""
        return self.group(prompt, params_of_one(params), *options, **named)[0]

    def group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: Any = None,
        interventions: Any = None,
        capture: Sequence[Any] | None = (),
        priority: int = 0,
    ) -> list[Request]:
        """Returns requests for the engine, one for each of the `n` answers; the others are `copies` of the first.

        Arguments are those of `generate`.
        """
        is_one = isinstance(prompt, (str, Mapping, RequestOutput))
        (one,) = as_prompts(prompt if is_one else {"prompt_token_ids": prompt})
        (options,) = self._intake.options(1, lora_request, interventions, capture, priority)
        return self._intake.group(one, params, options)

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Compiles the programs for answering this prompt once and alone, the sampler included; changes no state.

        Programs for log-probabilities of the prompt, several answers and structured output compile when first needed.
        """
        self.engine.prepare(self.request(prompt, params))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Any = None,
        interventions: Any = None,
        capture: Sequence[Any] | None = (),
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> Any:
        """Answers a conversation, rendered by the model's chat template; for a list of them, returns a list of outputs.

        With `continue_final_message` and `add_generation_prompt=False` the answer continues the last message.
        `chat_template_kwargs` are further variables of the template, such as `enable_thinking`.
        """
        params = one_of(params, sampling_params)
        is_batch = bool(messages) and all(isinstance(one, (list, tuple)) for one in messages)
        conversations: Any = messages if is_batch else [messages]
        how: Any = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        how |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        prompts = [self.chat_prompt(one, **how) for one in conversations]
        if not is_batch:
            params = params_of_one(params)  # pyright: ignore[reportArgumentType]
        options: Any = {"lora_request": lora_request, "interventions": interventions, "capture": capture}
        outs = self.generate(prompts, params, **options, priority=priority, use_tqdm=use_tqdm)
        return outs if is_batch else outs[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Returns the token ids of a conversation up to the assistant's answer, rendered with the options of `chat`."""
        return self._intake.conversation(messages, **options)


def _check_kind(name: str, given: Any, kind: type, *, may_lack: bool = False) -> None:
    """Raises ConfigError, naming the argument, unless it has this type or, with `may_lack`, is None."""
    if not isinstance(given, kind) and not (may_lack and given is None):
        raise ConfigError(f"{name} is {safe_repr(given)}, expected a {kind.__name__}")
