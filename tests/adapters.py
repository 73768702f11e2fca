"""Tiny adapters: directories as PEFT saves them, their settings written out and their tensors drawn from a seed."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ferrum_jax.config import ModelConfig
from ferrum_jax.models import adapters, specs
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.weights.peft import lay_out, read_adapter
from tests import tiny

LENGTH = 24  # tokens
EVERY = list(adapters.PROJECTIONS)

# For each: the tiny model it belongs to, and fields of its adapter_config.json.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "every": ("llama3", {"r": 4, "lora_alpha": 3, "target_modules": EVERY}),
    "queries_and_values": ("llama3", {"r": 8, "lora_alpha": 4.5, "target_modules": ["q_proj", "v_proj"]}),
    "rank_stabilised": (
        "llama3",
        {"r": 16, "lora_alpha": 3, "use_rslora": True, "target_modules": ["o_proj", "gate_proj", "up_proj"]},
    ),
    "patterns": (
        "llama3",
        {
            "r": 8,
            "lora_alpha": 4,
            "target_modules": EVERY,
            "rank_pattern": {"self_attn.o_proj": 12, "layers.1.mlp.up_proj": 3, r"model.layers.[02].*k_proj": 5},
            "alpha_pattern": {"mlp.(gate|up)_proj": 7, "q_proj": 2.5},
        },
    ),
    "wide": ("llama3", {"r": 64, "lora_alpha": 30, "target_modules": "all-linear"}),
    "rank_stabilised_patterns": (
        "llama3",
        {
            "r": 8,
            "lora_alpha": 2,
            "use_rslora": True,
            "target_modules": ["k_proj", "down_proj"],
            "rank_pattern": {"down_proj": 33},
            "alpha_pattern": {"model.layers.2.mlp.down_proj": 5},
        },
    ),
    "regular_expression": (
        "llama3",
        {"r": 6, "lora_alpha": 6, "target_modules": r".*layers\.[02]\.(self_attn\.[qk]_proj|mlp\.down_proj)"},
    ),
    "some_layers": (
        "llama3",
        {
            "r": 4,
            "lora_alpha": 4,
            "target_modules": ["v_proj", "mlp.gate_proj", "model.layers.0.self_attn.k_proj"],
            "layers_to_transform": [1, 2],
        },
    ),
    "one_layer": (
        "llama3",
        {"r": 4, "lora_alpha": 4, "target_modules": EVERY, "layers_to_transform": 2, "layers_pattern": "layers"},
    ),
    "excluding": (
        "llama3",
        {"r": 4, "lora_alpha": 4, "target_modules": EVERY, "exclude_modules": ["layers.1.mlp.down_proj", "k_proj"]},
    ),
    "biases": ("llama_biases", {"r": 4, "lora_alpha": 3, "target_modules": EVERY}),
    "mistral": ("mistral", {"r": 5, "lora_alpha": 4, "target_modules": EVERY}),
    "qwen2": ("qwen2_window", {"r": 6, "lora_alpha": 4, "target_modules": EVERY}),
    "phi3": ("phi3", {"r": 6, "lora_alpha": 5, "target_modules": EVERY}),
    "gemma2": ("gemma2", {"r": 5, "lora_alpha": 4, "target_modules": EVERY}),
    "qwen3": ("qwen3_tied", {"r": 7, "lora_alpha": 5, "target_modules": EVERY}),
    "gpt_oss": ("gpt_oss", {"r": 5, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
}
OTHER_FIELDS = {  # as PEFT writes them
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "a/model",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "use_dora": False,
    "loftq_config": {},
}


def prompt(name: str) -> list[int]:
    """Returns the token ids whose logits are the reference of an adapter."""
    return tiny.prompt(ADAPTERS[name][0])[:LENGTH]


def write_adapter(folder: Path, name: str, **fields: Any) -> Path:
    """Writes the directory of an adapter, with some `fields` of its configuration replaced."""
    model, settings = ADAPTERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = OTHER_FIELDS | settings | fields
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors(name, tiny.model_config(model)), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(name: str, cfg: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Draws the tensors of an adapter, by the names that PEFT gives them."""
    made = {}
    for module, weight in adapters.projections(cfg).items():
        rank = rank_at(name, module)
        if rank:
            for half, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                key = f"base_model.model.{module}.lora_{half}.weight"
                made[key] = tiny.seeded_tensor(tiny.SEED, f"{name} {key}", shape)
    return made


def rank_at(name: str, module: str) -> int:
    """Rank of an adapter at a module, 0 where it has none: written out, not derived from its patterns."""
    layer, projection = int(module.split(".")[2]), module.split(".")[-1]
    if name == "patterns":
        odd = {"o_proj": 12, "up_proj": 3 if layer == 1 else 8, "k_proj": 8 if layer == 1 else 5}
        return odd.get(projection, 8)
    own = {
        "queries_and_values": {"q_proj": 8, "v_proj": 8},
        "rank_stabilised": {"o_proj": 16, "gate_proj": 16, "up_proj": 16},
        "rank_stabilised_patterns": {"k_proj": 8, "down_proj": 33},
        "regular_expression": dict.fromkeys(["q_proj", "k_proj", "down_proj"], 6 if layer != 1 else 0),
        "some_layers": {"v_proj": 4 * (layer > 0), "gate_proj": 4 * (layer > 0), "k_proj": 4 * (layer == 0)},
        "one_layer": dict.fromkeys(EVERY, 4 * (layer == 2)),
        "excluding": dict.fromkeys(EVERY, 4) | {"k_proj": 0, "down_proj": 4 * (layer != 1)},
    }
    return own.get(name, dict.fromkeys(EVERY, ADAPTERS[name][1]["r"])).get(projection, 0)


def empty_stacks(cfg: ModelConfig, spec: LoraSpec) -> ParamTree:
    """Returns stacks of zeros, which change no product."""
    return jax.tree.map(jnp.zeros_like, specs.shapes(adapters.stack_specs(cfg, spec), "float32"))


def stacks_of(folder: Path, names: list[str | None], spec: LoraSpec) -> ParamTree:
    """Returns stacks whose rows are the adapters named, read back from `folder`; None leaves zeros."""
    model = next(ADAPTERS[name][0] for name in names if name)
    cfg = tiny.model_config(model)
    stacks = empty_stacks(cfg, spec)
    for index, name in enumerate(names):
        if name:
            adapter = read_adapter(write_adapter(folder / name, name), cfg)
            stacks = adapters.install(stacks, lay_out(adapter, spec, "float32"), index)
    return stacks
