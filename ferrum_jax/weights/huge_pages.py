"""Host memory in huge pages, for parameters that a CPU reads in every step."""

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.sharding.devices import JaxDevice

CHUNK = 64 << 20  # bytes mapped at a time, at least
PAGE = 2 << 20  # bytes of a huge page on x86-64, and on AArch64 with base pages of 4 KiB
LINE = 64  # bytes; JAX does not copy an array that begins at a multiple of this


class HugePages:
    """Allocates arrays, one after the other, in memory that Linux backs with huge pages.

    A step of few tokens reads every weight once. In base pages of 4 KiB every page is a miss of the address cache
    (TLB), which costs most on a virtual machine. Arrays share a chunk, so that small ones are in huge pages, too; a
    chunk is freed with the last of its arrays. If the system has no huge pages left, it gives ordinary ones.
    """

    def __init__(self) -> None:
        self._chunk, self._used = np.empty(0, np.uint8), 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Returns an uninitialised array."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self._used + num_bytes > self._chunk.nbytes:
            self._chunk, self._used = _map(max(num_bytes, CHUNK)), 0
        found = self._chunk[self._used : self._used + num_bytes].view(dtype).reshape(shape)
        self._used += -(-num_bytes // LINE) * LINE
        return found

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns a copy of an array of any shape and dtype."""
        found = self.empty(array.shape, array.dtype)
        found[...] = array
        return found


class DevicePlacer:
    """Puts trees of arrays on a device; on a CPU, as copies in huge pages if the system has them."""

    def __init__(self, device: JaxDevice):
        has_huge_pages = device.platform == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")
        self._device, self._pages = device, HugePages() if has_huge_pages else None

    def __call__(self, tree: Any) -> Any:
        """Puts a tree of arrays on the device."""
        if (pages := self._pages) is not None:
            tree = jax.tree.map(lambda leaf: pages.copy(np.asarray(leaf)), tree)
        return jax.device_put(tree, self._device)

    def stack(self, parts: Iterator[Any], count: int) -> Any:
        """Puts the stack of `count` trees of arrays on the device, as `stack_in_turn`."""
        empty = np.empty if self._pages is None else self._pages.empty
        return jax.device_put(stack_in_turn(parts, count, empty), self._device)


def stack_in_turn(parts: Iterator[Any], count: int, empty: Callable[..., NDArray[Any]] = np.empty) -> Any:
    """Stacks `count` arrays, or trees of them, on the host; frees each before it makes the next."""
    stack = None
    for index in range(count):
        part = next(parts)
        if stack is None:
            stack = jax.tree.map(lambda leaf: empty((count, *leaf.shape), leaf.dtype), part)
        jax.tree.map(lambda whole, leaf, at=index: whole.__setitem__(at, leaf), stack, part)
        del part
    return stack


def _map(num_bytes: int) -> NDArray[np.uint8]:
    """Maps whole huge pages; pages that are never written take no memory. Raises MemoryError if this fails."""
    size = -(-num_bytes // PAGE) * PAGE
    try:
        mapped = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as problem:
        raise MemoryError(f"{size + PAGE:,} bytes cannot be mapped: {problem}") from problem
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(mapped, np.uint8)
    start = -found.ctypes.data % PAGE
    return found[start : start + size]
