"""Callers that share one runner, each with sequences of its own, so that each knows what every answer must be."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import DecodeRun, FullLogits, KvCacheHandle, KvSlotRequest
from ferrum_jax.contract.errors import (
    AlreadyExistsError,
    NotFoundError,
    RequestValidationError,
    ResourceExhaustedError,
)
from ferrum_jax.executor import ModelRunner
from tests.executor.answers import V
from tests.executor.asking import batch, item, prompt, token
from tests.executor.conftest import ADAPTER_NAMES
from tests.executor.streams import STREAMS, Client, Known


class ThreadClient(Client):
    """Calls a runner directly."""

    def __init__(self, runner: ModelRunner, *rest: Any):
        super().__init__(*rest)
        self.runner = runner
        self.ids = [f"{self.name}-{at}" for at in range(3)]
        self.held: dict[str, Known] = {}

    def step(self) -> None:
        """Does one thing."""
        often = [self.prefill, self.decode, self.decode, self.unified, self.unified]
        rest = [self.fork, self.truncate, self.release, self.reserve, self.adapters, self.look, self.refuse]
        act = self.draw.choice([*often, self.prefill, self.decode, self.verify, self.decode_n, *rest])
        self.counts["calls"] += 1
        try:
            act()
        except ResourceExhaustedError:
            self.counts["refused"] += 1
            self.look()
            if self.draw.randrange(2):
                self.release()

    def release_all(self) -> None:
        for key in self.ids:
            self.runner.release(key)

    def opened(self, key: str) -> Known:
        """Returns what an id holds, which is nothing, under an adapter, if it is unknown."""
        if key not in self.held:
            known = self.begin()
            self.runner.set_lora_adapter_for_cache(key, self.adapter(known))
            return known
        if not self.held[key].room:
            self.runner.truncate_kv(key, 0)
            self.held[key] = replace(self.held[key], length=0)
        return self.held[key]

    def several(self) -> dict[str, Known]:
        return {key: self.opened(key) for key in self.draw.sample(self.ids, self.draw.randint(1, 3))}

    def prefill(self) -> None:
        key = self.draw.choice(self.ids)
        known = self.opened(key)
        count = self.count(known, 30)
        logits = self.runner.prefill(key, known.next(count))
        self.held[key] = known.grown(count)
        self.truth.expect(logits, self.held[key])

    def decode(self) -> None:
        rows = self.several()
        policies = [self.policy() for _ in rows]
        answers = self.runner.decode_batch_with_logits_policy(
            [(key, known.next(1)[0], known.length) for key, known in rows.items()], policies
        )
        for (key, known), answer, policy in zip(rows.items(), answers, policies, strict=True):
            self.held[key] = known.grown(1)
            self.truth.expect(answer, self.held[key], policy)

    def decode_n(self) -> None:
        rows = {key: known for key, known in self.several().items() if known.length}
        runs = [
            DecodeRun(cache_id=key, token=known.next(1)[0], pos=known.length, max_tokens=self.count(known, 6))
            for key, known in rows.items()
        ]
        for (key, known), run, found in zip(rows.items(), runs, self.runner.decode_n(runs), strict=True):
            assert len(found.token_ids) == run.max_tokens
            self.truth.expect_greedy(found.token_ids, known.grown(1))
            self.counts["decoded at once"] += run.max_tokens
            self.runner.truncate_kv(key, known.length + 1)  # what was chosen is in no stream
            self.held[key] = known.grown(1)

    def unified(self) -> None:
        rows = {key: (known, self.count(known), bool(self.draw.randrange(3))) for key, known in self.several().items()}
        policies = [self.policy() for _ in rows]
        answers = self.runner.unified_forward_with_logits_policy(
            [(key, known.next(count), known.length, final) for key, (known, count, final) in rows.items()], policies
        )
        for (key, (known, count, final)), answer, policy in zip(rows.items(), answers, policies, strict=True):
            self.held[key] = known.grown(count)
            assert (answer is not None) == final
            if final:
                self.truth.expect(answer, self.held[key], policy)

    def verify(self) -> None:
        rows = {key: (known, self.count(known)) for key, known in self.several().items()}
        answers = self.runner.forward_verify_batch([(key, known.next(n)) for key, (known, n) in rows.items()])
        for (key, (known, count)), logits in zip(rows.items(), answers, strict=True):
            self.held[key] = known.grown(count)
            self.truth.expect_all(logits, self.held[key], count)

    def fork(self) -> None:
        unknown = [key for key in self.ids if key not in self.held]
        if self.held and unknown:
            source = self.draw.choice(list(self.held))
            self.runner.release(unknown[0])  # which may be bound to an adapter by a call that was refused
            self.runner.fork(source, unknown[0])
            self.held[unknown[0]] = self.held[source]

    def truncate(self) -> None:
        for key, known in list(self.held.items())[:1]:
            left = self.cut(known)
            self.runner.truncate_kv(key, left.length)
            self.held[key] = left

    def release(self) -> None:
        key = self.draw.choice(self.ids)
        self.runner.release(key)
        self.held.pop(key, None)

    def reserve(self) -> None:
        key = self.draw.choice(self.ids)
        known = self.opened(key)
        request = KvSlotRequest(cache_id=key, target_len=known.length + self.count(known))
        self.runner.reserve_kv_slots([request])
        self.held[key] = known

    def adapters(self) -> None:
        name = self.draw.choice(ADAPTER_NAMES)
        try:
            self.runner.load_lora(name, self.folders[name])
        except AlreadyExistsError:
            self.counts["loaded already"] += 1
        try:
            self.runner.unload_lora(name)
        except (NotFoundError, RequestValidationError):  # somebody else was faster, or uses it
            self.counts["not unloaded"] += 1

    def look(self) -> None:
        self.runner.cache_metrics_snapshot()
        for key in self.ids:
            known = self.held.get(key)
            assert self.runner.kv_len(key) == (None if known is None else known.length)
            if known is not None and known.length:
                k, v = self.runner.kv_cache(key, 1)
                assert len(k) == len(v) == known.length
                assert np.isfinite(k).all()
                assert np.isfinite(v).all()

    def refuse(self) -> None:
        key = self.draw.choice(self.ids)
        at = self.held[key].length if key in self.held else 0
        for call in (lambda: self.runner.decode(key, 0, at + 1), lambda: self.runner.prefill(key, [1, V])):
            try:
                call()
            except RequestValidationError:
                self.counts["refused"] += 1
            else:
                raise AssertionError(f"{key} was given nonsense and took it")


class TaskClient(Client):
    """Calls an executor, and often does not wait for the answer."""

    def __init__(self, executor: LlmExecutor, *rest: Any):
        super().__init__(*rest)
        self.executor = executor
        self.held: dict[KvCacheHandle, Known] = {}

    async def step(self) -> None:
        """Does one thing."""
        acts = [self.prefill, self.prefills, self.decode, self.decodes, self.unified, self.verify, self.speculate]
        acts += [self.decode, self.truncate, self.clone, self.release, self.forward]
        act = self.draw.choice(acts if self.held else [self.prefill, self.prefills, self.forward])
        self.counts["calls"] += 1
        try:
            await act()
        except ResourceExhaustedError:
            self.counts["refused"] += 1
            self.look()
            await self.release()
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            self.look()
        await asyncio.sleep(0)

    def release_all(self) -> None:
        for handle in self.held:
            self.executor.release_cache(handle.cache_id)
        self.held.clear()

    async def ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Waits for a call, or cancels it sooner or later."""
        task = asyncio.create_task(call)
        if self.draw.random() < 0.3:
            await asyncio.sleep(self.draw.choice([0, 0, 0.001, 0.01, 0.1, 0.3]))
            task.cancel()
        return await task

    def keep(self, before: KvCacheHandle | None, handle: KvCacheHandle, known: Known) -> Known:
        assert handle.num_tokens == known.length
        if before is not None:
            del self.held[before]
        self.held[handle] = known
        return known

    def some(self, most: int = 1) -> list[tuple[KvCacheHandle, Known]]:
        """Held sequences that have room."""
        roomy = [pair for pair in self.held.items() if pair[1].room]
        return self.draw.sample(roomy, min(len(roomy), self.draw.randint(1, most)))

    def look(self) -> None:
        for handle, known in self.held.items():
            assert self.executor.handle(handle.cache_id).num_tokens == known.length
            assert handle.is_valid()

    def metadata(self, known: Known) -> dict[str, Any]:
        adapter = self.adapter(known)
        return {} if adapter is None else {"ferrum_lora_adapter": adapter.name, "ferrum_lora_path": adapter.path}

    def chunk(self) -> tuple[KvCacheHandle | None, Known, int, bool]:
        """A new sequence, or a held one, how many tokens it shall grow by, and whether all logits are wanted."""
        pair = self.some() if self.draw.randrange(2) or len(self.held) > 1 else []
        handle, known = pair[0] if pair else (None, self.begin())
        return handle, known, self.count(known, 24), not self.draw.randrange(4)

    async def prefill(self) -> None:
        await self._prefill(lambda inputs: self._one(inputs[0]), [self.chunk()])

    async def prefills(self) -> None:
        chunks = [self.chunk() for _ in range(2)]
        if chunks[0][0] is None or chunks[0][0] is not chunks[1][0]:
            await self._prefill(self.executor.batch_prefill, chunks)

    async def _one(self, given: Any) -> list[Any]:
        return [await self.executor.prefill(given)]

    async def _prefill(
        self,
        call: Callable[[list[Any]], Coroutine[Any, Any, Any]],
        chunks: Sequence[tuple[KvCacheHandle | None, Known, int, bool]],
    ) -> None:
        inputs = [
            prompt(known.next(count), handle, metadata={**self.metadata(known), "ferrum_require_full_logits": full})
            for handle, known, count, full in chunks
        ]
        for (handle, known, count, full), out in zip(chunks, await self.ask(call(inputs)), strict=True):
            grown = self.keep(handle, out.kv_cache, known.grown(count))
            self.truth.expect_all(out.logits[0], grown, count if full else 1)

    async def decode(self) -> None:
        for handle, known in self.some():
            policy = self.policy()
            out = await self.ask(self.executor.decode(token(known.next(1)[0], handle, logits_policy=policy)))
            grown = self.keep(handle, out.kv_cache, known.grown(1))
            self.truth.expect(out.logits[0] if isinstance(policy, FullLogits) else out.logits[0, 0], grown, policy)

    async def decodes(self) -> None:
        rows = self.some(2)
        outs = await self.ask(self.executor.batch_decode([token(known.next(1)[0], handle) for handle, known in rows]))
        for (handle, known), out in zip(rows, outs, strict=True):
            self.truth.expect(out.logits[0], self.keep(handle, out.kv_cache, known.grown(1)))

    async def unified(self) -> None:
        rows = [(handle, known, self.count(known), self.policy()) for handle, known in self.some(2)]
        items = [
            item("", known.next(count), known.length, kv_cache=handle, logits_policy=policy)
            for handle, known, count, policy in rows
        ]
        answers = await self.ask(self.executor.unified_decode(batch(*items)))
        for (handle, known, count, policy), answer in zip(rows, answers, strict=True):
            after = handle.with_sequence_length(handle.num_tokens + count)
            self.truth.expect(answer, self.keep(handle, after, known.grown(count)), policy)

    async def verify(self) -> None:
        for handle, known in self.some():
            count = self.count(known, 6)
            outs = await self.ask(self.executor.forward_verify([token(one, handle) for one in known.next(count)]))
            grown = self.keep(handle, outs[-1].kv_cache, known.grown(count))
            self.truth.expect_all(np.concatenate([out.logits for out in outs]), grown, count)

    async def speculate(self) -> None:
        for handle, known in self.some():
            first, *draft = known.next(self.count(known, 6))
            threshold = self.draw.choice([0.0, 0.3, 1.0])
            out = await self.ask(self.executor.speculative_decode(token(first, handle), draft, threshold))
            assert out.acceptance_count == len(draft) or threshold
            self.truth.expect(
                out.next_logits[0], self.keep(handle, out.kv_cache, known.grown(1 + out.acceptance_count))
            )

    async def truncate(self) -> None:
        handle, known = self.draw.choice(list(self.held.items()))
        left = self.cut(known)
        try:
            await self.ask(self.executor.truncate_kv(handle, left.length))
        except asyncio.CancelledError:  # which may have been too late
            now = self.executor.handle(handle.cache_id)
            assert now.num_tokens in (left.length, known.length)
            self.keep(handle, now, left if now.num_tokens == left.length else known)
            raise
        self.keep(handle, handle.with_sequence_length(left.length), left)

    async def clone(self) -> None:
        handle, known = self.draw.choice(list(self.held.items()))
        if len(self.held) < 3:
            self.keep(None, handle.clone_handle(), known)

    async def release(self) -> None:
        if self.held:
            handle = self.draw.choice(list(self.held))
            self.executor.release_cache(handle.cache_id)
            del self.held[handle]

    async def forward(self) -> None:
        stream, count = self.draw.randrange(len(STREAMS)), self.draw.randint(1, 12)
        logits = await self.ask(self.executor.forward([STREAMS[stream][:count]]))
        self.truth.expect_all(logits[0], Known(stream, count), count)
