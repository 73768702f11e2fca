"""What a request does in the next step."""

import numpy as np

from ferrum_jax.executor.batch import NO_OUTPUT, Output, ScheduledRow, TargetScores
from ferrum_jax.generate.request import Request


def next_row(request: Request, budget: int) -> ScheduledRow | None:
    """Returns a request's row of the next step, with at most `budget` tokens of its prompt; None if it has to wait."""
    if request.is_scoring:
        return _scoring_row(request, budget)
    start, unread = request.num_read, request.unread
    if not unread:
        if not request.num_in_flight or request.num_left < 1 or (request.bad_words and request.needs_every_token):
            return None
        return ScheduledRow(request.cache_id, None, start, request.output_wanted())
    count = len(unread)
    if request.copies:
        count = min(count, request.fork_position - start)
    if count > 1:
        count = min(count, budget)
    if count < 1:
        return None
    is_final = start + count == len(request.tokens)
    output: Output = request.output_wanted() if is_final else NO_OUTPUT
    return ScheduledRow(request.cache_id, np.array(unread[:count], np.int32), start, output)


def _scoring_row(request: Request, budget: int) -> ScheduledRow | None:
    start = request.num_read
    end = start + min(request.num_unscored, budget)
    if end <= start or request.has_scores_in_flight:
        return None
    tokens = np.array(request.prompt[start : end + 1], np.int32)
    with_alternatives = request.params.num_prompt_logprobs > 0
    return ScheduledRow(request.cache_id, tokens[:-1], start, TargetScores(tokens[1:], with_alternatives))
