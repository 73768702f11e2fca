"""Requests as runs of `decode_n`, which chooses many tokens of each in one call."""

from collections.abc import Iterable

from ferrum_jax.compile.sampler import MAX_STOP_IDS
from ferrum_jax.contract.decoding import DecodeRun
from ferrum_jax.generate.request import Request


def only_decodes(request: Request) -> bool:
    """True of a request that only decodes, in ways that multi-step programs know."""
    params = request.params
    is_read = 0 < request.num_read == len(request.tokens) - 1
    is_simple = not (params.presence_penalty or params.frequency_penalty or params.logit_bias or params.min_tokens)
    is_simple = is_simple and params.allowed_token_ids is None and not request.bad_words and params.num_logprobs < 1
    return is_read and is_simple and not request.copies and len(request.stop_ids) <= MAX_STOP_IDS


def runs_of(requests: Iterable[Request], most: int) -> list[DecodeRun]:
    """Returns what each request has `decode_n` do: up to `most` tokens."""
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
