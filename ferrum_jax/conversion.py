"""Conversion of any checkpoint to an Orbax one, with its tokenizer beside it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ferrum_jax.config import EngineConfig
from ferrum_jax.config.engine import DTYPES
from ferrum_jax.contract.errors import AlreadyExistsError, ConfigError
from ferrum_jax.generate.tokenizer import Tokenizer, load_tokenizer
from ferrum_jax.loading import load_params, open_checkpoint
from ferrum_jax.models.quantisation import dequantise
from ferrum_jax.sharding.devices import host_device
from ferrum_jax.weights import orbax
from ferrum_jax.weights.gguf import GgufSource
from ferrum_jax.weights.hub import resolve
from ferrum_jax.weights.wheel_model import remove_abandoned

BESIDE = (  # files of a Hugging Face folder besides its weights; the tokenizer reads ids from the configurations
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates",
)  # fmt: skip
_SCRATCH = ".ferrum-convert-"  # prefix of the folders in which a conversion works


def convert(
    source: str | os.PathLike[str] | None,
    destination: str | os.PathLike[str],
    dtype: str | None = None,
    progress: bool = True,
    quantize: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes a model as an Orbax checkpoint, which loads without any arithmetic, and its tokenizer's files beside it.

    The weights pass through the host's memory, whole; through the default device's where JAX has no CPU, as under
    `JAX_PLATFORMS=cuda`. The folder appears, or an empty one is filled, at the end or not at all. Folders
    `.ferrum-convert-…` that conversions killed more than a day ago left there or beside it are removed.

    Args:
        source: a Hugging Face folder, a `.gguf` file, an Orbax checkpoint or a Hugging Face id; None for the default
            model. Quantised weights are written as the numbers they stand for, unless `quantize` is `keep`.
        destination: the new folder, or an empty one; a link stands for the folder it leads to.
        dtype: of the weights; if None the one that the configuration names, float32 for a GGUF or another name.
        progress: show bars on standard error while working.
        quantize: `int8`, `float8_e4m3fn` or `keep`, as for `load`: the checkpoint is as much smaller, and loads so.
        tokenizer: a folder or `.gguf` file with a tokenizer to write beside, where the model's own will not do.

    Returns:
        The folder, which `load`, `load_params` and `LLM` take.

    Raises:
        AlreadyExistsError: there is something at `destination`; nothing was read.
        IOError: the folder cannot be written.
        FerrumError: the model cannot be found or read.
    """
    folder, target = _places(destination)
    is_new = not target.exists()
    asked = EngineConfig(dtype=dtype, quantize=quantize)
    beside = None if tokenizer is None else load_tokenizer(tokenizer)
    opened = open_checkpoint(resolve(source, progress=progress))
    named = opened.config.dtype.removeprefix("torch.")
    asked = asked.over(EngineConfig(dtype=named if named in DTYPES else "float32"))
    if beside is None and isinstance(opened, GgufSource) and "tokenizer.ggml.model" in opened.file.metadata:
        beside = Tokenizer.from_gguf(opened.file)  # a folder's files are copied instead
    with _workplace(folder, target) as work:  # before the weights are read, which may take long
        params, cfg = load_params(opened, asked.dtype, device=host_device(), quantize=quantize, progress=progress)
        if quantize in (None, "none"):  # a quantised Orbax checkpoint is read as it is
            params = dequantise(params)
        with orbax.writing(folder):
            orbax.save(work, params, replace(cfg, dtype=asked.dtype))
            if beside is not None:
                beside.save(work)
            elif opened.path.is_dir():
                _copy_beside(opened.path, work)
            _move(work, target, is_new=is_new)
    return folder


def _places(destination: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Returns the folder to write, which is new or empty, and where it lies if it is a link."""
    if not os.fspath(destination):
        raise ConfigError("folder is '', expected the path of a new one")
    with orbax.writing(Path(destination)):
        try:
            folder = Path(destination).expanduser().absolute()
            target = folder.resolve()
            os.fspath(target).encode()  # raises a ValueError for bytes that tensorstore does not take
        except RuntimeError as problem:  # nobody's home, or links in a circle
            raise OSError(str(problem)) from None
        if target.is_dir():
            remove_abandoned(target, _SCRATCH)
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise AlreadyExistsError(f"{folder} is not empty, a checkpoint is not written over what is there")
        return folder, target


@contextmanager
def _workplace(folder: Path, target: Path) -> Iterator[Path]:
    """Yields a place for the checkpoint until it is whole: beside its target, or in it where files cannot be moved."""
    with orbax.writing(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        is_alone = target.exists() and (target.is_mount() or not os.access(target.parent, os.W_OK))
        place = target if is_alone else target.parent
        remove_abandoned(place, _SCRATCH)
        work = tempfile.TemporaryDirectory(dir=place, prefix=_SCRATCH, ignore_cleanup_errors=True)
    with work as path:
        yield Path(path, "checkpoint")


def _move(work: Path, target: Path, *, is_new: bool) -> None:
    """Moves the checkpoint to its target; a folder that existed is filled, and keeps its owner and permissions."""
    if is_new:
        os.replace(work, target)
        return
    for path in sorted(work.iterdir(), key=lambda path: path.name == orbax.CONFIG):  # which makes it a checkpoint
        os.replace(path, target / path.name)


def _copy_beside(source: Path, destination: Path) -> None:
    for path in (source / name for name in BESIDE):
        if path.is_dir():
            shutil.copytree(path, destination / path.name)
        elif path.is_file():
            shutil.copyfile(path, destination / path.name)
