"""Where a parameter lies on a mesh; none of it needs more than one device."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ferrum_jax.contract.errors import ConfigError
from ferrum_jax.models import family
from ferrum_jax.models.specs import RULES, named_leaves, partition, shardings
from tests import tiny

# One device at every place: enough to say where things would lie.
MESH = Mesh(np.full((2, 3), jax.devices("cpu")[0]), ("data", "model"))
PAIR = Mesh(np.full(2, jax.devices("cpu")[0]), ("model",))


def partitioned(shape: tuple[int, ...], axes: tuple[str, ...], **rules: str | None) -> PartitionSpec:
    return partition("w", shape, axes, MESH, {**RULES, **rules}).spec


def test_each_dimension_goes_where_its_rule_says():
    assert partitioned((12, 7), ("mlp", "embed")) == PartitionSpec("model", None)
    assert partitioned((7, 12), ("embed", "heads")) == PartitionSpec(None, "model")
    assert partitioned((8, 12), ("embed", "heads"), embed="data") == PartitionSpec("data", "model")
    assert partitioned((8,), ("embed",)) == PartitionSpec(None)


def test_what_cannot_be_partitioned_is_refused_by_name():
    with pytest.raises(ConfigError, match="w: heads has 10, which 3 devices do not divide"):
        partitioned((10, 7), ("heads", "embed"))
    with pytest.raises(ConfigError, match="w: no rule for the logical axis 'depth'"):
        partitioned((10,), ("depth",))
    with pytest.raises(ConfigError, match=r"w: embed goes to the axis 'modle', the mesh has \('data', 'model'\)"):
        partitioned((12,), ("embed",), embed="modle")


def test_an_axis_that_the_mesh_lacks_divides_nothing():
    assert partitioned((10, 7), ("expert", "embed")) == PartitionSpec(None, None)
    assert partitioned((10,), ("embed",), embed="expert") == PartitionSpec(None)


def test_every_parameter_of_a_model_has_a_place():
    specs = family(tiny.model_config("qwen3")).param_specs(tiny.model_config("qwen3"))
    placed = named_leaves(shardings(specs, PAIR, {**RULES, "vocab": None}))
    assert set(placed) == set(named_leaves(specs))
    assert placed["model.layers.0.self_attn.q_proj.weight"].spec == PartitionSpec("model", None)
    assert placed["model.layers.0.self_attn.o_proj.weight"].spec == PartitionSpec(None, "model")
    assert placed["model.layers.0.mlp.down_proj.weight"].spec == PartitionSpec(None, "model")
    assert placed["model.norm.weight"].spec == PartitionSpec(None)
