"""`scripts/gpu_check.sh` runs on a GPU alone, goes on after a failure, and names its records as the documents do."""

import os
import subprocess
from pathlib import Path

from tests.bench.smoke import ROOT

PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in
*device_kind*) echo "NVIDIA H200" ;;
*bench.compare*) exit 1 ;;
esac
"""


def _run(folder: Path, *fakes: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with programs that only note how they are called."""
    for name in fakes:
        (folder / name).write_text(PROGRAM, encoding="utf-8")
        (folder / name).chmod(0o755)
    where = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), str(folder / "out")]
    return subprocess.run(command, env=os.environ | where | variables, capture_output=True, text=True, check=False)


def test_a_machine_without_a_gpu_is_refused_before_anything_is_measured(tmp_path: Path):
    assert _run(tmp_path, "timeout", JAX_PLATFORMS="cpu").returncode != 0
    assert not (tmp_path / "calls").exists()


def test_every_part_runs_and_records_have_the_names_of_those_that_are_kept(tmp_path: Path):
    done = _run(tmp_path, "python", "pytest")
    assert done.returncode == 1
    assert "== compare ended with 1" in done.stdout
    lines = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert any(f"--json {tmp_path}/out/compare-llama-3.1-8b-h200.json" in line for line in lines)
    assert (ROOT / "bench/results/compare-llama-3.1-8b-h200.json").is_file()
    assert any("torch.cuda.is_available()" in line for line in lines)
    tests = [line for line in lines if line.startswith("pytest")]
    assert len(tests) == 3
    assert all("--dist loadfile" in line for line in tests)
    assert lines[-1] == tests[-1]
