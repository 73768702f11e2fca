"""Hook points against PyTorch hooks on transformers' modules: what is captured, and what interventions change."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.models import Edit, replace_with
from tests import tiny
from tests.reference.test_models_reference import save_with_transformers
from tests.tiers import by_default

pytestmark = pytest.mark.reference

TOLERANCE = 1e-5  # of the largest: float32 sums in another order, over three layers
FAMILIES = ("llama3", "mistral", "qwen2", "qwen3_window_biases", "granite_biases_tied", "smollm3", "phi3", "olmo2",
            "gemma2", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek2", "deepseek3", "gpt_oss")  # fmt: skip
LAYER = 1
Found = dict[str, NDArray[np.float32]]


def _modules(model: Any) -> tuple[Any, Any, Any]:
    layer = model.model.layers[LAYER]
    return layer, layer.self_attn, layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def hooked(model: Any, tokens: list[int]) -> Found:
    """What PyTorch hooks see at one layer: `[T, ...]` by the points' names, and the logits."""
    layer, attention, mlp = _modules(model)
    found: Found = {}

    def keep(name: str, *, of_input: bool = False, shape: tuple[int, ...] = ()) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            value = arguments[0] if of_input else output
            value = value[0] if isinstance(value, tuple) else value
            value = value.detach().numpy().reshape(len(tokens), *(shape or (value.shape[-1],)))
            found[name] = value

        return hook

    width, factor = attention.head_dim if hasattr(attention, "head_dim") else -1, 1.0
    plan: list[tuple[Any, Any]] = [(layer, keep("resid_post")), (attention.o_proj, keep("z", of_input=True))]
    if queries := getattr(attention, "q_proj", None) or getattr(attention, "q_b_proj", None):
        plan += [(queries, keep("q"))]
    if hasattr(attention, "k_proj"):
        plan += [(attention.k_proj, keep("k", shape=(-1, width))), (attention.v_proj, keep("v", shape=(-1, width)))]
    if hasattr(layer, "residual_multiplier"):
        factor = layer.residual_multiplier
    has_later_norms = hasattr(layer, "post_feedforward_layernorm")
    plan += [(layer.post_attention_layernorm if has_later_norms else attention.o_proj, keep("attn_out"))]
    plan += [(layer.post_feedforward_layernorm if has_later_norms else mlp, keep("mlp_out"))]
    if hasattr(mlp, "gate_proj") and not hasattr(mlp, "experts"):
        plan += [(mlp.gate_proj, keep("mlp_pre")), (mlp.up_proj, keep("mlp_pre_linear"))]
        plan += [(mlp.down_proj, keep("mlp_post", of_input=True))]
    with ExitStack() as stack, torch.no_grad():

        def before(module: Any, arguments: Any, named: Any) -> None:
            states = arguments[0] if arguments else named["hidden_states"]
            found["resid_pre"] = states.detach().numpy()[0]

        stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        for module, hook in plan:
            stack.callback(module.register_forward_hook(hook).remove)
        out = model(torch.tensor([tokens]), output_attentions=True)
    for name in ("attn_out", "mlp_out"):
        found[name] = found[name] * factor
    found["pattern"] = out.attentions[LAYER][0].numpy()
    found["logits"] = out.logits[0].numpy()
    return found


@pytest.fixture(params=by_default(FAMILIES, "llama3", "gemma2", "qwen3_moe", "deepseek3"))
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, Any, Any]:
    model = save_with_transformers(request.param, tmp_path)
    params, cfg = ferrum_jax.load_params(tmp_path, dtype="float32")
    return request.param, model, params, cfg


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_captured_arrays_are_those_of_pytorch_hooks(both: tuple[str, Any, Any, Any]):
    name, model, params, cfg = both
    tokens = tiny.prompt(name)[:24]
    expected = hooked(model, tokens)
    logits = expected.pop("logits")
    points = tuple((point, LAYER) for point in expected)
    run = jax.jit(models.run, static_argnames=("cfg", "capture"))
    found_logits, found = run(params, jnp.asarray([tokens]), cfg, capture=points)
    close(found_logits[0], logits)
    assert {"resid_pre", "resid_post", "attn_out", "mlp_out", "z", "pattern"} <= set(expected)
    for point, theirs in expected.items():
        ours = np.asarray(found[point, LAYER][0])
        close(ours.reshape(theirs.shape), theirs)


def test_interventions_change_the_logits_as_pytorch_hooks_do(both: tuple[str, Any, Any, Any]):
    name, model, params, cfg = both
    tokens = tiny.prompt(name)[:24]
    layer, attention, _ = _modules(model)
    vector = np.random.RandomState(0).normal(size=cfg.hidden_size).astype(np.float32)
    heads = cfg.num_attention_heads

    def zero_head(module: Any, arguments: Any) -> Any:
        z = arguments[0].clone().reshape(1, len(tokens), heads, -1)
        z[:, 5:, heads - 1] = 0
        return (z.reshape(arguments[0].shape),)

    def add(module: Any, arguments: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        states = states + torch.from_numpy(vector)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def replace(module: Any, arguments: Any, named: Any) -> Any:
        states = (arguments[0] if arguments else named["hidden_states"]).clone()
        states[:, 3] = torch.from_numpy(vector)
        if arguments:
            return (states, *arguments[1:]), named
        return arguments, {**named, "hidden_states": states}

    mask = np.zeros((24, heads, 1), bool)
    mask[5:, heads - 1] = True
    at = np.zeros((24, 1), bool)
    at[3] = True
    cases: dict[str, tuple[Callable[[], Any], Any]] = {
        "zero a head from a position on": (
            lambda: attention.o_proj.register_forward_pre_hook(zero_head),
            {("z", LAYER): replace_with(np.float32(0), mask)},
        ),
        "add to the stream": (
            lambda: layer.register_forward_hook(add),
            {("resid_post", LAYER): Edit(add=vector)},
        ),
        "patch a position": (
            lambda: layer.register_forward_pre_hook(replace, with_kwargs=True),
            {("resid_pre", LAYER): replace_with(vector, at)},
        ),
    }
    plain = hooked(model, tokens)["logits"]
    for case, (register, edits) in cases.items():
        handle = register()
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].numpy()
        handle.remove()
        found = jax.jit(lambda ids, edits=edits: models.forward(params, ids, cfg, interventions=edits))
        close(found(jnp.asarray([tokens]))[0], expected)
        assert np.abs(expected - plain).max() > 1e-3, case
