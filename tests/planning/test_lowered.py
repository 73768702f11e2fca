"""What is predicted is what a lowered step really has: bytes of its arguments, and its collectives."""

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ferrum_jax.compile.step import packed_size
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import DeviceError
from ferrum_jax.planning import temporaries
from ferrum_jax.planning.estimate import Deployment, parameter_bytes
from ferrum_jax.planning.work import step_collectives
from tests import tiny
from tests.planning.plans import deployment
from tests.tiers import by_default

ROWS = 3
CASES = [
    ("llama31", None, {}),
    ("llama31", None, {"model": 4}),
    ("llama32_tied", "int8", {"model": 3}),
    ("gemma3", None, {"model": 2}),
    ("olmo2", None, {"model": 3}),
    ("qwen2_moe", None, {"expert": 2, "model": 2}),
    ("deepseek3", "float8_e4m3fn", {"expert": 2}),
    ("deepseek3", None, {"model": 4}),
    ("gpt_oss", None, {"expert": 3}),
]
COLLECTIVE = re.compile(r"= (?:\()?(\w+)\[([\d,]*)\]\S* (all-reduce|all-gather)\(")
BYTES = {"f32": 4, "bf16": 2}


def _compiled(at: Deployment) -> tuple[Any, str, int]:
    """Bytes of the arguments of a decode step on each device, its HLO, and the elements of its buffer."""
    context, keys = temporaries.lower_for(at)
    key = keys[-1]
    assert (key.decode_rows, key.blocks) == (ROWS, 0)
    compiled = key.lower(context).compile()
    return compiled.memory_analysis(), compiled.as_text() or "", packed_size(key)


@pytest.mark.devices
@pytest.mark.parametrize(("name", "quantize", "mesh"), by_default(CASES, *CASES[1:7]), ids=str)
def test_bytes_and_collectives_are_those_of_the_lowered_step(name: str, quantize: str | None, mesh: dict[str, Any]):
    at = deployment(name, quantize=quantize, rows=ROWS, **mesh)
    memory, text, elements = _compiled(at)
    plan = at.engine(ROWS)
    predicted = sum(parameter_bytes(at).values()) + plan.cache.num_bytes
    beside = 4 * (ROWS + elements)  # the tokens drawn last, and the packed input
    assert memory.argument_size_in_bytes == predicted + beside
    assert memory.alias_size_in_bytes == plan.cache.num_bytes

    expected = Counter()
    for one in step_collectives(at.division, num_tokens=ROWS, logit_rows=ROWS, itemsize=4):
        expected[one.kind, one.num_bytes] += one.count
    found = Counter()
    for dtype, sizes, kind in COLLECTIVE.findall(text):
        found[kind, BYTES[dtype] * math.prod(map(int, filter(None, sizes.split(","))))] += 1
    assert found == expected


def test_experts_and_dense_layers_are_both_compiled_and_further_layers_extrapolated(monkeypatch: pytest.MonkeyPatch):
    cfg = replace(tiny.model_config("deepseek3"), num_hidden_layers=9, layer_windows=(None,) * 9)
    assert cfg.experts is not None
    cfg = replace(cfg, experts=replace(cfg.experts, sparse_layers=(False,) * 2 + (True,) * 7))
    compiled: list[tuple[bool, ...]] = []

    def counted(_: Deployment, few: ModelConfig) -> int:
        assert few.experts is not None
        compiled.append(few.experts.sparse_layers)
        return 1000 + 30 * few.num_hidden_layers

    monkeypatch.setattr(temporaries, "compiled_bytes", counted)
    monkeypatch.setattr(temporaries, "gathered_bytes", lambda _: 7)
    at = deployment(cfg, rows=2, model=2)
    assert temporaries.measure(at) == 1000 + 30 * 9 + 7
    assert compiled == [(False, True), (False, True) * 2]
    half = replace(at, subject=replace(at.subject, dtype="bfloat16"))
    assert temporaries.measure(half) == 1000 + 30 * 2 + 15 * 7 + 7


@pytest.mark.slow
def test_what_is_extrapolated_is_near_what_the_whole_model_takes():
    cfg = replace(tiny.model_config("llama31"), num_hidden_layers=5, layer_windows=(None,) * 5)
    at = deployment(cfg, rows=2, model=2, context=32)
    assert temporaries.measure(at) == pytest.approx(temporaries.compiled_bytes(at, cfg), rel=0.1)


def test_windows_of_two_kinds_are_both_compiled():
    windows = temporaries.few_layers(tiny.model_config("gemma3"), 1).layer_windows
    assert set(windows) == set(tiny.model_config("gemma3").layer_windows)
    assert len(windows) == 2


def test_experts_that_are_gathered_are_counted_in_their_bits():
    plain, fp8 = (temporaries.gathered_bytes(deployment("qwen3_moe", quantize=q)) for q in (None, "float8_e4m3fn"))
    at_once = 2**27 // (28 * 48)
    assert plain == at_once * 3 * 28 * 48 * 4
    assert fp8 == at_once * (3 * 28 * 48 + 4 * (28 + 28 + 48))
    assert temporaries.gathered_bytes(deployment("llama31")) == 0


def test_a_mesh_that_this_cpu_cannot_stand_for_is_refused():
    with pytest.raises(DeviceError, match="needs 8 devices"):
        temporaries.measure(deployment("llama31", rows=1, model=8))


def test_float32_is_what_the_tiny_models_are_lowered_in():
    assert np.dtype(temporaries.LOWERED).itemsize == 4
