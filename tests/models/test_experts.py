"""Models with experts: every way through the runner, layouts, quantised weights, checkpoints, adapters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import conversion, models
from ferrum_jax.compile import sampler
from ferrum_jax.compile.sampler import SamplerSpec
from ferrum_jax.compile.step import ProgramContext, StepKey, blank
from ferrum_jax.contract.errors import ConfigError, InvalidFormatError, UnsupportedError
from ferrum_jax.kvcache import state
from ferrum_jax.models.adapters import LoraSpec, stack_specs
from ferrum_jax.models.backends import cache_spec
from ferrum_jax.models.layout import lay_out
from ferrum_jax.models.specs import ParamTree, initialise, named_leaves
from tests import tiny
from tests.tiers import by_default

TOLERANCE = 1e-4  # float32 sums in another order
ENGINE = ferrum_jax.EngineConfig(
    max_seqs=3, kv_capacity=64, block_size=8, decode_rows=(3,), query_blocks=(2,), block_tokens=16, verify_tokens=16
)
CONFIG = tiny.CONFIGS["qwen2_moe"] | {
    "num_hidden_layers": 2
}  # a layer with experts, also a shared one, and one without
CFG = ferrum_jax.ModelConfig.from_hf(CONFIG)
MIXTRAL = tiny.CONFIGS["mixtral"] | {"num_hidden_layers": 2}
TOKENS = tiny.prompt("qwen2_moe")


def logits_of(params: ParamTree, tokens: list[int], cfg: ferrum_jax.ModelConfig = CFG) -> NDArray[np.float32]:
    return np.asarray(jax.jit(models.forward, static_argnums=2)(params, jnp.asarray([tokens]), cfg)[0])


@pytest.mark.slow
def test_chunks_batches_and_mixed_steps_give_the_logits_of_one_forward(tmp_path: Path):
    expected = logits_of(tiny.tiny_params(CONFIG), TOKENS)
    with ferrum_jax.load(tiny.write_folder(tmp_path, CONFIG), engine=ENGINE, progress=False) as runner:
        np.testing.assert_allclose(runner.forward_verify("a", TOKENS[:20]), expected[:20], atol=TOLERANCE)
        np.testing.assert_allclose(runner.forward_verify("b", TOKENS), expected, atol=TOLERANCE)
        runner.truncate_kv("b", 40)
        found = runner.decode_batch([("a", TOKENS[20], 20), ("b", TOKENS[40], 40)])
        np.testing.assert_allclose(found, expected[[20, 40]], atol=TOLERANCE)
        mixed = runner.unified_forward([("a", TOKENS[21:30], 21, True), ("b", [TOKENS[41]], 41, True)])
        for logits, position in zip(mixed, (29, 41), strict=True):
            assert logits is not None
            np.testing.assert_allclose(logits, expected[position], atol=TOLERANCE)


def test_a_step_serialises_after_it_has_run():
    config, key, slots = MIXTRAL | {"num_hidden_layers": 1}, StepKey(2, 0, 0, 2, 2), 3
    cfg, params = ferrum_jax.ModelConfig.from_hf(config), tiny.tiny_params(config)
    spec = cache_spec(cfg, num_blocks=4, block_size=8, dtype="float32")
    sizes = sampler.shapes(SamplerSpec(num_slots=slots, vocab_size=cfg.vocab_size, capacity=16))
    program = key.lower(ProgramContext(cfg, params, state.shapes(spec), sizes)).compile()
    leaves, (buffer, packed) = jax.tree.leaves(params), blank(key, slots)
    assert packed.decode is not None
    packed.decode.tokens[:, 0], packed.decode.counts[:], packed.decode.tables[:] = TOKENS[:2], 1, [[0, 1], [2, 3]]
    packed.logit_index[:] = 0, 1

    def logits(program: Any) -> NDArray[np.float32]:
        return np.asarray(program(leaves, state.empty(spec), np.zeros(slots, np.int32), buffer)[0].logits)

    before = logits(program)
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(program), execution_devices=jax.local_devices()[:1]
    )
    np.testing.assert_array_equal(logits(loaded), before)
    assert np.isfinite(before).all()


@pytest.mark.slow
@pytest.mark.parametrize(("config", "layout"), [(CONFIG, "fused"), (MIXTRAL, "scanned")], ids=["fused", "scanned"])
def test_other_layouts_give_the_same_logits(config: dict[str, Any], layout: str):
    params, cfg = tiny.tiny_params(config), ferrum_jax.ModelConfig.from_hf(config)
    found = logits_of(lay_out(params, cfg, layout), TOKENS, cfg)
    np.testing.assert_allclose(found, logits_of(params, TOKENS, cfg), atol=TOLERANCE)


def test_layers_that_differ_are_not_stacked():
    with pytest.raises(UnsupportedError, match="the layers of this qwen2_moe have different parameters"):
        lay_out(tiny.tiny_params(CONFIG), CFG, "scanned")


@pytest.mark.slow
def test_quantised_experts_give_the_logits_of_what_they_stand_for_and_the_router_stays(tmp_path: Path):
    kept = models.quantise(tiny.tiny_params(CONFIG), CFG, "int8")
    np.testing.assert_allclose(logits_of(kept, TOKENS), logits_of(models.dequantise(kept), TOKENS), atol=TOLERANCE)
    block = kept["model"]["layers"][0]["mlp"]
    assert isinstance(block["experts"]["up_proj"]["weight"], models.QuantisedWeight)
    assert isinstance(block["gate"]["weight"], jax.Array)
    assert isinstance(block["shared_expert_gate"]["weight"], jax.Array)
    loaded, _ = ferrum_jax.load_params(tiny.write_folder(tmp_path, CONFIG), quantize="int8")
    tiny.assert_same_tree(loaded, kept)


@pytest.mark.parametrize("quantize", by_default([None, "int8"], None))
def test_a_converted_checkpoint_has_the_same_tree_and_configuration(quantize: str | None, tmp_path: Path):
    folder = tiny.write_folder(tmp_path / "model", CONFIG, shards=2)
    made = conversion.convert(folder, tmp_path / "converted", progress=False, quantize=quantize)
    found, cfg = ferrum_jax.load_params(made)
    expected, original = ferrum_jax.load_params(folder, quantize=quantize)
    assert cfg == original
    tiny.assert_same_tree(found, expected)
    assert named_leaves(found).keys() == named_leaves(expected).keys()


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path: Path):
    tensors = tiny.tensors(CONFIG)
    del tensors["model.layers.0.mlp.experts.4.up_proj.weight"]
    tensors["model.layers.0.mlp.experts.6.down_proj.weight"] = np.zeros((28, 48), np.float32)
    tensors["model.layers.0.mlp.experts.7.gate_proj.weight"] = np.zeros((28, 48), np.float32)
    with pytest.raises(InvalidFormatError) as caught:
        ferrum_jax.load_params(tiny.write_folder(tmp_path, CONFIG, named=tensors))
    message = str(caught.value)
    assert "model.layers.0.mlp.experts.4.up_proj.weight is missing" in message
    assert "model.layers.0.mlp.experts.6.down_proj.weight has shape [28, 48], expected [48, 28]" in message
    assert "model.layers.0.mlp.experts.7.gate_proj.weight is unknown" in message


@pytest.mark.slow
def test_adapters_change_attention_and_blocks_without_experts():
    spec, tokens = LoraSpec(max_loras=1, max_rank=2), jnp.asarray([TOKENS[:9]])
    blocks = stack_specs(CFG, spec)["model"]["layers"]
    assert [sorted(block["mlp"]) for block in blocks] == [[], ["down_proj", "gate_proj", "up_proj"]]
    stacks = jax.tree.map(lambda leaf: leaf + 0.1, initialise(stack_specs(CFG, spec), jax.random.key(0), "float32"))
    params = tiny.tiny_params(CONFIG)
    forward = jax.jit(lambda index: models.forward(params, tokens, CFG, loras=stacks, adapters=index)[0])
    plain, adapted = (np.asarray(forward(jnp.asarray([index]))) for index in (-1, 0))
    np.testing.assert_allclose(plain, logits_of(params, TOKENS)[:9], atol=TOLERANCE)
    assert np.abs(adapted - plain).max() > 0.1


def test_a_family_whose_experts_are_no_mlp_has_adapters_of_attention():
    layer = stack_specs(ferrum_jax.ModelConfig.from_hf(MIXTRAL), LoraSpec(max_loras=1, max_rank=2))
    assert sorted(named_leaves(layer["model"]["layers"][0])) == [
        f"self_attn.{name}_proj.{half}" for name in "koqv" for half in ("down", "up")
    ]


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "more chosen than there are": ("qwen2_moe", {"num_experts_per_tok": 8}, "cannot choose 8 of 7 experts"),
    "no experts chosen": ("qwen2_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    "a step of none": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    "no number of experts": ("qwen3_moe", {"num_experts": None}, "num_experts is None, expected an integer"),
    "a number of experts that is a truth": ("qwen3_moe", {"num_experts": False}, "num_experts is False, expected"),
    "dense layers that are text": ("qwen2_moe", {"mlp_only_layers": ["1"]}, "a layer of mlp_only_layers is '1'"),
    "dense layers that are a number": ("qwen2_moe", {"mlp_only_layers": 0}, "mlp_only_layers is 0, expected a list"),
    "no size of the shared expert": ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "size is 0"),
}


def test_a_mixture_that_cannot_be_is_refused():
    for name, change, message in WRONG.values():
        with pytest.raises(ConfigError, match=message):
            ferrum_jax.ModelConfig.from_hf(tiny.CONFIGS[name] | change)
