"""Prometheus metrics under vLLM's names, so that dashboards made for it work."""

import threading
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ferrum_jax.contract.errors import FerrumError
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.request import Request
from ferrum_jax.serve.answers import AnswerProgress

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """The counts of one server, in a registry of its own; the event loop writes them."""

    def __init__(self, model: str):
        """Makes the metrics of a model with this name."""
        self.registry = CollectorRegistry()
        self._model = model

        def one(kind: Any, name: str, told: str, *labels: str, **more: Any) -> Any:
            made = kind(name, told, ["model_name", *labels], registry=self.registry, **more)
            return made if labels else made.labels(model_name=model)

        self.running = one(Gauge, "vllm:num_requests_running", "Answers that have a row in the batch.")
        self.waiting = one(Gauge, "vllm:num_requests_waiting", "Answers that wait for a row or the end of a pause.")
        self.kv_usage = one(Gauge, "vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all.")
        self.gpu_usage = one(Gauge, "vllm:gpu_cache_usage_perc", "The same, under its older name.")
        self.prefix_queries = one(Counter, "vllm:prefix_cache_queries", "Tokens of prompts that looked for a known "
                                  "prefix, once for each prompt, however many answers it has.")  # fmt: skip
        self.prefix_hits = one(Counter, "vllm:prefix_cache_hits", "Tokens that were known and not computed again, "
                               "also for preempted answers and other users of the model.")  # fmt: skip
        self.preemptions = one(Counter, "vllm:num_preemptions", "Times an answer lost its row, as the KV ran short.")
        self.prompt_tokens = one(Counter, "vllm:prompt_tokens", "Prompt tokens, once for each answer of a prompt.")
        self.generated = one(Counter, "vllm:generation_tokens", "Tokens generated.")
        self.drafted = one(Counter, "vllm:spec_decode_num_draft_tokens", "Tokens drafted and verified.")
        self.accepted = one(Counter, "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self.finished = one(Counter, "vllm:request_success", "Answers by how they ended.", "finished_reason")
        for reason in ("stop", "length", "abort"):  # so that they are reported from the start, as 0
            self.finished.labels(model_name=model, finished_reason=reason)
        self.first = one(Histogram, "vllm:time_to_first_token_seconds", "Time to the first token.", buckets=SECONDS)
        self.gaps = [  # under both of vLLM's names; one observation for every token
            one(Histogram, name, "Time between two tokens.", buckets=TOKEN_SECONDS)
            for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
        ]
        self.mean_gap = one(Histogram, "vllm:request_time_per_output_token_seconds",
                            "Mean time between two tokens of an answer.", buckets=TOKEN_SECONDS)  # fmt: skip
        self.whole = one(Histogram, "vllm:e2e_request_latency_seconds", "Time of an answer.", buckets=REQUEST_SECONDS)
        self.prompt_sizes = one(Histogram, "vllm:request_prompt_tokens", "Tokens of a prompt.", buckets=TOKENS)
        self.answer_sizes = one(Histogram, "vllm:request_generation_tokens", "Tokens of an answer.", buckets=TOKENS)
        self.choices = one(Histogram, "vllm:request_params_n", "Answers asked for.", buckets=(1, 2, 5, 10, 20))
        self.responses = one(Counter, "ferrum:http_responses", "HTTP answers by status.", "status")
        self._seen_hits = 0
        self._scraping = threading.Lock()  # scrapes run in threads

    def count_response(self, status: int) -> None:
        """Counts an HTTP response."""
        self.responses.labels(model_name=self._model, status=str(status)).inc()

    def count_tokens(self, choices: Iterable[AnswerProgress]) -> None:
        """Counts the times between tokens that were taken since the last call."""
        for choice in choices:
            for gap in choice.gaps:
                for histogram in self.gaps:
                    histogram.observe(gap)
            choice.gaps.clear()

    def count_lookup(self, first: Request) -> None:
        """Counts the tokens of a prompt, given its first request, if it began and was looked up in the prefix cache."""
        if first.score_from is None and (first.is_begun or first.num_read):
            self.prefix_queries.inc(len(first.prompt))

    def count_answer(self, choice: AnswerProgress, reason: str) -> float:
        """Counts an answer that has ended, and returns its duration in seconds."""
        end = time.perf_counter() if reason == "abort" else choice.last
        request, seconds = choice.request, end - choice.started
        generated = choice.num_taken
        self.count_tokens([choice])
        self.finished.labels(model_name=self._model, finished_reason=reason).inc()
        self.prompt_tokens.inc(len(request.prompt))
        self.generated.inc(generated)
        self.preemptions.inc(request.preemptions)
        self.drafted.inc(request.drafted)
        self.accepted.inc(request.accepted)
        self.whole.observe(seconds)
        self.prompt_sizes.observe(len(request.prompt))
        self.answer_sizes.observe(generated)
        if generated:
            self.first.observe(choice.first - choice.started)
        if generated > 1:
            self.mean_gap.observe((choice.last - choice.first) / (generated - 1))
        return seconds

    def render(self, llm: LLM, held: int) -> bytes:
        """Returns the text for Prometheus; call it outside the event loop, as it may wait for a step.

        `held` is the number of answers that wait outside the engine.
        """
        scheduler = llm.engine.scheduler
        with self._scraping:
            self.running.set(scheduler.num_running)
            self.waiting.set(scheduler.num_waiting + held)
            try:
                blocks, reuse = llm.model.kv_slot_capacity_snapshot(), llm.model.cache_metrics_snapshot()
            except FerrumError:  # the model was closed or has failed: its last figures stay
                blocks = reuse = None
            if blocks is not None:
                usage = 1 - blocks.free_blocks / max(1, blocks.total_blocks)
                self.kv_usage.set(usage)
                self.gpu_usage.set(usage)
            if reuse is not None:
                hits = int(reuse.get("saved_prefill_tokens", 0))
                self.prefix_hits.inc(max(0, hits - self._seen_hits))
                self._seen_hits = hits
            return generate_latest(self.registry)
