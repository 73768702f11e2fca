"""Executors by name, for a process that serves several models."""

import threading
from collections.abc import Callable

from ferrum_jax.contract.errors import AlreadyExistsError, NotFoundError, RequestValidationError, safe_repr
from ferrum_jax.contract.execution import ExecutorMetrics, ExecutorRegistry, ModelExecutor


class LlmExecutorRegistry(ExecutorRegistry):
    """Executors by name; safe to use from several threads. It starts and stops none of them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._executors: dict[str, ModelExecutor] = {}

    def register(self, name: str, executor: ModelExecutor) -> None:
        """Adds an executor; a name that is taken is AlreadyExists."""
        if not isinstance(name, str) or not name:
            raise RequestValidationError(f"executor name {safe_repr(name)}: expected a string that is not empty")
        if not isinstance(executor, ModelExecutor):
            raise RequestValidationError(f"{name!r}: a {type(executor).__name__} is no ModelExecutor")
        with self._mutex:
            if name in self._executors:
                raise AlreadyExistsError(f"an executor named {name!r} is registered already")
            self._executors[name] = executor

    def get(self, name: str) -> ModelExecutor:
        """Returns the executor of a name; an unknown name is NotFound."""
        return self._found(name, self._executors.__getitem__)

    def remove(self, name: str) -> ModelExecutor:
        """Removes an executor, still running, and returns it; an unknown name is NotFound."""
        return self._found(name, self._executors.pop)

    def list_names(self) -> list[str]:
        """Names in the order they were registered."""
        with self._mutex:
            return list(self._executors)

    def get_metrics(self, name: str) -> ExecutorMetrics:
        """Returns the metrics of the executor of a name; an unknown name is NotFound."""
        return self.get(name).metrics()

    def _found(self, name: str, take: Callable[[str], ModelExecutor]) -> ModelExecutor:
        with self._mutex:
            if not isinstance(name, str) or name not in self._executors:
                raise NotFoundError(f"no executor is named {safe_repr(name)}, registered are {list(self._executors)}")
            return take(name)
