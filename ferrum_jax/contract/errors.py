"""Every error that ferrum_jax raises on purpose, one class per kind of the contract.

Each kind is also the natural builtin, so that a caller who does not know this package can still catch it.
"""

# `IOError` and `TimeoutError` are left out: `import *` would hide the builtins.
__all__ = [
    "AlreadyExistsError", "AuthError", "BackendError", "CancelledError", "ConfigError", "DeviceError", "FerrumError",
    "InternalError", "InvalidFormatError", "InvalidParameterError", "ModelError", "NetworkError", "NotFoundError",
    "PermissionDeniedError", "RateLimitError", "RequestValidationError", "ResourceExhaustedError", "SchedulerError",
    "SerializationError", "TokenizerError", "UnsupportedError",
]  # fmt: skip


class FerrumError(Exception):
    """Root of every error raised on purpose; its message says what was asked, what was found and the limit.

    Attributes:
        is_retryable: the same call may succeed later without being changed.
        is_client_error: the caller asked for something that cannot be.
        is_server_error: the engine or its machine failed.
    """

    is_retryable = False
    is_client_error = False
    is_server_error = False

    def __init_subclass__(cls, *, retryable: bool = False, client: bool = False, server: bool = False):
        super().__init_subclass__()
        cls.is_retryable |= retryable
        cls.is_client_error |= client
        cls.is_server_error |= server

    @property
    def kind(self) -> str:
        """Name of the kind: the class name without its `Error` suffix."""
        return type(self).__name__.removesuffix("Error")


class ConfigError(FerrumError, ValueError):
    """A configuration, argument of `load` or environment variable that cannot be honoured."""


class ModelError(FerrumError, RuntimeError, server=True):
    """A model that cannot be built or that misbehaved."""


class TokenizerError(FerrumError, ValueError):
    """A tokenizer that is missing, unknown or cannot encode what was given."""


class BackendError(FerrumError, RuntimeError, server=True):
    """The compiler or the runtime below the engine failed."""


class DeviceError(FerrumError, RuntimeError, server=True):
    """A device is absent or failed inside a step."""


class SchedulerError(FerrumError, RuntimeError, server=True):
    """The generation engine cannot schedule a request."""


class RequestValidationError(FerrumError, ValueError, client=True):
    """The caller did something wrong; nothing was changed."""


class ResourceExhaustedError(FerrumError, RuntimeError, retryable=True, server=True):
    """Slots, blocks or memory are short; nothing was changed and the call may be tried again.

    Attributes:
        needed: how many were needed, or None where counting makes no sense.
        free: how many were free, or None.
        replica: where, of a runner with several replicas: its number, else None.
        cache_ids: the rows of a batch that were to go there; empty where it is not known.
    """

    def __init__(self, message: str, *, needed: int | None = None, free: int | None = None):
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.replica: int | None = None
        self.cache_ids: frozenset[str] = frozenset()


class TimeoutError(FerrumError, TimeoutError, retryable=True, server=True):
    """Something took longer than it was given."""


class AuthError(FerrumError, PermissionError, client=True):
    """Credentials are missing or wrong."""


class RateLimitError(FerrumError, RuntimeError, client=True):
    """Too many calls in a span of time."""


class IOError(FerrumError, OSError):
    """A file could not be read or written."""


class SerializationError(FerrumError, ValueError):
    """A value could not be written to, or rebuilt from, bytes."""


class NetworkError(FerrumError, ConnectionError, retryable=True):
    """A remote host could not be reached or hung up."""


class InternalError(FerrumError, RuntimeError, server=True):
    """A bug in this package."""


class CancelledError(FerrumError, RuntimeError):
    """The call was abandoned, or the engine was closed."""


class NotFoundError(FerrumError, LookupError, client=True):
    """A file, model, adapter or id does not exist."""


class AlreadyExistsError(FerrumError, ValueError, client=True):
    """A name is taken."""


class PermissionDeniedError(FerrumError, PermissionError, client=True):
    """The caller may not do this."""


class UnsupportedError(FerrumError, NotImplementedError, client=True):
    """A request that makes sense but that this model, device or build cannot serve."""


class InvalidFormatError(FerrumError, ValueError):
    """A file or value that does not have the form it should have."""


class InvalidParameterError(FerrumError, ValueError):
    """A parameter outside its range."""


def safe_repr(value: object) -> str:
    """Returns `repr(value)`, or the type's name where there is no repr, as of a deleted array."""
    try:
        return repr(value)
    except (RuntimeError, TypeError, ValueError):  # ValueError: an integer of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"


def first_line(problem: BaseException | str) -> str:
    """Returns the first line of an error's text, or of a text; an error without text is named by its type."""
    return next(iter(str(problem).splitlines()), "") or ("" if isinstance(problem, str) else type(problem).__name__)
