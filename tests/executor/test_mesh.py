"""Law 4: a model divided over the devices of a mesh answers every call as it does on one device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.contract import DecodeRun, GreedyArgmax, Sampling
from ferrum_jax.contract.errors import InvalidParameterError, RequestValidationError, UnsupportedError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.executor.from_params import from_params
from ferrum_jax.models.layout import lay_out, layout_of
from ferrum_jax.models.specs import RULES, ParamTree
from tests import tiny
from tests.executor.conftest import CFG, REUSING, Oracle
from tests.executor.test_everything import run_machine
from tests.long import OPERATIONS

pytestmark = pytest.mark.devices

TOLERANCE = 1e-5  # of the largest number: float32 sums in another order
ENGINE = ferrum_jax.EngineConfig(
    max_seqs=3, kv_capacity=64, block_size=8, decode_rows=(3,), query_blocks=(3,), block_tokens=16, multi_step_tokens=4
)
MESHES = {  # heads, key heads with copies, experts by number, and both; sizes that do not divide are padded
    "model 2": {"model": 2},
    "model 3": {"model": 3},
    "model 4": {"model": 4},
    "expert 2": {"expert": 2},
    "expert 4": {"expert": 4},
    "expert 2, model 2": {"expert": 2, "model": 2},
    "data 2": {"data": 2},
    "data 2, model 2": {"data": 2, "model": 2},
}
QUICK = ("llama31", "model 4"), ("qwen2_moe", "expert 2, model 2")
PAIRS = [
    pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.slow, id=f"{name}, {mesh}")
    for name in tiny.CONFIGS
    for mesh in MESHES
    if "expert" not in MESHES[mesh] or tiny.model_config(name).experts is not None
]


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """A model on one device, and on a mesh."""
    name, mesh = request.param
    folder = tiny.write_folder(tmp_path_factory.mktemp(name), tiny.CONFIGS[name])
    with (
        ferrum_jax.load(folder, engine=ENGINE, progress=False) as one,
        ferrum_jax.load(folder, engine=ENGINE, mesh=MESHES[mesh], progress=False) as many,
    ):
        yield one, many


def agree(found: Any, expected: Any) -> None:
    """Demands the same answer, numbers to rounding."""
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            agree(mine, theirs)
    elif isinstance(expected, np.ndarray) and expected.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(1.0, np.abs(expected).max()))
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("pair", [pytest.param((p.values[0], p.values[1]), marks=p.marks, id=p.id) for p in PAIRS],
                         indirect=True)  # fmt: skip
def test_every_method_answers_as_on_one_device(pair: tuple[ModelRunner, ModelRunner]):
    one, many = pair
    tokens = np.random.default_rng(3).integers(97, size=40).tolist()

    def both(call: Any) -> None:
        agree(call(many), call(one))

    both(lambda runner: runner.prefill("a", tokens[:21]))
    both(lambda runner: runner.prefill("a", tokens[21:24]))
    both(lambda runner: runner.unified_forward([("a", tokens[24:25], 24, True), ("b", tokens[:9], 0, True)]))
    both(lambda runner: runner.decode_batch([("a", tokens[25], 25), ("b", tokens[9], 9)]))
    both(lambda runner: runner.forward_verify("b", tokens[10:15]))
    both(lambda runner: runner.fork("b", "c"))
    both(lambda runner: runner.decode_batch([("c", 3, 15), ("b", 4, 15)]))
    both(lambda runner: runner.truncate_kv("c", 7))
    both(lambda runner: runner.prefill("c", tokens[:4]))
    both(lambda runner: runner.decode_batch_with_logits_policy([("a", 5, 26)], [GreedyArgmax()]))
    both(lambda runner: runner.release("b"))
    scored = [("b", tokens[:20], tokens[1:21])]
    both(lambda runner: [(one.logprobs, one.greedy_ids) for one in runner.score_batch(scored)])
    run = [DecodeRun(cache_id="b", token=7, pos=20, max_tokens=6, sampling=Sampling(temperature=0.9), seed=11)]
    both(lambda runner: [one.token_ids for one in runner.decode_n(run)])
    for layer in range(one.model_config.num_hidden_layers):
        both(lambda runner, layer=layer: runner.kv_cache("c", layer))
    assert many.compile_stats()["compiles_after_warmup"] == 0
    mesh = {axis for axis, size in many.describe()["mesh"].items() if size > 1}
    assert not one.capabilities().supports_tensor_parallelism
    assert many.capabilities().supports_tensor_parallelism == (mesh != {"data"})


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("llama31", "model 4"), *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("llama31", "model 2"), ("deepseek3", "model 2"), ("gpt_oss", "model 2"), ("gemma2", "model 2")
    ))],
)  # fmt: skip
def test_edits_of_the_residual_stream_are_those_of_one_device(
    name: str, mesh: str, tmp_path_factory: pytest.TempPathFactory
):
    folder = tiny.write_folder(tmp_path_factory.mktemp("edited"), tiny.CONFIGS[name])
    found = []
    for where in (None, MESHES[mesh]):
        with ferrum_jax.load(folder, engine=ENGINE, mesh=where, progress=False) as runner:
            vector = np.linspace(-1, 1, runner.model_config.hidden_size, dtype=np.float32)
            plain = runner.prefill("plain", list(range(20)))
            edits = {("resid_mid", 1): models.Edit(add=vector), ("attn_out", 0): models.Edit(scale=np.float32(0.5))}
            runner.set_interventions("a", edits, start=3)
            runner.prefill("a", list(range(20)))
            together = runner.decode_batch([("a", 5, 20), ("plain", 5, 20)])
            found.append([*together, runner.forward_verify("a", [7, 8])])
            assert not np.allclose(*together, atol=1e-3)
            agree(runner.prefill("again", list(range(20))), plain)
    for one, many in zip(*found, strict=True):
        agree(many, one)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("llama31", "model 4"), *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("llama31", "model 2"), ("deepseek3", "model 2"), ("gpt_oss", "model 2"), ("gemma2", "model 2")
    ))],
)  # fmt: skip
def test_what_is_captured_is_what_one_device_captures(name: str, mesh: str, tmp_path_factory: pytest.TempPathFactory):
    folder = tiny.write_folder(tmp_path_factory.mktemp("captured"), tiny.CONFIGS[name])
    asked = {"hidden": (0, 2), "attention_weights": (1,), "points": [("attn_out", 1), ("resid_mid", 0)]}
    found = []
    for where in (None, MESHES[mesh]):
        with ferrum_jax.load(folder, engine=ENGINE, mesh=where, progress=False) as runner:
            found.append(runner.capture("a", list(range(20)), **asked))
            if where is not None:
                with pytest.raises(UnsupportedError, match="'z' is not available on a model divided over devices"):
                    runner.capture("a", [1], points=[("z", 1)])
                with pytest.raises(UnsupportedError, match="'z' is not available on a model divided over devices"):
                    runner.set_interventions("b", {("z", 0): models.Edit(scale=np.float32(2))})
                llm = ferrum_jax.LLM.from_model(runner)
                with pytest.raises(UnsupportedError, match="'z' is not available on a model divided over devices"):
                    llm.generate([[1]], capture=[("z", 1)])
                with pytest.raises(UnsupportedError, match="'z' is not available on a model divided over devices"):
                    llm.generate([[1]], interventions={("z", 0): models.Edit(scale=np.float32(2))})
                assert runner.kv_len("a") == 20
    one, many = found
    agree(many.logits, one.logits)
    for layer, states in one.hidden.items():
        agree(many.hidden[layer], states)
    agree(many.attention_weights[1], one.attention_weights[1])
    for point, array in one.points.items():
        agree(many.points[point], array)


def serve(folder: Path, mesh: dict[str, int] | None, **settings: Any) -> ModelRunner:
    return ferrum_jax.load(folder, engine=ENGINE, mesh=mesh, progress=False, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"layout": "fused", "quantize": "int8"},
        pytest.param({"layout": "fused"}, marks=pytest.mark.slow),
        pytest.param({"layout": "scanned"}, marks=pytest.mark.slow),
        pytest.param({"quantize": "int8"}, marks=pytest.mark.slow),
        pytest.param({"quantize": "float8_e4m3fn", "layout": "fused"}, marks=pytest.mark.slow),
        pytest.param({"quantize": "int8", "layout": "scanned"}, marks=pytest.mark.slow),
        pytest.param({"attention": "xla"}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": "float8_e4m3fn"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts_and_quantised_weights_give_the_same_logits(settings: dict[str, Any], tmp_path: Path):
    folder, tokens = tiny.write_folder(tmp_path, tiny.CONFIGS["llama31"]), list(range(3, 33))
    with serve(folder, None, **settings) as one, serve(folder, {"model": 3}, **settings) as many:
        agree(many.forward_verify("a", tokens), one.forward_verify("a", tokens))
        tiny.assert_same_tree(lay_out(many.params, one.model_config, layout_of(one.params)), one.params)
        assert many.model_info() == one.model_info()


@pytest.mark.parametrize("mesh", ["model 2", "data 2, model 2"])
def test_a_model_whose_layers_all_have_a_window_answers_as_on_one_device(mesh: str):
    """Its pool of blocks has no layers."""
    cfg = models.config_from_hf(tiny.CONFIGS["llama3"] | {"model_type": "mistral", "sliding_window": 8})
    params = models.init_params(cfg, jax.random.key(0))
    with (
        from_params(params, cfg, engine=ENGINE, window_kv=True) as one,
        from_params(params, cfg, engine=ENGINE, window_kv=True, mesh=MESHES[mesh]) as many,
    ):
        for runner in (one, many):
            assert runner.plan.cache.window_layers == cfg.num_hidden_layers
        agree(many.prefill("a", list(range(20))), one.prefill("a", list(range(20))))
        for pos in range(20, 30):
            agree(many.decode("a", 3, pos), one.decode("a", 3, pos))


def test_weights_of_a_mesh_are_read_and_set_in_the_checkpoints_form(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS["llama_biases"])
    other, cfg = tiny.tiny_params(tiny.CONFIGS["llama_biases"], seed=8), tiny.model_config("llama_biases")
    tokens = [5, 6, 7, 8]
    with serve(folder, {"model": 4}) as many, from_params(other, cfg, engine=ENGINE) as expected:
        before = many.prefill("a", tokens)
        with pytest.raises(RequestValidationError, match="release them before new weights are set"):
            many.set_params(other)
        many.release("a")
        with pytest.raises(InvalidParameterError, match="layout is 'fused', expected 'checkpoint' as on the mesh"):
            many.set_params(lay_out(other, cfg, "fused"))
        broken = jax.tree.map(lambda leaf: leaf, other)
        broken["model"]["layers"][1]["mlp"]["up_proj"]["weight"] = jnp.zeros((72, 47))
        with pytest.raises(InvalidParameterError, match=r"layers.1.mlp.up_proj.weight is float32\[72, 47\]"):
            many.set_params(broken)
        agree(many.prefill("a", tokens), before)
        many.release("a")
        many.set_params(other)
        tiny.assert_same_tree(many.params, other)
        agree(many.prefill("a", tokens), expected.prefill("a", tokens))
        many.release("a")
        expected.release("a")
        for runner in (many, expected):
            runner.set_params(lambda served: jax.tree.map(lambda leaf: leaf * 1.1, served))
        agree(many.prefill("a", tokens), expected.prefill("a", tokens))
        assert many.compile_stats()["compiles_after_warmup"] == 0


def test_parameters_that_lie_on_a_mesh_already_are_served_there():
    params, cfg = tiny.tiny_params(tiny.CONFIGS["qwen3"]), tiny.model_config("qwen3")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mine = jax.sharding.Mesh(mesh.devices[:1], ("data", "model"))
    spread = jax.device_put(params, models.specs.shardings(models.family(cfg).param_specs(cfg), mesh, {
        **RULES, "vocab": None}))  # fmt: skip
    with from_params(params, cfg, engine=ENGINE) as one, from_params(spread, cfg, mesh=mine, engine=ENGINE) as many:
        agree(many.prefill("a", [1, 2, 3]), one.prefill("a", [1, 2, 3]))
        assert many.placed.placement.devices == tuple(mine.devices.ravel())
    with pytest.raises(UnsupportedError, match="the parameters lie on 4 devices, a runner has one: give the mesh"):
        from_params(spread, cfg, engine=ENGINE)


def test_any_sequence_of_calls_on_a_mesh_gives_the_logits_of_the_cache_free_forward(
    spread_runner: ModelRunner, oracles: dict[str | None, Oracle], adapter_folders: dict[str, str]
):
    assert run_machine(spread_runner, oracles, adapter_folders, operations=80, steps=40) >= 80


@pytest.mark.slow
def test_very_many_sequences_of_calls_on_a_mesh_do(
    spread_runner: ModelRunner, oracles: dict[str | None, Oracle], adapter_folders: dict[str, str]
):
    operations = min(OPERATIONS, 20_000)
    assert run_machine(spread_runner, oracles, adapter_folders, operations=operations, steps=100) >= operations


@pytest.fixture(scope="module")
def spread_runner(params: ParamTree) -> Iterator[ModelRunner]:
    """A warm runner with prefixes, adapters and multi-step programs, on four devices for two key heads."""
    with from_params(params, CFG, mesh={"model": 4}, engine=REUSING) as runner:
        runner.warmup(progress=False)
        yield runner


def test_the_same_seeds_draw_the_same_text_on_a_mesh(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS["llama31"])
    prompts = [tiny.prompt("llama31")[: 5 + 4 * at] for at in range(5)]
    wanted = [ferrum_jax.SamplingParams(temperature=0.8, top_p=0.9, seed=at, max_tokens=12) for at in range(5)]
    texts = []
    for mesh in (None, {"model": 2}):
        with serve(folder, mesh) as runner:
            llm = ferrum_jax.LLM.from_model(runner)
            texts.append([(out.token_ids, out.finish_reason) for out in llm.generate(prompts, wanted)])
    assert texts[0] == texts[1]


def test_a_second_start_on_a_mesh_compiles_nothing(tmp_path: Path, compiles: list[str]):
    folder = tiny.write_folder(tmp_path / "model", tiny.CONFIGS["llama31"])
    answers, stats = [], {}
    for _ in range(2):
        compiles.clear()
        with serve(folder, {"model": 2}, artifacts=tmp_path / "steps") as runner:
            runner.warmup(progress=False)
            answers.append(runner.prefill("a", [1, 2, 3]))
            stats = runner.compile_stats()
    assert stats["compiled"] == 0
    assert stats["loaded"] >= 1
    assert compiles == []
    np.testing.assert_array_equal(*answers)
    with serve(folder, {"model": 4}, artifacts=tmp_path / "steps") as runner:  # other programs
        agree(runner.prefill("a", [1, 2, 3]), answers[0])
        assert runner.compile_stats()["compiled"] >= 1


def test_steps_of_a_mesh_in_any_order_of_devices_are_loaded_again(tmp_path: Path):
    params, cfg = tiny.tiny_params(tiny.CONFIGS["llama31"]), tiny.model_config("llama31")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:0:-1]), ("model",))
    answers = []
    for num_loaded in (0, 1):
        with from_params(params, cfg, mesh=mesh, engine=ENGINE, artifacts=tmp_path) as runner:
            answers.append(runner.prefill("a", [1, 2, 3]))
            assert runner.compile_stats()["loaded"] == num_loaded
    np.testing.assert_array_equal(*answers)
