"""Which kernels the products and sums of a forward use: those that go with its attention backend."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_in_use = ContextVar("ferrum_jax kernels", default="xla")


@contextlib.contextmanager
def kernels(of: str) -> Iterator[None]:
    """A context in which traced functions use the kernels that go with an attention backend, if there are any.

    `cpu` has those of ops/native, `triton` the one for experts (experts_triton.py), other backends none. Kernels have
    no gradients and no batching rules.
    """
    token = _in_use.set(of)
    try:
        yield
    finally:
        _in_use.reset(token)


def are_used(of: str) -> bool:
    """Whether the function traced now uses the kernels of a backend where it can."""
    return _in_use.get() == of
