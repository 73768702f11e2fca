"""Builds the CPU kernels when the package is installed or packed, where there is a C++ compiler."""

import ctypes
import importlib.util
import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Compiles ferrum_jax/ops/native; a wheel without the library is for any machine and runs on XLA's code.

    Only an editable install writes into the checkout: what a wheel holds is built in a temporary folder.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the library to what is packed, or the reason why there is none."""
        if self.target_name != "wheel":
            return
        place = Path(self.root, "ferrum_jax/ops/native/build.py")
        spec = importlib.util.spec_from_file_location("build_kernels", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if version == "editable":
            build_in_place(module)
            return
        self.scratch = tempfile.TemporaryDirectory()
        made = Path(self.scratch.name, module.LIBRARY.name)
        if problem := module.build(made):
            made = report(problem, made.with_name(module.PROBLEM.name))
        else:
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())
        build_data["force_include"][str(made)] = f"ferrum_jax/ops/native/{made.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was built for a wheel, which has its own copy now."""
        if self.target_name == "wheel" and version != "editable":
            self.scratch.cleanup()


def build_in_place(module: ModuleType) -> None:
    """Builds the library in the checkout, unless it is there. A stale one goes even if no other can be built."""
    present = can_be_kept(module)
    problem = None if present and not os.environ.get("CXX") else module.build()
    if problem is None:
        module.PROBLEM.unlink(missing_ok=True)
    elif present:
        print(f"ferrum-jax keeps the CPU kernels it has, new ones were not built: {problem}", file=sys.stderr)
    else:
        module.LIBRARY.unlink(missing_ok=True)
        report(problem, module.PROBLEM)


def can_be_kept(module: ModuleType) -> bool:
    """Whether the checkout has a library of the present sources that loads here: an older system may share it."""
    if not module.LIBRARY.exists() or module.digest_sources().encode() not in module.LIBRARY.read_bytes():
        return False
    try:
        ctypes.CDLL(str(module.LIBRARY))
    except OSError:
        return False
    return True


def report(problem: str, to: Path) -> Path:
    """Says why there are no kernels, and writes it for `ferrum-jax devices`: pip hides what is printed."""
    print(f"ferrum-jax is installed without its CPU kernels: {problem}", file=sys.stderr)
    to.write_text(problem, encoding="utf-8")
    return to
