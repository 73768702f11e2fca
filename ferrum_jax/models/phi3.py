"""Phi-3, Phi-3.5 and Phi-4, the dense models: Llama's layer, with projections that are fused in the checkpoint.

Abdin et al. 2024, "Phi-3 Technical Report", section 2. A part of each head may be rotated, by the frequencies of
LongRoPE: the short ones if no sequence of the engine or the call can pass the original positions, else the long ones.
Parity with Hugging Face transformers, which decides it for each call anew: tests/models/test_parity.py.
"""

from functools import partial

from ferrum_jax.config import ModelConfig
from ferrum_jax.models import decoder
from ferrum_jax.models.decoder import decoder_specs, pre_norm_layer, pre_norm_specs
from ferrum_jax.models.projections import linear_specs
from ferrum_jax.models.specs import ParamTree

FUSED: dict[str, dict[str, tuple[str, ...]]] = {}  # the checkpoint's own projections are


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Specs of every parameter."""
    return decoder_specs(cfg, [_layer_specs(cfg) for _ in range(cfg.num_hidden_layers)])


def _layer_specs(cfg: ModelConfig) -> ParamTree:
    model, wide = (cfg.hidden_size, "embed"), (cfg.intermediate_size, "mlp")
    queries = (cfg.num_attention_heads * cfg.head_dim, "heads")
    heads = cfg.num_attention_heads + 2 * cfg.num_key_value_heads
    attention = {
        "qkv_proj": linear_specs((heads * cfg.head_dim, "fused"), model),
        "o_proj": linear_specs(model, queries),
    }
    mlp = {
        "gate_up_proj": linear_specs((2 * cfg.intermediate_size, "fused"), model),
        "down_proj": linear_specs(model, wide),
    }
    return pre_norm_specs(cfg, attention, mlp=mlp)


forward = partial(decoder.forward, pre_norm_layer)
head = decoder.head
