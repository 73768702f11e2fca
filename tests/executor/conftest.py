"""A tiny model whose dimensions are all different, behind a runner, and the cache-free forward to compare with."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ferrum_jax import models
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.executor import ModelRunner, plan_engine
from ferrum_jax.models import adapters
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.devices import find_device

DEVICE = find_device(None)  # a GPU, where there is one
CAPACITY = 44  # positions, no multiple of the block size
CFG = ModelConfig(
    model_type="qwen3",
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10 if DEVICE.platform == "cpu" else 16,  # multiples of 16 alone have a kernel on a GPU
    max_position_embeddings=512,
    rope_theta=1000.0,
    qk_norm=True,
    attention_bias=True,
    tie_word_embeddings=True,
    layer_windows=(9, None),
)
ENGINE = EngineConfig(
    dtype="float32", max_seqs=4, kv_capacity=CAPACITY, block_size=8, kv_blocks=18, max_step_tokens=24,
    decode_rows=(1, 2, 4), query_blocks=(1, 3), block_tokens=8, verify_tokens=6,
)  # fmt: skip
REUSING = replace(
    ENGINE, prefix_cache=True, max_loras=2, max_lora_rank=4, multi_step_tokens=4, decode_rows=(4,), query_blocks=(3,),
    verify_blocks=(2,),
)  # fmt: skip
WINDOWED = replace(ENGINE, window_kv=True, multi_step_tokens=4, decode_rows=(1, 4), query_blocks=(1,))
NARROW = replace(ENGINE, multi_step_tokens=4, decode_rows=(1,), query_blocks=(1,))
Oracle = Callable[[Sequence[int]], NDArray[np.float32]]


@pytest.fixture(scope="session")
def params() -> ParamTree:
    return models.specs.initialise(models.family(CFG).param_specs(CFG), jax.random.key(0), "float32", scale=0.4)


@pytest.fixture(scope="session")
def oracle_of(params: ParamTree) -> Callable[[ParamTree], Oracle]:
    """Makes the forward that keeps no cache, for any weights of the tiny model; compiled once."""
    run = jax.jit(models.forward, static_argnames="cfg")
    compiled = run.lower(params, np.zeros((1, CAPACITY), np.int32), cfg=CFG).compile()

    def make(weights: ParamTree) -> Oracle:
        def logits(tokens: Sequence[int]) -> NDArray[np.float32]:
            padded = np.zeros((1, CAPACITY), np.int32)
            padded[0, : len(tokens)] = tokens
            return np.asarray(compiled(weights, padded))[0, : len(tokens)]

        return logits

    return make


@pytest.fixture(scope="session")
def oracle(params: ParamTree, oracle_of: Callable[[ParamTree], Oracle]) -> Oracle:
    """Logits of every token of a sequence, by the forward that keeps no cache."""
    return oracle_of(params)


ADAPTER_NAMES = ("one", "two", "three")  # one more than fit


def adapter_tensors(name: str) -> dict[str, NDArray[np.float32]]:
    """Draws the tensors of an adapter of rank 3 of some projections of the tiny model."""
    draw = np.random.RandomState(ADAPTER_NAMES.index(name))
    tensors = {}
    for module, weight in adapters.projections(CFG).items():
        if module.rpartition(".")[2] in TARGETS[name]:
            out_size, in_size = weight.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = draw.normal(size=(3, in_size)).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_B.weight"] = draw.normal(size=(out_size, 3)).astype(np.float32) / 9
    return tensors


TARGETS = {"one": ("q_proj", "down_proj"), "two": ("k_proj", "v_proj", "o_proj", "up_proj"), "three": ("gate_proj",)}


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders in PEFT's format, by name."""
    folders = {}
    for name in ADAPTER_NAMES:
        folder = tmp_path_factory.mktemp(name)
        config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": list(TARGETS[name])}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(adapter_tensors(name), folder / "adapter_model.safetensors")
        folders[name] = str(folder)
    return folders


def merged(params: ParamTree, name: str) -> ParamTree:
    """Adds an adapter to the weights themselves: alpha / r is 2."""
    leaves = dict(models.specs.named_leaves(params))
    tensors = adapter_tensors(name)
    for key, down in tensors.items():
        if key.endswith("lora_A.weight"):
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[key.replace("lora_A", "lora_B")]
            leaves[f"{module}.weight"] = leaves[f"{module}.weight"] + 2 * up @ down
    return models.specs.from_names(models.family(CFG).param_specs(CFG), leaves)


@pytest.fixture(scope="session")
def oracles(params: ParamTree, oracle_of: Callable[[ParamTree], Oracle]) -> dict[str | None, Oracle]:
    """The cache-free forward of the bare model, and of the model with each adapter merged into its weights."""
    return {None: oracle_of(params)} | {name: oracle_of(merged(params, name)) for name in ADAPTER_NAMES}


def make_runner(params: ParamTree, engine: EngineConfig = ENGINE, *, strict: bool = False) -> ModelRunner:
    plan = plan_engine(engine, CFG, platform=DEVICE.platform, free_bytes=10**9)
    return ModelRunner(params, CFG, plan, device=DEVICE, strict=strict)


def poison(runner: ModelRunner) -> None:
    """Fills the whole KV with NaN: whatever was not written must not matter."""
    kv = runner._device.kv
    nothing = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), kv)  # which JAX would compile
    runner._device._kv = jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), nothing, kv)


def emptied(runner: ModelRunner) -> ModelRunner:
    """Drops every sequence and adapter of a shared runner, and fills its KV with NaN."""
    runner.reset()
    for name in list(runner._adapters.loaded):
        runner.unload_lora(name)
    poison(runner)
    return runner


def late_compiles(runner: ModelRunner) -> int:
    return runner.compile_stats()["compiles_after_warmup"]


@pytest.fixture(scope="session")
def shared_runner(params: ParamTree) -> Iterator[ModelRunner]:
    with make_runner(params, WINDOWED) as runner:
        declared = runner.plan.declared()
        runner._programs.warmup([key for key in declared if not isinstance(key, MultiStepKey)])
        yield runner


@pytest.fixture
def runner(shared_runner: ModelRunner) -> ModelRunner:
    """A runner without prefixes and adapters, whose layer 0 keeps its sliding window alone.

    It is warm but for multi-step programs, and its KV is full of NaN.
    """
    return emptied(shared_runner)


@pytest.fixture(scope="session")
def reusing_runner(params: ParamTree) -> Iterator[ModelRunner]:
    with make_runner(params, REUSING) as runner:
        runner.warmup(progress=False)
        yield runner


@pytest.fixture
def reusing(reusing_runner: ModelRunner) -> ModelRunner:
    """A warm runner with prefixes, adapters and multi-step programs, its KV full of NaN."""
    return emptied(reusing_runner)


@pytest.fixture(scope="session")
def narrow_runner(params: ParamTree) -> Iterator[ModelRunner]:
    with make_runner(params, NARROW) as runner:
        yield runner


@pytest.fixture
def narrow(narrow_runner: ModelRunner) -> ModelRunner:
    """A runner of four sequences whose steps have room for one, its KV full of NaN."""
    return emptied(narrow_runner)
