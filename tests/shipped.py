"""Tests of what LLVM's optimisations decide: the suite compiles without them, `.ci/run` runs these with them."""

import os

import pytest

needs_optimisations = pytest.mark.skipif(
    "--xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", ""),
    reason="XLA cannot write every step that LLVM has not optimised: run with --xla_backend_optimization_level=3",
)
