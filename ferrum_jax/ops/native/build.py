"""Builds the kernels' library; used by the build hook, and by itself: `python build.py`."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libferrum_kernels.so"
PROBLEM = LIBRARY.with_suffix(".txt")  # why there is none
X86 = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
}
ARM: dict[str, tuple[str, ...]] = {"neon": ()}
SETS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}  # options of each instruction set, by machine
COMMON = "-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-fvisibility=hidden", "-Wno-psabi", "-fno-math-errno"


def find_compiler() -> list[str] | None:
    """Command of the C++ compiler: `CXX` if it is set, else the first that is installed."""
    asked = shlex.split(os.environ.get("CXX", ""))
    names = [asked[0]] if asked else ["c++", "g++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    return None if found is None else [found, *asked[1:]]


def headers() -> Path | None:
    """Folder of XLA's headers, in the jaxlib of this environment."""
    try:
        import jaxlib
    except ImportError:
        return None
    found = Path(jaxlib.__file__).parent / "include"
    return found if (found / "xla" / "ffi" / "api" / "ffi.h").exists() else None


def digest_sources() -> str:
    """Digest of the kernels' sources and of how they are built, which a library has in it."""
    total = hashlib.sha256(platform.machine().encode())
    sources = (path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h") and not path.name.startswith("."))
    for path in sorted([*sources, FOLDER / "build.py"]):
        total.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return total.hexdigest()


def unsupported() -> str | None:
    """Why there are no kernels for this system and processor, or None."""
    if platform.system() != "Linux":  # never tried elsewhere: pieces of work need more than 1 MB of stack
        return "the kernels are for Linux so far"
    machine = platform.machine().lower()
    return None if machine in SETS else f"there are none for {machine}"


def build(to: Path = LIBRARY, more: tuple[str, ...] = ()) -> str | None:
    """Compiles the library, with `more` options; returns why it could not, or None."""
    if problem := unsupported():
        return problem
    compiler, include = find_compiler(), headers()
    if compiler is None:
        return "there is no C++ compiler (CXX, c++, g++ or clang++)"
    if include is None:
        return "jaxlib's headers are not installed"
    with tempfile.TemporaryDirectory() as scratch:
        jobs = {
            Path(scratch, f"{name}.o"): ["kernels.cpp", f"-DFERRUM_SET={name}", *flags]
            for name, flags in SETS[platform.machine().lower()].items()
        }
        jobs[Path(scratch, "handlers.o")] = [
            "handlers.cpp", "-isystem", str(include), f'-DFERRUM_SOURCES="{digest_sources()}"'
        ]  # fmt: skip
        commands = [
            [*compiler, *COMMON, *more, "-c", str(FOLDER / source), *flags, "-o", str(object)]
            for object, (source, *flags) in jobs.items()
        ]
        made = Path(scratch, to.name)
        with ThreadPoolExecutor() as pool:
            problems = [problem for problem in pool.map(_run, commands) if problem]
        link = [*compiler, "-shared", *more, *map(str, jobs), "-o", str(made)]
        if problem := problems[0] if problems else _run(link):
            return problem
        new = to.with_name(f".{to.name}.{os.getpid()}")
        try:
            shutil.copyfile(made, new)
            new.replace(to)  # a process that has the old one loaded keeps it
        finally:
            new.unlink(missing_ok=True)
    return None


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as problem:
        return f"{command[0]} cannot be run: {problem}"
    return None if done.returncode == 0 else f"{shlex.join(command)}\n{done.stderr[-4000:]}"


if __name__ == "__main__":
    sys.exit(build())
