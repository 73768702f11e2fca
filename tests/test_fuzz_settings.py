"""Settings, values and files of wrong types end in a `FerrumError` or in something that is usable."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import ferrum_jax
from ferrum_jax import EngineConfig, LlmExecutorFactory, LlmExecutorRegistry, SamplingParams, contract
from ferrum_jax.config import ModelConfig, RopeScaling
from ferrum_jax.contract import DataType, Device, ExecutorConfig, FerrumError, ModelInfo
from tests import tiny
from tests.executor.conftest import CFG
from tests.executor.junk import JSON, JUNK, maybe, spoiled
from tests.long import SECONDS, SEED

NAME = "qwen3_window_biases"
OTHERS = ("gemma2", "gemma3", "gemma3_rope_by_kind", "phi3_beyond", "olmo2", "granite", "smollm3_window_biases")
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
CONTRACT = (getattr(contract, name) for name in contract.__all__)
KINDS = [kind for kind in CONTRACT if is_dataclass(kind) and isinstance(kind, type)]
KINDS += [SamplingParams, EngineConfig, ModelConfig, RopeScaling]
HF = {
    "model_type": "qwen3",
    "vocab_size": 7,
    "hidden_size": 8,
    "intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    "sliding_window": 8,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_window_layers": 1,
    "attention_bias": True,
    "hidden_act": "silu",
    "dtype": "float32",
    "tie_word_embeddings": True,
    "architectures": ["Qwen3ForCausalLM"],
    "num_experts": 0,
    "torch_dtype": "float32",
    "rope_scaling": None,
}


def usable_or_refused(call: Callable[[], Any]) -> None:
    with contextlib.suppress(FerrumError):
        call()


def built(kind: type) -> st.SearchStrategy[Callable[[], Any]]:
    """Builds a dataclass from its own defaults and junk."""
    needed = {one.name: JUNK for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    rest = {one.name: JUNK for one in fields(kind) if one.name not in needed}
    return st.fixed_dictionaries(needed, optional=rest).map(lambda given: lambda: kind(**given))


LOAD = {
    "dtype": None,
    "kv_dtype": None,
    "attention": None,
    "max_seqs": 1,
    "kv_capacity": 1,
    "block_size": 1,
    "prefix_cache": True,
    "kv_blocks": 1,
    "memory_fraction": 0.5,
    "max_step_tokens": 8,
    "quantize": None,
    "layout": None,
    "engine": None,
    "max_loras": 0,
    "max_lora_rank": 0,
    "device": "cpu",
    "mesh": None,
    "artifacts": None,
}
SAMPLING = {one.name: one.default for one in fields(SamplingParams)}
CFG_FIELDS = {one.name: getattr(CFG, one.name) for one in fields(CFG)}
INFO = {
    "model_id": "x",
    "model_type": "",
    "num_parameters": 0,
    "hidden_size": 0,
    "num_layers": 0,
    "num_heads": 0,
    "num_kv_heads": 0,
    "vocab_size": 0,
    "max_sequence_length": 0,
    "dtype": DataType.FP32,
    "device": Device("cpu"),
    "version": "1",
    "metadata": {},
}


@settings(max_examples=400, deadline=None, database=None, suppress_health_check=QUIET)
@given(st.one_of(*map(built, KINDS)))
def test_a_value_built_of_junk_is_refused_or_built(build: Callable[[], Any]):
    usable_or_refused(build)


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=QUIET)
@given(
    st.one_of(
        maybe(
            st.sampled_from([HF, *(tiny.CONFIGS[name] for name in OTHERS)]).flatmap(
                lambda config: st.one_of(spoiled(config, JUNK), spoiled(config, JSON))
            )
        ).map(lambda given: lambda: ModelConfig.from_hf(given)),
        spoiled(CFG_FIELDS, JUNK).map(lambda given: lambda: replace(CFG, **given)),
        JUNK.map(lambda given: lambda: Device.parse(given)),
        JUNK.map(lambda given: lambda: ferrum_jax.load(given, progress=False)),
        spoiled(LOAD, JUNK).map(lambda given: lambda: ferrum_jax.load("/nowhere", **given)),
        spoiled(SAMPLING, JUNK).map(lambda given: lambda: SamplingParams(**given)),
        JUNK.map(lambda given: lambda: EngineConfig(max_seqs=given, decode_rows=given)),
        st.tuples(JUNK, JUNK).map(lambda given: lambda: LlmExecutorRegistry().register(*given)),
        JUNK.map(lambda given: lambda: LlmExecutorRegistry().get(given)),
        JUNK.map(lambda given: lambda: LlmExecutorRegistry().remove(given)),
        JUNK.map(lambda given: lambda: ferrum_jax.LlmExecutor(given)),
    )
)
def test_settings_of_wrong_types_are_refused_or_usable(call: Callable[[], Any]):
    usable_or_refused(call)


EXECUTOR = {
    "device": Device("cpu"),
    "dtype": DataType.FP32,
    "max_batch_size": 2,
    "max_sequence_length": 24,
    "attention_config": {"block_size": 8, "sliding_window_size": None},
    "optimization_config": {"optimization_level": 2, "custom_flags": {}},
    "memory_config": {"max_memory_usage": 0.5, "memory_pool_size": None, "enable_kv_cache_sharing": False},
    "executor_options": {
        "progress": False,
        "kv_blocks": None,
        "engine": None,
        "kv_dtype": "float32",
        "attention": None,
        "max_loras": 1,
        "max_lora_rank": 2,
        "quantize": "none",
        "layout": None,
    },
}
PARTS = {
    "attention_config": contract.ExecutorAttentionConfig,
    "optimization_config": contract.OptimizationConfig,
    "memory_config": contract.ExecutorMemoryConfig,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_folder(tmp_path_factory.mktemp("models") / NAME, tiny.CONFIGS[NAME], shards=1))


def _config(model: str, given: dict[str, Any], info: dict[str, Any]) -> ExecutorConfig:
    parts = {
        name: kind(**given[name])
        for name, kind in PARTS.items()
        if type(given.get(name)) is dict and given[name].keys() <= EXECUTOR[name].keys()
    }
    told = {**INFO, **info}
    if told["model_id"] is INFO["model_id"]:
        told["model_id"] = model
    return ExecutorConfig(model_info=ModelInfo(**told), **{**EXECUTOR, **given, **parts})


@settings(
    max_examples=200, deadline=None, database=None, suppress_health_check=[*QUIET, HealthCheck.function_scoped_fixture]
)
@given(given=spoiled(EXECUTOR, JUNK), info=maybe(st.just(INFO), spoiled(INFO, JUNK)))
def test_an_executor_configuration_of_wrong_types_is_refused_or_possible(
    model: str, given: dict[str, Any], info: dict[str, Any]
):
    def validate() -> None:
        config = _config(model, given, info)
        factory = LlmExecutorFactory()
        try:
            factory.validate_config(config)
        except FerrumError as refusal:
            with pytest.raises(type(refusal)):
                asyncio.run(factory.create_executor(config))

    usable_or_refused(validate)


@pytest.mark.slow
def test_minutes_of_settings_of_wrong_types_are_refused_or_usable(model: str):
    end = time.monotonic() + SECONDS
    rounds = 0
    while time.monotonic() < end:
        again = seed(SEED + rounds)
        again(test_a_value_built_of_junk_is_refused_or_built)()
        again(test_settings_of_wrong_types_are_refused_or_usable)()
        again(test_an_executor_configuration_of_wrong_types_is_refused_or_possible)(model=model)
        rounds += 1
    print(f"{900 * rounds:,} examples, seed {SEED}")
