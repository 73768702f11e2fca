"""Hugging Face transformers over the same weights, as fast as it runs here.

`sdpa` attention, inference mode, logits of the last token only. On a CPU: eager, in float32, as many threads as cores,
over two kinds of cache: `DynamicCache` grows by concatenation, `StaticCache` is written in place and attends to all of
its capacity, which is set to what the row needs. On a GPU both of these, in the dtype of the weights, and the static
cache under `torch.compile(mode="reduce-overhead")`, which replays a CUDA graph. Needs the extra `reference`.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from bench.models import Subject
from bench.timing import Contestant
from ferrum_jax.config import ModelConfig
from ferrum_jax.models.specs import named_leaves

DEVICES = {"cpu": "cpu", "gpu": "cuda"}  # of torch, by JAX's platform
Cache = DynamicCache | StaticCache


class TransformersPeer:
    """One model of transformers, and the calls of it that are timed."""

    def __init__(self, subject: Subject, platform: str):
        if platform not in DEVICES or (platform == "gpu" and not torch.cuda.is_available()):
            raise NotImplementedError(f"this is a {platform}, and torch has none")
        torch.set_num_threads(os.cpu_count() or 1)
        self._dtype = subject.dtype
        self._device = torch.device(DEVICES[platform])
        dtype = getattr(torch, subject.dtype)
        with self._device:
            config = AutoConfig.for_model(**_config(subject.config))
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        self._fill(subject)
        self._forwards: dict[str, Callable[..., Any]] = {"dynamic": self._model, "static": self._model}
        if platform == "gpu":
            self._forwards["static compiled"] = torch.compile(self._model, mode="reduce-overhead", fullgraph=True)

    def _fill(self, subject: Subject) -> None:
        """Copies the weights one by one: a second copy of all of them might not fit."""
        theirs = self._model.state_dict()
        if subject.config.tie_word_embeddings:
            del theirs["lm_head.weight"]
        ours = named_leaves(subject.params)
        if set(theirs) != set(ours):
            raise RuntimeError(f"parameters of one side alone: {sorted(set(theirs) ^ set(ours))}")
        for name, leaf in ours.items():
            theirs[name].copy_(torch.from_dlpack(leaf))

    @property
    def module(self) -> Any:
        """The model itself, for hooks and gradients."""
        return self._model

    def prefill(self, tokens: list[int]) -> dict[str, Contestant]:
        """A prompt into an empty cache that grows: one written in place gains a prompt nothing."""
        ids = torch.tensor([tokens], device=self._device)
        return {"dynamic": Contestant(lambda: self._logits(self._model, ids, self._cache("dynamic", len(tokens))))}

    def decode(self, prompts: list[list[int]], token: int, *, burst: int) -> dict[str, Contestant]:
        """A token for each of some sequences of one length, by kind of cache."""
        return {kind: self._decode(kind, prompts, token, burst) for kind in self._forwards}

    def generate(self, prompts: list[list[int]], count: int) -> dict[str, Contestant]:
        """Its own `generate` over the prompts as one batch, by kind of cache."""
        ids = torch.tensor(prompts, device=self._device)
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}

        def answer(kind: str) -> NDArray[np.int64]:
            found = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), cache_implementation=kind, **settings
            )
            return found[:, ids.shape[1] :].cpu().numpy()

        return {kind: Contestant(partial(answer, kind)) for kind in ("dynamic", "static")}

    def precision(self, kind: str) -> str:
        """Returns the dtype of the weights, in which everything is kept."""
        return self._dtype

    def _decode(self, kind: str, prompts: list[list[int]], token: int, burst: int) -> Contestant:
        context = len(prompts[0])
        cache = self._cache(kind, context + 1)
        self._logits(self._model, torch.tensor(prompts, device=self._device), cache)
        ids = torch.full((len(prompts), 1), token, device=self._device)

        @torch.inference_mode()
        def restore() -> None:
            if isinstance(cache, StaticCache):
                for layer in cache.layers:
                    assert isinstance(layer, StaticLayer)
                    layer.cumulative_length.fill_(context)
            else:
                cache.crop(context - cache.get_seq_length())  # negative: so many fewer

        return Contestant(lambda: self._logits(self._forwards[kind], ids, cache), restore, burst)

    def _cache(self, kind: str, positions: int) -> Cache:
        config = self._model.config
        return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, positions)

    @torch.inference_mode()
    def _logits(self, forward: Callable[..., Any], ids: torch.Tensor, cache: Cache) -> NDArray[np.float32]:
        # another name from transformers 5.24 on
        name = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        output = forward(input_ids=ids, **{name: cache}, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float().cpu().numpy()


def _config(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the configuration in transformers' words, which most fields are already."""
    if any(cfg.layer_windows):
        raise NotImplementedError(f"windows of {cfg.model_type} are not set up for the peer")
    ours = ("rope_theta", "rope_scaling", "attention_out_bias", "qk_norm", "layer_windows", "dtype")
    fields = {name: value for name, value in asdict(cfg).items() if name not in ours}
    scaling: dict[str, Any] = {"rope_type": "default"}
    if cfg.rope_scaling is not None:
        scaling = {name: value for name, value in asdict(cfg.rope_scaling).items() if value is not None}
    return fields | {"rope_parameters": scaling | {"rope_theta": cfg.rope_theta}}
