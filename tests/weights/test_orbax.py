"""Orbax checkpoints: round trips, and what is refused."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ferrum_jax
from ferrum_jax.contract.errors import AlreadyExistsError, FerrumError, InvalidFormatError, IOError
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.weights import orbax
from tests import tiny
from tests.long import SEED

NAME = "llama_yarn_options"


slow = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "saved"
    orbax.save(folder, tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME))
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy, which a test may damage."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


OTHERS = ("llama_biases", "mistral", "qwen2_layer_types", "qwen3_llama3")


@pytest.mark.parametrize("name", [NAME, *(pytest.param(other, marks=slow) for other in OTHERS)])
def test_a_saved_checkpoint_is_loaded_as_it_was(name: str, tmp_path: Path):
    params, cfg = tiny.tiny_params(tiny.CONFIGS[name]), tiny.model_config(name)
    orbax.save(tmp_path / "checkpoint", params, cfg)
    found, found_cfg = ferrum_jax.load_params(tmp_path / "checkpoint")
    assert found_cfg == cfg
    assert hash(found_cfg) == hash(cfg)
    tiny.assert_same_tree(found, params)


def test_a_checkpoint_is_the_same_in_groups_and_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(orbax, "GROUP", 20_000)  # bytes; all have 400,000
    monkeypatch.setattr(orbax, "CHUNK", 1 << 10)
    params = tiny.tiny_params(tiny.CONFIGS[NAME])
    orbax.save(tmp_path / "checkpoint", params, tiny.model_config(NAME))
    with ocp.StandardCheckpointer() as checkpointer:
        stored = named_leaves(checkpointer.metadata(tmp_path / "checkpoint" / orbax.PARAMS).item_metadata.tree)
    pieces = [np.prod(leaf.storage.chunk_shape) * leaf.dtype.itemsize for leaf in stored.values()]
    assert max(pieces) <= 1 << 10
    calls: list[int] = []
    restore = orbax.OrbaxSource._restore

    def counted(source: orbax.OrbaxSource, wanted: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(wanted))
        return restore(source, wanted)

    monkeypatch.setattr(orbax.OrbaxSource, "_restore", counted)
    found, _ = ferrum_jax.load_params(tmp_path / "checkpoint")
    tiny.assert_same_tree(found, params)
    assert len(calls) > 10
    assert max(calls) > 1


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path):
    for name in tiny.CONFIGS:
        cfg = tiny.model_config(name).reaching(150)
        (tmp_path / orbax.CONFIG).write_text(json.dumps(dataclasses.asdict(cfg)), encoding="utf-8")
        assert orbax.read_config(tmp_path) == cfg, name
        assert hash(orbax.read_config(tmp_path)) == hash(cfg), name


@slow
def test_a_restored_model_gives_the_logits_of_its_folder(checkpoint: Path, tmp_path: Path):
    folder = tiny.write_folder(tmp_path / "folder", tiny.CONFIGS[NAME])
    engine = ferrum_jax.EngineConfig(max_seqs=1, kv_capacity=64, block_size=8, verify_tokens=32)
    logits = []
    for path in (folder, checkpoint):
        with ferrum_jax.load(path, engine=engine, progress=False) as model:
            logits.append(model.forward_verify("a", tiny.prompt(NAME)))
    np.testing.assert_array_equal(logits[0], logits[1], strict=True)


@pytest.mark.parametrize(
    ("dtype", "rounded"), [("bfloat16", ml_dtypes.bfloat16), pytest.param("float16", np.float16, marks=slow)]
)
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


@pytest.mark.parametrize("problem", [ValueError, OSError])  # tensorstore's, and Python's
def test_a_checkpoint_that_cannot_be_written_is_one_error(
    problem: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fill(*_: object, **__: object) -> None:
        raise problem("RESOURCE_EXHAUSTED: No space left on device" + " and settings" * 1000)

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.save", fill)
    with pytest.raises(IOError, match=r"cannot write the checkpoint .*full: .*No space left on device") as refusal:
        orbax.save(tmp_path / "full", tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME))
    assert len(str(refusal.value)) < 1000
    assert not orbax.is_checkpoint(tmp_path / "full")


def elsewhere(checkpoint: Path, *options: str) -> str:
    """Loads in a process of its own, where orbax's reads that fail later do no harm: "loaded", or the refusal."""
    program = f"""
        import ferrum_jax
        try:
            ferrum_jax.load_params({str(checkpoint)!r})
            print("loaded")
        except ferrum_jax.errors.InvalidFormatError as refusal:
            print(refusal)
    """
    command = [sys.executable, *options, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def error_elsewhere(checkpoint: Path) -> str:
    message = elsewhere(checkpoint)
    assert str(checkpoint) in message
    return message


def data_files(checkpoint: Path) -> list[Path]:
    found = sorted(path for path in checkpoint.rglob("d/*") if path.is_file())
    assert found
    return found


@pytest.mark.parametrize("part", ["params", "params/manifest.ocdbt", "params/ocdbt.process_0/manifest.ocdbt"])
def test_a_checkpoint_with_a_part_missing_is_refused_by_name(part: str, checkpoint: Path):
    gone = checkpoint / part
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(InvalidFormatError, match=f"{checkpoint}.* is missing, which {orbax.CHECKSUMS} lists"):
        ferrum_jax.load_params(checkpoint)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data + b"x"], ids=["cut", "longer"]
)
def test_a_checkpoint_whose_data_changed_in_length_is_refused_by_name(
    damage: Callable[[bytes], bytes], checkpoint: Path
):
    for path in data_files(checkpoint):
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InvalidFormatError, match=f"{checkpoint}.* is damaged"):
        ferrum_jax.load_params(checkpoint)


def test_one_flipped_bit_is_found_wherever_it_is(checkpoint: Path):
    for path in (path for path in (checkpoint / "params").rglob("*") if path.is_file()):
        content = path.read_bytes()
        at = len(content) // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        for read in (lambda: ferrum_jax.load_params(checkpoint), orbax.OrbaxSource(checkpoint).shapes):
            with pytest.raises(InvalidFormatError, match=f"{path} is damaged"):
                read()
        path.write_bytes(content)
    ferrum_jax.load_params(checkpoint)


@pytest.mark.slow
def test_damage_is_found_without_assertions_too(checkpoint: Path):
    (path,) = data_files(checkpoint)[:1]
    path.write_bytes(path.read_bytes() + b"x")
    assert f"{path} is damaged" in elsewhere(checkpoint, "-O")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_damaged_checksums_are_refused_by_name(content: bytes, checkpoint: Path):
    (checkpoint / orbax.CHECKSUMS).write_bytes(content)
    with pytest.raises(InvalidFormatError, match=orbax.CHECKSUMS):
        ferrum_jax.load_params(checkpoint)


def test_a_checkpoint_of_an_earlier_version_has_no_checksums_and_loads(checkpoint: Path):
    (checkpoint / orbax.CHECKSUMS).unlink()
    found, cfg = ferrum_jax.load_params(checkpoint)
    assert cfg == tiny.model_config(NAME)
    tiny.assert_same_tree(found, tiny.tiny_params(tiny.CONFIGS[NAME]))


def test_a_pipe_in_a_checkpoint_is_refused(checkpoint: Path):
    for path in (checkpoint / orbax.CHECKSUMS, data_files(checkpoint)[0]):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(InvalidFormatError, match=f"{path} is no regular file"):
            ferrum_jax.load_params(checkpoint)
        path.unlink()


@pytest.mark.slow
def test_data_that_were_cut_are_refused_without_checksums_too(checkpoint: Path):
    (checkpoint / orbax.CHECKSUMS).unlink()
    for path in data_files(checkpoint):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert len(error_elsewhere(checkpoint)) < 1000


@slow
def test_damage_anywhere_without_checksums_is_refused_or_gives_a_model(checkpoint: Path):
    """Each kind of file changed by chance: what orbax raises is one error of this package, never another."""
    (checkpoint / orbax.CHECKSUMS).unlink()
    random, files = np.random.default_rng(SEED), [p for p in (checkpoint / "params").rglob("*") if p.is_file()]
    for path in files:
        content = path.read_bytes()
        at, kind = int(random.integers(len(content))), random.integers(3)
        changed = [content[:at], content[:at] + b"\xff" + content[at + 1 :], content[:at] + bytes(8) + content[at:]][
            kind
        ]
        path.write_bytes(changed)
        assert elsewhere(checkpoint), f"{path}, seed {SEED}"
        path.write_bytes(content)


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


def test_a_part_of_the_configuration_that_is_no_object_is_refused(tmp_path: Path):
    fields = dataclasses.asdict(tiny.model_config("deepseek2"))
    for name in ("latent", "experts"):
        (tmp_path / orbax.CONFIG).write_text(json.dumps(fields | {name: 0}), encoding="utf-8")
        with pytest.raises(InvalidFormatError, match="is not a configuration of this version"):
            orbax.read_config(tmp_path)
    without = fields["experts"] | {"shared_expert_intermediate_size": None}
    for damage in ({"latent": None}, {"experts": without}):
        (tmp_path / orbax.CONFIG).write_text(json.dumps(fields | damage), encoding="utf-8")
        with pytest.raises(InvalidFormatError, match="is not a configuration of this version: a part is missing"):
            orbax.read_config(tmp_path)
