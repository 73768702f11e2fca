"""`config.json` of DeepSeek V2, V3 and R1."""

import math
from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch
from ferrum_jax.config.experts import ExpertsConfig
from ferrum_jax.config.latent import LatentConfig
from ferrum_jax.config.rope import read_rope
from ferrum_jax.contract.errors import UnsupportedError

IMPLEMENTED = ("n_routed_experts", "num_experts", "num_local_experts", "kv_lora_rank")


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`; of heads, those are counted that the KV has: one, a latent."""
    third = config["model_type"] == "deepseek_v3"
    read_activation(config, "hidden_act", "silu", ("silu", "swish"))
    latent = LatentConfig(
        q_lora_rank=config.get("q_lora_rank", 1536),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        rope_interleave=read_switch(config, "rope_interleave", True) or not third,
    )
    sizes = read_sizes(config) | {"num_key_value_heads": 1, "head_dim": latent.cached_dim}
    rope = read_rope(config)
    scaling, scale = rope["rope_scaling"], (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5
    if scaling is not None and scaling.mscale_all_dim and scaling.factor > 1:
        scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2
    return {
        **sizes,
        **rope,
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings"),
        "attention_bias": read_switch(config, "attention_bias"),
        "mlp_bias": read_switch(config, "mlp_bias") and not third,
        "attention_multiplier": scale,
        "layer_windows": (None,) * sizes["num_hidden_layers"],
        "latent": latent,
        "experts": _experts(config, sizes["num_hidden_layers"], third),
    }


def _experts(config: Mapping[str, Any], layers: int, third: bool) -> ExpertsConfig | None:
    method = config.get("topk_method", "noaux_tc" if third else "greedy")
    supported = ("noaux_tc",) if third else ("greedy", "group_limited_greedy")
    scoring = config.get("scoring_func", "sigmoid" if third else "softmax")
    if method not in supported or scoring != ("sigmoid" if third else "softmax"):
        raise UnsupportedError(f"topk_method {method!r} with scoring_func {scoring!r} is not implemented")
    renormalise = read_switch(config, "norm_topk_prob", third)
    if renormalise and not third:
        raise UnsupportedError("norm_topk_prob = true is not implemented for deepseek_v2")
    if config.get("moe_layer_freq", 1) != 1:
        raise UnsupportedError(f"moe_layer_freq {config['moe_layer_freq']} is not implemented, only 1 is")
    sparse = tuple(index >= config.get("first_k_dense_replace", 3 if third else 0) for index in range(layers))
    if not any(sparse):
        return None
    grouped = method != "greedy"
    names = [name for name in ("n_routed_experts", "num_local_experts", "num_experts") if name in config]
    if not names:
        raise KeyError("n_routed_experts")
    return ExpertsConfig(
        num_experts=config[names[0]],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
        norm_topk_prob=renormalise,
        shared_expert_intermediate_size=config["moe_intermediate_size"] * config["n_shared_experts"],
        sparse_layers=sparse,
        scoring_func=scoring,
        n_group=config["n_group"] if grouped else 1,
        topk_group=config["topk_group"] if grouped else 1,
        routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
    )
