"""The next work of requests: rows of a step, or runs of `decode_n`, which chooses many tokens of each in one call."""

from collections.abc import Iterable

import numpy as np

from ferrum_jax.compile.sampler import MAX_STOP_IDS
from ferrum_jax.contract.decoding import DecodeRun
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.batch import NO_OUTPUT, Output, ScheduledRow, TargetScores
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.request import Request


def next_row(request: Request, budget: int) -> ScheduledRow | None:
    """Returns a request's row of the next step, with at most `budget` tokens of its prompt; None if it has to wait."""
    if request.is_scoring:
        return _scoring_row(request, budget)
    start, unread = request.num_read, request.unread
    if not unread:
        if not request.num_in_flight or request.num_left < 1 or request.needs_every_token:
            return None
        return ScheduledRow(request.cache_id, None, start, request.output_wanted(), request.capture)
    count, capture = len(unread), request.capture
    if start < request.num_captured:  # recomputed: they were captured when they were first read
        count, capture = min(count, request.num_captured - start), ()
    if request.copies:
        count = min(count, request.fork_position - start)
    if count > 1:
        count = min(count, budget)
    if count < 1:
        return None
    is_final = start + count == len(request.tokens)
    output: Output = request.output_wanted() if is_final else NO_OUTPUT
    return ScheduledRow(request.cache_id, np.array(unread[:count], np.int32), start, output, capture)


def _scoring_row(request: Request, budget: int) -> ScheduledRow | None:
    start = request.num_read
    end = start + min(request.num_unscored, budget)
    if end <= start or request.has_scores_in_flight:
        return None
    tokens = np.array(request.prompt[start : end + 1], np.int32)
    with_alternatives = request.params.num_prompt_logprobs > 0
    settings = request.settings() if request.is_scored_by_params else None
    output = TargetScores(tokens[1:], with_alternatives, settings)
    return ScheduledRow(request.cache_id, tokens[:-1], start, output, request.capture)


def only_decodes(request: Request, model: DecoderOnlyLLM) -> bool:
    """True if a request only decodes, with settings that multi-step programs support.

    A model that is no `ModelRunner` need not tell log-probabilities under a distribution that is not its own.
    """
    params = request.params
    is_read = 0 < request.num_read == len(request.tokens) - 1
    is_simple = not (params.presence_penalty or params.frequency_penalty or params.logit_bias or params.min_tokens)
    is_simple = is_simple and params.allowed_token_ids is None and not request.bad_words
    is_own = params.temperature in (0, 1) and params.repetition_penalty == params.top_p == 1
    is_own = is_own and not (params.top_k or params.min_p)
    is_told = is_own or isinstance(model, ModelRunner)
    is_simple = is_simple and params.num_logprobs < (1 if is_told else 0)
    is_simple = is_simple and request.interventions is None and not request.capture and request.form is None
    return is_read and is_simple and not request.copies and len(request.stop_ids) <= MAX_STOP_IDS


def runs_of(requests: Iterable[Request], most: int) -> list[DecodeRun]:
    """Returns a run of up to `most` tokens for each request."""
    return [
        DecodeRun(
            cache_id=request.cache_id,
            token=request.tokens[-1],
            pos=request.num_read,
            max_tokens=min(most, request.num_left),
            stop_ids=request.stop_ids,
            sampling=request.params,
            seed=request.seed,
        )
        for request in requests
    ]
