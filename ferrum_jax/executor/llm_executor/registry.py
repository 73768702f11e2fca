"""Executors by name, for a process that serves several models."""

import threading

from ferrum_jax.contract.errors import AlreadyExistsError, RequestValidationError, safe_repr
from ferrum_jax.contract.execution import ExecutorMetrics, ExecutorRegistry, ModelExecutor


class LlmExecutorRegistry(ExecutorRegistry):
    """Executors by name; safe to use from several threads. It starts and stops none of them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._executors: dict[str, ModelExecutor] = {}

    def register(self, name: str, executor: ModelExecutor) -> None:
        """Adds an executor; a name in use is an AlreadyExistsError."""
        if not isinstance(name, str) or not name:
            raise RequestValidationError(f"executor name {safe_repr(name)}: expected a string that is not empty")
        if not isinstance(executor, ModelExecutor):
            raise RequestValidationError(f"{name!r}: a {type(executor).__name__} is no ModelExecutor")
        with self._mutex:
            if name in self._executors:
                raise AlreadyExistsError(f"an executor named {name!r} is registered already")
            self._executors[name] = executor

    def get(self, name: str) -> ModelExecutor | None:
        """Returns the executor of a name, or None."""
        with self._mutex:
            return self._executors.get(name) if isinstance(name, str) else None

    def remove(self, name: str) -> ModelExecutor | None:
        """Removes an executor, still running, and returns it; None for an unknown name."""
        with self._mutex:
            return self._executors.pop(name, None) if isinstance(name, str) else None

    def list_names(self) -> list[str]:
        """Names in the order they were registered."""
        with self._mutex:
            return list(self._executors)

    def get_metrics(self, name: str) -> ExecutorMetrics | None:
        """Returns the metrics of the executor of a name, or None."""
        found = self.get(name)
        return None if found is None else found.metrics()
