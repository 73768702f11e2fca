"""Fixtures that several rooms share."""

import importlib.util
from pathlib import Path

import jax
import jaxtyping
import pytest

from ferrum_jax import hub

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Checks shapes and dtypes in signatures, in what is imported from here on.
jaxtyping.install_import_hook(["ferrum_jax.models", "ferrum_jax.kvcache.state"], "beartype.beartype")

# Their imports need the extra `reference`; without it they are not there to be selected.
collect_ignore = [] if all(importlib.util.find_spec(name) for name in ("torch", "transformers")) else ["reference"]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's file: fetched once, then taken from the user's cache."""
    return hub.resolve(None, progress=False)
