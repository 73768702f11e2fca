"""Fixtures that several packages share."""

import errno
import gc
import importlib.util
import io
import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis

# The suite's time is compiling, which is faster without LLVM's optimisations (421 s), with the older emitters of
# fusions (283 s on two cores), which jaxlib has up to 0.10, and with a program in one piece (a tenth less): others test
# on the other cores. The programs given to XLA stay the same. With `--xla_backend_optimization_level=3` in XLA_FLAGS
# the suite runs what is shipped.
LEVEL = "--xla_backend_optimization_level"
if LEVEL not in (given := os.environ.get("XLA_FLAGS", "")):
    older = "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
    os.environ["XLA_FLAGS"] = f"{given} {LEVEL}=0 --xla_cpu_parallel_codegen_split_count=1 {older}".strip()

import jax
import jaxtyping
import pytest

from ferrum_jax.ops import native
from ferrum_jax.ops.native import build
from ferrum_jax.weights import hub

if os.environ.get("KERNELS") == "0":  # the suite as it runs where no C++ compiler was found
    native.LIBRARY = Path(os.devnull, "none")

jax.config.update("jax_num_cpu_devices", 4)  # for meshes; what asks for no device has the first
jax.config.update("jax_numpy_dtype_promotion", "strict")


def checks_what_lasts(function: Any = None, **options: Any) -> Any:
    """Is `jaxtyped`, but leaves functions in functions alone: it would compile checks whenever one is made."""
    if function is None:
        return partial(checks_what_lasts, **options)
    return function if "<locals>" in getattr(function, "__qualname__", "") else jaxtyped(function, **options)


# Checks shapes and dtypes in signatures, in what is imported from here on.
jaxtyped, jaxtyping.jaxtyped = jaxtyping.jaxtyped, checks_what_lasts
jaxtyping.install_import_hook(["ferrum_jax.models", "ferrum_jax.ops", "ferrum_jax.kvcache.state"], "beartype.beartype")

# The same examples in every run, unless --hypothesis-seed asks for others.
hypothesis.settings.register_profile("repeatable", derandomize=True)

REFERENCES = Path(__file__).parent / "reference"
# Their imports need the extra `reference`; without it they are not there to be selected.
collect_ignore = [] if all(importlib.util.find_spec(name) for name in ("torch", "transformers")) else ["reference"]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the first process says it, before it starts others
        check_kernels()
    os.environ["FERRUM_ARTIFACTS"] = "0"  # no test writes into the user's cache, unless it asks for a folder
    if config.getoption("--hypothesis-seed") is None:
        hypothesis.settings.load_profile("repeatable")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import torch and transformers only to deselect what needs them."""
    return True if collection_path == REFERENCES and "not reference" in (config.getoption("-m") or "") else None


def check_kernels() -> None:
    """Refuses to test XLA in the kernels' place, and to skip their tests, where they can be built and nobody asked."""
    can_build = build.unsupported() is None and build.find_compiler() is not None
    if os.environ.get("KERNELS") != "0" and can_build and native.instruction_set() is None:
        raise pytest.UsageError(
            f"there are no CPU kernels: {native.library()}\n"
            "Build them with `python ferrum_jax/ops/native/build.py`, or set KERNELS=0 to test what runs without them."
        )


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: collections need not walk through it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps what shares compiled runners in one process: with `--dist loadfile` a file, or one of two whole folders.

    Tests of benchmarks that start a process each and share nothing go where there is room.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByRunner(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            if file.name == "test_smoke.py":
                return nodeid
            return file.parent.name if file.parent.name in ("executor", "generate") else str(file)

    return ByRunner(config, log)


@pytest.fixture(scope="module", autouse=True)
def forgotten_executables() -> Iterator[None]:
    """Clears JAX's caches before the process runs out of memory maps: executables have some, Linux allows 65,530.

    Until then files reuse each other's executables.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > 30_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's file: fetched once, then taken from the user's cache."""
    return hub.resolve(None, progress=False)


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Takes the permission to search a folder, which root has for every one."""

    def close(folder: Path) -> None:
        def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
            def call_outside(path: Any, *rest: Any, **named: Any) -> Any:
                if isinstance(path, (str, os.PathLike)) and folder in Path(path).parents:
                    raise PermissionError(errno.EACCES, "Permission denied", str(path))
                return call(path, *rest, **named)

            return call_outside

        monkeypatch.setattr(os, "stat", refusing(os.stat))
        monkeypatch.setattr(io, "open", refusing(io.open))

    return close


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Calls as users make them: without the checks of signatures that the suite adds."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Every backend compilation of the process, whatever asked for it."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
