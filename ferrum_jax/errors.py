"""Every error that ferrum_jax raises on purpose, under the name that callers import: those of `contract.errors`."""

from ferrum_jax.contract.errors import *  # noqa: F403
from ferrum_jax.contract.errors import IOError as IOError
from ferrum_jax.contract.errors import TimeoutError as TimeoutError
from ferrum_jax.contract.errors import __all__ as __all__
