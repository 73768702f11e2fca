"""A runner over the CPU kernels: what it tells, and that it answers as one over XLA does, in whatever bits."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import EngineConfig, models
from ferrum_jax.compile.fingerprint import describe_code
from ferrum_jax.contract import ActiveLoraAdapter
from ferrum_jax.executor import ModelRunner, plan_engine
from ferrum_jax.executor.from_params import from_params
from ferrum_jax.kvcache import state
from ferrum_jax.models import Batch, Rows, specs
from ferrum_jax.models.adapters import LoraSpec, stack_specs
from ferrum_jax.models.hooks import Point
from ferrum_jax.models.layout import lay_out, layout_of
from ferrum_jax.models.quantisation import quantise
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops import native
from ferrum_jax.ops.quantised import is_quantised
from ferrum_jax.sharding.devices import find_device
from tests import tiny
from tests.executor.conftest import CFG, ENGINE, REUSING, WINDOWED, adapter_tensors
from tests.tiers import by_default

pytestmark = pytest.mark.skipif(native.instruction_set() is None, reason=f"no kernels: {native.library()}")

SMALL = ferrum_jax.EngineConfig(
    max_seqs=3, kv_capacity=160, block_size=8, decode_rows=(3,), query_blocks=(2,), verify_tokens=8
)


def make(params: ParamTree, attention: str) -> ModelRunner:
    plan = plan_engine(replace(ENGINE, attention=attention), CFG, platform="cpu", free_bytes=10**9)
    return ModelRunner(params, CFG, plan, device=find_device("cpu"))


def answers(runner: ModelRunner, tokens: list[int]) -> list[NDArray[np.float32]]:
    """Logits of a prompt, of its verification in parts, and of two sequences that decode together."""
    found = [np.asarray(runner.prefill("a", tokens[:-4])), runner.forward_verify("a", tokens[-4:])]
    runner.prefill("b", tokens[:5])
    decoded = runner.decode_batch([("a", tokens[0], len(tokens)), ("b", tokens[5], 5)])
    return [np.asarray(one, np.float32) for one in [*found, *decoded]]


def load(folder: Path, **settings: Any) -> ModelRunner:
    return ferrum_jax.load(folder, engine=SMALL, progress=False, artifacts=False, **settings)


def write_in(dtype: Any, folder: Path, name: str) -> Path:
    config = tiny.CONFIGS[name]
    return tiny.write_folder(
        folder, config, named={key: value.astype(dtype) for key, value in dict(tiny.tensors(config)).items()}
    )


def test_a_runner_tells_which_code_serves_it(params: ParamTree):
    with make(params, "cpu") as runner:
        told = runner.describe()
    assert (told["attention"], told["kernels"], told["no_kernels_because"]) == ("cpu", native.instruction_set(), None)
    assert told["weight_bytes"] == {"float32": sum(leaf.nbytes for leaf in jax.tree.leaves(params))}
    assert (told["dtype"], told["layout"], told["kv_capacity"]) == ("float32", "checkpoint", ENGINE.kv_capacity)
    with make(params, "xla") as runner:
        told = runner.describe()
    assert (told["attention"], told["kernels"]) == ("xla", None)
    assert told["no_kernels_because"] == "attention='xla', the kernels are those of attention='cpu'"
    in_bfloat16 = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    with make(in_bfloat16, "xla") as runner:
        assert runner.describe()["no_kernels_because"] == "dtype is bfloat16, the kernels compute in float32"


def test_steps_on_disk_depend_on_the_kernels(monkeypatch: pytest.MonkeyPatch):
    facts = describe_code()
    assert (facts["kernels"], facts["instruction_set"]) == (native.digest(), native.instruction_set())
    monkeypatch.setattr(native, "digest", lambda: "another")
    assert describe_code() != facts


@pytest.mark.parametrize("name", by_default(tiny.CONFIGS, "gpt_oss"))
def test_kernels_answer_as_xla_does(name: str, tmp_path: Path):
    folder, tokens = tiny.write_folder(tmp_path, tiny.CONFIGS[name]), tiny.prompt(name)[: tiny.LENGTH]
    with load(folder, attention="xla") as wanted, load(folder) as found:
        assert found.describe()["attention"] == "cpu"
        for ours, xla in zip(answers(found, tokens), answers(wanted, tokens), strict=True):
            np.testing.assert_allclose(ours, xla, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", by_default(["llama3", "gpt_oss", "gemma3", "deepseek3"], "llama3"))
def test_a_kv_of_eight_bits_is_read_by_kernels_as_xla_reads_it(name: str, tmp_path: Path):
    folder, tokens = tiny.write_folder(tmp_path, tiny.CONFIGS[name]), tiny.prompt(name)[: tiny.LENGTH]
    eight: dict[str, Any] = {"kv_dtype": "fp8"}
    with load(folder) as whole, load(folder, attention="xla", **eight) as wanted, load(folder, **eight) as found:
        assert (found.describe()["attention"], found.describe()["kv_dtype"]) == ("cpu", "float8_e4m3fn")
        assert 4 * found.plan.cache.num_bytes == whole.plan.cache.num_bytes
        exact, xla, ours = answers(whole, tokens), answers(wanted, tokens), answers(found, tokens)
        layer = next(at for at, one in enumerate(found.plan.pool_layers) if one is not None)  # not a window alone
        assert found.kv_cache("a", layer)[0].dtype == ml_dtypes.float8_e4m3fn
    for one, two, three in zip(exact, xla, ours, strict=True):
        np.testing.assert_allclose(three, two, rtol=0, atol=1e-4)
        assert 1e-4 < np.abs(three - one).mean() < 0.3 * one.std()  # of experts others may be chosen


@pytest.mark.parametrize("attention", by_default(["cpu", "xla"], "cpu"))
def test_a_kv_of_eight_bits_keeps_the_laws(attention: str, tmp_path: Path):
    folder, tokens = tiny.write_folder(tmp_path, tiny.CONFIGS["llama3"]), tiny.prompt("llama3")[: tiny.LENGTH]
    with load(folder, attention=attention, kv_dtype="fp8", prefix_cache=True) as runner:
        whole = np.asarray(runner.prefill("a", tokens))
        found = [np.asarray(runner.prefill("b", tokens))]  # its first blocks are reused
        counts = runner.cache_metrics_snapshot()
        assert (counts["hits"], counts["kv_dtype"]) == (1, "float8_e4m3fn")
        runner.release("b")
        runner.fork("a", "c")
        runner.truncate_kv("c", 5)
        found.append(np.asarray(runner.prefill("c", tokens[5:])))
        runner.reset()
        for token in tokens[:-1]:
            runner.prefill("d", [token])
        found.append(np.asarray(runner.decode("d", tokens[-1], len(tokens) - 1)))
    for one in found:
        np.testing.assert_allclose(one, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", by_default([ml_dtypes.bfloat16, np.float16], ml_dtypes.bfloat16))
@pytest.mark.parametrize("name", by_default(tiny.CONFIGS, "mixtral"))
def test_weights_of_sixteen_bits_give_the_same_bits(dtype: Any, name: str, tmp_path: Path):
    folder, tokens = write_in(dtype, tmp_path, name), tiny.prompt(name)[: tiny.LENGTH]
    with load(folder, quantize="none") as wanted, load(folder) as found:
        kept = [leaf for leaf in jax.tree.leaves(found.params, is_leaf=is_quantised) if is_quantised(leaf)]
        assert {leaf.values.dtype for leaf in kept} == {np.dtype(dtype)}
        assert sum(found.describe()["weight_bytes"].values()) < 0.6 * sum(wanted.describe()["weight_bytes"].values())
        for ours, wide in zip(answers(found, tokens), answers(wanted, tokens), strict=True):
            np.testing.assert_array_equal(ours, wide)


def test_weights_are_kept_only_where_kernels_multiply_them(tmp_path: Path):
    folder = write_in(ml_dtypes.bfloat16, tmp_path, "llama3")
    for settings in ({"attention": "xla"}, {"attention": "xla", "quantize": "auto"}, {"quantize": "none"}):
        with load(folder, **settings) as runner:
            assert runner.describe()["weight_bytes"].keys() == {"float32"}
    with load(folder, quantize="auto") as runner, load(folder) as by_default:
        assert runner.describe()["weight_bytes"] == by_default.describe()["weight_bytes"]
        assert "bfloat16" in runner.describe()["weight_bytes"]


@pytest.mark.parametrize("layout", by_default(["fused", "scanned"], "scanned"))
def test_weights_of_sixteen_bits_are_kept_in_every_layout(layout: str, tmp_path: Path):
    folder, tokens = write_in(ml_dtypes.bfloat16, tmp_path, "llama3"), tiny.prompt("llama3")
    with load(folder, quantize="none", layout=layout) as wanted, load(folder, layout=layout) as found:
        assert found.describe()["weight_bytes"].keys() == {"bfloat16", "float32"}
        for ours, wide in zip(answers(found, tokens), answers(wanted, tokens), strict=True):
            np.testing.assert_array_equal(ours, wide)


def everything(runner: ModelRunner, tokens: list[int]) -> list[NDArray[np.float32]]:
    """What `answers` gives, what is captured of one layer, and rows with and without an adapter."""
    found = answers(runner, tokens)
    runner.reset()
    captured = runner.capture("a", tokens, hidden=(1,), attention_weights=(1,))
    found += [*captured.hidden.values(), *captured.attention_weights.values()]
    if runner.plan.loras is not None:
        runner.set_lora("tuned", {key: jnp.asarray(value) for key, value in adapter_tensors("one").items()}, scale=2)
        runner.set_lora_adapter_for_cache("b", ActiveLoraAdapter(name="tuned", path=""))
        found.append(runner.prefill("b", tokens))
        found += runner.decode_batch([("a", 1, len(tokens)), ("b", 1, len(tokens))])
    return [np.asarray(one) for one in found]


@pytest.mark.parametrize(
    "engine", [REUSING, pytest.param(WINDOWED, marks=pytest.mark.slow)], ids=["adapters", "sliding windows"]
)
def test_stacked_layers_capture_adapt_and_keep_windows_as_others(engine: EngineConfig, params: ParamTree):
    tokens, stacked = list(range(1, 21)), lay_out(params, CFG, "scanned")
    with from_params(stacked, CFG, engine=engine) as found, from_params(params, CFG, engine=engine) as wanted:
        assert found.plan.cache == wanted.plan.cache
        assert bool(found.plan.cache.window_layers) == (engine is WINDOWED)
        for ours, theirs in zip(everything(found, tokens), everything(wanted, tokens), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


STEPS: dict[str, tuple[EngineConfig, tuple[Point, ...], Any]] = {  # sizes, what is captured, adapters
    "a loop": (REUSING, (), None),
    "a hook point": (REUSING, (Point("z", 1),), None),
    "adapters": (REUSING, (), np.zeros(4, np.int32)),
    "sliding windows": (WINDOWED, (), None),
}


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_over_stacked_layers_copies_no_matrix_of_them(kind: str, is_quantised: bool, params: ParamTree):
    engine, capture, adapters = STEPS[kind]
    stacked = lay_out(quantise(params, CFG, "int8") if is_quantised else params, CFG, "scanned")
    plan = plan_engine(replace(engine, attention="cpu"), CFG, platform="cpu", free_bytes=10**9)
    ones, tables = np.ones(4, np.int32), np.zeros((4, plan.buckets.table_columns + plan.cache.window_blocks), np.int32)
    rows = Rows(tokens=ones[:, None], lengths=ones, counts=ones, tables=tables, adapters=adapters)

    def step(params: ParamTree, kv: Any, batch: Any, loras: ParamTree) -> Any:
        how: dict[str, Any] = {"loras": loras, "attention": "cpu", "capture": capture}
        return models.family(CFG).forward(params, kv, batch, CFG, **how)

    loras = specs.shapes(stack_specs(CFG, LoraSpec(max_loras=2, max_rank=4)), "float32")
    batch = Batch(groups=(rows,), logit_rows=None)
    lowered = jax.jit(step, donate_argnums=1).lower(stacked, state.shapes(plan.cache), batch, loras)
    program = lowered.compile().as_text() or ""
    assert 'custom_call_target="ferrum_linear"' in program
    assert (" while(" in program) == (kind == "a loop")  # it would do for all layers what is asked of one
    for leaf in jax.tree.leaves(stacked["model"]["layers"]):
        if leaf.ndim == 3 and leaf.shape[-1] > 1:
            element, shape = "s8" if is_quantised else "f32", f"{leaf.shape[1]},{leaf.shape[2]}"
            assert not re.search(rf"= {element}\[(\d+,)?{shape}\]\S* (?!parameter|get-tuple-element)", program)


@pytest.mark.parametrize("name", by_default(tiny.CONFIGS, "gpt_oss", "qwen3_window_biases"))
def test_stacked_layers_answer_as_those_of_the_checkpoint(name: str, tmp_path: Path):
    folder, tokens = tiny.write_folder(tmp_path, tiny.CONFIGS[name]), tiny.prompt(name)[: tiny.LENGTH]
    with load(folder) as found, load(folder, layout="checkpoint") as wanted:
        kinds = set(map(jax.tree.structure, wanted.params["model"]["layers"]))
        is_alike = len(kinds) == 1 and wanted.model_config.latent is None
        assert (layout_of(found.params) == "scanned") == is_alike
        for ours, theirs in zip(answers(found, tokens), answers(wanted, tokens), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def test_a_row_that_decodes_has_the_same_logits_beside_any_others_of_its_bucket(params: ParamTree):
    with make(params, "cpu") as runner:
        for at, name in enumerate("abcd"):
            runner.prefill(name, list(range(1, 8 + at)))

        def decode(names: str) -> dict[str, NDArray[np.float32]]:
            found = runner.decode_batch([(name, 3, 7 + "abcd".index(name)) for name in names])
            for name in names:
                runner.truncate_kv(name, 7 + "abcd".index(name))
            return {name: np.array(one) for name, one in zip(names, found, strict=True)}

        together = decode("abcd")
        for names in ("abc", "dcb", "bad"):
            for name, logits in decode(names).items():
                np.testing.assert_array_equal(logits, together[name])


def test_a_runner_without_kernels_says_why(params: ParamTree, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "library", lambda: "they were not built")
    with make(params, "xla") as runner:
        assert runner.describe()["no_kernels_because"] == "there are no kernels: they were not built"
