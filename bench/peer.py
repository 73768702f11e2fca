"""Hugging Face transformers over the same weights, as fast as its eager mode runs here.

Llama on torch's CPU backend in float32: `sdpa` attention, inference mode, as many threads as cores, logits of the last
token only. Decoding runs over two kinds of cache: `DynamicCache` grows by concatenation, `StaticCache` is written in
place and attends to all of its capacity, which is set to what the row needs. Needs the extra `reference`.
"""

import os

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import StaticLayer

from bench.models import Subject
from bench.timing import Contestant
from ferrum_jax.config import ModelConfig
from ferrum_jax.models.specs import named_leaves


class Peer:
    """One model of transformers, and the calls of it that are timed."""

    def __init__(self, subject: Subject):
        torch.set_num_threads(os.cpu_count() or 1)
        self._model = LlamaForCausalLM(_config(subject.config)).eval()
        self._model.set_attn_implementation("sdpa")
        leaves = named_leaves(subject.params).items()
        weights = {name: torch.from_numpy(np.array(leaf, np.float32)) for name, leaf in leaves}
        if subject.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self._model.load_state_dict(weights, strict=True)
        self._model.tie_weights()

    def prefill(self, tokens: list[int]) -> Contestant:
        """A prompt into an empty cache; the call gives `[1, V]`."""
        ids = torch.tensor([tokens])
        return Contestant(lambda: self._logits(ids, DynamicCache(config=self._model.config)))

    def decode(self, kind: str, prompts: list[list[int]], token: int, *, burst: int) -> Contestant:
        """A token for each of some sequences of one length, over one kind of cache; the call gives `[B, V]`."""
        context = len(prompts[0])
        static = StaticCache(self._model.config, context + 1)
        cache = DynamicCache(config=self._model.config) if kind == "dynamic" else static
        self._logits(torch.tensor(prompts), cache)
        ids = torch.full((len(prompts), 1), token)

        def restore() -> None:
            if isinstance(cache, StaticCache):
                for layer in cache.layers:
                    assert isinstance(layer, StaticLayer)
                    layer.cumulative_length.fill_(context)
            else:
                cache.crop(context - cache.get_seq_length())  # negative: so many fewer

        return Contestant(lambda: self._logits(ids, cache), restore, burst)

    @torch.inference_mode()
    def _logits(self, ids: torch.Tensor, cache: DynamicCache | StaticCache) -> NDArray[np.float32]:
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].numpy()


def _config(cfg: ModelConfig) -> LlamaConfig:
    if cfg.model_type != "llama" or cfg.rope_scaling is not None:
        raise NotImplementedError(f"the peer is Llama without RoPE scaling, this is {cfg.model_type}")
    return LlamaConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_hidden_layers,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        max_position_embeddings=cfg.max_position_embeddings,
        rms_norm_eps=cfg.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
        tie_word_embeddings=cfg.tie_word_embeddings,
        attention_bias=cfg.attention_bias,
        mlp_bias=cfg.mlp_bias,
    )
