"""With JAX_ENABLE_X64=1, which holds for a whole process, everything gives the numbers that it gives without."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams, Speculation, from_params, generate_fn, models
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.contract import Sampling
from ferrum_jax.models import Edit
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.layout import lay_out
from tests import adapters, tiny

TOLERANCE = 1e-6  # the programs are the same but for integers that count and index, around which XLA may fuse otherwise
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4, 1, 5]]
ENGINE = EngineConfig(
    max_seqs=3, kv_capacity=40, block_size=4, decode_rows=(3,), query_blocks=(3,), block_tokens=8, max_step_tokens=24,
    verify_blocks=(3,), verify_tokens=4, multi_step_tokens=0,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=5, prompt_logprobs=2)
DRAWN = SamplingParams(max_tokens=5, temperature=0.9, seed=2**32 - 2)
FILTERED = replace(DRAWN, top_k=20, top_p=0.8, min_p=0.02, logprobs=3, logprobs_mode="processed", n=2)
CHANGED = replace(
    DRAWN, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={5: 1.5, 8: -2.0},
    allowed_token_ids=list(range(50)), min_tokens=3, stop_token_ids=[7], logprobs=2,
)  # fmt: skip
POINT = ("resid_post", 0)
REPORTED = "token_ids", "logprobs", "processed_logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"


def answers(llm: LLM, how: SamplingParams, **options: Any) -> Any:
    outs = llm.generate(PROMPTS, how, **options)
    return [[getattr(one, name) for name in REPORTED] + list(one.captured.values()) for one in outs]


def edits(cfg: ModelConfig) -> dict[Any, Edit[Any]]:
    return {POINT: Edit(add=np.linspace(-1, 1, cfg.hidden_size), scale=0.5)}


def model(name: str) -> tuple[Any, ModelConfig]:
    """A tiny model of as few layers as have a window or experts, which compile soonest."""
    layers = 1 if name == "qwen3_moe" else 2
    config = tiny.CONFIGS[name] | {"num_hidden_layers": layers, "sliding_window_pattern": 2}
    return tiny.tiny_params(config), ModelConfig.from_hf(config)


def served(folder: Path, name: str, quantised: str | None = None, layout: Any = "checkpoint", **settings: Any) -> Any:
    """Answers, scores, captures and interventions."""
    del folder
    params, cfg = model(name)
    if quantised is not None:
        params = models.quantise(params, cfg, quantised)
    with from_params(lay_out(params, cfg, layout), cfg, engine=ENGINE, **settings) as runner:
        llm = LLM.from_model(runner)
        found = [answers(llm, how) for how in (GREEDY, DRAWN, FILTERED, CHANGED)]
        found += [vars(one) for one in llm.score(PROMPTS, [[1, 2, 3], [4], [5, 6]], CHANGED)]
        return [*found, answers(llm, DRAWN, interventions=edits(cfg), capture=[POINT])]


def served_fast(folder: Path, name: str) -> Any:
    """Prefixes, multi-step programs or drafted tokens, and an adapter; compiled at first, then from the disk."""
    params, cfg, found = tiny.tiny_params(tiny.CONFIGS[name]), tiny.model_config(name), []
    path = adapters.write_adapter(folder / "adapter", "every")
    engine = replace(
        ENGINE, prefix_cache=True, multi_step_tokens=4, max_loras=1, max_lora_rank=4, artifacts=str(folder / "kept")
    )
    for speculation in (None, Speculation(num_tokens=3)):
        with from_params(params, cfg, engine=engine) as runner:
            runner.load_lora("every", path)
            llm = LLM.from_model(runner, speculation=speculation)
            found += [answers(llm, how, lora_request=["every", None, "every"]) for how in (GREEDY, DRAWN, CHANGED)]
    return found


def computed(folder: Path, name: str, adapter: str | None = None, **options: Any) -> Any:
    """The pure functions, which are given NumPy's arrays, and gradients."""
    params, cfg = model(name)
    tokens: Any = np.array(PROMPTS[::2])
    temperatures: Any = np.array([0.7, 1.3])
    lengths: Any = np.array([14, 5])
    seeds: Any = np.array([5, 2**32 - 1], np.uint32)
    if adapter is not None:
        params, cfg = tiny.tiny_params(tiny.CONFIGS[name]), tiny.model_config(name)
        stacks = adapters.stacks_of(folder, [adapter], LoraSpec(max_loras=1, max_rank=4))
        options |= {"loras": stacks, "adapters": np.array([0, -1])}

    def mean(params: Any) -> jax.Array:
        return models.log_probs(params, tokens, cfg, temperature=temperatures, **options).mean()

    asked = {"capture": [POINT, ("pattern", 1)], "interventions": edits(cfg), "logits": np.array([[3, 4], [0, 13]])}
    logits, captured = jax.jit(lambda params: models.run(params, tokens, cfg, **asked, **options))(params)

    one_by_one = models.forward(params, tokens, cfg, interventions=edits(cfg), logits="last")

    def generate(params: Any) -> Any:
        how = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2)
        return generate_fn(params, None, tokens, lengths, seeds, cfg, max_tokens=4, sampling=how, stop_ids=(3,))[0]

    found = jax.jit(jax.value_and_grad(mean))(params)
    drawn = models.init_params(cfg, jax.random.key(0))
    return [logits, list(captured.values()), one_by_one, found, vars(jax.jit(generate)(params)), drawn]


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "window": (served, {"name": "gemma3", "window_kv": True}),
    "experts, XLA": (served, {"name": "qwen3_moe", "attention": "xla"}),
    "fast": (served_fast, {"name": "llama3"}),
    "latent experts": (computed, {"name": "deepseek3"}),
    "dense": (served, {"name": "llama3"}),
    "dense, XLA": (served, {"name": "llama3", "attention": "xla"}),
    "window, XLA": (served, {"name": "gemma3", "window_kv": True, "attention": "xla"}),
    "scanned": (served, {"name": "llama3", "layout": "scanned"}),
    "experts": (served, {"name": "qwen3_moe"}),
    "latent": (served, {"name": "deepseek3"}),
    "latent, XLA": (served, {"name": "deepseek3", "attention": "xla"}),
    "sinks": (served, {"name": "gpt_oss"}),
    "int8": (served, {"name": "llama3", "quantised": "int8"}),
    "int8, XLA": (served, {"name": "llama3", "quantised": "int8", "attention": "xla"}),
    "fp8, XLA": (served, {"name": "llama3", "quantised": "float8_e4m3fn", "attention": "xla"}),
    "adapters": (computed, {"name": "llama3", "adapter": "every"}),
    "sinks alone": (computed, {"name": "gpt_oss"}),
    "paged": (computed, {"name": "gemma3", "attention": "xla"}),
}
TIERS = [list(CASES)[:4], list(CASES)[4:]]


def numbers(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """What some cases give, as arrays of NumPy."""
    found = {}
    for name in names:
        function, options = CASES[name]
        (folder / name).mkdir(parents=True)
        found[name] = jax.tree.map(np.asarray, function(folder / name, **options))
    return found


def write_numbers(folder: str, *names: str) -> None:
    """Writes `numbers` to a file; for a process of its own."""
    assert jax.config.read("jax_enable_x64")
    (Path(folder) / "found").write_bytes(pickle.dumps(numbers(Path(folder), names)))


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("names", TIERS, ids=["some", "others"])
def test_everything_is_the_same_with_and_without_x64(names: list[str], tmp_path: Path):
    program = "import sys; from tests.test_x64 import write_numbers; write_numbers(*sys.argv[1:])"
    there, environment = tmp_path / "x64", os.environ | {"JAX_ENABLE_X64": "1"}
    there.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", program, there, *names], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        expected = numbers(tmp_path, names)
        errors = process.communicate()[1]
    assert process.returncode == 0, errors
    found = pickle.loads((there / "found").read_bytes())
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE, err_msg=where, strict=True)
