"""Hook points against PyTorch hooks on transformers' modules: what is captured, and what interventions change."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import LLM, EngineConfig, Interventions, ModelConfig, SamplingParams, models
from ferrum_jax.models import Edit, Point, replace_with
from ferrum_jax.models.hooks import ATTENTION, NAMES, check_points
from ferrum_jax.models.specs import ParamTree
from tests import tiny
from tests.reference import torch_points
from tests.reference.test_models_reference import save_with_transformers
from tests.reference.torch_points import Arrays
from tests.tiers import by_default

pytestmark = pytest.mark.reference

TOLERANCE = 1e-5  # of the largest: float32 sums in another order, over three layers
FAMILIES = (
    "llama3", "mistral", "qwen2", "qwen3_window_biases", "granite", "granite_biases_tied", "smollm3", "phi3", "olmo2",
    "olmo3", "gemma", "gemma2", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek2", "deepseek3", "gpt_oss",
)  # fmt: skip
QUICK = "llama3", "granite", "phi3", "olmo2", "gemma2", "qwen2_moe", "deepseek3", "gpt_oss"
SERVED = "gemma2", "qwen3_moe", "deepseek3", "gpt_oss"
UNITS = ("q", "k", "v", "z", *ATTENTION, "router_logits", "expert_weights")  # one head, expert or choice is changed
LENGTH = 24
Edits = dict[Point, Edit[Any]]


class Pair(NamedTuple):
    """One model on both sides."""

    name: str
    theirs: Any
    params: ParamTree
    cfg: ModelConfig


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps PyTorch to one thread: products are so small that waiting for a second one takes most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("model")
    theirs = save_with_transformers(request.param, folder)
    return Pair(request.param, theirs, *ferrum_jax.load_params(folder, dtype="float32"))


every_family = pytest.mark.parametrize("pair", by_default(FAMILIES, *QUICK), indirect=True)


@partial(jax.jit, static_argnames="cfg")
def run(params: ParamTree, tokens: jax.Array, edits: Edits, cfg: ModelConfig) -> tuple[jax.Array, Any]:
    return models.run(params, tokens, cfg, capture=points_of(cfg), interventions=edits)


def points_of(cfg: ModelConfig) -> tuple[Point, ...]:
    """Every point that a model has."""
    return check_points([(name, None) for name in NAMES if cfg.latent is None or name not in ("k", "v")], cfg)


def ours(pair: Pair, tokens: list[int], edits: Edits) -> tuple[NDArray[np.float32], Arrays]:
    """Returns logits and every point, as `torch_points.run` does; one program for all values of edits."""
    logits, found = run(pair.params, jnp.asarray(np.array([tokens], np.int32)), edits, pair.cfg)
    groups = {point: value[0] if isinstance(value, tuple) else value for point, value in found.items()}
    return np.asarray(logits)[0], {point: np.asarray(value)[0] for point, value in groups.items()}


def neutral(shapes: Arrays, cfg: ModelConfig) -> Edits:
    """Returns edits that change nothing, at every point that is changed here.

    What is done to scores, weights and the choice of experts takes another way through a layer: in the last one alone,
    so that the others show the usual way.
    """
    last = cfg.num_hidden_layers - 1
    return {
        point: Edit(scale=np.ones_like(x), add=np.zeros_like(x))
        for point, x in shapes.items()
        if point.layer == last or point.name not in (*ATTENTION, "expert_indices")
    }


def edits_of(point: Point, plain: Arrays, other: Arrays, seed: int) -> Iterator[tuple[str, Edit[Any]]]:
    """Returns each kind of intervention at a point, as arrays of its shape; `other` is captured of other tokens."""
    x, patch, draw = plain[point], other[point], np.random.RandomState(seed)
    axis = 1 if point.name in ATTENTION else 0  # of the tokens
    at = np.arange(x.shape[axis]).reshape(-1, *(1,) * (x.ndim - 1 - axis))
    late, one = np.broadcast_to(at >= 5, x.shape), np.broadcast_to(at == 7, x.shape)
    first = last = np.ones_like(late)
    if point.name in UNITS:
        number = np.arange(x.shape[1 - axis]).reshape((-1, 1, 1) if axis else (1, -1, *(1,) * (x.ndim - 2)))
        first, last = np.broadcast_to(number == 0, x.shape), np.broadcast_to(number == number.max(), x.shape)
    if point.name == "expert_indices":
        yield "replace", instead(one, (x + 1) % (x.max() + 1), x.dtype)
        yield "patch", instead(late, patch, x.dtype)
        return
    noise = draw.normal(size=x.shape).astype(np.float32) * x[np.isfinite(x)].std()
    yield "add", Edit(scale=np.ones_like(x), add=noise)
    yield "scale", Edit(scale=draw.uniform(0.5, 1.5, x.shape).astype(np.float32), add=np.zeros_like(x))
    yield "zero", instead(late & last, np.zeros_like(x), x.dtype)
    yield "replace", instead(one, noise, x.dtype)
    yield "patch", instead(late & first, np.where(np.isfinite(patch), patch, 0), x.dtype)


def instead(where: NDArray[np.bool_], value: NDArray[Any], dtype: Any) -> Edit[NDArray[Any]]:
    return Edit(scale=(~where).astype(dtype), add=np.where(where, value, 0).astype(dtype))


def close(found: Any, expected: Any, message: str = "") -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    if np.issubdtype(expected.dtype, np.integer):
        np.testing.assert_array_equal(found, expected, message)
        return
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite, message)
    bound = TOLERANCE * np.abs(expected[finite]).max()
    np.testing.assert_allclose(found[finite], expected[finite], rtol=0, atol=bound, err_msg=message)


def tokens_of(name: str) -> tuple[list[int], list[int]]:
    prompt = tiny.prompt(name)
    return prompt[:LENGTH], prompt[-LENGTH:][::-1]


@every_family
def test_every_point_of_every_layer_is_that_of_pytorch_hooks(pair: Pair):
    tokens, _ = tokens_of(pair.name)
    logits, expected = torch_points.run(pair.theirs, tokens)
    assert set(expected) == set(points_of(pair.cfg))
    found_logits, found = ours(pair, tokens, {})
    close(found_logits, logits)
    for point, theirs in expected.items():
        close(found[point], theirs, str(point))


@every_family
def test_each_kind_of_intervention_at_every_point_changes_the_logits_as_pytorch_hooks_do(
    pair: Pair, compiles: list[str]
):
    """They add, scale, set a head to zero from a position on, replace a position, and patch from another run.

    Each is at one point of one layer; from kind to kind the layers take turns.
    """
    tokens, others = tokens_of(pair.name)
    plain_logits, plain = torch_points.run(pair.theirs, tokens)
    unchanged = neutral(plain, pair.cfg)
    their_other, our_other = torch_points.run(pair.theirs, others)[1], ours(pair, others, unchanged)[1]
    compiles.clear()
    for seed, name in enumerate(sorted({point.name for point in unchanged})):
        layers = [point.layer for point in unchanged if point.name == name]
        for turn in range(5):
            point = Point(name, layers[(seed + turn) % len(layers)])
            by_kind, by_our_kind = (list(edits_of(point, plain, other, seed)) for other in (their_other, our_other))
            if turn < len(by_kind):
                (kind, edit), (_, our_edit) = by_kind[turn], by_our_kind[turn]
                expected, _ = torch_points.run(pair.theirs, tokens, {point: edit})
                assert np.abs(expected - plain_logits).max() > 1e-3, (point, kind)
                close(ours(pair, tokens, unchanged | {point: our_edit})[0], expected, f"{kind} at {point}")
    assert compiles == []


@pytest.mark.parametrize("pair", by_default(SERVED, "gpt_oss"), indirect=True)
def test_chunks_rows_of_a_batch_and_answers_are_changed_as_by_pytorch_hooks_over_whole_sequences(
    pair: Pair, compiles: list[str]
):
    """Prompts are read 16 tokens a step, over a sliding-window cache where the model has windows."""
    cfg, (tokens, others), at = pair.cfg, tokens_of(pair.name), LENGTH // 2
    prompts = [tokens, others[:19], tokens[:13], others]
    patch = torch_points.run(pair.theirs, tokens[::-1])[1][Point("mlp_out", 1)][at]
    captured = [point for point in points_of(cfg) if point.name not in ATTENTION]
    engine = EngineConfig(
        dtype="float32", max_seqs=4, kv_capacity=48, block_size=8, max_step_tokens=16, decode_rows=(4,),
        query_blocks=(2,), block_tokens=8, window_kv=any(cfg.layer_windows),
    )  # fmt: skip
    params = SamplingParams(max_tokens=6, logprobs=True, prompt_logprobs=True, ignore_eos=True)
    with ferrum_jax.from_params(pair.params, cfg, engine=engine) as runner:
        llm = LLM.from_model(runner)
        for seed in range(2):
            each = interventions_of(cfg, patch, at, seed)
            compiles.clear()
            outs = llm.generate(prompts, params, interventions=each, capture=captured)
            assert not seed or compiles == []
            for out, given in zip(outs, each, strict=True):
                whole = out.prompt_token_ids + out.token_ids
                plain_logits, plain = torch_points.run(pair.theirs, whole)
                logits, points = torch_points.run(pair.theirs, whole, over_positions(given, plain))
                assert (np.abs(logits - plain_logits).max() > 1e-3) == (given is not None)
                assert logits[len(out.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == out.token_ids
                logprobs = np.take_along_axis(log_softmax(logits[:-1]), np.array(whole[1:])[:, None], axis=1)[:, 0]
                assert out.prompt_logprobs is not None
                assert out.logprobs is not None
                close(np.array([*out.prompt_logprobs[1:], *out.logprobs], np.float32), logprobs)
                for point in captured:
                    close(out.captured[point], points[point][:-1], str(point))


def interventions_of(cfg: ModelConfig, patch: NDArray[np.float32], at: int, seed: int) -> list[Interventions | None]:
    """Returns what is done to each of four rows: different things at the same points, in the last one nothing."""
    draw, last = np.random.RandomState(seed), cfg.num_hidden_layers - 1
    vector = draw.normal(size=cfg.hidden_size).astype(np.float32)
    is_kept = (np.arange(cfg.num_attention_heads) != seed)[:, None].astype(np.float32)
    steer = {("resid_post", 0): Edit(add=vector)}
    knock_out = {("z", 1): Edit(scale=is_kept)}
    replace = {("mlp_out", 1): replace_with(patch * (1 + seed))}
    if cfg.experts is None:
        steer |= {("mlp_post", last): Edit(scale=np.float32(0.5 + seed))}
    else:
        routes = np.arange(cfg.experts.num_experts_per_tok, dtype=np.int32) + seed
        steer |= {("router_logits", last): Edit(scale=np.float32(0.5 + seed))}
        knock_out |= {("expert_indices", last): replace_with(routes)}
    return [
        Interventions(steer),
        Interventions(knock_out, start=5 + seed),
        Interventions(replace, start=at, stop=at + 1),
        None,
    ]


def over_positions(given: Interventions | None, shapes: Arrays) -> Edits:
    """Returns interventions on a sequence as edits of all its tokens."""
    if given is None:
        return {}
    found: Edits = {}
    for at, edit in given.edits.items():
        point = Point(*at)
        scale, add = np.ones_like(shapes[point]), np.zeros_like(shapes[point])
        if edit.scale is not None:
            scale[given.start : given.stop] = edit.scale
        if edit.add is not None:
            add[given.start : given.stop] = edit.add
        found[point] = Edit(scale=scale, add=add)
    return found


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))
