"""Logits on the host to the next token of each request, through one compiled function per number of rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.compile.buckets import choose_bucket, ladder
from ferrum_jax.contract.errors import BackendError, DeviceError
from ferrum_jax.contract.llm import Logits
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.request import Request
from ferrum_jax.sampling.sample import SampleInputs, sample


class Sampler:
    """Compiles `sample` for a ladder of row counts; the rest of a bucket is filled with greedy rows of zeros."""

    def __init__(self, vocab_size: int, max_rows: int):
        self._vocab_size = vocab_size
        self._rows = ladder(max_rows)
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def warmup(self) -> None:
        """Compiles every row count.

        Raises:
            BackendError: it does not compile.
        """
        for rows in self._rows:
            self._get(rows)

    def prepare(self, params: SamplingParams) -> None:
        """Compiles what a request that is alone needs: nothing, if it is plainly greedy."""
        if not params.is_plain_greedy:
            self._get(choose_bucket(self._rows, 1))

    def choose(self, requests: Sequence[Request], logits: Sequence[Logits]) -> list[tuple[int, float | None]]:
        """Gives each request's next token id, and its log-probability if that is wanted.

        Raises:
            BackendError: the function does not compile for as many rows.
            DeviceError: the device failed; nothing is lost, as the sampler keeps nothing there.
        """
        if all(request.params.is_plain_greedy for request in requests):
            return [(int(np.argmax(row)), None) for row in logits]
        chosen = []
        for start in range(0, len(requests), self._rows[-1]):
            group = slice(start, start + self._rows[-1])
            chosen += self._choose_group(requests[group], logits[group])
        return chosen

    def _choose_group(self, requests: Sequence[Request], logits: Sequence[Logits]) -> list[tuple[int, float | None]]:
        size = choose_bucket(self._rows, len(requests))
        padded = np.zeros((size, self._vocab_size), np.float32)
        padded[: len(logits)] = logits
        inputs = _blank_inputs(size, self._vocab_size)
        for at, request in enumerate(requests):
            params = request.params
            inputs.temperature[at] = params.temperature
            inputs.top_k[at] = min(params.top_k, self._vocab_size)
            inputs.top_p[at] = params.top_p
            inputs.min_p[at] = params.min_p
            inputs.repetition_penalty[at] = params.repetition_penalty
            inputs.seed[at] = request.seed
            inputs.position[at] = len(request.tokens)
            if params.repetition_penalty != 1.0:
                inputs.seen[at, request.tokens] = True
        executable = self._get(size)
        try:
            choice = executable(padded, inputs)
            ids, logprobs = np.asarray(choice.token_ids), np.asarray(choice.logprobs)
        except jax.errors.JaxRuntimeError as problem:
            raise DeviceError(f"sampling {len(requests)} rows failed on the device: {problem}") from problem
        return [
            (int(ids[at]), float(logprobs[at]) if request.params.logprobs else None)
            for at, request in enumerate(requests)
        ]

    def _get(self, rows: int) -> jax.stages.Compiled:
        if rows not in self._compiled:
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _blank_inputs(rows, self._vocab_size)
            )
            logits = jax.ShapeDtypeStruct((rows, self._vocab_size), jnp.float32)
            try:
                self._compiled[rows] = jax.jit(sample).lower(logits, shapes).compile()
            except jax.errors.JaxRuntimeError as problem:
                raise BackendError(f"the sampler of {rows} rows does not compile: {problem}") from problem
        return self._compiled[rows]


def _blank_inputs(rows: int, vocab_size: int) -> SampleInputs[np.ndarray]:
    return SampleInputs(
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        repetition_penalty=np.ones(rows, np.float32),
        seed=np.zeros(rows, np.uint32),
        position=np.zeros(rows, np.int32),
        seen=np.zeros((rows, vocab_size), np.bool_),
    )
