"""What each device of a mesh holds: together all numbers of the model, in any split, padded with zeros."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import ConfigError, UnsupportedError
from ferrum_jax.models import division as divided
from ferrum_jax.models.division import PADDING, divide, from_mesh, on_mesh, part_of
from ferrum_jax.models.quantisation import Format, choose_formats, quantised_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, named_leaves
from ferrum_jax.ops.quantised import UINTS, QuantisedWeight, dequantise_weight, pack, pack_high, quantise_weight
from tests import tiny


def config(heads: int, keys: int, **changes: Any) -> ModelConfig:
    sizes = {"num_attention_heads": heads * keys, "num_key_value_heads": keys, "head_dim": 4} | changes
    return ModelConfig.from_hf(tiny.CONFIGS["llama3"] | sizes)


@settings(max_examples=200, deadline=None)
@given(group=st.integers(1, 7), keys=st.integers(1, 9), devices=st.integers(1, 16))
def test_every_head_is_on_one_device_beside_its_keys(group: int, keys: int, devices: int):
    cfg = config(group, keys)
    if devices > group * keys:
        with pytest.raises(ConfigError, match=f"at most {group * keys} devices can share it"):
            divide(cfg, model=devices)
        return
    found = divide(cfg, model=devices)
    own_group = found.local.num_attention_heads // found.local.num_key_value_heads
    seen = []
    for queries, key_runs in zip(found.query_heads, found.key_heads, strict=True):
        key_of = [key for start, count in key_runs for key in _numbers(start, count)]
        heads = [head for start, count in queries for head in _numbers(start, count)]
        assert len(heads) == found.local.num_attention_heads
        assert len(key_of) == found.local.num_key_value_heads
        for at, head in enumerate(heads):
            if head is not None:
                assert key_of[at // own_group] == head // group
                seen.append(head)
    assert sorted(seen) == list(range(group * keys))
    assert found.shards.num_key_heads % keys == 0  # every key head has as many copies


def _numbers(start: int, count: int) -> list[int | None]:
    return [None] * count if start == PADDING else list(range(start, start + count))


@pytest.mark.parametrize("name", tiny.QUICK)
@pytest.mark.parametrize("sizes", [{"model": 3}, {"model": 4}, {"expert": 2, "model": 2}], ids=str)
def test_parts_laid_side_by_side_are_the_leaf_on_the_mesh_and_give_it_back(name: str, sizes: dict[str, int]):
    cfg = tiny.model_config(name)
    if "expert" in sizes and cfg.experts is None:
        sizes = {"model": 4}
    found, params = divide(cfg, **sizes), named_leaves(tiny.tiny_params(tiny.CONFIGS[name]))
    specs = family(cfg).param_specs(cfg)
    partitions = named_leaves(divided.partitions(specs, found))
    lengths = named_leaves(divided.specs_on_mesh(specs, found))
    parts = named_leaves(divided.specs_of_one(specs, found))
    for path, spec in named_leaves(specs).items():
        leaf = np.asarray(params[path])
        whole = on_mesh(leaf, spec, found)
        assert whole.shape == lengths[path].shape
        np.testing.assert_array_equal(from_mesh(whole, spec, found), leaf, err_msg=path)
        axes = [(one,) if isinstance(one, str) else one or () for one in partitions[path]]
        for expert in range(found.expert):
            for model in range(found.model):
                at = {"expert": expert, "model": model}
                piece = part_of(leaf, spec, found, at)
                assert piece.shape == parts[path].shape
                expected = whole
                for dim, names in enumerate(axes):
                    index = 0
                    for axis in names:
                        index = index * getattr(found, axis) + at[axis]
                    size = piece.shape[dim]
                    expected = expected.take(range(index * size, (index + 1) * size), dim) if names else expected
                np.testing.assert_array_equal(piece, expected, err_msg=path)


def test_a_bias_that_is_added_to_a_sum_is_on_one_device():
    cfg = tiny.model_config("llama_biases")
    found, spec = divide(cfg, model=4), ParamSpec((5,), ("sum",))
    parts = [part_of(np.arange(1.0, 6.0), spec, found, {"expert": 0, "model": at}) for at in range(4)]
    np.testing.assert_array_equal(parts[0], np.arange(1.0, 6.0))
    assert not np.any(parts[1:])
    specs = named_leaves(family(cfg).param_specs(cfg))
    assert specs["model.layers.0.self_attn.o_proj.bias"].axes == ("sum",)
    assert specs["model.layers.0.mlp.down_proj.bias"].axes == ("sum",)
    assert specs["model.layers.0.self_attn.q_proj.bias"].axes == ("heads",)


FORMS = {
    "a scale a channel": Format("int8"),
    "a scale and an offset a channel": Format("int8", 1, "float32", "float32"),
    "groups": Format("int8", 6),
    "fp8": Format("float8_e4m3fn", 3),
    "two numbers a byte": Format("uint4", 6),
    "with offsets": Format("uint4", 3, "float32", "float32"),
    "scales of scales": Format("int8", 12, Format("int8", 3, "float16")),
    "scales and offsets of their own scales": Format("uint4", 6, *(2 * [Format("int8", 2, "float16")])),
    "five bits": Format("uint5", 3, "float32", "float32"),
    "six bits": Format("uint6", 1),  # a group that is split
    "a scale of all scales": Format("uint4", 6, Format("int8", 1, "float16")),
    "floats of four bits": Format("float4_e2m1fn", 3, "uint8"),
    "sixteen bits": Format("bfloat16"),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("axes", [("mlp", "embed"), ("embed", "mlp"), ("heads", "embed"), ("embed", "heads")], ids=str)
def test_quantised_weights_keep_their_numbers(name: str, devices: int, axes: tuple[str, str]):
    traced = axes == ("embed", "mlp") and devices == 4
    form = FORMS[name]
    cfg = config(3, 3, head_dim=8, intermediate_size=72)  # devices' columns end within groups of 12 and 24
    found = divide(cfg, model=devices)
    if form.dtype in ("uint5", "uint6") and axes == ("embed", "mlp") and devices != 3:  # 36 or 18 columns for each
        with pytest.raises(UnsupportedError, match="8 must divide it and a group's size"):
            divided.specs_on_mesh(quantised_specs({"w": ParamSpec((72, 72), axes)}, {"w": form}), found)
        return
    weight = _draw(form, 72)
    spec = quantised_specs({"w": ParamSpec((72, 72), axes)}, {"w": form})["w"]
    convert = jax.jit(lambda leaf: on_mesh(leaf, spec, found)) if traced else lambda leaf: on_mesh(leaf, spec, found)
    whole = jax.tree.map(np.asarray, convert(weight))
    plain = np.asarray(dequantise_weight(jax.tree.map(jnp.asarray, weight), "float32"))
    there = np.asarray(dequantise_weight(jax.tree.map(jnp.asarray, whole), "float32"))
    np.testing.assert_array_equal(there, on_mesh(plain, ParamSpec((72, 72), axes), found))
    described = divided.specs_on_mesh({"w": spec}, found)["w"]
    assert jax.tree.map(lambda leaf: leaf.shape, whole) == jax.tree.map(
        lambda leaf: leaf.shape, described, is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    jax.tree.map(np.testing.assert_array_equal, from_mesh(whole, spec, found), weight)
    parts = [part_of(weight, spec, found, {"expert": 0, "model": at}) for at in range(devices)]
    dim = axes.index("embed") ^ 1
    divided_by = divided.partitions({"w": spec}, found)["w"]  # each part has its own copy of a scale of all columns
    together = jax.tree.map(
        lambda axes, *leaves: np.concatenate(leaves, dim) if axes[dim] else leaves[-1], divided_by, *parts
    )
    jax.tree.map(np.testing.assert_array_equal, together, whole)


def _draw(form: Format, size: int) -> QuantisedWeight[Any]:
    rng = np.random.default_rng(5)
    wide = rng.standard_normal((size, size)).astype(np.float32)
    if form.dtype == "bfloat16":
        return QuantisedWeight(values=wide.astype(jnp.bfloat16))
    if form.dtype == "float4_e2m1fn":
        values = rng.integers(256, size=(size, size // 2)).astype(np.uint8)
        return QuantisedWeight(values=values, scales=rng.integers(120, 131, (size, form.groups)).astype(np.uint8))
    if form.dtype not in UINTS and isinstance(form.scales, str) and form.offsets is None:
        return quantise_weight(wide, form.dtype, form.groups)
    values, high = rng.integers(-127, 128, (size, size)).astype(np.int8), None
    if (bits := UINTS.get(form.dtype, 0)) > 0:
        numbers = rng.integers(2**bits, size=(size, size)).astype(np.uint8)
        values, high = pack(numbers, form.groups), pack_high(numbers, form.groups, bits) if bits > 4 else None

    def part(kept: str | Format | None) -> Any:
        if not isinstance(kept, Format):
            return None if kept is None else rng.standard_normal((size, form.groups)).astype(np.float32)
        counts = rng.integers(-32, 64, (size, form.groups)).astype(np.int8)
        return QuantisedWeight(values=counts, scales=rng.standard_normal((size, kept.groups)).astype(np.float16))

    return QuantisedWeight(values=values, scales=part(form.scales), offsets=part(form.offsets), high=high)


def test_numbers_that_share_a_byte_stay_together():
    odd = quantised_specs({"w": ParamSpec((8, 90), ("embed", "mlp"))}, {"w": Format("uint4", 3)})["w"]
    with pytest.raises(UnsupportedError, match="2 must divide it and a group's size"):
        divided.specs_on_mesh({"w": odd}, divide(config(2, 9), model=6))


def test_what_divides_nothing_is_refused():
    with pytest.raises(ConfigError, match="the mesh axis expert has 2 devices, this llama has 1 experts"):
        divide(config(2, 2), expert=2)
    with pytest.raises(ConfigError, match="the mesh axis expert has 6 devices, this mixtral has 5 experts"):
        divide(tiny.model_config("mixtral"), expert=6)


def test_formats_of_every_matrix_have_a_place():
    cfg = tiny.model_config("qwen2_moe")
    specs = quantised_specs(family(cfg).param_specs(cfg), choose_formats(cfg, "int8", group_size=4))
    placed = divided.partitions(specs, divide(cfg, expert=2, model=2))
    block = placed["model"]["layers"][0]["mlp"]["experts"]["down_proj"]["weight"]
    assert block.values == block.scales == jax.sharding.PartitionSpec("expert", None, "model")
