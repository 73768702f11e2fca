"""Kernels and whole engine steps lower for CUDA and for TPUs on a machine that has neither, and copy no KV.

The sizes are those of Llama 3.1 8B's attention, with few layers and a small vocabulary.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ferrum_jax import models
from ferrum_jax.compile import sampler
from ferrum_jax.compile.sampler import SamplerSpec
from ferrum_jax.compile.step import ProgramContext, StepKey, packed_size, step
from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models import family, specs
from ferrum_jax.models.backends import cache_spec
from ferrum_jax.ops.attention import attend
from ferrum_jax.ops.batch import Rows
from ferrum_jax.ops.moe import swiglu, weigh_experts
from ferrum_jax.ops.rope import rotations
from tests import tiny
from tests.tiers import by_default

LAYERS, BLOCKS, BLOCK, COLUMNS = 3, 500, 128, 64
CFG = ModelConfig(
    model_type="llama",
    vocab_size=1024,
    hidden_size=4096,
    intermediate_size=512,
    num_hidden_layers=LAYERS,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    layer_windows=(None,) * LAYERS,
)
DEVICES = {
    "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "tpu": AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu"),
}
KERNELS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
MOVES = ("transpose", "slice", "dynamic_slice", "gather", "concatenate", "pad", "convert", "copy")


def lowered(call: Callable[..., Any], platform: str, *shapes: Any, donated: int | None = None) -> str:
    """StableHLO of a call for another platform."""
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in KERNELS.values()]
    mesh = AbstractMesh((), (), abstract_device=DEVICES[platform])
    with use_abstract_mesh(mesh):
        return export.export(jax.jit(call, donate_argnums=donated), platforms=[platform], disabled_checks=checks)(
            *shapes
        ).mlir_module()


def cache(attention: str, dtype: str = "bfloat16") -> CacheSpec:
    return cache_spec(CFG, num_blocks=BLOCKS, block_size=BLOCK, dtype=dtype, attention=attention)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def moved(text: str, least: int) -> list[str]:
    """Operations that move data and whose result has at least so many elements."""
    found = []
    for line in text.splitlines():
        operation = re.search(r"= \"?stablehlo\.(\w+)", line)
        sizes = [
            functools.reduce(lambda a, b: a * int(b), dims.split("x")[:-1], 1)
            for dims in re.findall(r"tensor<((?:\d+x)+\w+)>", line.rpartition("->")[2])
        ]
        if operation and operation[1] in MOVES and sizes and max(sizes) >= least:
            found.append(line.strip())
    return found


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 128)])
def test_latents_lower_for_cuda_and_are_not_copied(rows: int, tokens: int):
    spec = replace(cache("triton"), num_kv_heads=1, head_dim=576, layout="latent_rows")
    group = Rows(tokens=ints(rows, tokens), lengths=ints(rows), counts=ints(rows), tables=ints(rows, COLUMNS))
    call = functools.partial(attend, scale=0.1, window=None, backend="triton")
    text = lowered(
        call, "cuda", jax.ShapeDtypeStruct((rows, tokens, 128, 576), jnp.bfloat16), state.shapes(spec), ints(), group
    )
    shares = rows == 1  # of a long context, which are merged
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1 + shares
    assert not moved(text, BLOCKS * BLOCK * 576)


@pytest.mark.parametrize("dtype", by_default(["bfloat16", "float16", "float32"], "bfloat16"))
@pytest.mark.parametrize(("rows", "tokens"), by_default([(1, 1), (8, 1), (1, 512), (3, 70)], (8, 1), (3, 70)))
def test_the_kernel_lowers_for_cuda_and_its_operand_is_the_pool(dtype: str, rows: int, tokens: int):
    group = Rows(tokens=ints(rows, tokens), lengths=ints(rows), counts=ints(rows), tables=ints(rows, COLUMNS))
    call = functools.partial(attend, scale=0.1, window=1000, backend="triton")
    q = jax.ShapeDtypeStruct((rows, tokens, 32, 128), dtype)
    text = lowered(call, "cuda", q, state.shapes(cache("triton", dtype)), ints(), group)
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    operands, *_ = re.findall(r"custom_call @__gpu\$xla\.gpu\.triton.*: \((.*?)\) ->", text)
    assert operands.count(f"tensor<{LAYERS * BLOCKS * BLOCK}x8x128x{short}>") == 2
    assert not moved(text, BLOCKS * BLOCK * 8 * 128)


STEPS = [StepKey(1, 0, 0, COLUMNS, 1), StepKey(8, 8, 128, COLUMNS, 8)]


def engine_step(key: StepKey, attention: str, platform: str) -> str:
    pure = functools.update_wrapper(functools.partial(step, cfg=CFG, key=key, attention=attention), step)
    params = specs.shapes(family(CFG).param_specs(CFG), "bfloat16")
    return lowered(pure, platform, params, state.shapes(cache(attention)), ints(16), ints(packed_size(key)), donated=1)


def check(text: str, leaves: int) -> None:
    """The KV is an input that the outputs take over, and nothing of a layer's size is moved."""
    (signature,) = re.findall(r"func\.func public @main\((.*)\) ->", text)
    donated = [
        one for one in re.split(r"(?=%arg\d+:)", signature) if "tf.aliasing_output" in one or "jax.buffer_donor" in one
    ]
    assert len(donated) == leaves
    assert all(f"tensor<{LAYERS}x{BLOCKS}x" in one for one in donated)
    assert not moved(text, BLOCKS * BLOCK * 8 * 128)


@pytest.mark.parametrize("key", by_default(STEPS, STEPS[1]), ids=str)
def test_a_whole_step_lowers_for_cuda(key: StepKey):
    text = engine_step(key, "triton", "cuda")
    check(text, leaves=2)
    groups = bool(key.decode_rows) + bool(key.blocks)
    calls = re.findall(r"custom_call @__gpu\$xla\.gpu\.triton.*?name = \"(\w+)\"", text)
    counts = {name: calls.count(name) for name in calls}  # one lowering for all layers
    assert counts == {"attend_paged": groups, "merge_shares": groups, "rotate_and_write": 1}
    assert len(re.findall(r"call @_call\w*\(", text)) == (groups + 1) * LAYERS


def test_what_follows_a_step_on_a_gpu_has_no_branch_or_loop():
    sizes = sampler.shapes(SamplerSpec(num_slots=4, vocab_size=CFG.vocab_size, capacity=64))
    texts = {}
    for way in sampler.WAYS:
        call = functools.partial(sampler.sample, way=way)
        texts[way] = lowered(call, "cuda", sizes, jax.ShapeDtypeStruct((4, CFG.vocab_size), jnp.float32), ints(4, 2))
    has_any = {way: "stablehlo.case" in text or "stablehlo.while" in text for way, text in texts.items()}
    assert has_any == {sampler.DRAW: False, sampler.FILTER: False, sampler.BRANCHES: True}


def test_a_gpu_has_no_loop_over_experts_where_one_step_computes_all_tiles():
    def numbers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    shares = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    few = [numbers(4, 48), ints(4, 3), shares, (numbers(7, 28, 48), numbers(7, 28, 48), numbers(7, 48, 28))]
    own = lowered(jnp.cumsum, "cuda", ints(7)).count("stablehlo.while")  # of JAX's cumsum, which XLA replaces
    many = [numbers(64, 4096), ints(64, 3), shares.update(shape=(64, 3)), (numbers(64, 4096, 4096),) * 3]
    loops = [
        lowered(functools.partial(weigh_experts, expert=swiglu), "cuda", *sizes).count("stablehlo.while")
        for sizes in (few, many)
    ]
    assert loops == [own, own + 1]


@pytest.mark.parametrize(
    "key", by_default([StepKey(2, 0, 0, 4, 2), StepKey(1, 1, 40, 4, 2)], StepKey(1, 1, 40, 4, 2)), ids=str
)
@pytest.mark.parametrize(("name", "kinds"), by_default([("llama31", 1), ("gemma3", 2)], ("gemma3", 2)))
def test_a_step_on_a_cpu_computes_the_rotation_of_a_kind_of_layer_once(name: str, kinds: int, key: StepKey):
    cfg = tiny.model_config(name)
    params = specs.shapes(family(cfg).param_specs(cfg), "float32")
    kv = state.shapes(cache_spec(cfg, num_blocks=9, block_size=16, dtype="float32"))
    with jax.default_device(jax.devices("cpu")[0]):
        sizes = sampler.shapes(SamplerSpec(num_slots=4, vocab_size=cfg.vocab_size, capacity=64))
        text = key.lower(ProgramContext(cfg, params, kv, sizes)).compile().as_text() or ""
    assert text.count(" cosine(") == text.count(" sine(") == kinds


def test_a_rotation_is_a_branch_on_a_cpu_alone():
    call = functools.partial(rotations, frequencies=np.ones(8, np.float32), magnitude=1.0)
    text = {platform: lowered(call, platform, ints(5)) for platform in DEVICES}
    text["cpu"] = export.export(jax.jit(call), platforms=["cpu"])(ints(5)).mlir_module()
    assert {platform for platform, lines in text.items() if "stablehlo.compare GE" in lines} == {"cpu"}


@pytest.mark.parametrize("name", by_default(tiny.CONFIGS, "llama31", "gemma2", "qwen2_moe", "deepseek3", "gpt_oss"))
def test_every_product_of_a_float32_model_has_the_highest_precision(name: str):
    """The default of a GPU rounds the operands to TF32."""
    cfg = tiny.model_config(name)
    params = specs.shapes(family(cfg).param_specs(cfg), "float32")
    kv = state.shapes(cache_spec(cfg, num_blocks=9, block_size=16, dtype="float32"))
    forward = functools.partial(models.forward, cfg=cfg)
    texts = [lowered(forward, "cuda", params, ints(1, tokens)) for tokens in (1, 9)]
    for key in (StepKey(1, 0, 0, 4, 1), StepKey(1, 1, 9, 4, 2)):
        pure = functools.update_wrapper(functools.partial(step, cfg=cfg, key=key), step)
        texts.append(lowered(pure, "cuda", params, kv, ints(16), ints(packed_size(key))))
    for text in texts:
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(products) > cfg.num_hidden_layers
        assert [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line] == []


@pytest.mark.parametrize("key", by_default(STEPS, STEPS[1]), ids=str)
def test_a_whole_step_lowers_for_tpu(key: StepKey):
    text = engine_step(key, "tpu", "tpu")
    check(text, leaves=1)
    assert "custom_call @tpu_custom_call" in text
