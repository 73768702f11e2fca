"""Callers of an engine that shares its runner with others: some wait, some are interrupted, stopped or walk away."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

from ferrum_jax import LLM, AsyncLLM
from ferrum_jax.contract.errors import CancelledError, ResourceExhaustedError
from ferrum_jax.generate.intake import RequestOptions
from ferrum_jax.generate.params import RequestOutput, SamplingParams
from tests.executor.streams import Client, Known

MOST_TOKENS = 12  # of an answer


class EngineClient(Client):
    """Asks for answers, of which the greedy ones are known."""

    def asked(self) -> tuple[Known, SamplingParams]:
        """A prompt, and how it shall be answered."""
        known = self.begin()
        known = known.grown(self.count(known, 24))
        params = SamplingParams(max_tokens=self.count(known, MOST_TOKENS), ignore_eos=True)
        if self.draw.randrange(2):
            params = SamplingParams(
                max_tokens=params.max_tokens, ignore_eos=True, temperature=1.3, top_k=9, seed=self.draw.randrange(99),
                repetition_penalty=1.2, logprobs=2,
            )  # fmt: skip
        return known, params

    def check(self, output: RequestOutput, known: Known, params: SamplingParams) -> None:
        """Fails unless an answer, which need not be finished, is one to its prompt."""
        assert output.prompt_token_ids == self.text(known)
        assert params.max_tokens is not None
        assert len(output.token_ids) <= params.max_tokens
        assert not output.finished or len(output.token_ids) == params.max_tokens
        if params.temperature == 0 and output.token_ids:
            self.truth.expect_greedy(output.token_ids, known)

    def text(self, known: Known) -> list[int]:
        return Known(known.stream).next(known.length)


class CallerClient(EngineClient):
    """Calls `LLM.generate` in a thread of its own, and is often interrupted while it waits."""

    def __init__(self, llm: LLM, *rest: Any):
        super().__init__(*rest)
        self.llm = llm

    def step(self) -> None:
        """Does one thing."""
        self.counts["generations"] += 1
        asked = [self.asked() for _ in range(self.draw.randint(1, 3))]
        try:
            if self.draw.random() < 0.3:
                self.generate_interrupted(asked)
            else:
                self.generate(asked)
        except KeyboardInterrupt:
            self.counts["interrupted"] += 1
        except ResourceExhaustedError:  # no room for an adapter
            self.counts["refused"] += 1

    def generate_interrupted(self, asked: Sequence[tuple[Known, SamplingParams]]) -> None:
        """Generates as `generate` does, with an interrupt while it waits for one of the answers."""
        left = self.draw.randrange(len(asked))

        def interrupt(groups: list[Any]) -> Iterator[Any]:
            yield from groups[:left]
            raise KeyboardInterrupt

        requests = [
            self.llm._intake.group(self.text(known), params, RequestOptions(self.adapter(known)))
            for known, params in asked
        ]
        self.llm._finish(requests, lambda groups: contextlib.nullcontext(interrupt(cast(Any, groups))))

    def generate(self, asked: Sequence[tuple[Known, SamplingParams]]) -> None:
        prompts = [self.text(known) for known, _ in asked]
        adapters = [self.adapter(known) for known, _ in asked]
        outputs = self.llm.generate(prompts, [params for _, params in asked], lora_request=adapters)
        for output, one in zip(outputs, asked, strict=True):
            self.check(output, *one)


class ListenerClient(EngineClient):
    """Iterates over `AsyncLLM.generate` to its end, leaves early, is cancelled, or has its request aborted."""

    def __init__(self, llm: AsyncLLM, *rest: Any):
        super().__init__(*rest)
        self.llm = llm

    async def step(self) -> None:
        """Does one thing."""
        self.counts["generations"] += 1
        known, params = self.asked()
        act = self.draw.choice(["listens", "listens", "leaves", "cancelled", "aborted"])
        name = f"{self.name} {self.counts['generations']}"
        task = asyncio.create_task(self.listen(name, known, params, leaves=act == "leaves"))
        if act in ("cancelled", "aborted"):
            await asyncio.sleep(self.draw.choice([0, 0.001, 0.01, 0.1, 0.3]))
            if act == "cancelled":
                task.cancel()
            await self.llm.abort(name)
        try:
            await task
            self.counts[act] += 1
        except (asyncio.CancelledError, CancelledError):
            assert act in ("cancelled", "aborted")
            self.counts[act] += 1
        except ResourceExhaustedError:
            self.counts["refused"] += 1

    async def listen(self, name: str, known: Known, params: SamplingParams, *, leaves: bool) -> None:
        async for output in self.llm.generate(
            self.text(known), params, request_id=name, lora_request=self.adapter(known)
        ):
            self.check(output, known, params)
            if leaves and self.draw.randrange(2):
                return
