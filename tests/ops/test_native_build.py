"""How the kernels are built: with sanitizers, as a wheel, and not at all."""

import importlib.util
import os
import re
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
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler")
SANITIZED = "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"
RUN = """
import sys
from pathlib import Path
from ferrum_jax.ops import native
native.LIBRARY = Path(sys.argv[1])
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", sys.argv[2], "tests/ops/test_native.py"]))
"""


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made = tmp_path / "lib.so"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "there is no C++ compiler" in (build.build(made) or "")
    monkeypatch.setenv("CXX", f"{sys.executable} -c 1/0")
    assert "ZeroDivisionError" in (build.build(made) or "")
    monkeypatch.setattr("platform.machine", lambda: "VAX")
    assert "there are none for vax" in (build.build(made) or "")
    assert not made.exists()


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


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("tests", ["numpys", "threads or place or sixteen or rows_beside"])
def test_no_kernel_reads_or_writes_elsewhere(tests: str, tmp_path: Path):
    made = tmp_path / "libsanitized.so"
    assert build.build(made, SANITIZED) is None
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


def wheel_of(folder: Path, **environment: str) -> tuple[str, bytes]:
    """Builds a wheel; gives its name and the only library in it."""
    command = [sys.executable, "-m", "uv", "build", "--wheel", "--out-dir", folder, ROOT]
    subprocess.run(command, check=True, env=os.environ | environment)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(".so")]
        assert names == [f"ferrum_jax/ops/native/{build.LIBRARY.name}"]
        return wheel.name, packed.read(names[0])


@pytest.mark.slow
@needs_compiler
def test_a_wheel_holds_one_library_with_every_instruction_set(tmp_path: Path):
    wheel, content = wheel_of(tmp_path)
    assert "-py3-none-" in wheel
    assert "any" not in wheel
    for name in build.SETS[os.uname().machine]:
        assert name.encode() in content


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed (the extra dev)")
def test_a_wheel_of_a_portable_compiler_runs_on_old_systems(tmp_path: Path):
    machine = os.uname().machine
    compiler = f"{sys.executable} -m ziglang c++ -target {machine}-linux-gnu.2.17"
    wheel, content = wheel_of(tmp_path, CXX=compiler, _PYTHON_HOST_PLATFORM=f"manylinux_2_17_{machine}")
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
