"""A tiny model whose dimensions are all different, behind a runner, and the cache-free forward to compare with."""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from ferrum_jax import models
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.executor import ModelRunner, plan_engine
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.devices import find_device

CAPACITY = 44  # positions, no multiple of the block size
CFG = ModelConfig(
    model_type="qwen3",
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=512,
    rope_theta=1000.0,
    qk_norm=True,
    attention_bias=True,
    tie_word_embeddings=True,
    layer_windows=(9, None),
)
ENGINE = EngineConfig(
    dtype="float32", max_seqs=4, kv_capacity=CAPACITY, block_size=8, kv_blocks=18, max_step_tokens=24,
    decode_rows=(1, 2, 4), chunk_rows=(1, 3), chunk_tokens=(4, 8, 24), verify_tokens=(6,),
)  # fmt: skip
Oracle = Callable[[Sequence[int]], NDArray[np.float32]]


@pytest.fixture(scope="session")
def params() -> ParamTree:
    return models.specs.initialise(models.family(CFG).param_specs(CFG), jax.random.key(0), "float32", scale=0.4)


@pytest.fixture(scope="session")
def oracle(params: ParamTree) -> Oracle:
    """Logits of every token of a sequence, by the forward that keeps no cache."""
    run = jax.jit(lambda tokens: models.forward(params, tokens, CFG))

    def logits(tokens: Sequence[int]) -> NDArray[np.float32]:
        padded = np.zeros((1, CAPACITY), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(padded))[0, : len(tokens)]

    return logits


def make_runner(params: ParamTree, engine: EngineConfig = ENGINE, *, strict: bool = False) -> ModelRunner:
    device = find_device("cpu")
    plan = plan_engine(engine, CFG, platform="cpu", free_bytes=10**9)
    return ModelRunner(params, CFG, plan, device=device, strict=strict)


def poison(runner: ModelRunner) -> None:
    """Fills the whole KV with NaN: whatever was not written must not matter."""
    kv = runner._device.kv
    runner._device._kv = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype), kv)


@pytest.fixture(scope="session")
def shared_runner(params: ParamTree) -> Iterator[ModelRunner]:
    with make_runner(params) as runner:
        runner.warmup()
        yield runner


@pytest.fixture
def runner(shared_runner: ModelRunner) -> ModelRunner:
    """A warm runner with no sequence in it, its KV full of NaN."""
    shared_runner.reset()
    poison(shared_runner)
    return shared_runner
