"""From a folder to logits, and what `load` refuses."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import EngineConfig, loading, models
from ferrum_jax.contract import Device
from ferrum_jax.contract.errors import (
    CancelledError,
    ConfigError,
    DeviceError,
    FerrumError,
    InvalidFormatError,
    InvalidParameterError,
    IOError,
    NotFoundError,
    ResourceExhaustedError,
)
from ferrum_jax.generate.tokenizer import load_tokenizer
from ferrum_jax.models.layout import lay_out
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.ops import native
from ferrum_jax.planning.subject import read_subject
from ferrum_jax.sharding import mesh
from ferrum_jax.sharding.devices import find_device
from tests import tiny

NAME = "qwen3_window_biases"
SMALL: dict[str, Any] = {"max_seqs": 2, "kv_capacity": 24, "block_size": 8, "progress": False}
ONE_STEP = EngineConfig(decode_rows=(2,), query_blocks=(1,), block_tokens=8, verify_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("models") / NAME, tiny.CONFIGS[NAME], shards=2)


def test_a_folder_is_loaded_and_gives_the_logits_of_its_tensors(folder: Path):
    with ferrum_jax.load(folder, engine=ONE_STEP, **SMALL) as runner:
        assert runner.model_config == tiny.model_config(NAME)
        tiny.assert_same_tree(
            lay_out(runner.params, runner.model_config, "checkpoint"), tiny.tiny_params(tiny.CONFIGS[NAME])
        )
        assert runner.compile_stats()["compiled"] == 0
        prompt = tiny.prompt(NAME)[:8]
        logits = runner.prefill("a", prompt)
        forward = jax.jit(models.forward, static_argnums=2)
        expected = forward(runner.params, jnp.array([prompt]), runner.model_config)[0, -1]
        np.testing.assert_allclose(logits, expected, atol=1e-4)  # float32 sums in another order
        assert runner.kv_capacity() == 24
    with pytest.raises(CancelledError, match="closed"):
        runner.prefill("a", [1])
    with pytest.raises(CancelledError, match="closed"):
        assert runner.params


LAYOUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers that are alike": (NAME, {}, "scanned"),
    "experts": ("mixtral", {}, "scanned"),
    "another layout": (NAME, {"layout": "fused"}, "fused"),
    "XLA's products": (NAME, {"attention": "xla"}, "checkpoint"),
    "bfloat16": (NAME, {"dtype": "bfloat16"}, "checkpoint"),
    "weights that kernels read": (NAME, {"quantize": "int8"}, "scanned"),
    "weights of eight bits": (NAME, {"quantize": "float8_e4m3fn"}, "scanned"),
    "layers of two kinds": ("qwen2_moe", {}, "checkpoint"),
    "latents": ("deepseek2", {}, "checkpoint"),
}


@pytest.mark.skipif(native.instruction_set() is None, reason="without kernels it is the checkpoint's")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_are_stacked_where_kernels_read_them_in_the_stack(name: str, tmp_path: Path):
    model, settings, layout = LAYOUTS[name]
    source = loading.open_checkpoint(tiny.write_folder(tmp_path, tiny.CONFIGS[model]))
    found = loading.with_defaults(EngineConfig(**settings), source, find_device("cpu"))
    assert found.layout == layout
    divided = loading.with_defaults(EngineConfig(**settings), source, find_device("cpu"), is_divided=True)
    assert divided.layout == settings.get("layout", "checkpoint")


def test_parameters_are_named_as_in_the_checkpoint(folder: Path):
    params, cfg = ferrum_jax.load_params(folder)
    assert cfg == tiny.model_config(NAME)
    expected = tiny.tensors(tiny.CONFIGS[NAME])
    found = named_leaves(params)
    assert set(found) == set(expected)
    assert "model.layers.2.self_attn.q_norm.weight" in found
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", "float16"])
def test_weights_are_cast_and_the_cache_follows_unless_told_otherwise(folder: Path, dtype: str):
    full = {"bf16": "bfloat16"}.get(dtype, dtype)
    params, _ = ferrum_jax.load_params(folder, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(full)}
    with ferrum_jax.load(folder, dtype=dtype, **SMALL) as runner:
        assert runner.plan.cache.dtype == full
    with ferrum_jax.load(folder, dtype=dtype, kv_dtype="fp32", **SMALL) as runner:
        assert runner.plan.cache.dtype == "float32"


def test_what_a_checkpoint_carries_beyond_its_parameters_is_left_unread(tmp_path: Path):
    config = tiny.CONFIGS["llama32_tied"]
    tensors = tiny.tensors(config)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    params, _ = ferrum_jax.load_params(tiny.write_folder(tmp_path / "good", config, named=tensors | extra))
    assert set(named_leaves(params)) == set(tensors)
    untied = tiny.CONFIGS["llama3"]
    surplus = tiny.tensors(untied) | {"surplus": np.ones(3, np.float32)}
    bad = tiny.write_folder(tmp_path / "bad", untied, named=surplus)
    with pytest.raises(InvalidFormatError, match="surplus is unknown"):
        ferrum_jax.load_params(bad)


REFUSED: dict[str, tuple[dict[str, Any], type[FerrumError], str]] = {
    "no mesh": ({"mesh": object()}, ConfigError, "mesh is <object object at"),
    "another axis": ({"mesh": {"tensor": 2}}, ConfigError, "expected sizes of the axes data, expert or model"),
    "no device": ({"mesh": {"model": 0}}, ConfigError, "model of the mesh is 0"),
    "too many devices": ({"mesh": {"model": 5}}, DeviceError, "needs 5 devices"),
    "more devices than heads": ({"mesh": {"model": 4, "expert": 4}}, DeviceError, "needs 16 devices"),
    "artifacts": ({"artifacts": ""}, ConfigError, "artifacts is ''"),
    "artifacts with a zero": ({"artifacts": "a\0b"}, ConfigError, "artifacts is"),
    "artifacts in no encoding": ({"artifacts": "\ud800"}, ConfigError, "artifacts is"),
    "artifacts of a stranger": ({"artifacts": "~no-such-user/x"}, ConfigError, "artifacts is '~no-such-user/x'"),
    "an unknown dtype": ({"dtype": "int4"}, ConfigError, "dtype is 'int4'"),
    "a dtype that is no name": ({"dtype": np.float32}, ConfigError, "expected a name"),
    "an unknown dtype of the cache": ({"kv_dtype": "fp4"}, ConfigError, "kv_dtype is 'fp4'"),
    "a device that is none": ({"device": "npu:0"}, InvalidParameterError, "'npu:0'"),
    "a second cpu": ({"device": "cpu:1"}, InvalidParameterError, "the cpu device has no index"),
    "a GPU that is not there": ({"device": "gpu"}, DeviceError, "device gpu"),
    "a device that is not there": ({"device": "tpu:0"}, DeviceError, "tpu:0"),
    "a device past the last": ({"device": Device("rocm", 7)}, DeviceError, "rocm:7"),
    "no sequences": ({"max_seqs": 0}, ConfigError, "max_seqs is 0"),
    "a share of memory above all of it": ({"memory_fraction": 1.5}, ConfigError, "memory_fraction"),
    "a share that is a flag": ({"memory_fraction": True}, ConfigError, "memory_fraction is True"),
    "strictness in words": ({"strict": "no"}, ConfigError, "strict is 'no', expected True or False"),
    "progress in numbers": ({"progress": 5}, ConfigError, "progress is 5, expected True or False"),
    "negative adapters": ({"max_loras": -1}, ConfigError, "max_loras is -1"),
    "adapters of no rank": ({"max_loras": 2}, ConfigError, "adapters need both"),
    "a pool larger than memory": ({"kv_blocks": 2**31 - 1}, ResourceExhaustedError, "2147483647 blocks"),
    "a pool beyond reason": ({"kv_blocks": 10**12}, ConfigError, "kv_blocks is 1000000000000, expected at most"),
    "an argument against the engine": (
        {"engine": EngineConfig(max_seqs=3)}, ConfigError, "max_seqs is 2 as an argument and 3 in `engine`"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(folder: Path, name: str):
    changes, kind, says = REFUSED[name]
    with pytest.raises(kind, match=says):
        ferrum_jax.load(folder, **(SMALL | changes))


def test_sizes_are_refused_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "_read", read)
    with pytest.raises(ConfigError, match="decode_rows ends in 9, max_seqs is 2"):
        ferrum_jax.load(folder, engine=EngineConfig(decode_rows=(9,)), **SMALL)
    weights = sum(tensor.nbytes for tensor in tiny.tensors(tiny.CONFIGS[NAME]).values())
    monkeypatch.setattr(mesh, "free_bytes", lambda _: weights + 5)
    with pytest.raises(ResourceExhaustedError, match="beside the KV, there are 5 free bytes"):
        ferrum_jax.load(folder, **SMALL)
    monkeypatch.setattr(mesh, "free_bytes", lambda _: weights - 5)
    with pytest.raises(ResourceExhaustedError, match="beside the KV, there are 0 free bytes"):
        ferrum_jax.load(folder, **SMALL)


def test_free_memory_is_not_asked_for_where_the_pool_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch):
    free, needed = mesh.Placement.free_bytes, []

    def record(placement: mesh.Placement, *, is_needed: bool = True) -> int:
        needed.append(is_needed)
        return free(placement)

    monkeypatch.setattr(mesh.Placement, "free_bytes", record)
    for kv_blocks in (None, 2):
        needed.clear()
        with ferrum_jax.load(folder, kv_blocks=kv_blocks, **SMALL) as runner:
            ferrum_jax.from_params(runner.params, runner.model_config, kv_blocks=kv_blocks, max_seqs=2).close()
        assert len(needed) >= 2
        assert set(needed) == {kv_blocks is None}


def test_a_capacity_below_the_models_is_told_if_nobody_has_asked_for_it(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ferrum_jax.executor.sizing.DEFAULT_CAPACITY", 16)
    caplog.set_level(logging.INFO, "ferrum_jax.loading")
    longest = tiny.CONFIGS[NAME]["max_position_embeddings"]
    for asked in (16, longest, None):
        assert caplog.messages == []
        settings: Any = SMALL | {"kv_capacity": asked}
        with ferrum_jax.load(folder, **settings) as runner:
            assert runner.kv_capacity() == (asked or 16)
    (message,) = caplog.messages
    assert f"16 positions, the model can have {longest} with kv_capacity" in message


def test_the_same_setting_given_twice_alike_is_no_contradiction(folder: Path):
    with ferrum_jax.load(folder, engine=EngineConfig(max_seqs=2, kv_blocks=3), **SMALL) as runner:
        assert (runner.plan.max_seqs, runner.plan.cache.num_blocks) == (2, 3)


def test_arguments_beat_the_environment_which_beats_the_defaults(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FERRUM_KV_CAPACITY", "16")
    monkeypatch.setenv("FERRUM_PAGED_MAX_SEQS", "3")
    monkeypatch.setenv("FERRUM_KV_MAX_BLOCKS", "5")
    monkeypatch.setenv("FERRUM_PREFIX_CACHE", "0")
    with ferrum_jax.load(folder, max_seqs=1, engine=EngineConfig(kv_blocks=4), progress=False) as runner:
        assert (runner.plan.max_seqs, runner.plan.kv_capacity, runner.plan.cache.num_blocks) == (1, 16, 4)
    with ferrum_jax.load(folder, max_seqs=2, kv_capacity=16, block_size=8, progress=False) as runner:
        assert runner.plan.cache.num_blocks == 4  # as the arguments fix it
    monkeypatch.setenv("FERRUM_PREFIX_CACHE", "1")
    with ferrum_jax.load(folder, **SMALL) as runner:
        assert runner.cache_metrics_snapshot()["enabled"]
    with ferrum_jax.load(folder, prefix_cache=False, **SMALL) as runner:
        assert not runner.cache_metrics_snapshot()["enabled"]
    monkeypatch.setenv("FERRUM_DTYPE", "float8")
    with pytest.raises(ConfigError, match="FERRUM_DTYPE='float8'"):
        ferrum_jax.load(folder, **SMALL)


def test_settings_may_be_given_by_position_in_the_order_of_the_contract(folder: Path):
    with ferrum_jax.load(folder, "float32", None, 2, 24, 8, progress=False) as runner:
        assert (runner.plan.max_seqs, runner.plan.kv_capacity, runner.plan.cache.block_size) == (2, 24, 8)


def test_sizes_may_be_of_numpy(folder: Path):
    sizes: dict[str, Any] = {"max_seqs": np.int64(2), "kv_capacity": np.int32(24), "block_size": np.uint8(8)}
    with ferrum_jax.load(folder, progress=False, **sizes) as runner:
        assert runner.plan.cache.num_blocks == 6
    assert EngineConfig(**sizes) == EngineConfig(max_seqs=2, kv_capacity=24, block_size=8)
    assert all(type(size) is int for size in vars(EngineConfig(**sizes)).values() if size is not None)


def test_a_path_that_leads_nowhere_or_to_no_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="path is '', expected the path of a model"):
        ferrum_jax.load("", **SMALL)
    with pytest.raises(NotFoundError, match="nowhere does not exist"):
        ferrum_jax.load(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"config\.json does not exist"):
        ferrum_jax.load(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"no model")
    with pytest.raises(InvalidFormatError, match=r"model\.bin"):
        ferrum_jax.load_params(tmp_path / "model.bin")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        ferrum_jax.load_params(tmp_path / "nowhere", dtype="int8")


def test_a_folder_that_must_not_be_searched_is_refused(folder: Path, close: Callable[[Path], None]):
    close(folder)
    with pytest.raises(IOError, match=r"config\.json cannot be read: Permission denied"):
        ferrum_jax.load(folder, **SMALL)
    with pytest.raises(IOError, match=r"tokenizer\.json cannot be read: Permission denied"):
        load_tokenizer(folder)
    with pytest.raises(ConfigError, match="Permission denied"):
        read_subject(str(folder))
    for load in (ferrum_jax.load, load_tokenizer):
        with pytest.raises(NotFoundError):
            load(folder / "below")


def test_a_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert ferrum_jax.load_params(f"~/{NAME}")[1].model_type == "qwen3"


def test_a_model_has_the_name_of_its_folder_wherever_it_is_loaded_from(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    with ferrum_jax.load(".", **SMALL) as runner:
        assert runner.model_info().model_id == NAME


@pytest.mark.slow
def test_a_pool_that_leaves_little_makes_room_for_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tiny.write_folder(tmp_path / "model", tiny.CONFIGS["llama3"] | {"num_hidden_layers": 2})
    free = 4_000_000  # bytes
    monkeypatch.setattr("ferrum_jax.sharding.mesh.free_bytes", lambda _: free)
    sizes = {"max_seqs": 64, "block_size": 8, "engine": ONE_STEP, "progress": False}
    with ferrum_jax.load(folder, **sizes) as modest, ferrum_jax.load(folder, memory_fraction=1.0, **sizes) as greedy:
        modest_bytes, greedy_bytes = modest.plan.cache.num_bytes, greedy.plan.cache.num_bytes
        greedy.prefill("a", [1, 2, 3, 4, 5])
        steps = greedy.compile_stats()["steps"]
        needed = max(step["temporary_bytes"] for name, step in steps.items() if name.startswith("step"))
    assert modest_bytes <= free / 2 < greedy_bytes
    room = free - greedy.plan.sampler.num_bytes - needed
    assert greedy_bytes <= room
    assert greedy_bytes > 0.8 * room - 10_000


def test_a_kv_that_was_allocated_in_vain_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def kvs() -> set[tuple[int, ...]]:
        return {leaf.shape for leaf in jax.live_arrays() if leaf.ndim == 5 and id(leaf) not in before}

    before, plan = {id(leaf) for leaf in jax.live_arrays()}, loading.plan_ahead
    monkeypatch.setattr(loading, "plan_ahead", lambda given, *more: plan(replace(given, kv_blocks=5), *more))
    with ferrum_jax.load(folder, **SMALL) as runner:
        assert runner.plan.cache.num_blocks == 6
        assert kvs() == {leaf.shape for leaf in jax.tree.leaves(runner._device.kv)}
        runner.prefill("a", [1, 2, 3])


def test_a_failed_reading_leaves_no_kv_and_no_thread(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise InvalidFormatError("injected")

    monkeypatch.setattr(loading, "_read", fail)
    before = {id(leaf) for leaf in jax.live_arrays()}
    with pytest.raises(InvalidFormatError, match="injected"):
        ferrum_jax.load(folder, **SMALL)
    assert [leaf.shape for leaf in jax.live_arrays() if leaf.ndim == 5 and id(leaf) not in before] == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kv")] == []


def test_a_hugging_face_id_is_resolved_and_a_path_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def resolve(model: str, *, progress: bool) -> Path:
        asked.append(model)
        return folder

    monkeypatch.setattr(loading, "resolve", resolve)
    monkeypatch.chdir(folder.parent)
    assert ferrum_jax.load_params("org/name@v1")[1].model_type == "qwen3"
    with ferrum_jax.load("org/name", **SMALL) as runner:
        assert runner.plan.max_seqs == 2
    assert asked == ["org/name@v1", "org/name"]
    (folder.parent / "org").mkdir()
    (folder.parent / "org" / "name").symlink_to(folder)
    ferrum_jax.load_params("org/name")
    for path in ("./org/other", "org/deeper/other", "org/model.gguf", "other"):
        with pytest.raises(NotFoundError):
            ferrum_jax.load_params(path)
    assert len(asked) == 2


def test_a_missing_model_in_a_folder_that_is_here_is_not_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "trained").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError, match="trained/step_100 does not exist"):
        ferrum_jax.load("trained/step_100")
