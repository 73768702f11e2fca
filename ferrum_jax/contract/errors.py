"""Every error that ferrum_jax raises on purpose, one class per kind of the contract.

Each kind is also the natural builtin, so that a caller who knows nothing of this package can still catch it.
"""


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

    @property
    def kind(self) -> str:
        """Name of the kind: the class name without its `Error` suffix."""
        return type(self).__name__.removesuffix("Error")


class ConfigError(FerrumError, ValueError):
    """A configuration, argument of `load` or environment variable that cannot be honoured."""


class ModelError(FerrumError, RuntimeError):
    """A model that cannot be built or that misbehaved."""

    is_server_error = True


class TokenizerError(FerrumError, ValueError):
    """A tokenizer that is missing, unknown or cannot encode what was given."""


class BackendError(FerrumError, RuntimeError):
    """The compiler or the runtime below the engine failed."""

    is_server_error = True


class DeviceError(FerrumError, RuntimeError):
    """A device is absent or failed inside a step."""

    is_server_error = True


class SchedulerError(FerrumError, RuntimeError):
    """The generation engine cannot schedule a request."""

    is_server_error = True


class RequestValidationError(FerrumError, ValueError):
    """The caller did something wrong; nothing was changed."""

    is_client_error = True


class ResourceExhaustedError(FerrumError, RuntimeError):
    """Slots, blocks or memory are short; nothing was changed and the call may be tried again.

    Attributes:
        needed: how many were needed, or None where counting makes no sense.
        free: how many were free, or None.
    """

    is_retryable = True
    is_server_error = True

    def __init__(self, message: str, *, needed: int | None = None, free: int | None = None):
        super().__init__(message)
        self.needed = needed
        self.free = free


class TimeoutError(FerrumError, TimeoutError):
    """Something took longer than it was given."""

    is_retryable = True
    is_server_error = True


class AuthError(FerrumError, PermissionError):
    """Credentials are missing or wrong."""

    is_client_error = True


class RateLimitError(FerrumError, RuntimeError):
    """Too many calls in a span of time."""

    is_client_error = True


class IOError(FerrumError, OSError):
    """A file could not be read or written."""


class SerializationError(FerrumError, ValueError):
    """A value could not be written to, or rebuilt from, bytes."""


class NetworkError(FerrumError, ConnectionError):
    """A remote host could not be reached or hung up."""

    is_retryable = True


class InternalError(FerrumError, RuntimeError):
    """A bug in this package."""

    is_server_error = True


class CancelledError(FerrumError, RuntimeError):
    """The caller gave up, or the engine was closed."""


class NotFoundError(FerrumError, LookupError):
    """A file, model, adapter or id does not exist."""

    is_client_error = True


class AlreadyExistsError(FerrumError, ValueError):
    """A name is taken."""

    is_client_error = True


class PermissionDeniedError(FerrumError, PermissionError):
    """The caller may not do this."""

    is_client_error = True


class UnsupportedError(FerrumError, NotImplementedError):
    """A request that makes sense but that this model, device or build cannot serve."""

    is_client_error = True


class InvalidFormatError(FerrumError, ValueError):
    """A file or value that does not have the form it should have."""


class InvalidParameterError(FerrumError, ValueError):
    """A parameter outside its range."""


def shown(value: object) -> str:
    """Gives how a message shows what was handed in; its type alone where it cannot be shown, as a deleted array."""
    try:
        return repr(value)
    except (RuntimeError, TypeError, ValueError):  # ValueError: an integer of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"
