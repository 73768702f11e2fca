"""Directories in PEFT's format: what is read, and what is refused."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ferrum_jax.contract.errors import (
    ConfigError,
    FerrumError,
    InvalidFormatError,
    InvalidParameterError,
    NotFoundError,
    RequestValidationError,
    UnsupportedError,
)
from ferrum_jax.models.adapters import LoraSpec, adapter_specs, checked_stacks, install, stack_specs
from ferrum_jax.models.specs import initialise, named_leaves
from ferrum_jax.weights.peft import PeftAdapter, lay_out, read_adapter, write_adapter
from tests import adapters, tiny

CFG = tiny.model_config("llama3")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UP = "model.layers.1.mlp.up_proj"
A, B = (f"base_model.model.{UP}.lora_{half}.weight" for half in "AB")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return adapters.write_adapter(tmp_path / "adapter", "patterns")


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(json.dumps(config | fields), encoding="utf-8")


def refuse(folder: Path, kind: type[FerrumError]) -> str:
    with pytest.raises(kind) as refusal:
        read_adapter(folder, CFG)
    assert type(refusal.value) is kind
    assert str(folder) in str(refusal.value)
    return str(refusal.value)


def assert_same(found: PeftAdapter, expected: PeftAdapter) -> None:
    assert found.projections.keys() == expected.projections.keys()
    for name, halves in expected.projections.items():
        for one, other in zip(found.projections[name], halves, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


@pytest.mark.parametrize("name", [name for name, (model, _) in adapters.ADAPTERS.items() if model == "llama3"])
def test_what_is_read_are_the_tensors_and_the_scale(name: str, tmp_path: Path):
    adapter = read_adapter(adapters.write_adapter(tmp_path, name), CFG)
    expected = adapters.tensors(name, CFG)
    assert adapter.rank == max(tensor.shape[0] for key, tensor in expected.items() if "lora_A" in key)
    fields = adapters.ADAPTERS[name][1]
    for module, (down, up) in adapter.projections.items():
        alpha = fields["lora_alpha"]
        if name == "patterns":
            alpha = 7 if "gate" in module or "up_proj" in module else 2.5 if "q_proj" in module else 4
        if name == "rank_stabilised_patterns" and module == "model.layers.2.mlp.down_proj":
            alpha = 5
        scale = alpha / (math.sqrt(len(down)) if fields.get("use_rslora") else len(down))
        np.testing.assert_array_equal(down, expected.pop(f"base_model.model.{module}.lora_A.weight"), strict=True)
        own = expected.pop(f"base_model.model.{module}.lora_B.weight")
        np.testing.assert_allclose(up, own * scale, rtol=1e-6)
    assert not expected


def test_names_and_settings_as_older_files_have_them_read_the_same(folder: Path):
    expected = read_adapter(folder, CFG)
    older = {key.replace(".weight", ".default.weight"): tensor for key, tensor in load_file(folder / WEIGHTS).items()}
    save_file(older, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    kept = ("peft_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern")
    change = {"enable_lora": None, "merge_weights": False, "fan_in_fan_out": False, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps({key: config[key] for key in kept} | change), encoding="utf-8")
    assert_same(read_adapter(folder, CFG), expected)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_an_adapter_of_a_multimodal_model_is_read(prefix: str, folder: Path):
    expected = read_adapter(folder, CFG)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace("base_model.model.model.", f"base_model.model.{prefix}")] = tensors.pop(name)

    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    spelt = {
        field: {
            name.replace("model.", prefix, 1) if name.startswith("model.") else name: value
            for name, value in config[field].items()
        }
        for field in ("rank_pattern", "alpha_pattern")
    }
    assert spelt["rank_pattern"] != config["rank_pattern"]
    change_config(folder, **spelt)
    change_tensors(folder, rename)
    assert_same(read_adapter(folder, CFG), expected)
    wanted = "|".join({name.rpartition(".")[2] for name in expected.projections})
    change_config(folder, target_modules=rf".*language_model.*\.({wanted})", exclude_modules=None)
    read_adapter(folder, CFG)
    change_tensors(
        folder,
        lambda tensors: tensors.update({"base_model.model.vision_tower.q.lora_A.weight": np.ones(3, np.float32)}),
    )
    assert "vision_tower.q.lora_A.weight is unknown" in refuse(folder, InvalidFormatError)


@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_widths_become_float32(narrow: type, folder: Path):
    written = {key: tensor.astype(narrow) for key, tensor in load_file(folder / WEIGHTS).items()}
    save_file(written, folder / WEIGHTS)
    down, _ = read_adapter(folder, CFG).projections[UP]
    np.testing.assert_array_equal(down, written[A].astype(np.float32), strict=True)


@pytest.mark.parametrize(
    "harmless",
    [
        {"init_lora_weights": start} for start in (True, False, None, "gaussian", "eva", "orthogonal", "mica")
    ]
    + [{"corda_config": {"corda_method": "ipm"}}, {"lora_dropout": 0.3}, {"task_type": None}, {"something_new": None}],
    ids=str,
)  # fmt: skip
def test_what_changes_no_logits_is_accepted(harmless: dict[str, Any], folder: Path):
    expected = read_adapter(folder, CFG)
    change_config(folder, **harmless)
    assert_same(read_adapter(folder, CFG), expected)


def test_the_layout_pads_with_zeros(folder: Path):
    spec = LoraSpec(max_loras=2, max_rank=13)
    adapter = read_adapter(folder, CFG)
    leaves = named_leaves(lay_out(adapter, spec, "bfloat16"))
    shapes = {name: leaf.shape for name, leaf in named_leaves(adapter_specs(CFG, spec)).items()}
    assert {name: leaf.shape for name, leaf in leaves.items()} == shapes
    down, up = adapter.projections[UP]
    assert len(down) == 3
    found = leaves[f"{UP}.down"], leaves[f"{UP}.up"]
    np.testing.assert_array_equal(found[0][:3], down.astype(ml_dtypes.bfloat16), strict=True)
    np.testing.assert_array_equal(found[1][:, :3], up.astype(ml_dtypes.bfloat16), strict=True)
    assert not found[0][3:].any()
    assert not found[1][:, 3:].any()


def test_projections_without_an_adapter_are_zeros(tmp_path: Path):
    adapter = read_adapter(adapters.write_adapter(tmp_path, "queries_and_values"), CFG)
    leaves = named_leaves(lay_out(adapter, LoraSpec(max_loras=2, max_rank=8), "float32"))
    assert {name.split(".")[-2] for name, leaf in leaves.items() if leaf.any()} == {"q_proj", "v_proj"}


def test_a_rank_above_the_limit_is_refused_with_both(folder: Path):
    adapter = read_adapter(folder, CFG)
    lay_out(adapter, LoraSpec(max_loras=1, max_rank=12), "float32")
    with pytest.raises(RequestValidationError, match="rank 12, more than max_lora_rank, which is 11"):
        lay_out(adapter, LoraSpec(max_loras=1, max_rank=11), "float32")


def test_values_too_large_for_a_narrow_dtype_are_refused(folder: Path):
    change_tensors(folder, lambda tensors: tensors[B].fill(1e5))
    adapter = read_adapter(folder, CFG)
    lay_out(adapter, LoraSpec(max_loras=1, max_rank=12), "bfloat16")
    with pytest.raises(InvalidFormatError, match=rf"{UP}\.up has values that are not finite in float16"):
        lay_out(adapter, LoraSpec(max_loras=1, max_rank=12), "float16")


@pytest.mark.parametrize(
    ("fields", "kind", "named"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, "peft_type 'IA3'"),
        ({"peft_type": None}, UnsupportedError, "peft_type None"),
        ({"task_type": "SEQ_CLS"}, UnsupportedError, "SEQ_CLS"),
        ({"bias": "all"}, UnsupportedError, "bias 'all'"),
        ({"bias": "lora_only"}, UnsupportedError, "bias 'lora_only'"),
        ({"use_dora": True}, UnsupportedError, "use_dora"),
        ({"use_qalora": True}, UnsupportedError, "use_qalora"),
        ({"lora_bias": True}, UnsupportedError, "lora_bias"),
        ({"fan_in_fan_out": True}, UnsupportedError, "fan_in_fan_out"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save"),
        ({"layer_replication": [[0, 2], [1, 3]]}, UnsupportedError, "layer_replication"),
        ({"trainable_token_indices": [5]}, UnsupportedError, "trainable_token_indices"),
        ({"alora_invocation_tokens": [5]}, UnsupportedError, "alora_invocation_tokens"),
        ({"target_parameters": ["experts.up"]}, UnsupportedError, "target_parameters"),
        ({"kasa_config": {"beta": 1e-4}}, UnsupportedError, "kasa_config"),
        ({"arrow_config": {"top_k": 3}}, UnsupportedError, "arrow_config"),
        ({"something_new": 3}, UnsupportedError, "something_new = 3"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "pissa_niter_4"),
        ({"init_lora_weights": "olora"}, UnsupportedError, "olora"),
        ({"init_lora_weights": "loftq"}, UnsupportedError, "loftq"),
        ({"init_lora_weights": [True]}, UnsupportedError, "init_lora_weights [True]"),
        ({"target_modules": ["q_proj", "lm_head"]}, UnsupportedError, "lm_head"),
        ({"target_modules": ["embed_tokens"]}, UnsupportedError, "model.embed_tokens"),
        ({"target_modules": ".*"}, UnsupportedError, "lm_head"),
        ({"target_modules": None}, ConfigError, "target_modules"),
        ({"target_modules": 3}, ConfigError, "target_modules"),
        ({"target_modules": [["q_proj"]]}, ConfigError, "target_modules"),
        ({"target_modules": ["query_key_value"]}, ConfigError, "no projection"),
        ({"target_modules": "(q_proj"}, ConfigError, "(q_proj"),
        ({"target_modules": "[[a]q_proj"}, ConfigError, "[[a]q_proj"),
        ({"target_modules": "a{99999999999}"}, ConfigError, "target_modules"),
        ({"target_modules": "all-linear", "layers_to_transform": 1}, ConfigError, "layers_to_transform"),
        ({"exclude_modules": 4}, ConfigError, "exclude_modules"),
        ({"layers_to_transform": "1"}, ConfigError, "layers_to_transform"),
        ({"layers_to_transform": [True]}, ConfigError, "layers_to_transform is True, expected an integer"),
        ({"layers_to_transform": False}, ConfigError, "layers_to_transform is False, expected an integer"),
        ({"layers_to_transform": ""}, ConfigError, "layers_to_transform is '', expected an integer"),
        ({"layers_to_transform": [1, -1]}, ConfigError, "layers_to_transform is -1, expected an integer of at least 0"),
        ({"layers_pattern": {"a": 1}}, ConfigError, "layers_pattern"),
        ({"layers_pattern": ["("]}, ConfigError, "layers_pattern"),
        ({"layers_to_transform": [0], "layers_pattern": "blocks"}, ConfigError, "no projection"),
        ({"r": 0}, ConfigError, "r is 0"),
        ({"r": "8"}, ConfigError, "r is '8'"),
        ({"r": True}, ConfigError, "r is True"),
        ({"r": None}, ConfigError, "r is None"),
        ({"r": 10**300}, ConfigError, "expected at most 2147483647"),
        ({"r": 10**6}, InvalidFormatError, "expected"),
        ({"lora_alpha": None}, ConfigError, "lora_alpha"),
        ({"lora_alpha": math.nan}, ConfigError, "lora_alpha"),
        ({"lora_alpha": 10**400}, ConfigError, "lora_alpha"),
        ({"lora_alpha": 1e300}, ConfigError, "lora_alpha is 1e+300, expected a number, finite in float32"),
        ({"use_rslora": "yes"}, ConfigError, "use_rslora"),
        ({"rank_pattern": ["q_proj"]}, ConfigError, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 2.5}}, ConfigError, "q_proj"),
        ({"rank_pattern": {"q_proj": 9}}, InvalidFormatError, "[8, 48], expected [9, 48]"),
        ({"alpha_pattern": {"q_proj": "1"}}, ConfigError, "q_proj"),
        ({"alpha_pattern": {"*": 1}}, ConfigError, "alpha_pattern"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_configuration_that_cannot_be_honoured_is_refused(
    fields: dict[str, Any], kind: type[FerrumError], named: str, folder: Path
):
    change_config(folder, **fields)
    assert named in refuse(folder, kind)


def test_places_that_hold_no_adapter_are_refused(folder: Path):
    assert "no directory" in refuse(folder / "nowhere", NotFoundError)
    assert "no directory" in refuse(folder / CONFIG, NotFoundError)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "pickle" in refuse(folder, UnsupportedError)
    (folder / "adapter_model.bin").unlink()
    assert WEIGHTS in refuse(folder, NotFoundError)
    (folder / CONFIG).unlink()
    assert CONFIG in refuse(folder, NotFoundError)
    (folder / CONFIG).mkdir()
    with pytest.raises(FerrumError, match="cannot be read"):
        read_adapter(folder, CFG)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"r": ' + "1" * 10_000 + "}", "[]", "{", "\ud800"])
def test_a_configuration_that_is_no_object_is_refused(text: str, folder: Path):
    (folder / CONFIG).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert CONFIG in refuse(folder, InvalidFormatError)


@pytest.mark.parametrize("kept", [0, 5, 8, 100, 3000, -1])
def test_a_truncated_file_is_refused(kept: int, folder: Path):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:kept])
    assert WEIGHTS in refuse(folder, InvalidFormatError)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(A), f"{A} is missing"),
        (lambda tensors: tensors.pop(B), f"{B} is missing"),
        (lambda tensors: tensors.update({A: np.ascontiguousarray(tensors[A].T)}), f"{A} has shape [48, 3]"),
        (lambda tensors: tensors.update({B: tensors[B].reshape(3, -1)}), f"{B} has shape [3, 72]"),
        (lambda tensors: tensors.update(stranger=tensors[A]), "stranger is unknown"),
        (lambda tensors: tensors.update({A.replace("layers.1", "layers.3"): tensors[A]}), "layers.3"),
        (lambda tensors: tensors.update({B.replace("lora_B", "lora_magnitude_vector"): tensors[B]}), "magnitude"),
        (lambda tensors: tensors.update({A.replace("_A", "_A.default"): tensors[A]}), "there twice"),
        (lambda tensors: tensors[A].__setitem__((2, 40), np.nan), f"{A} has values that are not finite"),
        (lambda tensors: tensors[B].__setitem__((70, 1), -np.inf), f"{B} has values that are not finite"),
        (lambda tensors: tensors.update({B: tensors[B].astype(np.float64) * 1e300}), f"{B} has values that are not"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, np.ndarray]], object], named: str, folder: Path
):
    change_tensors(folder, change)
    message = refuse(folder, InvalidFormatError)
    assert named in message
    assert WEIGHTS in message


def test_a_scale_that_makes_values_infinite_is_refused_by_name(folder: Path):
    change_config(folder, lora_alpha=3e38, alpha_pattern={})
    change_tensors(folder, lambda tensors: tensors.update({B: tensors[B] * np.float32(1000)}))
    assert f"{B} has values that are not finite in float32, its scale included" in refuse(folder, InvalidFormatError)


def test_an_integer_tensor_is_refused_by_name(folder: Path):
    change_tensors(folder, lambda tensors: tensors.update({A: np.zeros((3, 48), np.int8)}))
    assert f"{A} is I8" in refuse(folder, UnsupportedError)


def test_an_adapter_of_another_model_is_refused(folder: Path):
    with pytest.raises(InvalidFormatError, match=r"expected"):
        read_adapter(folder, tiny.model_config("llama2"))


def test_all_problems_come_in_one_message(folder: Path):
    change_tensors(folder, lambda tensors: [tensors.pop(key) for key in list(tensors) if "layers.2" in key])
    message = refuse(folder, InvalidFormatError)
    assert "model.layers.2.self_attn.k_proj.lora_B.weight is missing" in message
    assert "; and 6 more" in message


def damage(folder: Path, draw: np.random.RandomState) -> None:
    """Damages a directory in one of the ways that files are damaged, or written by another program."""
    config, weights = folder / CONFIG, folder / WEIGHTS
    kind = draw.randint(6)
    if kind == 0:
        whole = config.read_bytes()
        config.write_bytes(whole[: draw.randint(len(whole))])
    elif kind == 1:
        whole = weights.read_bytes()
        weights.write_bytes(whole[: draw.randint(len(whole))])
    elif kind in (2, 3):
        path = (config, weights)[kind - 2]
        whole = bytearray(path.read_bytes())
        end = len(whole) if draw.randint(4) == 0 or kind == 2 else 8 + int.from_bytes(whole[:8], "little")
        for at in draw.randint(end, size=draw.randint(1, 5)):
            whole[at] = draw.randint(256)
        path.write_bytes(whole)
    else:
        fields = json.loads(config.read_text(encoding="utf-8"))
        values = [
            None,
            True,
            -1,
            0,
            3.5,
            10**400,
            math.inf,
            "",
            "(",
            "none",
            [],
            [1],
            ["q_proj"],
            {},
            {"a": "b"},
            {"(": 1},
        ]
        for name in draw.choice(sorted(fields), size=draw.randint(1, 4)):
            if draw.randint(8) == 0:
                fields.pop(name, None)
            else:
                fields[name] = values[draw.randint(len(values))]
        config.write_text(json.dumps(fields), encoding="utf-8")


def test_damaged_directories_are_refused_or_read_and_nothing_else(tmp_path: Path):
    whole = adapters.write_adapter(tmp_path / "whole", "some_layers", rank_pattern={"k_proj": 4}, exclude_modules=[])
    draw, messages = np.random.RandomState(5), {}
    for number in range(400):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        damage(folder, draw)
        try:
            adapter = read_adapter(folder, CFG)
            leaves = named_leaves(lay_out(adapter, LoraSpec(max_loras=1, max_rank=4), "float32"))
            assert all(np.isfinite(leaf).all() for leaf in leaves.values())
        except FerrumError as refusal:
            messages[folder] = str(refusal)
        shutil.rmtree(folder)
    assert 200 < len(messages) < 400
    assert all(str(folder) in message for folder, message in messages.items())


def test_what_is_written_is_read_back(tmp_path: Path):
    cfg, spec = tiny.model_config("qwen2"), LoraSpec(max_loras=2, max_rank=3)
    start = initialise(stack_specs(cfg, spec), jax.random.key(0), "float32")
    stacks = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), start)
    write_adapter(tmp_path / "made", stacks, cfg, 1)
    found = install(start, lay_out(read_adapter(tmp_path / "made", cfg), spec, "float32"), 1)
    for name, leaf in named_leaves(found).items():
        row = (slice(None), 1) if name.endswith("up") else 1
        np.testing.assert_array_equal(leaf[row], named_leaves(stacks)[name][row])
    with pytest.raises(InvalidParameterError, match="there are 2 adapters, number 2 is not among them"):
        write_adapter(tmp_path, stacks, cfg, 2)


@pytest.mark.parametrize("rank", [None, 0], ids=["left out", "of rank 0"])
def test_projections_may_be_left_out_of_what_is_written(tmp_path: Path, rank: int | None):
    cfg, key = tiny.model_config("llama3"), jax.random.key(0)
    stacks = initialise(stack_specs(cfg, LoraSpec(max_loras=1, max_rank=3)), key, "float32")
    given: list[Any] = [{}] * cfg.num_hidden_layers
    given[1] = {"self_attn": {"q_proj": stacks["model"]["layers"][1]["self_attn"]["q_proj"]}}
    part: Any = {"model": {"layers": given}}
    write_adapter(tmp_path, part if rank is None else checked_stacks(part, cfg), cfg)
    found = read_adapter(tmp_path, cfg).projections
    assert list(found) == ["model.layers.1.self_attn.q_proj"]
    np.testing.assert_array_equal(
        found["model.layers.1.self_attn.q_proj"][0], given[1]["self_attn"]["q_proj"]["down"][0]
    )


def test_what_is_no_adapter_is_not_written(tmp_path: Path):
    cfg = tiny.model_config("llama3")
    stacks: Any = initialise(stack_specs(cfg, LoraSpec(max_loras=1, max_rank=3)), jax.random.key(0), "float32")
    for damaged, message in (
        (jax.tree.map(lambda leaf: leaf[:, :0] if leaf.shape[0] == 1 else leaf[..., :0], stacks), "every rank is 0"),
        ({"model": {"layers": stacks["model"]["layers"][:1]}}, "these are not stacks of adapters of this model"),
        ({"model": {"layers": [{}] * cfg.num_hidden_layers}}, "these are not stacks of adapters of this model"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            write_adapter(tmp_path / "made", damaged, cfg)
    assert not (tmp_path / "made").exists()


def test_projections_of_other_ranks_are_written_with_their_own(tmp_path: Path):
    cfg, key = tiny.model_config("llama3"), jax.random.key(0)
    stacks = initialise(stack_specs(cfg, LoraSpec(max_loras=1, max_rank=4)), key, "float32")
    first, *others = stacks["model"]["layers"]
    thin = {name: {"down": own["down"][:, :2], "up": own["up"][..., :2]} for name, own in first["mlp"].items()}
    mixed = {"model": {"layers": [first | {"mlp": thin}, *others]}}
    mixed = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), mixed)
    write_adapter(tmp_path, mixed, cfg)
    found, expected = read_adapter(tmp_path, cfg), named_leaves(mixed)
    assert found.rank == 4
    for name, (down, up) in found.projections.items():
        np.testing.assert_array_equal(down, expected[f"{name}.down"][0])
        np.testing.assert_array_equal(up, expected[f"{name}.up"][:, 0])
