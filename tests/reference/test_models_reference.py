"""Tiny models that transformers itself builds and saves, live against it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.models.rotary import frequencies
from ferrum_jax.models.specs import named_leaves
from scripts.make_references import logits_of
from tests import tiny
from tests.models.test_rotary import PUBLISHED, settings_of
from tests.tiers import by_default

pytestmark = pytest.mark.reference

TOLERANCE = 2e-4  # float32 sums in another order, over three layers; logits are of the order of one

NEW = ("gemma", "phi3", "olmo", "granite", "smollm3")  # families that are compared at three seeds each
every_model = pytest.mark.parametrize("name", tiny.CONFIGS)


def save_with_transformers(
    name: str, folder: Path, max_shard_size: str = "5GB", seed: int = tiny.SEED
) -> PreTrainedModel:
    """Lets transformers build a model with random parameters, norms and biases among them, and save it."""
    settings = {key: value for key, value in tiny.CONFIGS[name].items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(tiny.CONFIGS[name]["model_type"], **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    torch.manual_seed(seed)
    cfg = tiny.model_config(name)
    specs = named_leaves(models.family(cfg).param_specs(cfg))
    scales = {key for key, spec in specs.items() if key.endswith("norm.weight") and spec.init == "ones"}
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = 0.2 if parameter.ndim == 1 else 1.2 * parameter.shape[1] ** -0.5
            centre = 1.0 if parameter_name in scales else 0.0
            parameter.copy_(torch.randn_like(parameter) * spread + centre)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


@every_model
def test_what_transformers_saved_in_many_files_gives_its_logits_at_every_position(name: str, tmp_path: Path):
    tokens = tiny.prompt(name)
    expected = logits_of(save_with_transformers(name, tmp_path, "40KB"), tokens)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _check_forward(tmp_path, tokens, expected)


@pytest.mark.parametrize("name", by_default(tiny.CONFIGS, *tiny.QUICK, "llama_long"))
def test_serving_what_transformers_saved_gives_its_logits_at_every_position(name: str, tmp_path: Path):
    tokens = tiny.prompt(name)
    expected = logits_of(save_with_transformers(name, tmp_path), tokens)
    engine = ferrum_jax.EngineConfig(max_seqs=1, kv_capacity=max(160, len(tokens)), block_size=8, verify_tokens=32)
    with ferrum_jax.load(tmp_path, dtype="float32", engine=engine, progress=False) as model:
        np.testing.assert_allclose(model.forward_verify("a", tokens), expected, rtol=0, atol=TOLERANCE)


def test_what_transformers_saved_in_one_file_gives_its_logits_at_every_position(tmp_path: Path):
    tokens = tiny.prompt("llama31")
    _check_forward(tmp_path, tokens, logits_of(save_with_transformers("llama31", tmp_path), tokens))


def _check_forward(folder: Path, tokens: list[int], expected: np.ndarray) -> None:
    params, cfg = ferrum_jax.load_params(folder, dtype="float32")
    logits = jax.jit(models.forward, static_argnums=2)(params, jnp.asarray([tokens]), cfg)
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_text_of_a_model_with_images_has_its_logits(kind: str, tmp_path: Path):
    name, of_images = {"gemma3": ("gemma3", "siglip_vision_model"), "mistral3": ("mistral", "pixtral")}[kind]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"model_type": of_images, "image_size": 16, "patch_size": 8}
    config = AutoConfig.for_model(kind, text_config=tiny.CONFIGS[name], vision_config=vision, image_token_index=96)
    torch.manual_seed(tiny.SEED)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else parameter.shape[1] ** -0.5))
    model.save_pretrained(tmp_path)
    tokens = tiny.prompt(name)
    assert config.image_token_index not in tokens
    _check_forward(tmp_path, tokens, logits_of(model, tokens))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("name", [name for name in tiny.CONFIGS if name.startswith(NEW)])
def test_other_seeds_give_its_logits_in_chunks_and_single_tokens(name: str, seed: int, tmp_path: Path):
    tokens = tiny.prompt(name)
    expected = logits_of(save_with_transformers(name, tmp_path, seed=seed), tokens)
    engine = ferrum_jax.EngineConfig(max_seqs=2, kv_capacity=160, block_size=8, verify_tokens=32)
    with ferrum_jax.load(tmp_path, dtype="float32", engine=engine, progress=False) as model:
        np.testing.assert_allclose(model.forward_verify("a", tokens), expected, rtol=0, atol=TOLERANCE)
        model.prefill("b", tokens[:20])
        for at in range(20, len(tokens)):
            decoded = model.decode("b", tokens[at], at)
            np.testing.assert_allclose(decoded, expected[at], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("kind", "factor"), [("yarn", 4.0), ("yarn", None), ("llama3", 4.0)])
def test_an_outer_original_length_is_taken_as_transformers_takes_it(kind: str, factor: float | None):
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 16}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    settings = tiny.CONFIGS["llama3"] | {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    found, magnitude = frequencies(ferrum_jax.ModelConfig.from_hf(settings))
    theirs = LlamaRotaryEmbedding(LlamaConfig(**settings))
    np.testing.assert_allclose(found, theirs.inv_freq, rtol=1e-6)
    assert magnitude == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_of_a_published_model_are_those_of_transformers(name: str):
    settings = settings_of(name)
    found, magnitude = frequencies(ferrum_jax.ModelConfig.from_hf(settings))
    config = AutoConfig.for_model(**{key: value for key, value in settings.items() if key != "architectures"})
    of_layer = {"layer_type": "full_attention"} if "full_attention" in config.rope_parameters else {}
    scaling = config.rope_parameters.get("full_attention", config.rope_parameters)
    theirs, their_magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), **of_layer)
    np.testing.assert_allclose(found, theirs, rtol=1e-6)
    assert magnitude == pytest.approx(their_magnitude)
