"""Logits on the host to the next token of each request, through one compiled function per number of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.artifacts import Artifacts, build
from ferrum_jax.compile.buckets import choose_bucket, ladder
from ferrum_jax.contract.errors import BackendError, DeviceError
from ferrum_jax.contract.llm import DecoderOnlyLLM, Logits
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.request import Request
from ferrum_jax.ops.sampling import SampleInputs, distribution, sample

Executables = dict[int, jax.stages.Compiled]  # by number of rows


@dataclass(frozen=True)
class Turn:
    """What the choice of a token depends on besides the logits: how it is made, and the tokens before it."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]


def artifacts_of(model: DecoderOnlyLLM) -> Artifacts | None:
    """Where the compiled steps of a model are kept, if they are."""
    return model.artifacts if isinstance(model, ModelRunner) else None


class Sampler:
    """Compiles `sample` for a ladder of row counts; the rest of a bucket is filled with greedy rows of zeros."""

    def __init__(self, vocab_size: int, max_rows: int, artifacts: Artifacts | None = None):
        self._vocab_size = vocab_size
        self._artifacts = artifacts
        self._rows = ladder(max_rows)
        self._compiled: Executables = {}
        self._distributions: Executables = {}

    def warmup(self, *, distributions: bool = False) -> None:
        """Compiles every row count; `distributions`: of that function as well.

        Raises:
            BackendError: it does not compile.
        """
        for rows in self._rows:
            self._get(rows, self._compiled, sample)
            if distributions:
                self._get(rows, self._distributions, distribution)

    def prepare(self, params: SamplingParams, count: int = 1) -> None:
        """Compiles what `count` rows of one request need: nothing, if it is plainly greedy."""
        if not params.is_plain_greedy:
            self._get(choose_bucket(self._rows, count), self._compiled, sample)

    def choose(self, turns: Sequence[Request | Turn], logits: Sequence[Logits]) -> list[tuple[int, float | None]]:
        """Gives each request's next token id, and its log-probability if that is wanted.

        Raises:
            BackendError: the function does not compile for as many rows.
            DeviceError: the device failed; nothing is lost, as the sampler keeps nothing there.
        """
        if all(turn.params.is_plain_greedy for turn in turns):
            return [(int(np.argmax(row)), None) for row in logits]
        chosen = []
        for start in range(0, len(turns), self._rows[-1]):
            group = slice(start, start + self._rows[-1])
            choice = self._run(turns[group], logits[group], self._compiled, sample)
            ids, logprobs = np.asarray(choice.token_ids), np.asarray(choice.logprobs)
            chosen += [
                (int(ids[at]), float(logprobs[at]) if turn.params.logprobs else None)
                for at, turn in enumerate(turns[group])
            ]
        return chosen

    def distributions(self, turns: Sequence[Request | Turn], logits: Sequence[Logits]) -> NDArray[np.float64]:
        """Gives the probabilities with which `choose` draws each token, `[n, vocab]`; each row sums to 1.

        Raises:
            BackendError, DeviceError: as `choose`.
        """
        rows = []
        for start in range(0, len(turns), self._rows[-1]):
            group = slice(start, start + self._rows[-1])
            found = self._run(turns[group], logits[group], self._distributions, distribution)
            rows.append(np.asarray(found, np.float64)[: len(turns[group])])
        probabilities = np.concatenate(rows)
        return probabilities / probabilities.sum(axis=-1, keepdims=True)

    def _run(
        self,
        turns: Sequence[Request | Turn],
        logits: Sequence[Logits],
        executables: Executables,
        function: Callable,
    ):
        size = choose_bucket(self._rows, len(turns))
        padded = np.zeros((size, self._vocab_size), np.float32)
        padded[: len(logits)] = logits
        inputs = _fill(turns, size, self._vocab_size)
        executable = self._get(size, executables, function)
        try:
            return jax.block_until_ready(executable(padded, inputs))
        except jax.errors.JaxRuntimeError as problem:
            raise DeviceError(f"sampling {len(turns)} rows failed on the device: {problem}") from problem

    def _get(self, rows: int, executables: Executables, function: Callable) -> jax.stages.Compiled:
        if rows not in executables:
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _blank_inputs(rows, self._vocab_size)
            )
            logits = jax.ShapeDtypeStruct((rows, self._vocab_size), jnp.float32)
            name = f"{function.__name__} {rows} rows of {self._vocab_size}"
            try:
                executables[rows] = build(name, lambda: jax.jit(function).lower(logits, shapes), self._artifacts)
            except jax.errors.JaxRuntimeError as problem:
                raise BackendError(f"the sampler of {rows} rows does not compile: {problem}") from problem
        return executables[rows]


def _fill(turns: Sequence[Request | Turn], size: int, vocab_size: int) -> SampleInputs[np.ndarray]:
    inputs = _blank_inputs(size, vocab_size)
    for at, turn in enumerate(turns):
        params = turn.params
        inputs.temperature[at] = params.temperature
        inputs.top_k[at] = min(params.top_k, vocab_size)
        inputs.top_p[at] = params.top_p
        inputs.min_p[at] = params.min_p
        inputs.repetition_penalty[at] = params.repetition_penalty
        inputs.seed[at] = turn.seed
        inputs.position[at] = len(turn.tokens)
        if params.repetition_penalty != 1.0:
            inputs.seen[at, turn.tokens] = True
    return inputs


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
