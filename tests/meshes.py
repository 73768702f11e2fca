"""Meshes as researchers make them, and tiny models divided over them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ferrum_jax import models
from ferrum_jax.config import ModelConfig
from ferrum_jax.models.specs import RULES, ParamTree
from tests import tiny

TOLERANCE = 2e-5  # of the largest number: float32 sums in another order


def mesh_of(kind: str) -> jax.sharding.Mesh:
    """Two devices along `data` and two along `model`; axes are `explicit`, JAX's default, or `auto`."""
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=None if kind == "explicit" else (AxisType.Auto,) * 2)


def model_on(mesh: jax.sharding.Mesh, name: str) -> tuple[ParamTree, ParamTree, ModelConfig]:
    """Parameters on one device, the same ones divided over `model`, and their configuration."""
    params, cfg = tiny.tiny_params(tiny.CONFIGS[name]), tiny.model_config(name)
    rules = {**RULES, "vocab": None, "expert": None}  # tiny vocabularies and numbers of experts are odd
    specs = models.family(cfg).param_specs(cfg)
    return params, jax.device_put(params, models.specs.shardings(specs, mesh, rules)), cfg


def tokens_of(name: str) -> jax.Array:
    return jnp.asarray(tiny.prompt(name)[:36], jnp.int32).reshape(4, 9)


def by_data(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Divides arrays over `data` along their first axis."""
    return jax.device_put(tree, NamedSharding(mesh, P("data")))


def agree(found: Any, expected: Any) -> None:
    """Compares two trees, each array in proportion to its largest number."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        most = max(1e-6, float(np.abs(b[finite]).max(initial=0)))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=TOLERANCE * most, err_msg=name)


def collectives(function: Any, *arguments: Any) -> list[str]:
    """What moves between devices in a compiled function: shapes and operations, of one device."""
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.finditer(rf"(\w+\[[\d,]*\])\S* ({names})\(", text)
    return [f"{one[1]} {one[2]}" for one in found]
