"""Many tokens of every request in one call of the model, where nothing else is to be done."""

from collections.abc import Sequence

from ferrum_jax.contract.decoding import MOST_STOP_IDS, DecodeRun
from ferrum_jax.contract.errors import ResourceExhaustedError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.generate.request import Request


def advance(model: DecoderOnlyLLM, batch: Sequence[Request], *, until_one_ends: bool) -> bool:
    """Gives every request of a batch its next tokens, as many as one call of `decode_n` yields.

    False, and nothing has changed, where the model has no such call, a prompt of the batch is not read yet, or blocks
    for so many tokens are short: then the batch goes on token by token.
    """
    most = model.loop_tokens
    if not most or not all(_can_run(request) for request in batch):
        return False
    runs = [
        DecodeRun(
            cache_id=request.cache_id,
            token=request.tokens[-1],
            pos=request.num_read,
            max_tokens=min(most, request.limit - len(request.answer)),
            stop_ids=request.stop_ids,
            sampling=request.params,
            seed=request.seed,
        )
        for request in batch
    ]
    try:
        found = model.decode_n(runs, until_one_ends=until_one_ends)
    except ResourceExhaustedError:
        return False
    for request, run in zip(batch, found, strict=True):
        for token, logprob in zip(run.token_ids, run.logprobs, strict=True):
            request.num_read += 1
            request.append(token, logprob if request.params.logprobs else None)
            if request.is_done:  # by a stop text, perhaps: what was decoded past it goes with the sequence
                break
    return True


def _can_run(request: Request) -> bool:
    is_read = 0 < request.num_read == len(request.tokens) - 1
    return is_read and not request.copies and len(request.stop_ids) <= MOST_STOP_IDS
