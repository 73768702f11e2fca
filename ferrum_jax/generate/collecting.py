"""Whether the garbage collector is at work: what it frees, at any point of a thread, must not wait for a lock."""

import gc
import threading
from collections.abc import Mapping

_collector = threading.local()


def watch_collector() -> None:
    """Begins to notice the collector's runs, once for the process."""
    if _notice not in gc.callbacks:
        gc.callbacks.append(_notice)


def is_collecting() -> bool:
    """True in a finalizer that the collector of cycles calls in this thread; others run where their owner let go."""
    return getattr(_collector, "is_running", False)


def _notice(phase: str, _: Mapping[str, int]) -> None:
    _collector.is_running = phase == "start"
