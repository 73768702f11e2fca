"""`ferrum-jax plan`, in this process."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.test_cli import Run, refused, run, steps

__all__ = ["run", "steps"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(tiny.CONFIGS["qwen3"] | {"num_hidden_layers": 1}))
    return path


def test_plan_prints_what_is_needed_and_what_limits_it(run: Run, config: Path):
    code, out, _ = run("plan", config, "--device", "H100", "--mesh", "data=2,model=2", "--context", "32", "--rows", "3")
    assert code == 0
    text = " ".join(out.split())
    for says in (
        "tiny, weights in bfloat16", "4 x h100, data=2, model=2", "80.00 GB usable, 3.35 TB/s", "NVLink 4, 450 GB/s",
        "6 in the decode step below", "2 of 288 bytes in a decode step", "decode step", "limited by collectives",
    ):  # fmt: skip
        assert says in text
    assert "not lowered" not in text
    assert "TFLOP/s; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 " in text


def test_plan_prints_one_json_object_instead(run: Run, config: Path):
    options = ("--device", "v5e", "--context", "32", "--dtype", "int8", "--no-lower", "--json")
    code, out, _ = run("plan", config.parent, *options)
    assert code == 0
    found = json.loads(out)
    assert (found["model"], found["weights"], found["device"]) == ("tiny", "int8", "v5e")
    assert (found["temporary_bytes"], found["collectives"], found["interconnect"]) == (None, [], None)
    assert found["mesh"] == {"data": 1, "expert": 1, "model": 1}
    assert found["rows"] == 64
    assert found["decode"]["tokens_per_second"] == pytest.approx(64e3 / found["decode"]["step_ms"])


def test_plan_counts_no_more_positions_than_the_model_has(run: Run, config: Path):
    code, out, _ = run("plan", config, "--device", "h100", "--no-lower", "--json")
    assert (code, json.loads(out)["context"]) == (0, 160)
    refused(run("plan", config, "--device", "h100", "--context", "-1"), "Config", "1 to 160 positions")


def test_plan_counts_the_positions_that_longrope_reaches(run: Run, config: Path):
    config.write_text(json.dumps(tiny.CONFIGS["phi3_beyond"]))
    for options, context in (((), 160), (("--context", "100"), 100)):
        code, out, _ = run("plan", config, "--device", "h100", "--no-lower", "--json", *options)
        assert (code, json.loads(out)["context"]) == (0, context)


def test_plan_refuses_what_does_not_fit_or_is_not_known(run: Run, config: Path):
    big = run("plan", "llama-3.1-8b", "--device", "v5e", "--no-lower")
    refused(big, "ResourceExhausted", "16.06 GB for parameters", "14.40 GB are usable", "fits on model=2 or on model=4")
    refused(run("plan", config, "--device", "h100", "--mesh", "model=3x"), "Config", "model of the mesh is '3x'")
    refused(
        run("plan", config, "--device", "h100", "--mesh", "model=9", "--context", "32"), "Config", "8 attention heads"
    )
    refused(run("plan", config, "--device", "h99"), "Config", "known are h100, h200")
    refused(run("plan", config, "--device", "h100", "--context", "1000"), "Config", "1 to 160 positions")
    refused(run("plan", "nothing", "--device", "h100"), "Config", "known names are")
    refused(run("plan", "~nobody-is-called-so/model", "--device", "h100"), "Config", "cannot be found")
