"""From a configuration to an executor; a field that cannot be honoured is an error, and a table says when."""

import asyncio
import re
import threading
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import EngineConfig, LlmExecutor, LlmExecutorFactory, ModelRunner, factory, models
from ferrum_jax.compile.artifacts import check_compiler_options
from ferrum_jax.contract import (
    AttentionType,
    DataType,
    Device,
    ExecutorAttentionConfig,
    ExecutorConfig,
    ExecutorMemoryConfig,
    ExecutorState,
    ExecutorType,
    FerrumError,
    ModelInfo,
    OptimizationConfig,
)
from ferrum_jax.contract.errors import (
    ConfigError,
    DeviceError,
    NotFoundError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.executor.sizing import plan_engine
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.sharding.devices import find_device
from ferrum_jax.sharding.mesh import Placement
from tests import tiny
from tests.executor.asking import prompt, run

NAME = "qwen3_window_biases"
LADDERS = EngineConfig(decode_rows=(2,), query_blocks=(1,), block_tokens=8, verify_tokens=8)
TABLE = Path(ferrum_jax.__file__).parents[1] / "docs" / "contract.md"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ExecutorConfig:
    folder = tiny.write_folder(tmp_path_factory.mktemp("models") / NAME, tiny.CONFIGS[NAME], shards=1)
    return ExecutorConfig(
        model_info=ModelInfo(
            model_id=str(folder), model_type="", num_parameters=0, hidden_size=0, num_layers=0, num_heads=0,
            num_kv_heads=0, vocab_size=0, max_sequence_length=0, dtype=DataType.FP32, device=Device("cpu"),
            version="1", metadata={"mine": True},
        ),
        device=Device("cpu"),
        dtype=DataType.FP32,
        max_batch_size=2,
        max_sequence_length=24,
        attention_config=ExecutorAttentionConfig(block_size=8),
        executor_options={"engine": LADDERS, "progress": False},
    )  # fmt: skip


def _with(config: ExecutorConfig, name: str, value: Any) -> ExecutorConfig:
    """Replaces a field, or with a dot a field of a part."""
    part, _, field = name.partition(".")
    return replace(config, **{part: replace(getattr(config, part), **{field: value}) if field else value})


def test_sequences_that_pass_the_original_positions_of_longrope_are_planned_and_stated(
    config: ExecutorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS["phi3_beyond"])
    planned: list[int] = []
    plan_ahead = factory.plan_ahead

    def planning(*given: Any) -> Any:
        planned.append((plan := plan_ahead(*given)).kv_capacity)
        return plan

    monkeypatch.setattr(factory, "plan_ahead", planning)
    for length, longest in ((100, 160), (12, tiny.ORIGINAL)):
        own = _with(replace(config, max_sequence_length=length), "model_info.model_id", str(folder))
        executor = run(LlmExecutorFactory().create_executor(own))
        assert executor.info().max_sequence_length == longest
        run(executor.shutdown())
    assert planned == [100, 12]


def test_a_quantised_executor_says_what_its_weights_are(config: ExecutorConfig):
    executor = run(LlmExecutorFactory().create_executor(replace(config, executor_options={"quantize": "int8"})))
    assert executor.info().dtype is DataType.INT8
    assert executor.capabilities().supported_dtypes == (DataType.FP32,)


def test_an_executor_runs_the_model_of_its_configuration(config: ExecutorConfig, monkeypatch: pytest.MonkeyPatch):
    warmed: list[dict[str, Any]] = []
    monkeypatch.setattr(ModelRunner, "warmup", lambda _, **settings: warmed.append(settings))
    executor = run(LlmExecutorFactory().create_executor(config))
    tokens = tiny.prompt(NAME)[:8]
    params, cfg = ferrum_jax.load_params(config.model_info.model_id)
    expected = jax.jit(models.forward, static_argnums=2)(params, jnp.array([tokens]), cfg)[0, -1]
    out = run(executor.prefill(prompt(tokens)))
    np.testing.assert_allclose(out.logits[0, 0], expected, atol=1e-4)
    assert executor.kv_capacity() == 24
    assert executor.capabilities().max_batch_size == 2
    pool = executor.kv_slot_capacity_snapshot()
    assert pool is not None
    assert (pool.block_size, pool.total_blocks) == (8, 6)
    info = executor.info()
    assert (info.model_type, info.version, info.metadata) == ("qwen3", "1", {"mine": True})
    assert info.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert (info.num_heads, info.num_kv_heads, info.vocab_size) == (8, 2, 97)
    run(executor.warmup())
    assert warmed == [{"progress": False}]
    run(executor.shutdown())
    assert executor.status().state is ExecutorState.Shutdown


def test_a_batch_executor_is_one_as_well(config: ExecutorConfig):
    executor = run(LlmExecutorFactory().create_batch_executor(config))
    assert isinstance(executor, LlmExecutor)
    assert executor.supports_batch_size(2)
    assert AttentionType.Flash in executor.capabilities().attention_mechanisms
    run(executor.shutdown())
    assert set(LlmExecutorFactory().supported_types()) == set(ExecutorType) - {ExecutorType.PipelineParallel}


def test_an_executor_may_be_divided_over_a_mesh(config: ExecutorConfig):
    options = {"executor_type": ExecutorType.TensorParallel, "mesh": {"model": 2}, "progress": False}
    executor = run(LlmExecutorFactory().create_executor(replace(config, executor_options=options)))
    assert executor.capabilities().supports_tensor_parallelism
    run(executor.shutdown())


def test_a_sequential_executor_runs_one_sequence_and_is_no_batch_executor(config: ExecutorConfig):
    options = {**config.executor_options, "engine": None, "executor_type": ExecutorType.Sequential}
    single = replace(config, max_batch_size=1, executor_options=options)
    executor = run(LlmExecutorFactory().create_executor(single))
    assert executor.capabilities().max_batch_size == 1
    run(executor.shutdown())
    with pytest.raises(ConfigError, match="a batch executor needs another type"):
        run(LlmExecutorFactory().create_batch_executor(single))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_info.num_layers", 3),
        ("model_info.vocab_size", 97),
        ("model_info.max_sequence_length", 160),
        ("attention_config.attention_type", AttentionType.Paged),
        ("attention_config.attention_type", AttentionType.Flash),
        ("attention_config.enable_flash_attention", True),
        ("attention_config.attention_type", AttentionType.SlidingWindow),
        ("attention_config.sliding_window_size", 9),
        ("memory_config.max_memory_usage", 0.1),
        ("memory_config.max_memory_usage", 1),
        *(("optimization_config.optimization_level", level) for level in (0, 1, 2, 3)),
        ("optimization_config.enable_kernel_fusion", False),
        ("optimization_config.custom_flags", {"xla_cpu_enable_fast_math": True}),
        ("executor_options", {}),
        ("executor_options", {"kv_blocks": 3, "kv_dtype": "bf16", "max_step_tokens": 16, "engine": None}),
        ("executor_options", {"strict": True, "progress": True, "max_loras": 0, "max_lora_rank": 0}),
        ("executor_options", {"executor_type": ExecutorType.Speculative}),
        ("dtype", DataType.BF16),
    ],
)
def test_a_field_that_can_be_honoured_is_valid(config: ExecutorConfig, field: str, value: Any):
    changed = _with(config, field, value)
    if field == "dtype":
        changed = _with(changed, "model_info.dtype", value)
        LlmExecutorFactory().validate_config(_with(changed, "optimization_config.enable_mixed_precision", True))
    LlmExecutorFactory().validate_config(changed)


@pytest.mark.parametrize(
    ("field", "value", "kind", "match"),
    [
        ("model_info", None, ConfigError, "expected a ModelInfo"),
        ("model_info.model_id", "", ConfigError, "expected the path"),
        ("model_info.model_id", "/nowhere", NotFoundError, "nowhere does not exist"),
        ("model_info.model_type", "llama", ConfigError, "model_type is 'llama', the checkpoint has 'qwen3'"),
        ("model_info.num_parameters", 7, ConfigError, "num_parameters is 7"),
        ("model_info.hidden_size", 7, ConfigError, "hidden_size is 7, the checkpoint has 48"),
        ("model_info.num_layers", 4, ConfigError, "num_layers is 4"),
        ("model_info.num_heads", 4, ConfigError, "num_heads is 4"),
        ("model_info.num_kv_heads", 4, ConfigError, "num_kv_heads is 4"),
        ("model_info.vocab_size", 98, ConfigError, "vocab_size is 98"),
        ("model_info.max_sequence_length", 161, ConfigError, "the model can reach 160"),
        ("model_info.dtype", DataType.BF16, ConfigError, "model_info.dtype"),
        ("model_info.device", Device("cuda"), ConfigError, "model_info.device is cuda:0, device is cpu"),
        ("device", "cpu", ConfigError, "expected a Device"),
        ("dtype", "float32", ConfigError, "expected a DataType"),
        ("dtype", DataType.INT8, UnsupportedError, "dtype INT8"),
        ("max_batch_size", 0, ConfigError, "max_seqs is 0"),
        ("max_batch_size", True, ConfigError, "max_seqs is True"),
        ("max_sequence_length", 0, ConfigError, "kv_capacity is 0"),
        ("max_sequence_length", 161, ConfigError, "max_sequence_length is 161, the model can reach 160"),
        ("attention_config", None, ConfigError, "expected a ExecutorAttentionConfig"),
        ("attention_config.attention_type", AttentionType.MultiHead, ConfigError, "8 heads, 2 key/value heads"),
        ("attention_config.attention_type", AttentionType.MultiQuery, ConfigError, "8 heads"),
        ("attention_config.attention_type", "paged", ConfigError, "attention_type is 'paged'"),
        ("attention_config.enable_flash_attention", 0, ConfigError, "expected True or False"),
        ("attention_config.enable_paged_attention", False, UnsupportedError, "always paged; block_size"),
        ("attention_config.block_size", 0, ConfigError, "block_size is 0"),
        ("attention_config.sliding_window_size", 8, ConfigError, r"sliding_window_size is 8, the model has \[9\]"),
        ("memory_config", {}, ConfigError, "expected a ExecutorMemoryConfig"),
        ("memory_config.enable_memory_pooling", False, UnsupportedError, "one pool; memory_pool_size"),
        ("memory_config.memory_pool_size", 100, ConfigError, "one KV block takes"),
        ("memory_config.memory_pool_size", 1e9, ConfigError, "expected a number of bytes"),
        ("memory_config.memory_pool_size", 2**42, ResourceExhaustedError, "blocks"),
        ("memory_config.memory_pool_size", 2**50, ConfigError, "kv_blocks is .*, expected at most"),
        ("memory_config.enable_kv_cache_sharing", None, ConfigError, "expected True or False"),
        ("memory_config.max_memory_usage", 0, ConfigError, "memory_fraction is 0"),
        ("memory_config.max_memory_usage", 1.5, ConfigError, "memory_fraction is 1.5"),
        ("optimization_config", None, ConfigError, "expected a OptimizationConfig"),
        ("optimization_config.enable_cuda_graphs", True, UnsupportedError, "enable_cuda_graphs is True, cpu"),
        ("optimization_config.enable_cuda_graphs", 0, ConfigError, "enable_cuda_graphs is 0"),
        ("optimization_config.enable_kernel_fusion", "no", ConfigError, "enable_kernel_fusion is 'no'"),
        ("optimization_config.enable_mixed_precision", True, ConfigError, "set dtype BF16 or FP16"),
        ("optimization_config.enable_mixed_precision", "yes", ConfigError, "expected True or False"),
        *(
            ("optimization_config.optimization_level", level, ConfigError, "expected an integer from 0 to 3")
            for level in (-1, 4, 2.0, True)
        ),
        ("optimization_config.custom_flags", {"fast": True}, ConfigError, "compiler_options .*cpu.*option: 'fast'"),
        (
            "optimization_config.custom_flags",
            {"xla_cpu_enable_fast_math": 1},
            ConfigError,
            "custom_flags is .* True",
        ),
        ("optimization_config.custom_flags", ["fast"], ConfigError, "custom_flags is"),
        ("executor_options", {"compiler_options": {"": 1}}, ConfigError, "compiler_options has"),
        ("executor_options", {"compiler_options": {"xla_cpu_enable_fast_math": "?"}}, ConfigError, "fast_math, '.'"),
        ("executor_options", [], ConfigError, "expected a Mapping"),
        ("executor_options", {"typo": 1}, ConfigError, "'typo'.* is unknown, known are"),
        ("executor_options", {"dtype": "float32"}, ConfigError, "set dtype instead"),
        ("executor_options", {"max_seqs": 3}, ConfigError, "set max_batch_size instead"),
        ("executor_options", {"strict": 1}, ConfigError, "expected True or False"),
        ("executor_options", {"engine": 1}, ConfigError, "expected an EngineConfig"),
        ("executor_options", {"engine": EngineConfig(max_seqs=3)}, ConfigError, "max_seqs is 2 as an argument and 3"),
        ("executor_options", {"kv_dtype": 3}, ConfigError, "dtype is 3"),
        ("executor_options", {"kv_blocks": 0}, ConfigError, "kv_blocks is 0"),
        ("max_batch_size", None, ConfigError, "max_batch_size is None"),
        ("memory_config.max_memory_usage", None, ConfigError, "max_memory_usage is None"),
        ("model_info.max_sequence_length", -1, ConfigError, "model_info.max_sequence_length is -1"),
        ("model_info.max_sequence_length", True, ConfigError, "model_info.max_sequence_length is True"),
        ("executor_options", {"executor_type": "batch"}, ConfigError, "expected an ExecutorType"),
        ("executor_options", {"executor_type": ExecutorType.Sequential}, ConfigError, "set max_batch_size to 1"),
        ("executor_options", {"executor_type": ExecutorType.TensorParallel}, ConfigError, "the mesh is one device"),
        ("executor_options", {"executor_type": ExecutorType.PipelineParallel}, UnsupportedError, "Pipeline"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused(
    config: ExecutorConfig, field: str, value: Any, kind: type[FerrumError], match: str
):
    changed = _with(config, field, value)
    with pytest.raises(kind, match=match):
        LlmExecutorFactory().validate_config(changed)
    with pytest.raises(kind, match=match):
        run(LlmExecutorFactory().create_executor(changed))


def test_a_device_that_is_not_there_is_refused(config: ExecutorConfig):
    changed = replace(config, device=Device("tpu", 3), model_info=replace(config.model_info, device=Device("tpu", 3)))
    with pytest.raises(DeviceError, match="tpu:3"):
        LlmExecutorFactory().validate_config(changed)
    wrong: Any = {"device": "cpu"}
    with pytest.raises(ConfigError, match="dict, expected an ExecutorConfig"):
        LlmExecutorFactory().validate_config(wrong)


def test_what_the_compiler_may_do_reaches_xla(config: ExecutorConfig, monkeypatch: pytest.MonkeyPatch):
    seen: list[dict[str, Any] | None] = []
    compile_it = jax.stages.Lowered.compile

    def compile_and_note(lowered: jax.stages.Lowered, **settings: Any) -> jax.stages.Compiled:
        seen.append(settings["compiler_options"])
        return compile_it(lowered, **settings)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_note)
    asked = OptimizationConfig(
        optimization_level=1, enable_kernel_fusion=False, custom_flags={"xla_cpu_enable_fast_math": False}
    )
    # Later ones have no others: the older emitters of tests/conftest.py compute nonsense unfused.
    own = {"xla_cpu_use_fusion_emitters": True} if version("jaxlib").startswith("0.10.") else {}
    own["xla_cpu_enable_fast_min_max"] = True
    options = {**config.executor_options, "compiler_options": own}
    tokens, counts, answers = tiny.prompt(NAME)[:8], [], []
    engine = replace(LADDERS, artifacts=False)
    for changed in (config, replace(config, optimization_config=asked, executor_options=options)):
        seen.clear()
        given = {**changed.executor_options, "engine": engine}
        executor = run(LlmExecutorFactory().create_executor(replace(changed, executor_options=given)))
        answers.append(run(executor.prefill(prompt(tokens))).logits)
        counts.append(_num_thunks(executor))
        run(executor.shutdown())
        wanted = None
        if changed is not config:
            wanted = {
                "xla_backend_optimization_level": 1,
                "xla_disable_hlo_passes": "fusion,priority-fusion,multi_output_fusion",
                "xla_cpu_enable_fast_math": False,
                **own,
            }
        assert len(seen) > 1  # the step and the empty KV, say
        assert all(one == wanted for one in seen)
    assert counts[1] > 1.2 * counts[0]
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-4)


def _num_thunks(executor: LlmExecutor) -> int:
    """Counts what XLA runs one after another, which fusion makes fewer."""
    model: Any = executor._model
    texts = [(step.as_text() or "").partition("\nENTRY ")[2] for step in model._programs._steps.values()]
    return sum(text.count(" = ") for text in texts)


def test_two_fields_that_give_one_option_must_agree(config: ExecutorConfig):
    levelled = _with(config, "optimization_config.optimization_level", 1)
    for level in (1, 3):
        both = _with(levelled, "executor_options", {"compiler_options": {"xla_backend_optimization_level": level}})
        if level == 1:
            LlmExecutorFactory().validate_config(both)
        else:
            with pytest.raises(ConfigError, match="xla_backend_optimization_level is 3, another field makes it 1"):
                LlmExecutorFactory().validate_config(both)
    other = EngineConfig(compiler_options={"xla_cpu_enable_fast_math": True})
    with pytest.raises(ConfigError, match=r"compiler_options is .* as an argument"):
        LlmExecutorFactory().validate_config(_with(levelled, "executor_options", {"engine": other}))


@pytest.mark.parametrize(
    ("name", "value", "platform"),
    [("enable_cuda_graphs", True, "tpu"), ("enable_kernel_fusion", False, "tpu"), ("optimization_level", 0, "tpu")],
)
def test_a_compiler_without_the_option_is_named(config: ExecutorConfig, name: str, value: Any, platform: str):
    changed = _with(_with(config, f"optimization_config.{name}", value), "device", Device(platform))
    with pytest.raises(UnsupportedError, match="tpu:0"):
        factory._compiler_options(changed, SimpleNamespace(platform=platform))  # pyright: ignore[reportArgumentType]


def test_graphs_of_a_gpu_are_an_option_that_xla_knows(config: ExecutorConfig):
    changed = _with(config, "optimization_config.enable_cuda_graphs", True)
    options = factory._compiler_options(changed, SimpleNamespace(platform="gpu"))  # pyright: ignore[reportArgumentType]
    assert set(options or ()) == {"xla_gpu_enable_command_buffer"}
    check_compiler_options(options, jax.devices()[0])  # every backend parses it


def test_a_pool_is_as_large_as_its_bytes(config: ExecutorConfig):
    block = 8 * 2 * 3 * 2 * 20 * 4  # positions, keys and values, layers, heads, width, bytes
    sized = _with(config, "memory_config.memory_pool_size", 3 * block + 1)
    executor = run(LlmExecutorFactory().create_executor(sized))
    pool = executor.kv_slot_capacity_snapshot()
    assert pool is not None
    assert pool.total_blocks == 3
    run(executor.shutdown())
    both = _with(sized, "executor_options", {"kv_blocks": 3})
    with pytest.raises(ConfigError, match="give one"):
        LlmExecutorFactory().validate_config(both)


def test_sharing_is_prefix_reuse(config: ExecutorConfig):
    shared = _with(config, "memory_config.enable_kv_cache_sharing", True)
    executor = run(LlmExecutorFactory().create_executor(shared))
    assert executor.cache_metrics_snapshot()["enabled"]
    run(executor.shutdown())


def test_a_cancelled_load_frees_what_it_loaded(config: ExecutorConfig, monkeypatch: pytest.MonkeyPatch):
    begun, gate, loaded = threading.Event(), threading.Event(), []
    load = ferrum_jax.load

    def slow(*args: Any, **settings: Any) -> Any:
        begun.set()
        assert gate.wait(60)
        loaded.append(load(*args, **settings))
        return loaded[0]

    monkeypatch.setattr("ferrum_jax.factory.load", slow)

    async def scenario() -> None:
        task = asyncio.create_task(LlmExecutorFactory().create_executor(config))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario())
    assert loaded[0].state is ExecutorState.Shutdown


def test_the_table_of_the_documents_has_a_row_for_every_field():
    rows = set(re.findall(r"^\| `([a-z_.]+)`", TABLE.read_text(), flags=re.MULTILINE))
    parts = {
        "attention_config": ExecutorAttentionConfig,
        "memory_config": ExecutorMemoryConfig,
        "optimization_config": OptimizationConfig,
    }
    expected = {field.name for field in fields(ExecutorConfig)} - set(parts)
    for part, kind in parts.items():
        expected |= {f"{part}.{field.name}" for field in fields(kind)}
    assert expected <= rows


def test_a_pool_beside_sliding_window_caches_is_as_large_as_its_bytes():
    cfg = tiny.model_config(NAME)
    placed = ModelPlacement.of(cfg, Placement((find_device("cpu"),)))
    engine = replace(LADDERS, window_kv=True, max_seqs=2, kv_capacity=512, block_size=8, dtype="float32")
    sized = factory._sized(engine, 10**6, cfg, placed)
    spec = plan_engine(sized, cfg, platform="cpu", free_bytes=2**62).cache
    assert spec.window_slots == 2
    assert spec.num_bytes <= 10**6 < spec.num_bytes + spec.bytes_per_position * spec.block_size
    with pytest.raises(ConfigError, match="sliding-window caches"):
        factory._sized(engine, 1000, cfg, placed)
    everywhere = replace(cfg, layer_windows=(7,) * cfg.num_hidden_layers)
    assert plan_engine(engine, everywhere, platform="cpu", free_bytes=2**62).cache.num_layers == 0
    assert factory._sized(engine, 10**6, everywhere, placed) == engine
