"""`bench.quantised` counts the bytes that a step reads of each kind of weights, and has the peers that can run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import models, quantised
from bench.models import TINY
from ferrum_jax.config import ExpertsConfig

EXPERTS = ExpertsConfig(
    num_experts=16, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True, sparse_layers=(True, True)
)


@pytest.mark.parametrize("rows", [[(9, 1)], [(0, 32)]])
def test_of_quantised_experts_a_step_reads_those_that_it_meets(rows: list[tuple[int, int]]):
    plain = models.random("experts", replace(TINY, model_type="qwen3_moe", experts=EXPERTS), "float32")
    subjects = {name: quantised._kept(plain, name) for name in (quantised.PLAIN, "int8")}
    works = quantised._works(subjects, rows)
    cached = sum(start + count for start, count in rows) * 2 * 2 * TINY.num_key_value_heads * TINY.head_dim * 4
    full, int8 = (works[name].num_bytes - cached for name in subjects)
    assert full / 4 < int8 < 0.35 * full  # values of one byte, and their scales
    assert works["int8"].operations == works[quantised.PLAIN].operations


def test_a_model_that_is_not_written_as_q8_0_has_the_peer_over_its_own_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def load(subject: Any, platform: str, file: Path | None = None, kept: str = "F32") -> str:
        if file is None:
            raise NotImplementedError(f"no {kept} of a gemma3")
        return file.name

    path = tmp_path / "gemma.gguf"
    path.touch()
    monkeypatch.setattr(quantised, "LlamaCppPeer", load)
    monkeypatch.setattr(quantised, "NEEDS", {"llama.cpp": ()})
    plain = models.Subject("gemma", {}, TINY, "float32")
    peers = quantised._find_peers(SimpleNamespace(smoke=False, model=str(path)), plain)  # pyright: ignore[reportArgumentType]
    assert peers == {quantised.SAME_FILE: "gemma.gguf"}
    assert "no Q8_0 of a gemma3" in capsys.readouterr().out
