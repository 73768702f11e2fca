"""`Service`: one model, with its adapters, limits and counts, behind a server."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.errors import ConfigError, FerrumError, IOError, UnsupportedError
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.intake import capacity_of
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.token_bytes import TokenBytes
from ferrum_jax.generate.updates import LivePolicy, params_update
from ferrum_jax.loading import load_params, open_checkpoint
from ferrum_jax.serve.admission import Admission
from ferrum_jax.serve.answers import AnswerProgress, Answers, Caller, Wakeups
from ferrum_jax.serve.errors import ApiError, bad_request, from_engine, unavailable
from ferrum_jax.serve.metrics import Metrics
from ferrum_jax.serve.settings import ServerSettings
from ferrum_jax.serve.tools.choice import choose_format
from ferrum_jax.sharding.devices import host_device

T = TypeVar("T")
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _usable(param: str) -> Iterator[None]:
    """Converts errors of files that a field of the request names, and that cannot be used, to a 400."""
    try:
        yield
    except (ConfigError, IOError) as problem:
        raise bad_request(str(problem), param) from problem


class Service:
    """A model, its adapters by name, and the limits of its clients; one event loop uses it."""

    def __init__(self, llm: LLM, settings: ServerSettings):
        """Takes a model, which the caller closes, and loads the adapters.

        Raises:
            ConfigError: the tool format does not exist, or an adapter has the model's name.
            FerrumError: an adapter cannot be loaded; then no adapter is.
        """
        self.llm = llm
        self.settings = settings
        self.name = settings.model or (llm.model.name if isinstance(llm.model, ModelRunner) else "model")
        template = None if llm.tokenizer is None else llm.tokenizer.template_for(tools=True)
        files = None if settings.generation_config == "none" else llm.tokenizer
        self.sampling_defaults = {"temperature": 1.0} | dict({} if files is None else files.recommended)
        self.tool_format = choose_format(settings.tool_parser, template)
        self.has_parallel_calls = "single tool-calls at once" not in (template or "")  # Llama 3's refuses several
        self.admission = Admission(llm.engine.scheduler.max_rows, settings.max_waiting)
        self.vocabulary = TokenBytes(llm.tokenizer)
        self.metrics = Metrics(self.name)
        self.started = int(time.time())
        self.adapters: dict[str, str] = {}  # paths by name
        self.live: set[Answers] = set()  # running ones
        self.callers: set[Caller] = set()  # clients that wait for answers
        self.is_ending = False  # `end_all` was called
        self._body_timeouts: set[asyncio.Timeout] = set()  # of the bodies that are being read
        if self.name in settings.adapters:
            raise ConfigError(f"an adapter is called {self.name!r}, as the model itself: give it another name")
        try:
            for name, path in settings.adapters.items():
                llm.runner.load_lora(name, path)
                self.adapters[name] = path
        except BaseException:
            self._drop_adapters()
            raise
        self._pool = ThreadPoolExecutor(2, "serve")
        self._slow = ThreadPoolExecutor(2, "serve-slow")
        self._administration = ThreadPoolExecutor(2, "serve-administration")
        self._is_closed = False
        self._updating = asyncio.Lock()
        self._wakeups: Wakeups | None = None

    def close(self) -> None:
        """Ends the threads of `run`, and unloads the adapters.

        It does not wait for an adapter or checkpoint that is being read, which nobody needs: it is not served.
        """
        self._is_closed = True
        self._administration.shutdown(wait=False, cancel_futures=True)
        for pool in (self._pool, self._slow):
            pool.shutdown(cancel_futures=True)
        self._drop_adapters()

    def check_not_closed(self) -> None:
        """Raises UnsupportedError after `close`."""
        if self._is_closed:
            raise UnsupportedError("this application was shut down and serves only once: make another with make_app")

    def _drop_adapters(self) -> None:
        for name in self.adapters:
            with contextlib.suppress(FerrumError):  # the model was closed or has failed
                self._unload(name)

    def wakeups(self) -> Wakeups:
        """Returns the `Wakeups` with which the engine's thread wakes waiters in the running event loop."""
        loop = asyncio.get_running_loop()
        if self._wakeups is None or self._wakeups.loop is not loop:
            self._wakeups = Wakeups(loop)
        return self._wakeups

    async def run(self, work: Callable[..., T], *arguments: Any, slow: bool = False, administers: bool = False) -> T:
        """Runs work that would block the event loop in another thread; converts errors of the engine for clients.

        Work that is `slow` takes seconds, and work that `administers` adapters, weights or the prefix cache may take
        minutes: each has its own pool of threads. No work may wait for requests to end.
        """
        pool = self._administration if administers else self._slow if slow else self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
        except FerrumError as problem:
            raise from_engine(problem) from problem

    def adapter_of(self, model: str | None) -> ActiveLoraAdapter | None:
        """Returns the adapter that a request names as its model, None for the model itself; else raises a 404."""
        if model is None or model == self.name:
            return None
        if model not in self.adapters:
            raise ApiError(
                404,
                f"the model {model!r} does not exist, {[self.name, *self.adapters]} do",
                param="model",
                code="model_not_found",
            )
        return ActiveLoraAdapter(name=model, path="")

    @property
    def capacity(self) -> int:
        """Positions that a sequence can have."""
        return capacity_of(self.llm.model)

    @property
    def most_prompt_tokens(self) -> int:
        """The most tokens that a prompt may have."""
        own = self.capacity
        return own if self.settings.max_prompt_tokens is None else min(own, self.settings.max_prompt_tokens)

    def count_answer(self, choice: AnswerProgress, reason: str) -> None:
        """Counts an answer that has ended."""
        self.admission.took(self.metrics.count_answer(choice, reason))

    def end_all(self) -> None:
        """Ends every request with a 503, also those whose body has not come."""
        self.is_ending = True
        for timeout in self._body_timeouts:
            if not timeout.expired():
                timeout.reschedule(0)
        for caller in self.callers:
            caller.end(unavailable("the server stops, and the answer was not complete in time", 5, "draining"))

    @contextlib.contextmanager
    def reading(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Expires a body's timeout when `end_all` is called within this context, or was called before."""
        if self.is_ending:
            timeout.reschedule(0)
        self._body_timeouts.add(timeout)
        try:
            yield
        finally:
            self._body_timeouts.discard(timeout)

    def forget(self, answers: Answers) -> None:
        """Counts a request that has ended, and its unread answers as aborted."""
        self.live.discard(answers)
        for first, *_ in answers.groups:
            self.metrics.count_lookup(first)
        for choice in answers.choices:
            if not choice.is_ended:
                self.metrics.count_answer(choice, "abort")

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads an adapter, whose name requests may then give as their model; raises a 409 for a name in use."""
        if name in self.adapters or name == self.name:
            raise ApiError(409, f"the name {name!r} is taken by a model that is loaded", param="lora_name")
        await self.run(self._load, name, path, administers=True)
        self.adapters[name] = path

    @_usable("lora_path")
    def _load(self, name: str, path: str) -> None:
        self.llm.runner.load_lora(name, path)
        if self._is_closed:  # meanwhile: nobody knows the adapter
            self.llm.runner.unload_lora(name)

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter once the requests with it have ended; raises a 404 if it is not loaded."""
        if name not in self.adapters:
            raise ApiError(404, f"adapter {name!r} is not loaded, {sorted(self.adapters)} are", param="lora_name")
        async with self.admission.leaving(name):
            await self.run(self._unload, name, administers=True)
            del self.adapters[name]  # last: if unloading fails, it can be tried again

    def _unload(self, name: str) -> None:
        self.llm.runner.unload_lora(name)  # `llm.runner` waits for aborted requests, which still hold the adapter

    def path_of_adapter(self, path: str) -> str:
        """Resolves a client's path below the adapter root; raises a 403 for a path outside it, or without a root."""
        root = self.settings.adapter_root
        if not root:
            raise ApiError(403, "adapters are loaded over HTTP only where the server has an --adapter-root")
        base = Path(os.path.expanduser(root)).resolve()
        try:
            found = (base / path).resolve()
        except (OSError, ValueError, RuntimeError) as problem:
            raise bad_request(f"lora_path is not a valid path: {problem}", "lora_path") from None
        if found != base and base not in found.parents:
            raise ApiError(403, f"{path} is not under the --adapter-root of this server", param="lora_path")
        return os.fspath(found)

    async def update_weights(self, path: str, live: LivePolicy) -> int:
        """Reads new weights of the same model and sets them between two steps; returns their version.

        Updates wait for each other, so that at most one checkpoint is in memory beside the served weights.
        """
        async with self._updating:
            params = await self.run(self._read_weights, path, administers=True)
            try:
                update = params_update(self.llm.model, params, live)
                # Without a thread that waits until requests end.
                return await asyncio.wrap_future(self.llm.engine.begin_update(update))
            except FerrumError as problem:
                raise from_engine(problem) from problem

    @_usable("path")
    def _read_weights(self, path: str) -> Any:
        runner = self.llm.runner
        served, source = runner.describe(), open_checkpoint(path)
        own, given = (
            config.reaching(runner.kv_capacity(), at_most=True) for config in (runner.model_config, source.config)
        )
        if differences := [
            f"{name} is {getattr(given, name)} there, {getattr(own, name)} of the model that is served"
            for name in (field.name for field in dataclasses.fields(own) if field.name != "dtype")
            if not _are_like(getattr(given, name), getattr(own, name))
        ]:
            raise bad_request(f"{path} is another model: {'; '.join(differences)}", "path")
        quantize = EngineConfig(quantize=self.settings.quantize).over_environment().quantize
        if quantize in (None, "auto"):  # as in `load`
            quantize = "auto" if served["attention"] == "cpu" else "none"
        params, _ = load_params(
            source,
            served["dtype"],
            layout=served["layout"],
            device=self._place_to_read(served["mesh"]),
            quantize=quantize,
        )
        return params

    def _place_to_read(self, mesh: Mapping[str, int]) -> Any:
        """Returns the device for whole weights: the host's where the served ones are divided, if JAX has it."""
        if any(size > 1 for axis, size in mesh.items() if axis != "data"):
            return host_device(self.llm.runner.device)
        return self.llm.runner.device


def _are_like(a: Any, b: Any) -> bool:
    """Whether two values of configurations are equal, up to the float32 rounding of GGUF files."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(_are_like(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_are_like, a, b))
    return a == b
