"""Checkpoints of every kind to Orbax: the same numbers, the same text, all or nothing."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ferrum_jax
from ferrum_jax import EngineConfig, SamplingParams
from ferrum_jax.contract.errors import AlreadyExistsError, ConfigError, FerrumError, IOError, NotFoundError
from ferrum_jax.generate.tokenizer import Tokenizer, load_tokenizer
from ferrum_jax.models.layout import CHECKPOINT, FUSED
from ferrum_jax.models.quantisation import dequantise
from ferrum_jax.weights import orbax
from tests import tiny
from tests.generate.test_request import letters
from tests.generate.test_tokenizer import write_gguf as write_vocabulary
from tests.weights.test_gguf import write_gguf

NAME = "llama_yarn_options"
TEXTS = ["The capital of France is", "x =  5 ½", "def f(x):\n    return x\n", "<|im_start|>user\nHi<|im_end|>", "é👍🏽"]
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tiny.CONFIGS[NAME] | {"vocab_size": 23, "eos_token_id": 7}
    path = tiny.write_folder(tmp_path / "folder", config, shards=2)
    letters().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "a", "add_bos_token": True}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (path / "README.md").write_text("not copied")
    return path


def assert_same_tokenizer(found: Tokenizer, expected: Tokenizer) -> None:
    for name in ("eos_token_ids", "bos_token", "eos_token", "pad_token", "unk_token", "chat_templates", "vocab_size"):
        assert getattr(found, name) == getattr(expected, name), name


def test_a_folder_becomes_a_checkpoint_that_says_the_same(folder: Path, tmp_path: Path):
    made = ferrum_jax.convert(folder, tmp_path / "new" / "made", progress=False)
    assert made == tmp_path / "new" / "made"
    assert orbax.is_checkpoint(made)
    assert not (made / "README.md").exists()
    assert list(made.parent.iterdir()) == [made]
    (params, cfg), (expected, expected_cfg) = (ferrum_jax.load_params(path) for path in (made, folder))
    assert cfg == expected_cfg
    tiny.assert_same_tree(params, expected)
    assert_same_tokenizer(load_tokenizer(made), load_tokenizer(folder))
    assert load_tokenizer(made).eos_token_ids == (7,)
    engine = EngineConfig(max_seqs=1, kv_capacity=32, block_size=8, dtype="float32")
    answers = []
    for path in (folder, made):
        with ferrum_jax.LLM(path, engine=engine, artifacts=str(tmp_path / "steps"), progress=False) as llm:
            answers.append(llm.chat([{"role": "user", "content": "cab"}], SamplingParams(max_tokens=8)))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].text == answers[1].text != ""


@pytest.mark.parametrize("comes_from", ["folder", "checkpoint"])
def test_models_are_converted_and_loaded_where_jax_has_no_cpu(
    comes_from: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As under `JAX_PLATFORMS=cuda`; the default device stands for a GPU."""
    if comes_from == "checkpoint":
        folder = ferrum_jax.convert(folder, tmp_path / "first", progress=False)
    real = jax.local_devices

    def local_devices(*args: Any, backend: str | None = None, **options: Any) -> Any:
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return real(*args, backend=backend, **options)

    monkeypatch.setattr(jax, "local_devices", local_devices)
    laid = [ferrum_jax.load_params(folder, layout=layout)[0] for layout in (CHECKPOINT, FUSED)]
    made = ferrum_jax.convert(folder, tmp_path / "made", progress=False)
    monkeypatch.undo()
    for layout, found in zip((CHECKPOINT, FUSED), laid, strict=True):
        tiny.assert_same_tree(found, ferrum_jax.load_params(made, layout=layout)[0])


def test_the_template_of_a_processor_is_converted_too(folder: Path, tmp_path: Path):
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    made = ferrum_jax.convert(folder, tmp_path / "made", progress=False)
    assert load_tokenizer(made).chat_template == TEMPLATE


def test_a_checkpoint_is_converted_again_and_cast(folder: Path, tmp_path: Path):
    narrow = ferrum_jax.convert(folder, tmp_path / "narrow", "bf16", progress=False)
    again = ferrum_jax.convert(narrow, tmp_path / "again", progress=False)
    (params, cfg), (expected, _) = (ferrum_jax.load_params(path, "float32") for path in (again, folder))
    assert cfg.dtype == "bfloat16"
    tiny.assert_same_tree(params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), expected))
    assert_same_tokenizer(load_tokenizer(again), load_tokenizer(folder))


def test_a_quantised_checkpoint_is_dequantised_unless_it_is_kept(folder: Path, tmp_path: Path):
    narrow = ferrum_jax.convert(folder, tmp_path / "narrow", quantize="int8", progress=False)
    expected, _ = ferrum_jax.load_params(narrow)
    kept = ferrum_jax.convert(narrow, tmp_path / "kept", quantize="keep", progress=False)
    tiny.assert_same_tree(ferrum_jax.load_params(kept)[0], expected)
    plain = ferrum_jax.convert(narrow, tmp_path / "plain", progress=False)
    tiny.assert_same_tree(ferrum_jax.load_params(plain)[0], dequantise(expected))
    assert not orbax.read_formats(plain)


@pytest.mark.parametrize(
    ("named", "stored", "dtype"),
    [("float64", np.float64, "float32"), ("auto", np.float32, "float32"), ("torch.bfloat16", np.float32, "bfloat16")],
)
def test_a_dtype_that_only_the_configuration_names_is_no_reason_to_refuse(
    named: str, stored: type, dtype: str, tmp_path: Path
):
    config = tiny.CONFIGS[NAME] | {"torch_dtype": named}
    tensors = {name: tensor.astype(stored) for name, tensor in tiny.tensors(config).items()}
    path = tiny.write_folder(tmp_path / "folder", config, named=tensors)
    params, cfg = ferrum_jax.load_params(ferrum_jax.convert(path, tmp_path / "made", progress=False), dtype)
    assert cfg.dtype == dtype
    tiny.assert_same_tree(params, ferrum_jax.load_params(path, dtype)[0])


def test_a_gguf_becomes_a_checkpoint_with_or_without_a_vocabulary(tmp_path: Path):
    file = write_gguf(tmp_path / "model.gguf", tiny.CONFIGS["qwen3"])
    made = ferrum_jax.convert(file, tmp_path / "made", progress=False)
    (params, cfg), (expected, expected_cfg) = (ferrum_jax.load_params(path) for path in (made, file))
    assert cfg == expected_cfg
    tiny.assert_same_tree(params, expected)
    with pytest.raises(NotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(made)


@pytest.mark.parametrize("framed", [True, False])
def test_a_gguf_vocabulary_that_is_saved_is_the_same(framed: bool, tmp_path: Path):
    ids = {"ggml_bos_token_id": 0, "ggml_eos_token_id": 1, "ggml_eot_token_id": 2}
    metadata = {"ggml_add_bos_token": framed, "chat_template": TEMPLATE, "chat_template.rag": "rag"}
    expected = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", **ids, **metadata))
    expected.save(tmp_path)
    found = load_tokenizer(tmp_path)
    assert_same_tokenizer(found, expected)
    assert found.eos_token_ids == (1, 2)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(found.encode(text))


def test_the_real_vocabulary_that_is_saved_is_the_same(smollm2_path: Path, tmp_path: Path):
    expected = load_tokenizer(smollm2_path)
    expected.save(tmp_path)
    found = load_tokenizer(tmp_path)
    assert_same_tokenizer(found, expected)
    assert [found.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path):
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "x").touch()
    file.touch()
    refused: list[tuple[Path, Path, str | None, type[FerrumError]]] = [
        (folder, taken, None, AlreadyExistsError),
        (folder, file, None, AlreadyExistsError),
        (folder, tmp_path / "new", "int8", ConfigError),
        (tmp_path / "nowhere", tmp_path / "new", None, NotFoundError),
        (folder, file / "below", None, IOError),
    ]
    before = sorted(tmp_path.iterdir())
    for source, destination, dtype, kind in refused:
        with pytest.raises(kind):
            ferrum_jax.convert(source, destination, dtype, progress=False)
    with pytest.raises(ConfigError, match="folder is ''"):
        ferrum_jax.convert(folder, "", progress=False)
    wrong: Any = 5
    with pytest.raises(ConfigError, match="tokenizer is 5, expected the path of one"):
        ferrum_jax.convert(folder, tmp_path / "new", tokenizer=wrong, progress=False)
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "empty").mkdir()
    assert ferrum_jax.convert(folder, tmp_path / "empty", progress=False) == tmp_path / "empty"


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [({"dtype": "int8"}, ConfigError), ({"quantize": "int3"}, ConfigError), ({"tokenizer": "nowhere"}, NotFoundError)],
)
def test_what_no_model_can_be_converted_with_is_refused_before_one_is_looked_for(
    wrong: dict[str, Any], kind: type[FerrumError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ferrum_jax.conversion.resolve", lambda *_, **__: pytest.fail("a model was looked for"))
    with pytest.raises(kind):
        ferrum_jax.convert("org/name", tmp_path / "made", **wrong)


def test_a_link_stands_for_the_folder_it_leads_to(folder: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for name, at in (("link", "empty"), ("dangling", "not there yet")):
        (tmp_path / name).symlink_to(tmp_path / at)
        assert ferrum_jax.convert(folder, tmp_path / name, progress=False) == tmp_path / name
        assert (tmp_path / name).is_symlink()
        assert orbax.is_checkpoint(tmp_path / at)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for nowhere in (tmp_path / "circle", "~nobody-is-called-so/made", "a" * 10_000, "nul\0"):
        with pytest.raises(IOError, match="cannot write the checkpoint"):
            ferrum_jax.convert(folder, nowhere, progress=False)


def test_an_empty_folder_is_filled_and_not_replaced(folder: Path, tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o2770)  # which a new folder would not have
    before = target.stat()
    assert ferrum_jax.convert(folder, target, progress=False) == target
    assert (target.stat().st_ino, target.stat().st_mode) == (before.st_ino, before.st_mode)
    tiny.assert_same_tree(ferrum_jax.load_params(target)[0], ferrum_jax.load_params(folder)[0])
    assert sorted(tmp_path.iterdir()) == [folder, target]
    assert {path.name for path in target.iterdir()} >= {"config.json", "ferrum_config.json", "tokenizer.json"}
    assert not [path for path in target.iterdir() if path.name.startswith(".")]


def test_a_place_that_cannot_be_written_is_refused_before_the_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ferrum_jax.conversion.load_params", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / "file").touch()
    with pytest.raises(IOError, match=r"cannot write the checkpoint .*below"):
        ferrum_jax.convert(folder, tmp_path / "file" / "below", progress=False)
    latin = tmp_path / os.fsdecode(b"caf\xe9")
    latin.mkdir()
    (tmp_path / "link").symlink_to(latin)
    for place in (latin, latin / "made", tmp_path / "link"):  # tensorstore takes UTF-8 only
        with pytest.raises(IOError, match=r"cannot write the checkpoint.*can't encode"):
            ferrum_jax.convert(folder, place, progress=False)


def test_what_killed_conversions_left_is_removed_after_a_day(folder: Path, tmp_path: Path):
    for name, hours in ((".ferrum-convert-old", 25), (".ferrum-convert-young", 23), ("mine", 1000)):
        (tmp_path / name / "checkpoint").mkdir(parents=True)
        os.utime(tmp_path / name, (time.time(), time.time() - hours * 3600))
    ferrum_jax.convert(folder, tmp_path / "made", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir() if path != folder) == [
        ".ferrum-convert-young",
        "made",
        "mine",
    ]


def test_an_interrupt_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ferrum_jax.conversion._copy_beside", stop)
    with pytest.raises(KeyboardInterrupt):
        ferrum_jax.convert(folder, tmp_path / "made", progress=False)
    assert list(tmp_path.iterdir()) == [folder]


def test_an_interrupt_while_orbax_writes_waits_for_its_threads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    main, ends = threading.get_ident(), ocp.StandardCheckpointHandler.finalize
    threads, was_called = set(threading.enumerate()), []

    def finalize(self: Any, *given: Any) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.2)
        ends(self, *given)
        was_called.append(True)

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "finalize", finalize)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            ferrum_jax.convert(folder, tmp_path / "made", progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert was_called
    assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == [folder]
