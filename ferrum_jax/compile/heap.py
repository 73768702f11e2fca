"""The host's heap after compiling and loading."""

import contextlib
import ctypes


def trim_heap() -> None:
    """Gives what compilers have freed back to the operating system, where the C library keeps it for itself (glibc).

    Compiling a dozen steps leaves some 400 MB so, which takes a tenth of a second; loading one, 50 MB.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)
