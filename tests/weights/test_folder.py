"""Hugging Face folders: what is read, and what is refused."""

import errno
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ferrum_jax
from ferrum_jax.contract.errors import (
    ConfigError,
    FerrumError,
    InvalidFormatError,
    IOError,
    NotFoundError,
    UnsupportedError,
)
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.weights import folder as folder_module
from ferrum_jax.weights.folder import SafetensorsSource
from tests import tiny
from tests.long import SEED

CONFIG = tiny.CONFIGS["llama_biases"]
TIED = tiny.CONFIGS["llama32_tied"]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"
Q = "model.layers.1.self_attn.q_proj.weight"


def refuse(folder: Path) -> str:
    """Demands that loading is refused before a tensor is read; gives the message."""
    not_read = patch.object(SafetensorsSource, "read", side_effect=AssertionError("a tensor was read"))
    with not_read, pytest.raises(FerrumError) as refusal:
        ferrum_jax.load_params(folder)
    return str(refusal.value)


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object], file: str = SINGLE) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_any_number_of_shards_gives_the_same_parameters(shards: int, tmp_path: Path):
    params, cfg = ferrum_jax.load_params(tiny.write_folder(tmp_path, CONFIG, shards))
    assert cfg == tiny.model_config("llama_biases")
    tiny.assert_same_tree(params, tiny.tiny_params(CONFIG))


def test_a_whole_file_goes_before_an_index_that_does_not_name_it(tmp_path: Path):
    """As of transformers, which writes it beside the index and the shards of an older checkpoint, or what is left."""
    folder = tiny.write_folder(tmp_path, CONFIG, 3)
    save_file(tiny.tensors(CONFIG, 5), folder / SINGLE, metadata={"format": "pt"})
    wanted = tiny.tiny_params(CONFIG, 5)
    tiny.assert_same_tree(ferrum_jax.load_params(folder)[0], wanted)
    (folder / SECOND).unlink()
    tiny.assert_same_tree(ferrum_jax.load_params(folder)[0], wanted)


def test_a_single_shard_may_have_any_name(tmp_path: Path):
    tiny.write_folder(tmp_path, CONFIG)
    (tmp_path / SINGLE).rename(tmp_path / "weights.safetensors")
    tiny.assert_same_tree(ferrum_jax.load_params(tmp_path)[0], tiny.tiny_params(CONFIG))


@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_widths_become_float32_exactly(narrow: type, tmp_path: Path):
    written = {name: tensor.astype(narrow) for name, tensor in tiny.tensors(CONFIG).items()}
    params, _ = ferrum_jax.load_params(tiny.write_folder(tmp_path, CONFIG, named=written), dtype="float32")
    for name, leaf in ferrum_jax.models.specs.named_leaves(params).items():
        np.testing.assert_array_equal(leaf, written[name].astype(np.float32), strict=True)


@pytest.mark.parametrize(("dtype", "rounded"), [("bfloat16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_the_dtype_asked_for_is_what_the_parameters_have(dtype: str, rounded: type, tmp_path: Path):
    params, _ = ferrum_jax.load_params(tiny.write_folder(tmp_path, CONFIG), dtype=dtype)
    for name, leaf in ferrum_jax.models.specs.named_leaves(params).items():
        np.testing.assert_array_equal(np.asarray(leaf), tiny.tensors(CONFIG)[name].astype(rounded), strict=True)


def test_derived_tensors_in_a_checkpoint_are_left_unread(tmp_path: Path):
    head = tiny.tensors(TIED)["model.embed_tokens.weight"]
    extra = {"lm_head.weight": head, "model.rotary_emb.inv_freq": np.zeros(10, np.float32)}
    folder = tiny.write_folder(tmp_path, TIED, named=tiny.tensors(TIED) | extra)
    params, cfg = ferrum_jax.load_params(folder)
    assert cfg.tie_word_embeddings
    tiny.assert_same_tree(params, tiny.tiny_params(TIED))
    named = tiny.tensors(TIED)
    named["lm_head.weight"] = named.pop("model.embed_tokens.weight")  # the other name of a tied tensor alone
    params, cfg = ferrum_jax.load_params(tiny.write_folder(tmp_path / "head", TIED, named=named))
    assert cfg.tie_word_embeddings
    tiny.assert_same_tree(params, tiny.tiny_params(TIED))


@pytest.mark.parametrize("rows", [3, 1 << 12])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_head_that_differs_from_the_embeddings_unties_the_model(
    shards: int, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(folder_module, "_ROWS", rows)
    tensors = tiny.tensors(TIED)
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    tied = tiny.write_folder(tmp_path / "tied", TIED, shards, named=tensors | {"lm_head.weight": head})
    untied = TIED | {"tie_word_embeddings": False}
    expected = tiny.write_folder(tmp_path / "untied", untied, named=tensors | {"lm_head.weight": head})
    (params, cfg), (wanted, wanted_cfg) = (ferrum_jax.load_params(path) for path in (tied, expected))
    assert cfg == wanted_cfg
    tiny.assert_same_tree(params, wanted)
    made = ferrum_jax.convert(tied, tmp_path / "made", progress=False)
    assert ferrum_jax.load_params(made)[1] == wanted_cfg


def test_a_head_of_another_dtype_with_the_same_numbers_is_tied(tmp_path: Path):
    embeddings = tiny.tensors(TIED)["model.embed_tokens.weight"].astype(np.float16)
    for kind, is_tied in ((np.float32, True), (ml_dtypes.bfloat16, False)):
        extra = {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings.astype(kind)}
        folder = tiny.write_folder(tmp_path, TIED, named=tiny.tensors(TIED) | extra)
        assert ferrum_jax.load_params(folder)[1].tie_word_embeddings == is_tied


@pytest.mark.parametrize("shape", [(97, 47), (4,), ()])
def test_a_head_of_another_shape_than_the_embeddings_is_refused(shape: tuple[int, ...], tmp_path: Path):
    extra = {"lm_head.weight": np.zeros(shape, np.float32)}
    folder = tiny.write_folder(tmp_path, TIED, named=tiny.tensors(TIED) | extra)
    assert f"lm_head.weight has shape {list(shape)}" in refuse(folder)


@pytest.mark.parametrize("kept", [0, 5, 8, 100, 3000, -1])
def test_a_truncated_file_is_refused_by_name(kept: int, tmp_path: Path):
    file = tiny.write_folder(tmp_path, CONFIG) / SINGLE
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in refuse(tmp_path)


@pytest.mark.parametrize(("times", "seed"), [(100, 3), pytest.param(2000, None, marks=pytest.mark.slow)])
def test_corrupted_headers_are_refused_or_give_the_numbers_that_are_there(times: int, seed: int | None, tmp_path: Path):
    file = tiny.write_folder(tmp_path, TIED) / SINGLE
    whole = file.read_bytes()
    expected = {name: np.asarray(leaf) for name, leaf in named_leaves(tiny.tiny_params(TIED)).items()}
    messages = []
    for damaged in tiny.damaged(
        whole, 8 + int.from_bytes(whole[:8], "little"), times=times, seed=SEED if seed is None else seed
    ):
        file.write_bytes(damaged)
        try:
            found = named_leaves(ferrum_jax.load_params(tmp_path)[0])
        except FerrumError as refusal:
            messages.append(str(refusal))
            continue
        assert {name: leaf.shape for name, leaf in found.items()} == {n: leaf.shape for n, leaf in expected.items()}
        numbers = [leaf.tobytes() for leaf in expected.values()]  # names of tensors of one shape may have been swapped
        assert all(np.asarray(leaf).tobytes() in numbers for leaf in found.values())
    assert len(messages) > 0.6 * times, f"seed {seed or SEED}"
    assert all(str(tmp_path) in message for message in messages)


@pytest.mark.parametrize("name", [INDEX, "config.json", SECOND])
def test_a_pipe_in_the_place_of_a_file_is_refused(name: str, tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG, shards=3)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name} is no regular file" in refuse(folder)


def test_a_number_of_layers_that_no_model_has_is_refused_before_they_are_counted(tmp_path: Path):
    tiny.write_folder(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 9999}))
    with pytest.raises(ConfigError, match=r"config\.json: num_hidden_layers is 9999, expected at most 1000"):
        ferrum_jax.load_params(tmp_path)


def test_a_corrupted_index_or_configuration_is_refused_by_name(tmp_path: Path):
    for file in (INDEX, "config.json"):
        folder = tiny.write_folder(tmp_path / file, CONFIG, shards=3)
        for content in (
            b"",
            b"{",
            b"[]",
            b"\xff\xfe",
            b"null",
            b"{}",
            b'{"weight_map": 3}',
            b'{"weight_map": {"a": 1}}',
        ):
            (folder / file).write_bytes(content)
            assert refuse(folder)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_a_json_file_that_cannot_be_read_is_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tiny.write_folder(tmp_path, CONFIG, shards=3)
    for text in ('{"a":' + "[" * 100_000, '{"a": ' + "1" * 5000 + "}"):
        (folder / name).write_text(text)
        assert name in refuse(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(IOError, match=name):
        ferrum_jax.load_params(folder)
    (folder / name).rmdir()

    def locked(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    tiny.write_folder(tmp_path, CONFIG, shards=3)
    monkeypatch.setattr(Path, "read_text", locked)
    with pytest.raises(IOError, match=r"config\.json cannot be read: Permission denied"):
        ferrum_jax.load_params(folder)


def test_a_missing_shard_is_refused_by_name(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG, shards=3)
    (folder / SECOND).unlink()
    assert SECOND in refuse(folder)


def test_a_tensor_that_the_index_promises_but_no_shard_holds_is_refused_by_name(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG, shards=3)
    change_index(folder, lambda weight_map: weight_map.update(ghost=SECOND))
    message = refuse(folder)
    assert "ghost" in message
    assert SECOND in message


def test_a_tensor_in_two_shards_is_refused_by_name(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG, shards=3)
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(48, np.float32)}), SECOND)
    change_tensors(
        folder,
        lambda tensors: tensors.update({"model.norm.weight": np.ones(48, np.float32)}),
        SECOND.replace("2-", "3-"),
    )
    message = refuse(folder)
    assert "model.norm.weight" in message
    assert SECOND in message


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_leaves_its_folder_is_refused(name: str, tmp_path: Path):
    folder = tiny.write_folder(tmp_path / "inside", CONFIG, shards=3)
    save_file(tiny.tensors(CONFIG), tmp_path / "outside.safetensors")
    change_index(folder, lambda weight_map: weight_map.update({Q: name}))
    message = refuse(folder)
    assert repr(name) in message
    assert INDEX in message


@pytest.mark.parametrize(
    ("layers", "head"),
    [
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.", "lm_head."),
        ("model.", "lm_head."),
    ],
    ids=["before", "within", "alone", "not at all"],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_the_language_model_of_a_checkpoint_with_images_is_read(layers: str, head: str, shards: int, tmp_path: Path):
    spelt = {"model.": layers, "lm_head.": head}
    named = {
        prefix + name.removeprefix(own): tensor
        for name, tensor in tiny.tensors(CONFIG).items()
        for own, prefix in spelt.items()
        if name.startswith(own)
    }
    images: dict[str, np.ndarray] = {
        f"{one}.{name}": np.ones(3, np.float32)
        for one in ("vision_tower", "model.multi_modal_projector")
        for name in ("norm.weight", "lm_head.weight")
    }
    images["vision_tower.position_ids"] = np.arange(3)  # of a dtype that no parameter may have
    config = {"model_type": "mistral3", "text_config": CONFIG, "tie_word_embeddings": False}
    folder = tiny.write_folder(tmp_path, config, shards, named=images | named)
    tiny.assert_same_tree(ferrum_jax.load_params(folder)[0], tiny.tiny_params(CONFIG))


@pytest.mark.parametrize("name", ["mistral", "llama32_tied"])
def test_a_checkpoint_of_mistral3_says_itself_whether_its_head_is_tied(name: str, tmp_path: Path):
    """Mistral Small 3.1 has a head and transformers saves none for a tied model; neither says so in `config.json`."""
    text = {key: value for key, value in tiny.CONFIGS[name].items() if key != "tie_word_embeddings"}
    text |= {"model_type": "mistral", "sliding_window": None, "rope_scaling": None}
    folder = tiny.write_folder(
        tmp_path, {"model_type": "mistral3", "text_config": text}, named=tiny.tensors(tiny.CONFIGS[name])
    )
    params, cfg = ferrum_jax.load_params(folder)
    assert cfg.tie_word_embeddings == ("lm_head" not in params) == (name == "llama32_tied")


def test_a_tensor_that_is_there_by_two_names_is_refused(tmp_path: Path):
    within = Q.replace("model.", "model.language_model.", 1)
    tensors = {f"language_model.{name}": tensor for name, tensor in tiny.tensors(CONFIG).items()}
    folder = tiny.write_folder(tmp_path, CONFIG, named=tensors | {within: tensors[f"language_model.{Q}"]})
    assert re.search(
        rf"{within} and language_model\.{Q} are both {Q}|language_model\.{Q} and {within} are", refuse(folder)
    )


def test_a_checkpoint_that_was_saved_without_its_head_lacks_a_prefix(tmp_path: Path):
    named = {name.removeprefix("model."): tensor for name, tensor in tiny.tensors(TIED).items()}
    folder = tiny.write_folder(tmp_path, TIED, named=named)
    tiny.assert_same_tree(ferrum_jax.load_params(folder)[0], tiny.tiny_params(TIED))
    change_tensors(folder, lambda tensors: tensors.pop("norm.weight"))
    assert "model.norm.weight is missing" in refuse(folder)


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG)
    change_tensors(folder, lambda tensors: tensors.pop(Q))
    message = refuse(folder)
    assert f"{Q} is missing" in message
    assert str(folder) in message


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG)
    change_tensors(folder, lambda tensors: tensors.update(stranger=np.ones(3, np.float32)))
    assert "stranger is unknown" in refuse(folder)


def test_an_untied_head_that_is_missing_is_refused_by_name(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG)
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight is missing" in refuse(folder)


def test_wrong_shapes_are_refused_by_name_even_where_the_number_of_elements_is_right(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG)
    change_tensors(folder, lambda tensors: tensors.update({Q: np.ascontiguousarray(tensors[Q].T)}))
    message = refuse(folder)
    assert f"{Q} has shape [48, 160], expected [160, 48]" in message
    assert str(folder) in message


def test_all_problems_come_in_one_message_and_long_lists_are_counted(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG | {"num_hidden_layers": 9})
    tiny.write_folder(folder, CONFIG | {"num_hidden_layers": 9}, named=tiny.tensors(CONFIG))
    message = refuse(folder)
    assert "model.layers.3.input_layernorm.weight is missing" in message
    assert " more" in message
    assert len(message) < 2000


def test_a_quantised_tensor_is_refused_by_name(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, CONFIG)
    change_tensors(folder, lambda tensors: tensors.update({Q: np.zeros((160, 48), np.int8)}))
    message = refuse(folder)
    assert Q in message
    assert "I8" in message


def test_a_file_that_cannot_be_read_is_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, opened = tiny.write_folder(tmp_path, CONFIG), Path.open

    def forbidden(path: Path, *mode: Any, **more: Any) -> Any:  # root may read everything
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *mode, **more)

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(IOError, match=r"model\.safetensors cannot be read: Permission denied"):
        ferrum_jax.load_params(folder)


def test_a_place_that_holds_no_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(NotFoundError, match="does not exist"):
        ferrum_jax.load_params(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"config\.json"):
        ferrum_jax.load_params(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with pytest.raises(NotFoundError, match=r"no model\.safetensors and no .*json$"):
        ferrum_jax.load_params(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(NotFoundError, match=r"its \.bin files are not read: save the model as safetensors"):
        ferrum_jax.load_params(tmp_path)
    for name in ("a", "b"):
        save_file({"x": np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(NotFoundError, match="2 safetensors files but no"):
        ferrum_jax.load_params(tmp_path)


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, UnsupportedError, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedError, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, FerrumError, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, FerrumError, "low_freq_factor"),
        ({"rope_scaling": "yarn"}, FerrumError, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, FerrumError, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, FerrumError, "two"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 0}},
            FerrumError,
            "original",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, UnsupportedError, "full_attention"),
        ({"hidden_act": "gelu"}, UnsupportedError, "gelu"),
        (
            {"model_type": "falcon"},
            UnsupportedError,
            "model_type 'falcon' ['LlamaForCausalLM']: supported are llama, mis",
        ),
        ({"quantization_config": {"bits": 4}}, UnsupportedError, "quant_method None, supported are gptq"),
        ({"num_key_value_heads": 3}, FerrumError, "3 key/value heads"),
        ({"vocab_size": "many"}, FerrumError, "vocab_size"),
        ({"vocab_size": None}, FerrumError, "vocab_size"),
        ({"num_attention_heads": 0}, FerrumError, "num_attention_heads"),
        ({"num_hidden_layers": 10**9}, FerrumError, "num_hidden_layers"),
        ({"head_dim": 7}, FerrumError, "head_dim"),
        ({"sliding_window": 0, "model_type": "mistral"}, FerrumError, "sliding_window"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_honoured_is_refused(
    change: dict[str, object], kind: type[FerrumError], named: str, tmp_path: Path
):
    folder = tiny.write_folder(tmp_path, CONFIG)
    (folder / "config.json").write_text(json.dumps(CONFIG | change), encoding="utf-8")
    with pytest.raises(kind) as refusal:
        ferrum_jax.load_params(folder)
    assert named in str(refusal.value)
    assert str(folder / "config.json") in str(refusal.value)


MEASURE = textwrap.dedent("""
    import resource, sys
    from pathlib import Path
    import jax, numpy as np
    import ferrum_jax, ferrum_jax.weights.folder
    def peak():  # on Linux ru_maxrss is at least the parent's, which may have been far larger
        if sys.platform == "linux":
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jax.block_until_ready(jax.device_put(np.zeros(3, np.float32)))
    before = peak()
    params, _ = ferrum_jax.load_params(sys.argv[1], dtype="float32")
    jax.block_until_ready(params)
    print(peak() - before)
""")


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [ml_dtypes.bfloat16, np.float32])
def test_the_peak_of_memory_is_the_parameters_and_the_largest_tensor(narrow: type, tmp_path: Path):
    config = CONFIG | {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 30000}
    shapes = {name: leaf.shape for name, leaf in _specs(config).items()}
    written = {name: np.zeros(shape, narrow) for name, shape in shapes.items()}
    folder = tiny.write_folder(tmp_path, config, shards=2, named=written)
    bytes_of = {name: 4 * int(np.prod(shape)) for name, shape in shapes.items()}
    assert sum(bytes_of.values()) > 600e6
    command = [sys.executable, "-c", MEASURE, str(folder)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak > 0.9 * sum(bytes_of.values()), "the measure misses the parameters"
    # The contract allows 500 MB above this; a copy kept of every tensor would cost more than these 200.
    assert peak < sum(bytes_of.values()) + 2 * max(bytes_of.values()) + 200e6


def _specs(config: Mapping[str, object]) -> dict[str, ferrum_jax.models.specs.ParamSpec]:
    cfg = ferrum_jax.ModelConfig.from_hf(config)
    return ferrum_jax.models.specs.named_leaves(ferrum_jax.models.family(cfg).param_specs(cfg))


def test_a_tensor_that_cannot_be_read_any_more_is_refused_by_name(tmp_path: Path):
    source = SafetensorsSource(tiny.write_folder(tmp_path, CONFIG))
    (tmp_path / SINGLE).write_bytes(b"")
    with pytest.raises(InvalidFormatError) as refusal:
        source.read(Q)
    assert Q in str(refusal.value)
