"""Benchmarks whose records are drawn run on a tiny model, and their images are drawn: `pytest -m smoke`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.compare import CPU, column
from tests.bench.smoke import CARD, CEILING, PLACE, ROOT, smoke

DECODE = {"rows", "context", "call_ms", "call_p90_ms", "step_ms", "host_ms", "tokens_per_second", "read_gb_per_second",
          "floor_ms", "call_over_floor"} | PLACE  # fmt: skip
PREFILL = {"tokens", "steps", "call_ms", "call_p90_ms", "tokens_per_second", "gflop_per_second", "floor_ms",
           "call_over_floor"} | PLACE  # fmt: skip
SCALING = {"sweep", "rows", "context", "call_ms", "call_p90_ms", "floor_ms", "call_over_floor"} | PLACE
MIXED = {"chunk", "way", "tokens_per_second", "call_ms", "call_p90_ms", "worst_gap_ms", "worst_gap_p90_ms",
         "first_token_ms", "floor_ms", "call_over_floor"}  # fmt: skip
COMPARE = {"row", "ours_ms", "ours_p90_ms", "floor_ms", "floor_limit", "ours_over_floor", "ours_p10_over_floor",
           "calls", "strayed"} | PLACE  # fmt: skip
THEIRS = {"ms", "p90_ms", "setting", "all_ms", "over_ours", "logits_difference"}  # of a peer

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all of them write their results to."""
    return tmp_path_factory.mktemp("records")


@pytest.mark.parametrize(
    ("name", "row", "count"),
    [("decode", DECODE, 4), ("prefill", PREFILL, 3), ("scaling", SCALING, 6), ("mixed", MIXED, 4)],
)
def test_a_sweep_ends_in_a_json_line(name: str, row: set[str], count: int, records: Path):
    result = smoke(name, records, "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING
    assert len(result["rows"]) == count
    for found in result["rows"]:
        assert set(found) == row
        assert found["call_ms"] > 0


def test_compare_ends_in_a_json_line_with_or_without_its_peers(records: Path):
    result = smoke("compare", records, "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING | {"layout"}
    peers = {"transformers", "llama.cpp"} - set(result["notes"])
    keys = COMPARE | {f"{column(peer)}_{name}" for peer in peers for name in THEIRS}
    assert [set(row) for row in result["rows"]] == [keys] * 7
    assert result["farthest_from_floor"] in {row["row"] for row in result["rows"]}
    assert {floor["row"] for floor in result["floors"]} == set(CPU.floors)
    for aim in result["aims"]:
        assert (aim["ratio"] is None) == (aim["peer"] not in peers)


def test_plan_ends_in_a_json_line_of_times_no_shorter_than_predicted(records: Path):
    result = smoke("plan", records, "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING
    assert [(row["step"], row["rows"]) for row in result["rows"]] == [("decode", 1), ("decode", 3), ("prompt", 1)]
    for row in result["rows"]:
        assert row["measured_over_predicted"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
        assert row["measured_over_predicted"] > 1
    assert len(result["plans"]) == 6
    assert all(0 < row["efficiency"] <= 1 for row in result["scaling"])


def test_images_are_drawn_of_these_records(records: Path, tmp_path: Path):
    command = [sys.executable, "-m", "bench.plot", "--smoke", "--results", str(records)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    images = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert len(images) == 4
