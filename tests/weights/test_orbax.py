"""Orbax checkpoints: round trips, and what is refused."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax.contract.errors import AlreadyExistsError, FerrumError, InvalidFormatError
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.weights import orbax
from tests import tiny

NAME = "llama_yarn_options"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    orbax.save(folder, tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME))
    return folder


@pytest.mark.parametrize("name", [NAME, "llama_biases", "mistral", "qwen2_layer_types", "qwen3_llama3"])
def test_a_saved_checkpoint_is_loaded_as_it_was(name: str, tmp_path: Path):
    params, cfg = tiny.tiny_params(tiny.CONFIGS[name]), tiny.model_config(name)
    orbax.save(tmp_path / "checkpoint", params, cfg)
    found, found_cfg = ferrum_jax.load_params(tmp_path / "checkpoint")
    assert found_cfg == cfg
    assert hash(found_cfg) == hash(cfg)
    tiny.assert_same_tree(found, params)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_configuration_is_read_as_it_was_written(name: str, tmp_path: Path):
    cfg = tiny.model_config(name).reaching(150)
    (tmp_path / orbax.CONFIG).write_text(json.dumps(dataclasses.asdict(cfg)), encoding="utf-8")
    assert orbax.read_config(tmp_path) == cfg
    assert hash(orbax.read_config(tmp_path)) == hash(cfg)


def test_a_restored_model_gives_the_logits_of_its_folder(checkpoint: Path, tmp_path: Path):
    folder = tiny.write_folder(tmp_path / "folder", tiny.CONFIGS[NAME])
    engine = ferrum_jax.EngineConfig(max_seqs=1, kv_capacity=64, block_size=8, verify_tokens=(32,))
    logits = []
    for path in (folder, checkpoint):
        with ferrum_jax.load(path, engine=engine, progress=False) as model:
            logits.append(model.forward_verify("a", tiny.prompt(NAME)))
    np.testing.assert_array_equal(logits[0], logits[1], strict=True)


@pytest.mark.parametrize(("dtype", "rounded"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_a_checkpoint_is_cast_to_the_dtype_asked_for(dtype: str, rounded: type, checkpoint: Path):
    found = named_leaves(ferrum_jax.load_params(checkpoint, dtype=dtype)[0])
    for name, tensor in tiny.tensors(tiny.CONFIGS[NAME]).items():
        np.testing.assert_array_equal(np.asarray(found[name]), tensor.astype(rounded), strict=True, err_msg=name)


def test_a_narrow_checkpoint_widens_exactly(tmp_path: Path):
    params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), tiny.tiny_params(tiny.CONFIGS[NAME]))
    orbax.save(tmp_path / "checkpoint", params, tiny.model_config(NAME))
    wide, _ = ferrum_jax.load_params(tmp_path / "checkpoint", dtype="float32")
    tiny.assert_same_tree(wide, jax.tree.map(lambda leaf: leaf.astype("float32"), params))


def test_a_checkpoint_is_not_written_over_another(checkpoint: Path):
    before = sorted(path.name for path in checkpoint.rglob("*"))
    with pytest.raises(AlreadyExistsError, match="not empty"):
        orbax.save(checkpoint, tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME))
    assert sorted(path.name for path in checkpoint.rglob("*")) == before


def test_a_save_that_was_interrupted_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        orbax.save(tmp_path / "half", tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME))
    assert not orbax.is_checkpoint(tmp_path / "half")
    with pytest.raises(FerrumError, match="half"):
        ferrum_jax.load_params(tmp_path / "half")


def refuse_elsewhere(checkpoint: Path) -> str:
    """Gives the message of a refusal in a process of its own, where orbax's reads that fail later do no harm."""
    program = f"""
        import ferrum_jax
        try:
            ferrum_jax.load_params({str(checkpoint)!r})
        except ferrum_jax.errors.InvalidFormatError as refusal:
            print(refusal)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    message = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert str(checkpoint) in message
    return message


@pytest.mark.parametrize("part", ["params", "params/manifest.ocdbt"])
def test_a_checkpoint_with_a_part_missing_is_refused_by_name(part: str, checkpoint: Path):
    gone = checkpoint / part
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    refuse_elsewhere(checkpoint)


def test_a_checkpoint_whose_data_were_cut_is_refused_by_name(checkpoint: Path):
    data = [path for path in checkpoint.rglob("d/*") if path.is_file()]
    assert data
    for path in data:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert len(refuse_elsewhere(checkpoint)) < 1000


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"hidden_size": 64}, r"embed_tokens\.weight has shape \[97, 48\], expected \[97, 64\]"),
        ({"num_hidden_layers": 2, "layer_windows": [None, None]}, r"layers\.2\..* is unknown"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight is missing"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_model_is_refused_by_name(change: dict[str, object], found: str, checkpoint: Path):
    fields = dataclasses.asdict(tiny.model_config(NAME)) | change
    (checkpoint / "ferrum_config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(InvalidFormatError, match=f"{checkpoint}.*{found}"):
        ferrum_jax.load_params(checkpoint)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff", b'{"rope_scaling": 3, "layer_windows": []}', b'{"layer_windows": 3}']
)
def test_a_damaged_configuration_is_refused_by_name(content: bytes, checkpoint: Path):
    (checkpoint / "ferrum_config.json").write_bytes(content)
    with pytest.raises(InvalidFormatError, match=r"ferrum_config\.json"):
        ferrum_jax.load_params(checkpoint)


def test_a_configuration_of_another_version_is_refused_by_name(checkpoint: Path):
    fields = json.loads((checkpoint / "ferrum_config.json").read_text(encoding="utf-8"))
    for other in (fields | {"from_the_future": 1}, {k: v for k, v in fields.items() if k != "vocab_size"}):
        (checkpoint / "ferrum_config.json").write_text(json.dumps(other), encoding="utf-8")
        with pytest.raises(InvalidFormatError, match=r"ferrum_config\.json"):
            ferrum_jax.load_params(checkpoint)
