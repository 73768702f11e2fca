"""Hugging Face transformers over the same weights, as fast as it runs here.

`sdpa` attention, inference mode, logits of the last token only. On a CPU: eager, in float32, as many threads as cores,
over two kinds of cache: `DynamicCache` grows by concatenation, `StaticCache` is written in place and attends to all of
its capacity, which is set to what the row needs. On a GPU both of these, in the dtype of the weights, and the static
cache in a CUDA graph, so that no kernel waits for Python: of the eager kernels, and with `torch.compile` of what lies
between the products and the attention (norms, rotations, the feed-forward block), which fuses it. The whole model is
not compiled: it would be anew for every number of rows. Needs the extra `reference`.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
        config = AutoConfig.for_model(**_config(subject.config))
        with torch.device("meta"):
            _check_shapes(subject, AutoModelForCausalLM.from_config(config, dtype=dtype))
        with self._device:
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        theirs = _parameters(self._model)
        for name, leaf in named_leaves(subject.params).items():  # one by one: a second copy of all might not fit
            theirs[name].copy_(torch.from_dlpack(leaf))
        self._graphs = ("graph", "compiled graph") if platform == "gpu" else ()
        self._compiled: dict[tuple[Any, str], Callable[..., Any]] = {}

    @property
    def module(self) -> Any:
        """The model itself, for hooks and gradients."""
        return self._model

    def prefill(self, tokens: list[int]) -> dict[str, Contestant]:
        """A prompt into an empty cache that grows: one written in place gains a prompt nothing."""
        ids = torch.tensor([tokens], device=self._device)
        return {"dynamic": Contestant(lambda: self._logits(self._model, ids, self._cache("dynamic", len(tokens))))}

    def decode(self, prompts: list[list[int]], token: int, *, burst: int) -> dict[str, Contestant]:
        """A token for each of some sequences of one length, by kind of cache and of graph."""
        context, ids = len(prompts[0]), torch.tensor(prompts, device=self._device)
        caches = {kind: self._cache(kind, context + 1) for kind in ("dynamic", "static")}
        for cache in caches.values():
            self._logits(self._model, ids, cache)
        graphs = dict.fromkeys(self._graphs, caches["static"])  # the same numbers
        last = torch.full_like(ids[:, :1], token)
        return {kind: self._decode(kind, last, cache, context, burst) for kind, cache in (caches | graphs).items()}

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

    def _decode(self, kind: str, ids: torch.Tensor, cache: Cache, context: int, burst: int) -> Contestant:
        @torch.inference_mode()
        def restore() -> None:
            if isinstance(cache, StaticCache):
                for layer in cache.layers:
                    assert isinstance(layer, StaticLayer)
                    layer.cumulative_length.fill_(context)
            else:
                cache.crop(context - cache.get_seq_length())  # negative: so many fewer

        if kind in ("dynamic", "static"):
            return Contestant(lambda: self._logits(self._model, ids, cache), restore, burst)
        with self._fused() if kind == "compiled graph" else nullcontext():
            graph, logits = self._captured(ids, cache, restore)

        def replay() -> NDArray[np.float32]:
            graph.replay()
            return logits.float().cpu().numpy()

        return Contestant(replay, restore, burst)

    @torch.inference_mode()
    def _captured(
        self, ids: torch.Tensor, cache: Cache, restore: Callable[[], None]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Captures one step; it is run before, so that nothing is allocated or compiled in it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                restore()
                self._step(self._model, ids, cache)
        torch.cuda.current_stream().wait_stream(stream)
        restore()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._step(self._model, ids, cache)
        return graph, logits

    @contextmanager
    def _fused(self) -> Iterator[None]:
        """Has norms, rotations and feed-forward blocks compiled, once for all layers."""
        modeling = sys.modules[type(self._model).__module__]
        classes = {type(module) for module in self._model.modules()}
        parts: list[tuple[Any, str]] = [(modeling, "apply_rotary_pos_emb")]
        parts += [(one, "forward") for one in classes if one.__name__.endswith(("RMSNorm", "MLP"))]
        before = [getattr(owner, name) for owner, name in parts]
        for (owner, name), function in zip(parts, before, strict=True):
            if (owner, name) not in self._compiled:
                self._compiled[owner, name] = torch.compile(function, dynamic=False)
            setattr(owner, name, self._compiled[owner, name])
        try:
            yield
        finally:
            for (owner, name), function in zip(parts, before, strict=True):
                setattr(owner, name, function)

    def _cache(self, kind: str, positions: int) -> Cache:
        config = self._model.config
        return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, positions)

    def _logits(self, forward: Callable[..., Any], ids: torch.Tensor, cache: Cache) -> NDArray[np.float32]:
        return self._step(forward, ids, cache).float().cpu().numpy()

    @torch.inference_mode()
    def _step(self, forward: Callable[..., Any], ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        # another name from transformers 5.24 on
        name = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        return forward(input_ids=ids, **{name: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    """Returns a model's parameters by our names; those of gate and up are views of what it fuses for all experts."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            prefix = name.removesuffix("gate_up_proj")
            found |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        else:
            found[f"{name}.weight" if name.endswith(".experts.down_proj") else name] = tensor
    if model.config.tie_word_embeddings:
        del found["lm_head.weight"]
    return found


def _check_shapes(subject: Subject, model: Any) -> None:
    """Raises NotImplementedError unless both sides have parameters of the same names and shapes."""
    ours = {name: tuple(leaf.shape) for name, leaf in named_leaves(subject.params).items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in _parameters(model).items()}
    if differ := sorted({name for name, _ in ours.items() ^ theirs.items()}):
        some = "; ".join(f"{name} is {ours.get(name)}, there {theirs.get(name)}" for name in differ[:2])
        family = subject.config.model_type
        raise NotImplementedError(f"{subject.name}: {len(differ)} parameters of transformers' {family} differ: {some}")


def _config(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the configuration in transformers' words, which most fields are already."""
    if any(cfg.layer_windows):
        raise NotImplementedError(f"windows of {cfg.model_type} are not set up for the peer")
    ours = ("rope_theta", "rope_scaling", "attention_out_bias", "qk_norm", "layer_windows", "dtype")
    fields = {name: value for name, value in asdict(cfg).items() if name not in ours}
    if cfg.experts is not None:
        dense = [layer for layer, is_sparse in enumerate(cfg.experts.sparse_layers) if not is_sparse]
        fields |= fields.pop("experts") | {"mlp_only_layers": dense}
    scaling: dict[str, Any] = {"rope_type": "default"}
    if cfg.rope_scaling is not None:
        scaling = {name: value for name, value in asdict(cfg.rope_scaling).items() if value is not None}
    return fields | {"rope_parameters": scaling | {"rope_theta": cfg.rope_theta}}
