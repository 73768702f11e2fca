"""`AsyncLLM`: the engine for asyncio, as servers use it."""

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from ferrum_jax.contract.checks import check_not_forked, with_thread
from ferrum_jax.contract.errors import (
    AlreadyExistsError,
    CancelledError,
    ConfigError,
    RequestValidationError,
    safe_repr,
)
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.params import RequestOutput, SamplingParams, one_of, params_of_one
from ferrum_jax.generate.prompts import Prompt
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.updates import LivePolicy, lora_update, params_update
from ferrum_jax.models.specs import NewParams

T = TypeVar("T")


class AsyncLLM:
    """Answers prompts for coroutines of any event loop; one engine thread steps for all of them."""

    def __init__(self, llm: LLM | str | None = None, **settings: Any):
        """Takes an `LLM`, which the caller closes, or loads one as `LLM` does, which `close` closes.

        Raises:
            ConfigError: there are settings beside an `LLM`, which is loaded already.
            ResourceExhaustedError: the process may not have another thread.
            FerrumError: as `LLM` raises.
        """
        if isinstance(llm, LLM) and settings:
            raise ConfigError(f"settings beside an LLM, which is loaded already: {', '.join(settings)}")
        self._tokenising = with_thread(ThreadPoolExecutor(1, "async-llm-tokenising"))  # one thread keeps calls in order
        self._is_owner = not isinstance(llm, LLM)
        self.llm = llm if isinstance(llm, LLM) else LLM(llm, **settings)
        self._live: dict[str, Request] = {}  # by the caller's id
        self._lock = threading.Lock()  # for removals from it
        self._pid = os.getpid()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: Any = None,
        interventions: Any = None,
        capture: Sequence[Any] | None = (),
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the answer so far each time it grows, and at last the finished one with its `finish_reason`.

        Each output holds the whole answer so far, so a slow consumer skips outputs in between. Leaving the iterator
        early, or a cancellation, aborts the request.

        Args:
            prompt: a text or token ids.
            params: how to answer; greedy if None.
            sampling_params: another name of `params`.
            request_id: the id for `abort` and of the outputs; a new one if None.
            lora_request: an adapter, as for `LLM.generate`.
            interventions: as for `LLM.generate`.
            capture: as for `LLM.generate`; only the last output has the captures.
            priority: as for `LLM.generate`.

        Raises:
            AlreadyExistsError: a request with this id runs.
            CancelledError: this `AsyncLLM` is closed, or the request was aborted.
            FerrumError: the prompt is refused, or the request failed.
        """
        if not isinstance(request_id, str | None):
            raise RequestValidationError(f"request_id is {safe_repr(request_id)}, expected a text")
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        params = params_of_one(one_of(params, sampling_params), "`AsyncLLM.as_completed` gives several")
        asked = prompt, params, lora_request, interventions, capture, priority
        request = await self._tokenise(self.llm.request, *asked)
        if request_id is not None:
            request.request_id = request_id
        name = request.request_id
        if self._live.setdefault(name, request) is not request:
            raise AlreadyExistsError(f"a request {name!r} runs already")

        def notify(_: Request) -> None:
            if request.is_settled:
                self._forget(request)
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # the loop is closed: the generator can neither take outputs nor end
                self._forget(request)
                self.llm.engine.abort(request)

        request.notify = notify
        try:
            self.llm.engine.submit(request)
            told = 0, ""
            while True:
                await changed.wait()
                changed.clear()
                is_last = request.is_settled  # read first: the output after it is then complete
                output = request.output(return_error=not is_last)
                grown = len(output.token_ids), output.text
                if is_last or (grown != told and not output.finished):  # else its slot and blocks may not be free yet
                    told = grown
                    yield output
                if is_last:
                    return
        finally:
            self._forget(request)
            if not request.is_done:
                self.llm.engine.abort(request)

    async def as_completed(
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
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Answers prompts together, and yields each output with its index when it is finished, as `LLM.as_completed`.

        Leaving the iterator early, a cancellation or an error aborts the requests that still run.
        """
        loop, done = asyncio.get_running_loop(), asyncio.Queue[Request]()
        asked = prompts, one_of(params, sampling_params), lora_request, interventions, capture, priority
        groups = await self._tokenise(self.llm._groups, *asked)
        indices = {request: at for at, request in enumerate(itertools.chain.from_iterable(groups))}

        def notify(request: Request) -> None:
            if loop.is_closed():  # the generator can neither take outputs nor end
                self.llm.engine.abort(*indices)
            elif request.is_settled:
                with contextlib.suppress(RuntimeError):  # it was closed just now
                    loop.call_soon_threadsafe(done.put_nowait, request)

        for request in indices:
            request.notify = notify
        left = set(indices)
        try:
            self.llm.engine.submit(*(first for first, *_ in groups))
            while left:
                if (request := await done.get()) in left:
                    left.discard(request)
                    yield indices[request], request.output(return_error=return_errors)
        finally:
            self.llm.engine.abort(*left)

    async def abort(self, request_id: str) -> None:
        """Ends a request after the step that runs; its iterator raises CancelledError. An unknown id is no error."""
        if request_id not in self._live:  # its prompt may still be tokenised: it is known after that
            with contextlib.suppress(CancelledError):  # closed: no request begins any more
                await self._tokenise(lambda: None)
        request = self._live.get(request_id)
        if request is not None:
            await asyncio.to_thread(self.llm.engine.end, [request], _cancel)

    def _forget(self, request: Request) -> None:
        """Makes the id of a request free that ended or was aborted."""
        with self._lock:
            if self._live.get(request.request_id) is request:
                del self._live[request.request_id]

    async def _tokenise(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs a call in the thread that keeps the order of calls; raises CancelledError once closed.

        Raises UnsupportedError in a forked child, which does not have this thread.
        """
        check_not_forked("LLM", self._pid)
        try:
            pending = self._tokenising.submit(work, *arguments)
        except RuntimeError as problem:
            raise CancelledError("this LLM is closed") from problem
        return await asyncio.wrap_future(pending)

    async def reset_prefix_cache(self) -> None:
        """Clears the prefix cache, as `LLM.reset_prefix_cache`."""
        await asyncio.to_thread(self.llm.reset_prefix_cache)

    async def set_params(self, params: NewParams, *, live: LivePolicy = "wait") -> int:
        """Sets new weights, as `LLM.set_params`; a cancellation before the change begins keeps the old ones."""
        update = params_update(self.llm.model, params, live)
        return await asyncio.wrap_future(self.llm.engine.begin_update(update))

    async def set_lora(
        self, name: str, tree: Any, *, scale: float = 1.0, index: int = 0, live: LivePolicy = "wait"
    ) -> int:
        """Sets an adapter's arrays, as `LLM.set_lora`; a cancellation before they are set keeps the old ones."""
        update = lora_update(self.llm.model, name, tree, live, scale=scale, index=index)
        return await asyncio.wrap_future(self.llm.engine.begin_update(update))

    async def close(self) -> None:
        """Closes the `LLM` if it was loaded here, which ends every request with a CancelledError."""
        self._tokenising.shutdown(wait=False)
        if self._is_owner:
            await asyncio.to_thread(self.llm.close)


def _cancel(request: Request) -> None:
    request.error = CancelledError(f"{request.request_id!r} was aborted")
