"""Host memory in huge pages, for parameters that a CPU reads in every step."""

import contextlib
import mmap
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.sharding.devices import JaxDevice

CHUNK = 64 << 20  # bytes mapped at a time, at least
PAGE = 2 << 20  # bytes of a huge page on x86-64, and on AArch64 with base pages of 4 KiB
LINE = 64  # bytes; JAX takes an array that begins at a multiple without copying it


class HugePages:
    """Copies arrays one after the other into memory that Linux backs with huge pages.

    A step of few tokens reads every weight once. In base pages of 4 KiB that is a miss of the address cache (TLB) for
    each of them, which costs most on a virtual machine. Arrays share a chunk, so that small ones lie in huge pages,
    too; a chunk is freed with the last of them. Where the system has no huge pages left, it gives ordinary ones.
    """

    def __init__(self) -> None:
        self._chunk, self._used = np.empty(0, np.uint8), 0

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns a copy of an array of any shape and dtype."""
        if self._used + array.nbytes > self._chunk.nbytes:
            self._chunk, self._used = _map(max(array.nbytes, CHUNK)), 0
        copied = self._chunk[self._used : self._used + array.nbytes].view(array.dtype).reshape(array.shape)
        copied[...] = array
        self._used += -(-array.nbytes // LINE) * LINE
        return copied


def putter(device: JaxDevice) -> Callable[[Any], Any]:
    """Returns the function that puts trees of arrays on a device; on a CPU, copies in huge pages if there are any."""
    if device.platform != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return lambda tree: jax.device_put(tree, device)
    pages = HugePages()
    return lambda tree: jax.device_put(jax.tree.map(lambda leaf: pages.copy(np.asarray(leaf)), tree), device)


def _map(num_bytes: int) -> NDArray[np.uint8]:
    """Maps whole huge pages; what is never written takes no memory. Raises MemoryError."""
    size = -(-num_bytes // PAGE) * PAGE
    try:
        mapped = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as problem:
        raise MemoryError(f"{size + PAGE:,} bytes cannot be mapped: {problem}") from problem
    with contextlib.suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(mapped, np.uint8)
    start = -found.ctypes.data % PAGE
    return found[start : start + size]
