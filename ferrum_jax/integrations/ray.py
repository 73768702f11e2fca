"""An `LLM` on the processes of a Ray cluster (extra `ray`).

Each process is an actor with its own devices. The processes connect as in docs/several-hosts.md, and the first one
answers calls. Answers and errors are those of `LLM`.
"""

# pyright: reportMissingImports=false
import contextlib
import importlib
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Self

import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ferrum_jax.config import EngineConfig
from ferrum_jax.config.checks import check_integer, check_number
from ferrum_jax.config.engine import MeshSizes
from ferrum_jax.config.processes import COORDINATOR, COUNT, INDEX, START, START_SECONDS
from ferrum_jax.contract.errors import CancelledError, ConfigError, DeviceError, FerrumError, ResourceExhaustedError
from ferrum_jax.generate.params import RequestOutput, Score

CALLS = 64  # calls that the first process answers at a time, in one batch
PATIENCE = 20.0  # seconds to wait for the first process's error after another has ended, or for the LLM to close


class RayLLM:
    """An `LLM` whose processes are actors of Ray. Any thread may call it; calls at the same time share steps."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        mesh: MeshSizes,
        num_processes: int,
        resources: Mapping[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
        start_seconds: int = START_SECONDS,
        **settings: Any,
    ):
        """Starts the processes on the cluster that `ray.init` has connected to, and loads the model in them.

        Args:
            path: as for `LLM`, None is the default model; it must exist on every host of the cluster.
            mesh: devices along the axes `expert` and `model`; all devices of all processes.
            num_processes: number of actors, which Ray places all at once.
            resources: resources of each actor, by Ray's names, such as `{"CPU": 4, "GPU": 4}`; one CPU if not given.
            environment: environment variables of each actor.
            start_seconds: time for the cluster to place all actors, and for them to connect.
            **settings: as for `LLM`.

        Raises:
            ConfigError: a setting is wrong, or `ray.init` was not called.
            ResourceExhaustedError: the cluster does not have these resources free.
            DeviceError: a process ended, or the processes did not connect.
            FerrumError: as `LLM` raises.
        """
        self._processes: list[Any] = []
        self._group: Any = None
        check_integer("num_processes", num_processes, 1)
        check_integer("start_seconds", start_seconds, 1)
        if not (sizes := EngineConfig(mesh=mesh).mesh_sizes):
            raise ConfigError(f"mesh is {mesh!r}, expected devices along expert or model")
        held = {"CPU": 1} | dict(resources or {})
        for name, count in held.items():
            check_number(name, count, above=None)
        held = {name: count for name, count in held.items() if count}
        if not held or min(held.values()) < 0:
            raise ConfigError(f"resources are {resources}, expected numbers above 0")
        if any(not isinstance(text, str) for pair in (environment or {}).items() for text in pair):
            raise ConfigError(f"environment is {environment}, expected texts by name")
        if not ray.is_initialized():
            raise ConfigError("no Ray cluster is connected: call ray.init first")
        others = {name: count for name, count in held.items() if name not in ("CPU", "GPU", "memory")}
        try:
            self._group = placement_group([held] * num_processes, strategy="PACK")
            if not self._group.wait(start_seconds):
                raise ResourceExhaustedError(
                    f"the cluster has not placed {num_processes} processes with {held} each within {start_seconds} s; "
                    f"free are {ray.available_resources()}"
                )
            places = [
                PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
                for index in range(num_processes)
            ]
            where = _answer(ray.remote(_free_address).options(num_cpus=0, scheduling_strategy=places[0]).remote())
            job = {COORDINATOR: where, COUNT: str(num_processes), START: str(start_seconds)}
            for index, place in enumerate(places):
                actor = ray.remote(_Process).options(
                    num_cpus=held.get("CPU", 0),
                    num_gpus=held.get("GPU", 0),
                    memory=held.get("memory"),
                    resources=others,
                    scheduling_strategy=place,
                    runtime_env={"env_vars": dict(environment or {}) | job | {INDEX: str(index)}},
                    max_concurrency=1 if index else CALLS,
                )
                self._processes.append(actor.remote())
            settings = {"progress": False} | settings | {"mesh": sizes}
            loads = [
                process.load.remote(None if path is None else os.fspath(path), settings) for process in self._processes
            ]
            ended, _ = ray.wait(loads)  # only the first process's `load` returns, unless a process fails
            first, _ = ray.wait(loads[:1], timeout=PATIENCE)  # its error says why another process has ended
            _answer((first or ended)[0])
            if not first:
                raise DeviceError(f"a process of {num_processes} ended before the model was loaded")
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        self._first()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, *given: Any, **options: Any) -> list[RequestOutput]:
        """As `LLM.generate`."""
        return self._call("generate", *given, **options)

    def chat(self, *given: Any, **options: Any) -> Any:
        """As `LLM.chat`."""
        return self._call("chat", *given, **options)

    def score(self, *given: Any, **options: Any) -> list[Score]:
        """As `LLM.score`."""
        return self._call("score", *given, **options)

    def warmup(self) -> None:
        """As `LLM.warmup`."""
        self._call("warmup", progress=False)

    def reset(self) -> None:
        """As `LLM.reset`."""
        self._call("reset")

    def close(self) -> None:
        """Ends the processes and gives their resources back; a second call does nothing."""
        processes = self._processes
        try:
            if processes and ray.is_initialized():
                # Where CALLS calls run, this one queues. Those that outlast PATIENCE end with the processes.
                ended, _ = ray.wait([processes[0].call.remote("close", (), {})], timeout=PATIENCE)
                if ended:
                    with contextlib.suppress(DeviceError):  # processes are gone already
                        _answer(ended[0])
        finally:
            self._stop()

    def _call(self, method: str, *given: Any, **options: Any) -> Any:
        first = self._first()
        try:
            return _answer(first.call.remote(method, given, options))
        except DeviceError as problem:
            if not self._processes:
                raise CancelledError("this LLM was closed during the call") from problem
            raise

    def _first(self) -> Any:
        processes = self._processes
        if not processes:
            raise CancelledError("this LLM is closed")
        return processes[0]

    def _stop(self) -> None:
        """Ends the actors and gives the resources back, unless Ray was shut down, which did so already."""
        processes, self._processes = self._processes, []
        group, self._group = self._group, None
        if not ray.is_initialized():
            return
        try:
            for process in processes:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(process)
        finally:
            if group is not None:
                remove_placement_group(group)


def _free_address() -> str:
    """Returns an address at which the processes can connect: this host, and a port that is free now."""
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as free:
        return f"{host}:{free.getsockname()[1]}"


class _Process:
    """The class of the actors."""

    def load(self, path: str | None, settings: Mapping[str, Any]) -> None:
        """Loads the model; in processes other than the first, this returns only at the end."""
        llm: Any = importlib.import_module("ferrum_jax.generate.llm")
        self._llm = llm.LLM(path, **settings)

    def call(self, method: str, given: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Calls the LLM."""
        return getattr(self._llm, method)(*given, **options)


def _answer(ref: Any) -> Any:
    """Waits for an actor's result; raises the actor's error, or DeviceError if the actor is gone."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as problem:
        if isinstance(problem.cause, FerrumError):
            raise problem.cause from problem
        raise
    except ray.exceptions.RayError as problem:
        raise DeviceError(f"a process of the model is gone: {' '.join(str(problem).split())}") from problem
