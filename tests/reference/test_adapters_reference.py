"""Adapters that PEFT itself makes and saves, live against it, and the gradients of tuning them against torch's."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from ferrum_jax import models
from ferrum_jax.models import adapters
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.specs import ParamTree, initialise, named_leaves
from ferrum_jax.weights.peft import lay_out, read_adapter, write_adapter
from scripts.make_references import load_tiny, logits_of
from tests import tiny
from tests.adapters import EVERY, empty_stacks, prompt

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
]

TOLERANCE = 1e-4  # float32 sums in another order, over three layers; logits are of the order of one
OF_GRADIENTS = 1e-4  # of each tensor's largest gradient
POSITION, TARGET = 20, 5
OF_PHI3 = ("only qkv_proj", "only gate_up_proj")  # which no other family has

CONFIGS: dict[str, dict[str, Any]] = {
    **{f"only {name}": {"r": 4, "lora_alpha": 3, "target_modules": [name]} for name in EVERY},
    "all-linear": {"r": 7, "lora_alpha": 4, "target_modules": "all-linear"},
    "rank stabilised": {"r": 16, "lora_alpha": 3, "use_rslora": True, "target_modules": EVERY},
    "patterns": {
        "r": 64,
        "lora_alpha": 3,  # larger ones make float32 err by more than the tolerance, in torch too: the test below
        "target_modules": EVERY,
        "rank_pattern": {"o_proj": 5, r"layers\.\d\.mlp\.gate_proj": 9, "2.mlp.down_proj": 2, "v_proj": 11},
        "alpha_pattern": {"layers.0.*": 1.5, "v_proj": 1},
        "use_rslora": True,
    },
    "a pattern of layers": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["k_proj", "up_proj", "model.layers.1.mlp.gate_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": ["h", "layers"],
    },
    "excluding": {"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "exclude_modules": r".*\.1\..*|.*o_proj"},
    "orthogonal": {"r": 4, "lora_alpha": 4, "target_modules": EVERY, "init_lora_weights": "orthogonal"},
}


def saved(folder: Path, model: str, settings: dict[str, Any]) -> PeftModel:
    """Lets PEFT make an adapter with random tensors for a tiny model, and save it to `folder`/adapter."""
    torch.manual_seed(tiny.SEED)
    base = load_tiny(tiny.write_folder(folder / "model", tiny.CONFIGS[model]))
    adapted: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
    adapted.save_pretrained(folder / "adapter")
    return adapted.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_saved_gives_its_logits_at_every_position(name: str, tmp_path: Path):
    model = "phi3" if name in OF_PHI3 else "llama3"
    cfg, spec = tiny.model_config(model), LoraSpec(max_loras=2, max_rank=64)
    expected = logits_of(saved(tmp_path, model, CONFIGS[name]), prompt("every"))
    own = lay_out(read_adapter(tmp_path / "adapter", cfg), spec, "float32")
    stacks = adapters.install(empty_stacks(cfg, spec), own, 1)
    logits = jax.jit(models.forward, static_argnums=2)(
        tiny.tiny_params(tiny.CONFIGS[model]),
        jnp.asarray([prompt("every")]),
        cfg,
        loras=stacks,
        adapters=jnp.asarray([1]),
    )
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=TOLERANCE)


def test_peft_reads_what_is_written_of_several_ranks_and_not_every_projection(tmp_path: Path):
    cfg, params = tiny.model_config("llama3"), tiny.tiny_params(tiny.CONFIGS["llama3"])
    key = jax.random.key(tiny.SEED)
    stacks = initialise(adapters.stack_specs(cfg, LoraSpec(max_loras=1, max_rank=4)), key, "float32")
    first, second, *others = stacks["model"]["layers"]
    thin = {name: {"down": own["down"][:, :2], "up": own["up"][..., :2]} for name, own in first["mlp"].items()}
    stacks = {"model": {"layers": [first | {"mlp": thin}, {"self_attn": second["self_attn"]}, *others]}}
    stacks = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape) * leaf.shape[-1] ** -0.5, stacks)
    write_adapter(tmp_path / "adapter", stacks, cfg)
    base = load_tiny(tiny.write_folder(tmp_path / "model", tiny.CONFIGS["llama3"]))
    tokens = prompt("every")
    unadapted = logits_of(base, tokens)
    expected = logits_of(PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval(), tokens)
    logits = models.forward(params, jnp.asarray([tokens]), cfg, loras=stacks, adapters=jnp.asarray([0]))
    assert np.abs(unadapted - expected).max() > 0.1
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("alpha", [12, 32, 64])
def test_at_large_scales_the_error_against_float64_is_that_of_torch(alpha: int, tmp_path: Path):
    settings = CONFIGS["patterns"] | {"lora_alpha": alpha}
    adapted: Any = saved(tmp_path, "llama3", settings)
    theirs = logits_of(adapted, prompt("every"))
    exact = logits_of(adapted.double(), prompt("every"))
    cfg, spec = tiny.model_config("llama3"), LoraSpec(max_loras=1, max_rank=64)
    own = lay_out(read_adapter(tmp_path / "adapter", cfg), spec, "float32")
    logits = jax.jit(models.forward, static_argnums=2)(
        tiny.tiny_params(tiny.CONFIGS["llama3"]),
        jnp.asarray([prompt("every")]),
        cfg,
        loras=adapters.install(empty_stacks(cfg, spec), own, 0),
        adapters=jnp.asarray([0]),
    )
    error, of_torch = np.abs(logits[0] - exact).max(), np.abs(theirs - exact).max()
    assert of_torch > 1e-5  # float32 is not enough for either
    assert error <= 3 * of_torch


@pytest.mark.parametrize("model", ["llama3", "qwen3_tied", "qwen2_window"])
def test_gradients_of_tuning_equal_those_of_torch(model: str, tmp_path: Path):
    rank, tokens, cfg = 6, tiny.prompt(model)[:24], tiny.model_config(model)
    settings = {"r": rank, "lora_alpha": rank, "target_modules": EVERY}  # a scale of one, which is part of `up`
    adapted: Any = saved(tmp_path, model, settings)
    adapted(torch.tensor([tokens])).logits[0, POSITION].log_softmax(-1)[TARGET].backward()
    expected = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): leaf.grad.numpy()
        for name, leaf in adapted.named_parameters()
        if leaf.grad is not None
    }
    params, spec = tiny.tiny_params(tiny.CONFIGS[model]), LoraSpec(max_loras=2, max_rank=rank)
    own = lay_out(read_adapter(tmp_path / "adapter", cfg), spec, "float32")
    stacks = adapters.install(empty_stacks(cfg, spec), own, 1)

    def log_probability(loras: ParamTree) -> jax.Array:
        logits = models.forward(params, jnp.asarray([tokens]), cfg, loras=loras, adapters=jnp.asarray([1]))
        return jax.nn.log_softmax(logits[0, POSITION])[TARGET]

    found = named_leaves(jax.jit(jax.grad(log_probability))(stacks))
    assert len(found) == len(expected) == 2 * 7 * 3
    for name, gradient in found.items():
        half = ("lora_A", 0) if name.endswith("down") else ("lora_B", 1)
        other = expected[f"{name.rsplit('.', 1)[0]}.{half[0]}"]
        rows = np.moveaxis(np.asarray(gradient), half[1], 0)
        assert not rows[0].any()
        largest = np.abs(other).max()
        assert largest > 0
        np.testing.assert_allclose(rows[1], other, rtol=0, atol=OF_GRADIENTS * largest, err_msg=name)
