"""Builds the CPU kernels when the package is installed or packed, where there is a C++ compiler."""

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Compiles ferrum_jax/ops/native; a wheel without the library is for any machine and runs on XLA's code."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the library to what is packed, or says why there is none."""
        if self.target_name != "wheel":
            return
        place = Path(self.root, "ferrum_jax/ops/native/build.py")
        spec = importlib.util.spec_from_file_location("build_kernels", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if problem := module.build():
            print(f"ferrum-jax is installed without its CPU kernels: {problem}", file=sys.stderr)
            module.LIBRARY.unlink(missing_ok=True)
            module.PROBLEM.write_text(problem, encoding="utf-8")  # for `ferrum-jax devices`: pip hides what is printed
            build_data["artifacts"].append(f"/{module.PROBLEM.relative_to(self.root).as_posix()}")
            return
        module.PROBLEM.unlink(missing_ok=True)
        build_data["artifacts"].append(f"/{module.LIBRARY.relative_to(self.root).as_posix()}")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())
