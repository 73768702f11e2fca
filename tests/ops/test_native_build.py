"""How the kernels are built: with sanitizers, as a wheel, in a checkout, and not at all."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.models.backends import choose_attention
from ferrum_jax.ops import native
from ferrum_jax.ops.attention_cpu import check
from ferrum_jax.ops.native import build
from tests.executor.conftest import CFG

ROOT = Path(__file__).parents[2]
LIBRARY, PROBLEM = (path.relative_to(ROOT).as_posix() for path in (build.LIBRARY, build.PROBLEM))
NO_COMPILER = {"CXX": "/nowhere/c++"}
needs_compiler = pytest.mark.skipif(
    build.unsupported() is not None or build.find_compiler() is None, reason="the kernels cannot be built"
)
needs_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed (the extra dev)"
)
READS_APART = [0, 1] if native.instruction_set() == "avx512" else [0]  # whether in several sequences, as FERRUM_APART
SANITIZED = "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"
RUN = """
import sys
from pathlib import Path
from ferrum_jax.ops import native
native.LIBRARY = Path(sys.argv[1])
import pytest
files = "tests/ops/test_native.py", "tests/ops/test_native_choice.py"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *files, "-k", *sys.argv[2:]]))
"""

PRODUCTS = """
import sys
import zlib
from pathlib import Path
from ferrum_jax.ops import native
native.LIBRARY = Path(sys.argv[1])
assert native.instruction_set()
import jax.numpy as jnp
import numpy as np
rng = np.random.default_rng(0)
for dtype in ("float32", "bfloat16"):
    for inputs in (1, 40, 576, 2050):
        weight = jnp.asarray(rng.standard_normal((100, inputs)), dtype)
        x = jnp.asarray(rng.standard_normal((18, inputs)), "float32")
        for rows in range(1, 19):
            print(zlib.crc32(np.asarray(native.product(x[:rows], weight)).tobytes()))
"""


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made = tmp_path / "lib.so"
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "there is no C++ compiler" in (build.build(made) or "")
    monkeypatch.setenv("CXX", f"{sys.executable} -c 1/0")
    assert "ZeroDivisionError" in (build.build(made) or "")
    monkeypatch.setattr("platform.machine", lambda: "VAX")
    assert "there are none for vax" in (build.build(made) or "")
    assert not made.exists()


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_kernels_are_neither_built_nor_loaded_but_on_linux(
    system: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    native.library.cache_clear()
    try:
        assert build.build(tmp_path / "lib.so") == native.library() == "the kernels are for Linux so far"
        assert native.instruction_set() is None
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_the_suite_does_not_start_without_kernels_that_it_could_build(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "KERNELS"}
    asked = [sys.executable, "-c", RUN, str(tmp_path / "none.so"), "numpys", "-n1"]
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "there are no CPU kernels: they were not built" in done.stderr
    assert "python ferrum_jax/ops/native/build.py" in done.stderr
    assert len((done.stdout + done.stderr).strip().splitlines()) == 2


def test_without_a_library_xla_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    sizes = {"platform": "cpu", "dtype": "float32", "kv_dtype": "float32", "block_size": 16}
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    native.library.cache_clear()
    try:
        assert choose_attention(None, CFG, **sizes) == "xla"
        assert native.instruction_set() is None
        with pytest.raises(UnsupportedError, match="has no kernels: they were not built"):
            check()
        (tmp_path / "none.so").write_bytes(b"no library")
        native.library.cache_clear()
        assert "cannot be used" in str(native.library())
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


@needs_compiler
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "digest_sources", lambda: "changed since")
    assert "built from other sources: install the package again" in str(native.register(build.LIBRARY))


def test_an_editors_files_are_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for path in build.FOLDER.iterdir():
        if path.suffix in (".cpp", ".h", ".py"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    before = build.digest_sources()
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    (tmp_path / ".#linear.h").symlink_to("nobody@nowhere.1")
    (tmp_path / ".linear.h.swp").write_text("x")
    assert build.digest_sources() == before
    (tmp_path / "more.h").write_text("x")
    assert build.digest_sources() != before


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("apart", READS_APART)
@pytest.mark.parametrize("tests", ["numpys", "threads or place or sixteen or rows_beside or of_many or kernel"])
def test_no_kernel_reads_or_writes_elsewhere(tests: str, apart: int, tmp_path: Path):
    made = tmp_path / "libsanitized.so"
    assert build.build(made, (*SANITIZED, f"-DFERRUM_APART={apart}")) is None
    command = build.find_compiler()
    assert command is not None
    libraries = ("libasan.so", "libubsan.so")
    found = [subprocess.check_output([*command, f"-print-file-name={name}"], text=True) for name in libraries]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(path.strip() for path in found),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
    }
    asked = [sys.executable, "-c", RUN, str(made), tests]
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(len(READS_APART) == 1, reason="a weight is read in one order with this instruction set")
def test_the_order_in_which_a_weight_is_read_changes_no_bit(tmp_path: Path):
    found = []
    for apart in READS_APART:
        made = tmp_path / f"lib{apart}.so"
        assert build.build(made, (f"-DFERRUM_APART={apart}",)) is None
        found.append(subprocess.check_output([sys.executable, "-c", PRODUCTS, str(made)], cwd=ROOT, text=True))
    assert found[0] == found[1]
    assert len(found[0].split()) == 2 * 4 * 18


@needs_compiler
@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        pytest.param([], 1000, id="plain"),
        pytest.param(["-fsanitize=thread"], 50_000, marks=pytest.mark.slow, id="tsan"),
    ],
)
def test_a_busy_pool_computes_every_item_once_and_frees_every_record(options: list[str], rounds: int, tmp_path: Path):
    compiler, include, program = build.find_compiler(), build.headers(), tmp_path / "busy_pool"
    assert compiler is not None
    folders = ["-isystem", str(include), f"-I{build.FOLDER}"]
    source = str(Path(__file__).with_name("busy_pool.cpp"))
    command = [*compiler, "-std=c++17", "-O1", "-g", "-pthread", *options, *folders, source, "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program, str(rounds)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[:3000]
    assert done.stdout == "all hold\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the package is built from, with kernels of other sources."""
    copy = tmp_path / "checkout"
    shutil.copytree(
        ROOT / "ferrum_jax", copy / "ferrum_jax", ignore=shutil.ignore_patterns("__pycache__", "*libferrum*")
    )
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    (copy / LIBRARY).write_bytes(b"kernels of other sources")
    return copy


def pack(checkout: Path, *arguments: str, compiler: dict[str, str] = NO_COMPILER) -> str:
    """Builds as `pip` does, where there is no compiler unless one is given; gives what was said."""
    command = [sys.executable, "-m", "hatchling", "build", *arguments]
    return subprocess.run(
        command, check=True, cwd=checkout, env=os.environ | compiler, stderr=subprocess.PIPE, text=True
    ).stderr


@needs_hatchling
def test_a_wheel_without_kernels_leaves_those_of_the_checkout(checkout: Path, tmp_path: Path):
    said = pack(checkout, "-t", "wheel", "-d", str(tmp_path))
    assert (checkout / LIBRARY).read_bytes() == b"kernels of other sources"
    assert not (checkout / PROBLEM).exists()
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert [name for name in packed.namelist() if "libferrum" in name] == [PROBLEM]
        assert f"without its CPU kernels: {packed.read(PROBLEM).decode()}" in said


@needs_hatchling
@needs_compiler
@pytest.mark.parametrize("other", ["kernels of other sources", "...{}... but no library"])
def test_an_editable_install_without_a_compiler_keeps_only_kernels_that_can_be_used(checkout: Path, other: str):
    editable = "-t", "wheel:editable", "--hooks-only"
    shutil.copy(build.LIBRARY, checkout / LIBRARY)
    assert "keeps the CPU kernels it has" in pack(checkout, *editable)
    assert (checkout / LIBRARY).read_bytes() == build.LIBRARY.read_bytes()
    assert not (checkout / PROBLEM).exists()
    (checkout / LIBRARY).unlink()
    (checkout / LIBRARY).write_text(other.format(build.digest_sources()))
    said = pack(checkout, *editable)
    assert not (checkout / LIBRARY).exists()
    assert f"without its CPU kernels: {(checkout / PROBLEM).read_text()}" in said


@needs_hatchling
@needs_compiler
def test_an_editable_install_builds_no_kernels_that_are_there(checkout: Path, tmp_path: Path):
    tried = tmp_path / "tried"
    (compiler := tmp_path / "c++").write_text(f"#!/bin/sh\ntouch {tried}\nexit 1\n")
    compiler.chmod(0o755)
    found = {"CXX": "", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    editable = "-t", "wheel:editable", "--hooks-only"
    shutil.copy(build.LIBRARY, checkout / LIBRARY)
    assert "kernels" not in pack(checkout, *editable, compiler=found)
    assert (checkout / LIBRARY).read_bytes() == build.LIBRARY.read_bytes()
    assert not tried.exists()
    pack(checkout, *editable, compiler={"CXX": str(compiler)})  # who names a compiler has them built
    assert tried.exists()


@pytest.mark.slow
@needs_compiler
def test_what_is_installed_without_a_compiler_says_so(checkout: Path, tmp_path: Path):
    folder = tmp_path / "installed"
    command = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", folder, checkout]
    subprocess.run(command, check=True, env=os.environ | NO_COMPILER)
    done = subprocess.run(
        [sys.executable, "-c", "from ferrum_jax import cli; print(cli.__file__); cli.main()", "devices"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(str(folder))
    assert "XLA computes everything: they were not built when the package was installed: there is no C++" in done.stdout


def wheel_of(checkout: Path, folder: Path, **environment: str) -> tuple[str, bytes]:
    """Builds a wheel and leaves the checkout as it was; gives its name and the only library in it."""
    command = [sys.executable, "-m", "uv", "build", "--wheel", "--out-dir", folder, checkout]
    subprocess.run(command, check=True, env=os.environ | environment)
    assert (checkout / LIBRARY).read_bytes() == b"kernels of other sources"
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(".so")]
        assert names == [LIBRARY]
        return wheel.name, packed.read(names[0])


@pytest.mark.slow
@needs_compiler
def test_a_wheel_holds_one_library_with_every_instruction_set(checkout: Path, tmp_path: Path):
    compiler = build.find_compiler()
    assert compiler is not None
    (quick := tmp_path / "c++").write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@" -O0\n')  # it is not run here
    quick.chmod(0o755)
    wheel, content = wheel_of(checkout, tmp_path, CXX=str(quick))
    assert "-py3-none-" in wheel
    assert "any" not in wheel
    for name in build.SETS[os.uname().machine]:
        assert name.encode() in content


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed (the extra dev)")
def test_a_wheel_of_a_portable_compiler_runs_on_old_systems(checkout: Path, tmp_path: Path):
    machine = os.uname().machine
    compiler = f"{sys.executable} -m ziglang c++ -target {machine}-linux-gnu.2.17"
    wheel, content = wheel_of(checkout, tmp_path, CXX=compiler, _PYTHON_HOST_PLATFORM=f"manylinux_2_17_{machine}")
    assert wheel.endswith(f"-py3-none-manylinux_2_17_{machine}.whl")
    asked = {(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", content)}
    assert asked
    assert max(asked) <= (2, 17)
    assert b"GLIBCXX_" not in content  # nor a C++ library of the system's
    library = tmp_path / "lib.so"
    library.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(library), "numpys"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
