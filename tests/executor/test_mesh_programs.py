"""What the programs of a mesh move between devices: the sums that are due, and nothing of the KV or the weights."""

import re
from collections import Counter
from pathlib import Path

import pytest

import ferrum_jax
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.compile.step import StepKey
from tests import tiny

pytestmark = pytest.mark.devices

COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
ENGINE = ferrum_jax.EngineConfig(
    max_seqs=3, kv_capacity=64, block_size=8, decode_rows=(3,), query_blocks=(3,), block_tokens=16, multi_step_tokens=4,
    max_loras=2, max_lora_rank=4,
)  # fmt: skip
CASES = {  # family: axes, and sums of a layer
    "llama31": ({"model": 4}, 2),
    "qwen2_moe": ({"expert": 2, "model": 2}, 2),
    "deepseek3": ({"expert": 2}, 2),
    "olmo2": ({"model": 2}, 3),  # the squares of all heads
}


def collectives(text: str) -> Counter[str]:
    """Counts what moves between devices in a program's text."""
    return Counter(re.findall(rf"= \S+ ({COLLECTIVES})(?:-start)?\(", text))


def shapes_moved(text: str) -> list[tuple[str, str]]:
    """Kind and shape of every collective of a program."""
    return [(kind, shape) for shape, kind in re.findall(rf"= (\S+?)(?:\{{\S*)? ({COLLECTIVES})(?:-start)?\(", text)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name != "qwen2_moe" else ()) for name in CASES]
)
def test_a_step_adds_parts_twice_a_layer_and_joins_the_logits(name: str, tmp_path: Path):
    mesh, sums = CASES[name]
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS[name])
    with ferrum_jax.load(folder, engine=ENGINE, mesh=mesh, progress=False) as runner:
        cfg, kv_bytes = runner.model_config, runner.plan.cache.num_bytes
        keys = [key for key in runner.plan.declared() if isinstance(key, StepKey | MultiStepKey)]
        kinds = {(key.decode_rows > 0, key.blocks > 0) for key in keys if isinstance(key, StepKey)}
        assert kinds == {(True, False), (False, True), (True, True)}
        for key in keys:
            program = runner._programs.get(key)
            text, memory = program.as_text(), program.memory_analysis()
            assert text is not None
            assert memory is not None
            # one sum for the embedding
            assert collectives(text) == {"all-reduce": 1 + sums * cfg.num_hidden_layers, "all-gather": 1}, key
            rows = key.rows_at_once if isinstance(key, StepKey) else key.rows
            width = -(-cfg.vocab_size // len(runner.placed.placement.devices)) * len(runner.placed.placement.devices)
            moved = shapes_moved(text)
            assert ("all-gather", f"f32[{rows},{width}]") in moved
            tokens = key.num_tokens if isinstance(key, StepKey) else key.rows
            sizes = {shape for kind, shape in moved if kind == "all-reduce"}
            assert sizes <= {f"f32[{tokens},{cfg.hidden_size}]", f"f32[{tokens},2]"}, key
            assert memory.alias_size_in_bytes >= kv_bytes, key
            assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 5 * rows * 4 * width, key


def test_other_programs_move_nothing(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS["llama31"])
    with ferrum_jax.load(folder, engine=ENGINE, mesh={"model": 4}, progress=False) as runner:
        keys = [key for key in runner.plan.declared() if not isinstance(key, StepKey | MultiStepKey)]
        assert len(keys) >= 5
        for key in keys:
            text = runner._programs.get(key).as_text()
            assert text is not None
            assert not collectives(text), key
