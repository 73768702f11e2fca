"""Benchmarks run on a tiny model and end in one JSON object: `pytest -m smoke`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.compare import column

ROOT = Path(__file__).parents[2]
CARD = {"device", "processor", "cores", "load_average", "versions", "model", "dtype", "weight_bytes",
        "kv_bytes_per_position", "kv_bytes"}  # fmt: skip
CEILING = {"product_rate", "read_rate"}
PLACE = {"operations", "num_bytes"} | CEILING
DECODE = {"rows", "context", "call_ms", "call_p90_ms", "step_ms", "host_ms", "tokens_per_second", "read_gb_per_second",
          "floor_ms", "call_over_floor"} | PLACE  # fmt: skip
PREFILL = {"tokens", "steps", "call_ms", "call_p90_ms", "tokens_per_second", "gflop_per_second", "floor_ms",
           "call_over_floor"} | PLACE  # fmt: skip
SCALING = {"sweep", "rows", "context", "call_ms", "call_p90_ms", "floor_ms", "call_over_floor"} | PLACE
MIXED = {"chunk", "way", "tokens_per_second", "call_ms", "call_p90_ms", "worst_gap_ms", "worst_gap_p90_ms",
         "first_token_ms", "floor_ms", "call_over_floor"}  # fmt: skip
OVERHEAD = {"rows", "leaves", "call_us", "call_p90_us", "bare_us", "bare_p90_us", "bare_at_once_us", "host_us", "calls"}
COMPARE = {"row", "ours_ms", "ours_p90_ms", "floor_ms", "floor_limit", "ours_over_floor", "calls", "strayed"} | PLACE
SPECULATIVE = {"task", "batch", "num_tokens", "drafted", "accepted", "call_ms", "call_p90_ms", "acceptance_rate",
               "plain_tokens_per_second", "tokens_per_second", "plain_over_speculative", "answers_equal"}  # fmt: skip
THEIRS = {"ms", "p90_ms", "setting", "all_ms", "over_ours", "logits_difference"}  # of a peer


pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all of them write their results to."""
    return tmp_path_factory.mktemp("records")


def _smoke(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """Runs a benchmark and gives its last line, which must be what it wrote to `--json`."""
    path = folder / f"{name}.json"
    command = [sys.executable, "-m", f"bench.{name}", "--smoke", "--json", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert path.read_text(encoding="utf-8") == line + "\n"
    result = json.loads(line)
    assert (result["benchmark"], result["smoke"]) == (name, True)
    return result


@pytest.mark.parametrize(
    ("name", "row", "count"),
    [("decode", DECODE, 4), ("prefill", PREFILL, 3), ("scaling", SCALING, 6), ("mixed", MIXED, 4)],
)
def test_a_sweep_ends_in_a_json_line(name: str, row: set[str], count: int, records: Path):
    result = _smoke(name, records, "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING
    assert len(result["rows"]) == count
    for found in result["rows"]:
        assert set(found) == row
        assert found["call_ms"] > 0


def test_attention_ends_in_a_json_line(records: Path):
    rows = _smoke("attention", records, "--rounds", "1")["rows"]
    assert [(row["backend"], row["rows"], row["tokens"], row["context"]) for row in rows] == [
        ("xla", 2, 1, 64),
        ("xla", 1, 16, 32),
    ]
    assert all(row["call_over_floor"] == pytest.approx(row["call_ms"] / row["floor_ms"]) for row in rows)


def test_prefix_ends_in_a_json_line_that_counts_what_was_reused(records: Path):
    row = _smoke("prefix", records, "--rounds", "1")["rows"][0]
    assert (row["tokens"], row["reused"]) == (128, 112)
    assert row["ratio"] == pytest.approx(row["cold_ms"] / row["reused_ms"])


def test_adapters_ends_in_a_json_line(records: Path):
    row = _smoke("adapters", records, "--rounds", "1")["rows"][0]
    assert (row["rows"], row["adapters"], row["rank"]) == (8, 5, 8)
    assert row["ratio"] == pytest.approx(row["mixed_ms"] / row["bare_ms"])


def test_quantised_ends_in_a_json_line_and_a_quarter_of_the_bytes(records: Path):
    result = _smoke("quantised", records, "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING
    assert len(result["rows"]) == 9
    for plain, int8, fp8 in zip(*[iter(result["rows"])] * 3, strict=True):
        assert plain["over_plain"] == 1
        assert int8["weight_bytes"] == fp8["weight_bytes"] < 0.3 * plain["weight_bytes"]
        assert plain["floor_ms"] >= int8["floor_ms"] == fp8["floor_ms"] > 0


def test_moe_ends_in_a_json_line_of_its_active_experts(records: Path):
    result = _smoke("moe", records, "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING
    assert [(row["rows"], row["experts"]) for row in result["rows"]] == [(1, 16), (8, 16)]
    for row in result["rows"]:
        assert 2 <= row["active"] <= min(16, 2 * row["rows"])
        assert row["layer_over_floor"] == pytest.approx(row["layer_ms"] / row["floor_ms"])
        assert row["every_over_layer"] == pytest.approx(row["every_ms"] / row["layer_ms"])


def test_compare_ends_in_a_json_line_with_or_without_its_peers(records: Path):
    result = _smoke("compare", records, "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING | {"layout"}
    peers = {"transformers", "llama.cpp"} - set(result["notes"])
    keys = COMPARE | {f"{column(peer)}_{name}" for peer in peers for name in THEIRS}
    assert [set(row) for row in result["rows"]] == [keys] * 6
    assert result["farthest_from_floor"] in {row["row"] for row in result["rows"]}
    for aim in result["aims"]:
        assert (aim["ratio"] is None) == (aim["peer"] not in peers)


def test_overhead_ends_in_a_json_line(records: Path):
    result = _smoke("overhead", records, "--rounds", "1")
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert set(row) == OVERHEAD
        assert row["host_us"] == pytest.approx(row["call_us"] - row["bare_us"])
    assert [row["rows"] for row in result["generate"]] == [1, 8]
    for row in result["generate"]:
        assert row["host_us"] == pytest.approx(row["call_us"] - row["bare_us"])
    for row in result["loops"]:
        assert row["host_us_a_step"] == pytest.approx((row["call_us"] - row["bare_us"]) / row["tokens"])


def test_layouts_end_in_a_json_line(records: Path):
    result = _smoke("layouts", records, "--rounds", "1")
    assert [row["layout"] for row in result["rows"]] == ["checkpoint", "fused", "scanned"] * 2
    assert all(row["step_ms"] > 0 for row in result["rows"])


def test_serve_ends_in_a_json_line(records: Path):
    result = _smoke("serve", records)
    beside = result["generate"]
    assert beside["over_bare"] == pytest.approx(beside["tokens_per_second"] / beside["bare_tokens_per_second"])
    for row in result["rows"]:
        assert row["requests"] == 8
        assert row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
        assert row["goodput"] <= row["requests_per_second"]


def test_a_soak_compiles_nothing_and_loses_no_block(records: Path):
    result = _smoke("soak", records)
    assert (result["compiles"], result["lost_blocks"]) == (0, 0)
    assert sum(row["finished"] for row in result["rows"]) > 0


def test_speculative_ends_in_a_json_line(records: Path):
    result = _smoke("speculative", records, "--rounds", "1")
    assert set(result["card"]) == CARD
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert set(row) == SPECULATIVE
        assert row["answers_equal"]
        assert 0 <= row["accepted"] <= row["drafted"]


def test_compile_time_ends_in_a_json_line(records: Path):
    result = _smoke("compile_time", records)
    assert set(result["card"]) == CARD | {"persistent_cache"}
    assert result["steps"] == len(result["rows"]) > 0
    assert result["seconds_per_step"] * result["steps"] == pytest.approx(result["seconds"])


def test_start_ends_in_a_json_line_and_its_second_start_compiles_nothing(records: Path):
    result = _smoke("start", records)
    first, second = result["rows"]
    assert first["compiles"] > first["compiled"] > 0
    assert first["loaded"] >= 1
    assert (second["compiles"], second["traces"], second["compiled"]) == (0, 0, 0)
    assert second["loaded"] >= 1
    assert result["artifact_bytes"] > 0


def test_memory_ends_in_a_json_line(records: Path):
    result = _smoke("memory", records)
    assert set(result["card"]) == CARD
    stages = ["start", "weights", "KV", "warm", "one prompt"]
    expected = [(start, stage) for start in ("first", "later") for stage in stages]
    assert [(row["start"], row["stage"]) for row in result["rows"]] == expected
    assert result["rows"][2]["expected_bytes"] == result["card"]["kv_bytes"]
    assert 0 < result["later_ratio"] <= result["first_ratio"] < 1


def test_images_are_drawn_of_these_records(records: Path, tmp_path: Path):
    command = [sys.executable, "-m", "bench.plot", "--smoke", "--results", str(records)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    images = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert len(images) == 3
