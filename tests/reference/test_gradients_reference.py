"""Gradients through the serving forward against torch's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ferrum_jax import models
from ferrum_jax.models.specs import ParamTree, named_leaves
from scripts.make_references import load_tiny
from tests import tiny

pytestmark = pytest.mark.reference

TOLERANCE = 1e-4  # of each tensor's largest gradient
POSITION, TARGET = 30, 5  # past every window and original context


@pytest.mark.parametrize(
    "name",
    ["llama31", "llama32_tied", "llama_yarn_options", "llama_biases", "mistral", "qwen2_layer_types", "qwen3_tied",
     "gemma2", "phi3_beyond", "olmo2", "granite", "qwen3_moe", "mixtral", "deepseek3", "gpt_oss"],
)  # fmt: skip
def test_gradients_of_a_log_probability_equal_those_of_torch(name: str, tmp_path: Path):
    tokens = tiny.prompt(name)
    model = load_tiny(tiny.write_folder(tmp_path, tiny.CONFIGS[name]))
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    embeddings = weight[torch.tensor([tokens])].detach().requires_grad_()
    model(inputs_embeds=embeddings).logits[0, POSITION].log_softmax(-1)[TARGET].backward()
    cfg, params = tiny.model_config(name), tiny.tiny_params(tiny.CONFIGS[name])
    expected = named_as_here(
        {key: leaf.grad.numpy() for key, leaf in model.named_parameters() if leaf.grad is not None}, cfg.model_type
    )
    assert embeddings.grad is not None
    expected["the input embeddings"] = embeddings.grad.numpy()

    factor = tiny.CONFIGS[name].get("embedding_multiplier", 1.0)  # Granite's, of given embeddings in transformers alone

    def log_probability(params: ParamTree, embeddings: jax.Array) -> jax.Array:
        logits = models.forward(params, jnp.asarray([tokens]), cfg, inputs_embeds=factor * embeddings)
        return jax.nn.log_softmax(logits[0, POSITION])[TARGET]

    own = jnp.asarray(embeddings.detach().numpy())
    of_params, of_embeddings = jax.jit(jax.grad(log_probability, argnums=(0, 1)))(params, own)
    found = named_leaves(of_params) | {"the input embeddings": of_embeddings}
    if not cfg.tie_word_embeddings:  # the table itself took no part, and torch then gives it no gradient
        assert not np.any(found.pop("model.embed_tokens.weight"))
    for key in [key for key in found if key.endswith("e_score_correction_bias")]:  # affects the choice alone
        assert not np.any(found.pop(key))
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        largest = np.abs(gradient).max()
        assert largest > 0
        np.testing.assert_allclose(found[key], gradient, rtol=0, atol=TOLERANCE * largest, err_msg=key)


def named_as_here(gradients: Mapping[str, NDArray[Any]], model_type: str) -> dict[str, NDArray[Any]]:
    """Splits and renames gradients of experts, whose gate and up projections transformers keeps as one array."""
    gate, up, down = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, NDArray[Any]] = {}
    for key, gradient in gradients.items():
        name = key.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else key
        block, _, last = name.rpartition(".")
        if not block.endswith(".experts"):
            found[name] = gradient
        elif model_type == "gpt_oss":
            found[name] = gradient.swapaxes(1, 2) if gradient.ndim == 3 else gradient
        elif last == "gate_up_proj":
            found[f"{block}.{gate}.weight"], found[f"{block}.{up}.weight"] = np.split(gradient, 2, axis=1)
        else:
            found[f"{block}.{down}.weight"] = gradient
    return found


def test_the_gradient_of_the_embedding_table_itself_equals_that_of_torch(tmp_path: Path):
    name = "llama32_tied"  # the table is both the embeddings and the head
    tokens = tiny.prompt(name)
    model = load_tiny(tiny.write_folder(tmp_path, tiny.CONFIGS[name]))
    model(torch.tensor([tokens])).logits[0, POSITION].log_softmax(-1)[TARGET].backward()
    cfg = tiny.model_config(name)

    def log_probability(params: ParamTree) -> jax.Array:
        logits = models.forward(params, jnp.asarray([tokens]), cfg)
        return jax.nn.log_softmax(logits[0, POSITION])[TARGET]

    gradient = jax.jit(jax.grad(log_probability))(tiny.tiny_params(tiny.CONFIGS[name]))
    found = gradient["model"]["embed_tokens"]["weight"]
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    assert weight.grad is not None
    expected = weight.grad.numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
