"""Phi-3, Phi-3.5 and Phi-4, the dense ones: Llama's block, with products that the checkpoint has fused.

Abdin et al. 2024, "Phi-3 Technical Report", section 2. A share of each head may turn, by the frequencies of LongRoPE:
the short ones where no sequence of the engine or the call can pass the original positions, the long ones where one can.
Parity with Hugging Face transformers, which decides it for each call anew: tests/models/test_parity.py.
"""

from functools import partial

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models import decoder
from ferrum_jax.models.attention import Site, self_attention
from ferrum_jax.models.decoder import Adapted, decoder_specs
from ferrum_jax.models.mlp import gated_mlp
from ferrum_jax.models.products import linear_specs
from ferrum_jax.models.specs import ParamTree, norm_specs
from ferrum_jax.ops.norm import rms_norm

FUSED: dict[str, dict[str, tuple[str, ...]]] = {}  # the checkpoint's own products are


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Describes every parameter."""
    return decoder_specs(cfg, [_layer_specs(cfg) for _ in range(cfg.num_hidden_layers)])


def _layer_specs(cfg: ModelConfig) -> ParamTree:
    model, wide = (cfg.hidden_size, "embed"), (cfg.intermediate_size, "mlp")
    queries = (cfg.num_attention_heads * cfg.head_dim, "heads")
    heads = cfg.num_attention_heads + 2 * cfg.num_key_value_heads
    return {
        "input_layernorm": norm_specs(cfg.hidden_size),
        "self_attn": {
            "qkv_proj": linear_specs((heads * cfg.head_dim, "fused"), model),
            "o_proj": linear_specs(model, queries),
        },
        "post_attention_layernorm": norm_specs(cfg.hidden_size),
        "mlp": {
            "gate_up_proj": linear_specs((2 * cfg.intermediate_size, "fused"), model),
            "down_proj": linear_specs(model, wide),
        },
    }


def _layer(
    layer: ParamTree, adapted: Adapted, x: jax.Array, kv: KvState[jax.Array], site: Site, cfg: ModelConfig
) -> tuple[jax.Array, KvState[jax.Array]]:
    normed = rms_norm(x, layer["input_layernorm"]["weight"], cfg.rms_norm_eps)
    mixed, kv = self_attention(layer["self_attn"], adapted["self_attn"], normed, kv, site, cfg)
    x = x + mixed
    normed = rms_norm(x, layer["post_attention_layernorm"]["weight"], cfg.rms_norm_eps)
    return x + gated_mlp(layer["mlp"], adapted["mlp"], normed), kv


forward = partial(decoder.forward, _layer)
head = decoder.head
