"""GPT-OSS beyond parity: layouts, rings, quantised and stored experts, adapters of attention, refusals."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import conversion, models
from ferrum_jax.contract.errors import ConfigError, FerrumError, InvalidFormatError, UnsupportedError
from ferrum_jax.models.adapters import LoraSpec, stack_specs
from ferrum_jax.models.layout import lay_out
from ferrum_jax.models.specs import ParamTree, initialise, named_leaves
from tests import tiny
from tests.tiers import by_default

TOLERANCE = 1e-4  # float32 sums in another order
CONFIG = tiny.CONFIGS["gpt_oss"] | {"num_hidden_layers": 2}  # a layer with a window and one without
CFG = ferrum_jax.ModelConfig.from_hf(CONFIG)
TOKENS = tiny.prompt("gpt_oss")
EXPERTS = "model.layers.0.mlp.experts"

run = jax.jit(models.forward, static_argnums=2)


def logits_of(params: ParamTree) -> NDArray[np.float32]:
    return np.asarray(run(params, jnp.asarray([TOKENS]), CFG)[0])


@pytest.fixture(scope="module")
def expected() -> NDArray[np.float32]:
    return logits_of(tiny.tiny_params(CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fused", "scanned"])
def test_other_layouts_give_the_same_logits(layout: str, expected: NDArray[np.float32]):
    params = lay_out(tiny.tiny_params(CONFIG), CFG, layout)
    np.testing.assert_allclose(logits_of(params), expected, atol=TOLERANCE)


@pytest.mark.slow
def test_rings_of_the_layers_with_a_window_give_the_same_logits(tmp_path: Path, expected: NDArray[np.float32]):
    engine = ferrum_jax.EngineConfig(
        max_seqs=2, kv_capacity=64, block_size=4, decode_rows=(2,), query_blocks=(1,), block_tokens=8, window_kv=True
    )
    with ferrum_jax.load(tiny.write_folder(tmp_path, CONFIG), engine=engine, progress=False) as runner:
        assert runner.plan.cache.window_layers == 1
        np.testing.assert_allclose(runner.prefill("a", TOKENS[:30]), expected[29], atol=TOLERANCE)
        runner.prefill("b", TOKENS[:11])
        for at in range(11, 24):
            rows = runner.decode_batch([("a", TOKENS[at + 19], at + 19), ("b", TOKENS[at], at)])
            np.testing.assert_allclose(rows, expected[[at + 19, at]], atol=TOLERANCE)


def test_each_part_counts(expected: NDArray[np.float32]):
    for name, leaf in named_leaves(tiny.tiny_params(CONFIG)).items():
        if name.endswith(("bias", "sinks")) and ".1." not in name and "k_proj" not in name:
            params = tiny.tiny_params(CONFIG)
            *path, last = name.split(".")
            block: Any = params
            for key in path:
                block = block[int(key) if key.isdigit() else key]
            block[last] = leaf + jnp.linspace(0.5, 1.0, leaf.shape[-1], dtype=leaf.dtype)
            assert np.abs(logits_of(params) - expected).max() > 1e-2, name


@pytest.mark.parametrize("quantize", by_default([None, "int8"], "int8"))
def test_a_converted_checkpoint_has_the_same_tree_and_configuration(quantize: str | None, tmp_path: Path):
    folder = tiny.write_folder(tmp_path / "model", CONFIG, shards=2)
    made = conversion.convert(folder, tmp_path / "converted", progress=False, quantize=quantize)
    found, cfg = ferrum_jax.load_params(made)
    original, read = ferrum_jax.load_params(folder, quantize=quantize)
    assert cfg == read == CFG
    tiny.assert_same_tree(found, original)
    if quantize is None:
        tiny.assert_same_tree(found, tiny.tiny_params(CONFIG))


@pytest.mark.slow
def test_an_orbax_checkpoint_of_plain_weights_is_quantised_as_it_is_read(tmp_path: Path):
    folder = tiny.write_folder(tmp_path / "model", CONFIG)
    made = conversion.convert(folder, tmp_path / "converted", progress=False)
    found, _ = ferrum_jax.load_params(made, quantize="int8")
    tiny.assert_same_tree(found, ferrum_jax.load_params(folder, quantize="int8")[0])


@pytest.mark.slow
def test_quantised_experts_give_the_logits_of_what_they_stand_for_and_biases_stay():
    kept = models.quantise(tiny.tiny_params(CONFIG), CFG, "int8")
    np.testing.assert_allclose(logits_of(kept), logits_of(models.dequantise(kept)), atol=TOLERANCE)
    layer = kept["model"]["layers"][0]
    stay = {"mlp.router.weight", "mlp.router.bias", "self_attn.sinks"}
    stay |= {f"mlp.experts.{name}_proj_bias" for name in ("gate_up", "down")}
    parts = named_leaves(layer)
    assert {name for name, leaf in parts.items() if leaf.dtype == jnp.float32 and name in stay} == stay
    assert {name for name in parts if name.endswith("values") and "experts" in name} == {
        f"mlp.experts.{name}_proj.values" for name in ("gate_up", "down")
    }


def test_experts_that_are_missing_or_of_another_shape_are_named(tmp_path: Path):
    tensors = tiny.tensors(CONFIG)
    del tensors[f"{EXPERTS}.gate_up_proj"]
    tensors[f"{EXPERTS}.down_proj"] = np.zeros((6, 48, 72), np.float32)  # turned
    tensors[f"{EXPERTS}.down_proj_bias"] = np.zeros((6,), np.float32)
    with pytest.raises(InvalidFormatError) as caught:
        ferrum_jax.load_params(tiny.write_folder(tmp_path, CONFIG, named=tensors))
    for problem in ("gate_up_proj is missing", "down_proj has shape", "down_proj_bias has shape [6], expected [6, 48]"):
        assert f"{EXPERTS}.{problem}" in str(caught.value)


@pytest.mark.slow
def test_adapters_of_attention_are_added_to_its_weights():
    spec = LoraSpec(max_loras=1, max_rank=2)
    specs = stack_specs(CFG, spec)
    assert sorted(named_leaves(specs["model"]["layers"][0])) == [
        f"self_attn.{name}_proj.{half}" for name in "koqv" for half in ("down", "up")
    ]
    stacks = jax.tree.map(lambda leaf: leaf + 0.1, initialise(specs, jax.random.key(0), "float32", scale=0.1))
    params = tiny.tiny_params(CONFIG)
    forward = jax.jit(lambda index: models.forward(params, jnp.asarray([TOKENS]), CFG, loras=stacks, adapters=index)[0])
    adapted = forward(jnp.asarray([0]))
    np.testing.assert_allclose(forward(jnp.asarray([-1])), logits_of(params), atol=TOLERANCE)
    merged = tiny.tiny_params(CONFIG)
    for layer, own in zip(merged["model"]["layers"], stacks["model"]["layers"], strict=True):
        for name, halves in own["self_attn"].items():
            added = jnp.einsum("FR,RD->FD", halves["up"][:, 0], halves["down"][0], precision="highest")
            layer["self_attn"][name]["weight"] += added
    np.testing.assert_allclose(adapted, logits_of(merged), atol=TOLERANCE)
    assert np.abs(adapted - logits_of(params)).max() > 0.1


@pytest.mark.slow
def test_gradients_reach_every_parameter():
    config = CONFIG | {"num_hidden_layers": 1}

    def loss(params: ParamTree) -> jax.Array:
        logits = models.forward(params, jnp.asarray([TOKENS[:12]]), ferrum_jax.ModelConfig.from_hf(config))
        return -jax.nn.log_softmax(logits)[0, :, 3].mean()

    gradients = jax.jit(jax.grad(loss))(tiny.tiny_params(config))
    for name, leaf in named_leaves(gradients).items():
        assert np.isfinite(leaf).all(), name
        assert ("k_proj.bias" in name) or np.abs(leaf).max() > 0, name


def test_what_a_configuration_leaves_out_is_what_transformers_has():
    names = ("rope_scaling", "rope_theta", "swiglu_limit", "rms_norm_eps")
    cfg = ferrum_jax.ModelConfig.from_hf({name: value for name, value in CONFIG.items() if name not in names})
    assert cfg.rope_scaling is not None
    assert (cfg.rope_scaling.rope_type, cfg.rope_scaling.factor, cfg.rope_scaling.truncate) == ("yarn", 32.0, False)
    assert cfg.experts is not None
    assert (cfg.experts.swiglu_limit, cfg.experts.swiglu_alpha) == (7.0, 1.702)
    assert (cfg.rope_theta, cfg.rms_norm_eps, cfg.layer_windows) == (150000.0, 1e-5, (7, None))


WRONG: dict[str, tuple[dict[str, Any], type[FerrumError], str]] = {
    "more chosen than there are": ({"num_experts_per_tok": 7}, ConfigError, "cannot choose 7 of 6 experts"),
    "no number of experts": ({"num_local_experts": None}, ConfigError, "num_local_experts is None"),
    "no window": ({"sliding_window": None}, ConfigError, "sliding_window is null"),
    "no limit": ({"swiglu_limit": 0.0}, ConfigError, "swiglu_limit is 0.0"),
    "another activation": ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act 'gelu'"),
    "a limit in a family without one": ({"model_type": "llama"}, UnsupportedError, "is not implemented for llama"),
}


def test_a_configuration_that_cannot_be_is_refused():
    for change, kind, message in WRONG.values():
        with pytest.raises(kind, match=message):
            ferrum_jax.ModelConfig.from_hf(CONFIG | change)
