"""Settings and values of wrong types end in a `FerrumError`, or hold what was given in the types they declare."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from beartype import BeartypeConf
from beartype.door import is_bearable
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import ferrum_jax
from ferrum_jax import EngineConfig, LlmExecutorFactory, LlmExecutorRegistry, SamplingParams, contract
from ferrum_jax.config import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling
from ferrum_jax.contract import DataType, Device, ExecutorConfig, FerrumError, ModelInfo
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import named_leaves
from tests import tiny
from tests.executor.conftest import CFG
from tests.executor.junk import JSON, JUNK, maybe, spoiled
from tests.long import SECONDS, SEED

NAME = "qwen3_window_biases"
EXAMPLES = 40  # of each test; the slow one runs them again and again with other seeds
OTHERS = (
    "gemma2",
    "gemma3",
    "gemma3_rope_by_kind",
    "phi3_beyond",
    "olmo2",
    "olmo3",
    "granite",
    "smollm3_window_biases",
)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
CONTRACT = (getattr(contract, name) for name in contract.__all__)
KINDS = [kind for kind in CONTRACT if is_dataclass(kind) and isinstance(kind, type)]
SETTINGS = [EngineConfig, ModelConfig, RopeScaling, ExpertsConfig, LatentConfig]
KINDS += [SamplingParams, *SETTINGS]
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


def same(found: Any, given: Any) -> bool:
    return found is given or (type(found) is type(given) and repr(found) == repr(given))


def check_value(kind: type, given: dict[str, Any]) -> None:
    """Builds a value, which is refused or holds what was given and else its defaults; settings have their types."""
    try:
        value = kind(**given)
    except FerrumError:
        return
    for one in fields(kind):
        found = getattr(value, one.name)
        if one.name in given:
            wanted = given[one.name]
            plain = wanted.item() if isinstance(wanted, (np.integer, np.floating)) else wanted
            assert same(found, wanted) or same(found, plain) or kind is EngineConfig, f"{one.name} is {found!r}"
        elif one.default is not MISSING:
            assert same(found, one.default), f"{one.name} is {found!r} by default"
    if kind in SETTINGS:
        check_types(value)


def check_types(settings: Any) -> None:
    for one in fields(settings):
        value, hint = getattr(settings, one.name), cast(Any, one.type)
        assert is_bearable(value, hint, conf=BeartypeConf(is_pep484_tower=True)), f"{one.name} is {value!r}"
    if isinstance(settings, ModelConfig):
        assert 1 <= settings.max_seq_len <= 2**31 - 1
        assert len(settings.layer_windows) == settings.num_hidden_layers
        assert hash(settings) == hash(replace(settings))


def check_model(config: Any) -> None:
    """Reads a `config.json`, which is refused or describes parameters that all have some numbers."""
    try:
        cfg = ModelConfig.from_hf(config)
    except FerrumError:
        return
    check_types(cfg)
    assert cfg.model_type == config["model_type"]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert same(getattr(cfg, name), config[name])
    if cfg.num_hidden_layers < 9 and cfg.latent is None and cfg.experts is None:
        leaves = named_leaves(family(cfg).param_specs(cfg))
        assert all(size >= 1 for leaf in leaves.values() for size in leaf.shape)
        assert leaves["model.embed_tokens.weight"].shape == (cfg.vocab_size, cfg.hidden_size)


def check_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(FerrumError):
        call()


def built(kind: type) -> st.SearchStrategy[Callable[[], Any]]:
    """Builds a dataclass from its own defaults and junk."""
    needed = {one.name: JUNK for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    rest = {one.name: JUNK for one in fields(kind) if one.name not in needed}
    return st.fixed_dictionaries(needed, optional=rest).map(lambda given: lambda: check_value(kind, given))


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


@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=QUIET)
@given(st.one_of(*map(built, KINDS)))
def test_a_value_built_of_junk_is_refused_or_holds_it(check: Callable[[], None]):
    check()


def check_device(text: Any) -> None:
    try:
        device = Device.parse(text)
    except FerrumError:
        return
    assert Device.parse(str(device)) == device


def check_unknown(name: Any) -> None:
    """An empty registry knows no name and takes nothing that is no executor."""
    registry = LlmExecutorRegistry()
    check_refused(lambda: registry.register(name, name))
    assert registry.get(name) is registry.remove(name) is registry.get_metrics(name) is None
    assert registry.list_names() == []


@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=QUIET)
@given(
    st.one_of(
        maybe(
            st.sampled_from([HF, *(tiny.CONFIGS[name] for name in OTHERS)]).flatmap(
                lambda config: st.one_of(spoiled(config, JUNK), spoiled(config, JSON))
            )
        ).map(lambda given: lambda: check_model(given)),
        spoiled(CFG_FIELDS, JUNK).map(lambda given: lambda: check_value(ModelConfig, CFG_FIELDS | given)),
        JUNK.map(lambda given: lambda: check_device(given)),
        JUNK.map(lambda given: lambda: check_refused(lambda: ferrum_jax.load(given, progress=False))),
        spoiled(LOAD, JUNK).map(lambda given: lambda: check_refused(lambda: ferrum_jax.load("/nowhere", **given))),
        spoiled(SAMPLING, JUNK).map(lambda given: lambda: check_value(SamplingParams, given)),
        JUNK.map(lambda given: lambda: check_value(EngineConfig, {"max_seqs": given, "decode_rows": given})),
        JUNK.map(lambda given: lambda: check_unknown(given)),
        JUNK.map(lambda given: lambda: check_refused(lambda: ferrum_jax.LlmExecutor(given))),
    )
)
def test_settings_of_wrong_types_are_refused_or_are_what_was_given(check: Callable[[], None]):
    check()


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
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[*QUIET, HealthCheck.function_scoped_fixture],
)
@given(given=spoiled(EXECUTOR, JUNK), info=maybe(st.just(INFO), spoiled(INFO, JUNK)))
def test_an_executor_configuration_is_refused_by_both_or_valid(model: str, given: dict[str, Any], info: dict[str, Any]):
    try:
        config = _config(model, given, info)
    except FerrumError:
        return
    factory = LlmExecutorFactory()
    try:
        factory.validate_config(config)
    except FerrumError as refusal:
        with pytest.raises(type(refusal)):
            asyncio.run(factory.create_executor(config))


@pytest.mark.slow
def test_minutes_of_settings_of_wrong_types(model: str):
    end = time.monotonic() + SECONDS
    rounds = 0
    print(f"seed {SEED}")
    while time.monotonic() < end:
        again = seed(SEED + rounds)
        again(test_a_value_built_of_junk_is_refused_or_holds_it)()
        again(test_settings_of_wrong_types_are_refused_or_are_what_was_given)()
        again(test_an_executor_configuration_is_refused_by_both_or_valid)(model=model)
        rounds += 1
    print(f"{3 * EXAMPLES * rounds:,} examples, seed {SEED}")
