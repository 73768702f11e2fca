"""Which kernels products and sums use: those of the attention backend that the model function was given."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_in_use = ContextVar("ferrum_jax kernels", default="xla")


@contextlib.contextmanager
def kernels(of: str) -> Iterator[None]:
    """A context in which what is traced uses the kernels of an attention backend, where there are any.

    `cpu` has those of ops/native, `triton` that of experts (experts_triton.py); others, as `xla`, have none. Kernels
    have no gradients and no batching rules.
    """
    token = _in_use.set(of)
    try:
        yield
    finally:
        _in_use.reset(token)


def are_used(of: str) -> bool:
    """Whether what is traced now uses the kernels of a backend where it can."""
    return _in_use.get() == of
