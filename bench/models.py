"""The model under test: SmolLM2, another one, or a random one, of a known shape or tiny; and prompts for it."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from ferrum_jax.compile.artifacts import Artifacts
from ferrum_jax.compile.fingerprint import describe_program
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.contract.llm import DecodeRow
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.executor.sizing import plan_engine
from ferrum_jax.loading import load_params
from ferrum_jax.models import specs
from ferrum_jax.models.backends import layout_for
from ferrum_jax.models.layout import CHECKPOINT, lay_out
from ferrum_jax.models.quantisation import Format, quantised_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree, map_specs, named_leaves
from ferrum_jax.ops import native
from ferrum_jax.ops.quantised import is_quantised
from ferrum_jax.planning.subject import CONFIGURATIONS
from ferrum_jax.sharding.devices import default_dtype, find_device, free_bytes
from ferrum_jax.sharding.mesh import Placement
from ferrum_jax.weights import hub
from ferrum_jax.weights.huge_pages import DevicePlacer

TOKEN = 1  # that is decoded
TINY = ModelConfig(
    model_type="llama",
    vocab_size=193,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    layer_windows=(None, None),
)


WIDE = EngineConfig(  # as most of these run, the other sizes by default
    max_seqs=8,
    kv_capacity=2048,
)


@dataclass(frozen=True)
class Subject:
    """A model that has been read but does not run yet."""

    name: str
    params: ParamTree
    config: ModelConfig
    dtype: str


def read(options: argparse.Namespace, dtype: str | None = None) -> Subject:
    """Reads the model that the options ask for; `dtype` is the device's own if None."""
    dtype = dtype or default_dtype(find_device(None))
    if options.smoke:
        return random("tiny random", TINY, dtype)
    if options.model in CONFIGURATIONS:
        return random(f"{options.model}, random weights", ModelConfig.from_hf(CONFIGURATIONS[options.model]), dtype)
    path = hub.resolve(options.model)
    params, cfg = load_params(path, dtype, progress=True)
    return Subject(hub.model_name(path), params, cfg, dtype)


def check_has_files(model: str | None) -> None:
    """Raises SystemExit for random weights: they have no tokenizer, and nothing that another process could read."""
    if model in CONFIGURATIONS:
        raise SystemExit(f"{model} has random weights and no files: name a model that has them")


def random(name: str, cfg: ModelConfig, dtype: str) -> Subject:
    """Draws random weights, which lie as served ones do; matrices are drawn in float32 one by one, and then rounded."""
    place, key = DevicePlacer(find_device(None)), jax.random.key(0)
    params = map_specs(lambda own, spec: place(specs.draw(own, spec, key, dtype)), family(cfg).param_specs(cfg))
    return Subject(name, params, cfg, dtype)


def with_experts_in(name: str, cfg: ModelConfig, dtype: str, kind: Format) -> Subject:
    """As `random`, but draws of experts the values, scales and offsets of a format, given for groups of 32 inputs."""
    plain = family(cfg).param_specs(cfg)
    formats = {
        own: replace(kind, groups=spec.shape[-1] // 32)
        for own, spec in named_leaves(plain).items()
        if "expert" in spec.axes and spec.axes[-1] in ("embed", "mlp")
    }
    rng, key, place = np.random.default_rng(0), jax.random.key(0), DevicePlacer(find_device(None))

    def draw(own: str, spec: ParamSpec) -> jax.Array:
        if spec.dtype == "uint8":
            low, high = (118, 122) if own.endswith(".scales") else (0, 256)
            return place(rng.integers(low, high, spec.shape, np.uint8))
        if own.endswith((".scales", ".offsets")):
            return place((rng.standard_normal(spec.shape, np.float32) / 256).astype(spec.dtype))
        return place(specs.draw(own, spec, key, dtype))

    return Subject(name, map_specs(draw, quantised_specs(plain, formats)), cfg, dtype)


def run(
    subject: Subject, engine: EngineConfig, layout: str | None = None, artifacts: Path | None = None
) -> ModelRunner:
    """Makes a strict runner: after `warmup`, a step that is missing is an error.

    `layout` is that of its parameters, the one that `load` would give them if None; `artifacts` the folder where
    compiled steps are kept, if they are.
    """
    device = find_device(None)
    settings = engine.over(EngineConfig(dtype=subject.dtype))
    plan = plan_engine(settings, subject.config, platform=device.platform, free_bytes=free_bytes(device))
    layout = layout or _served_layout(subject, plan.cache.attention)
    params = laid_out(subject, layout)
    kept = None
    if artifacts is not None:
        here = Placement((device,))
        kept = Artifacts(
            artifacts, describe_program(subject.config, params, plan.cache, plan.sampler, plan.loras, here)
        )
    return ModelRunner(params, subject.config, plan, device=device, strict=True, artifacts=kept)


def laid_out(subject: Subject, layout: str) -> ParamTree:
    """Returns the parameters in a layout, put as `load` puts what it reads."""
    if layout == CHECKPOINT:
        return subject.params
    return DevicePlacer(find_device(None))(lay_out(subject.params, subject.config, layout))


def _served_layout(subject: Subject, attention: str) -> str:
    """Returns the layout that `load` would give the parameters."""
    best = layout_for(subject.config, attention)
    leaves = jax.tree.leaves(subject.params, is_leaf=is_quantised)
    try:
        jax.eval_shape(lambda own: lay_out(own, subject.config, best), subject.params)
    except UnsupportedError:  # quantised in several ways
        return CHECKPOINT
    return best if all(native.has_kernel(leaf) for leaf in leaves if is_quantised(leaf)) else CHECKPOINT


def decodes(runner: ModelRunner, cache_ids: Sequence[str], context: int) -> tuple[list[DecodeRow], Callable[[], None]]:
    """Returns a batch of one token for each of some sequences of `context` positions, and its undoing."""

    def restore() -> None:
        for cache_id in cache_ids:
            runner.truncate_kv(cache_id, context)

    return [(cache_id, TOKEN, context) for cache_id in cache_ids], restore


def prefilled(runner: ModelRunner, rows: int, context: int) -> tuple[list[DecodeRow], Callable[[], None]]:
    """As `decodes`, of the sequences "0", "1", …, which are read unless they are there already."""
    cache_ids = [str(row) for row in range(rows)]
    for row, cache_id in enumerate(cache_ids):
        if runner.kv_len(cache_id) != context:
            runner.release(cache_id)
            runner.prefill(cache_id, prompt(runner.model_config, context, seed=row))
    return decodes(runner, cache_ids, context)


def prompt(cfg: ModelConfig, count: int, seed: int = 0) -> list[int]:
    """Draws token ids: times do not depend on which they are."""
    return np.random.default_rng([seed, count]).integers(cfg.vocab_size, size=count).tolist()
