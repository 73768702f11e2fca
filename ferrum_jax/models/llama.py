"""Llama 2 to 3.2, and the families that differ from it in settings: Mistral, Qwen2, Qwen3, SmolLM3, Granite 3.

Touvron et al. 2023, "Llama 2"; Jiang et al. 2023, "Mistral 7B" (sliding window); Qwen2 (biases of q, k and v); Qwen3
(RMSNorm of query and key heads); SmolLM3 (layers without rotary embeddings); IBM 2024, "Granite 3.0 Language Models",
section 3 (factors on embeddings, scores, residuals and logits, those of Yang et al. 2022, "Tensor Programs V").
Parity with Hugging Face transformers: tests/models/test_parity.py.
"""

from functools import partial

from ferrum_jax.config import ModelConfig
from ferrum_jax.models import attention, decoder, feed_forward
from ferrum_jax.models.decoder import decoder_specs, pre_norm_layer, pre_norm_specs
from ferrum_jax.models.feed_forward import mlp_specs
from ferrum_jax.models.specs import ParamTree

FUSED = {"self_attn": attention.FUSED, "mlp": feed_forward.FUSED}


def param_specs(cfg: ModelConfig) -> ParamTree:
    """Specs of every parameter."""
    return decoder_specs(cfg, [pre_norm_specs(cfg, mlp=mlp_specs(cfg)) for _ in range(cfg.num_hidden_layers)])


forward = partial(decoder.forward, pre_norm_layer)
head = decoder.head
