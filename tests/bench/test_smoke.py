"""Benchmarks run on a tiny model and end in one JSON object: `pytest -m smoke`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import gguf_copy, models
from bench.models import TINY
from ferrum_jax.ops import native
from tests.bench.smoke import CARD, CEILING, ROOT, smoke

OVERHEAD = {
    "rows",
    "leaves",
    "layout",
    "call_us",
    "call_p90_us",
    "bare_us",
    "bare_p90_us",
    "bare_at_once_us",
    "host_us",
    "calls",
}
SPECULATIVE = {"task", "batch", "num_tokens", "drafted", "accepted", "call_ms", "call_p90_ms", "acceptance_rate",
               "plain_tokens_per_second", "tokens_per_second", "plain_over_speculative", "answers_equal"}  # fmt: skip

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all of them write their results to."""
    return tmp_path_factory.mktemp("records")


def test_attention_ends_in_a_json_line(records: Path):
    rows = smoke("attention", records, "--rounds", "1")["rows"]
    backends = ["xla", "cpu"] if native.instruction_set() else ["xla"]
    wanted = [(backend, *load) for load in ((2, 1, 64), (2, 16, 32)) for backend in backends]
    assert [(row["backend"], row["rows"], row["tokens"], row["context"]) for row in rows] == wanted
    assert all(row["call_over_floor"] == pytest.approx(row["call_ms"] / row["floor_ms"]) for row in rows)


def test_sampler_ends_in_a_json_line_of_every_setting(records: Path):
    rows = smoke("sampler", records, "--rounds", "1")["rows"]
    assert len({(row["setting"], row["rows"]) for row in rows}) == len(rows) == 14
    ways = ["xla_ms", "kernel_ms"] if native.instruction_set() else ["xla_ms"]
    assert all(row[way] > 0 for row in rows for way in ways)


def test_prefix_ends_in_a_json_line_that_counts_what_was_reused(records: Path):
    row = smoke("prefix", records, "--rounds", "1")["rows"][0]
    assert (row["tokens"], row["reused"]) == (128, 112)
    assert row["ratio"] == pytest.approx(row["cold_ms"] / row["reused_ms"])


def test_replicas_ends_in_a_json_line_of_twice_the_sequences(records: Path):
    one, two = smoke("replicas", records)["rows"]
    assert (one["replicas"], two["replicas"]) == (1, 2)
    assert two["most_sequences"] > 1.5 * one["most_sequences"] > 0
    assert one["prefix_hits"] > 0


def test_research_ends_in_a_json_line_of_three_answers_that_agree(records: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch", reason="comes with the extra `reference`")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    patches, gradient, scores = smoke("research", records)["rows"]
    assert scores["tokens"] > 0
    assert set(patches["settings"]) == {"a forward for each patch", "a row for each position"}
    assert patches["theirs_s"] == min(patches["settings"].values())
    ways = {"ours", "products", "remat", "scanned products", "scanned remat", "without the option"}
    assert gradient["ways"].keys() == ways | {"theirs"}
    assert all(row["ours_s"] > 0 and row["theirs_s"] > 0 for row in (patches, gradient, scores))
    assert max(row["largest_difference"] for row in (patches, gradient, scores)) < 1e-4


def test_rollouts_ends_in_a_json_line_of_prompts_that_were_read_once(records: Path):
    (row,) = smoke("rollouts", records)["rows"]
    assert (row["rollouts"], row["prompt_tokens_read"]) == (14, 2 * 8)
    assert 0 < row["busy_share"] < 1
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])


def test_shares_ends_in_a_json_line_of_what_two_processes_held(records: Path):
    result = smoke("shares", records)
    rows = result["rows"]
    assert [(row["checkpoint"], row["process"]) for row in rows] == [
        (kind, process) for kind in ("safetensors", "orbax") for process in (0, 1)
    ]
    for row in rows:
        assert row["share"] == pytest.approx(result["checkpoint_bytes"] / 2, rel=0.05)
        assert row["most"] - row["share"] - row["largest"] == row["beyond"]
        assert row["before"] < row["most"]


def test_adapters_ends_in_a_json_line(records: Path):
    row = smoke("adapters", records, "--rounds", "1")["rows"][0]
    assert (row["rows"], row["adapters"], row["rank"]) == (8, 5, 8)
    assert row["ratio"] == pytest.approx(row["mixed_ms"] / row["bare_ms"])


def test_quantised_ends_in_a_json_line_and_a_quarter_of_the_bytes(records: Path):
    result = smoke("quantised", records, "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING
    assert len(result["rows"]) == 9
    for plain, int8, fp8 in zip(*[iter(result["rows"])] * 3, strict=True):
        assert plain["over_plain"] == 1
        assert int8["weight_bytes"] == fp8["weight_bytes"] < 0.3 * plain["weight_bytes"]
        assert plain["floor_ms"] >= int8["floor_ms"] == fp8["floor_ms"] > 0


def test_quantised_checks_kept_weights_and_llama_cpp_before_it_times_them(tmp_path: Path):
    cfg = replace(TINY, hidden_size=64, intermediate_size=96, num_attention_heads=8)
    gguf_copy.write(models.random("tiny", cfg, "float32"), tmp_path / "tiny.gguf", "Q4_1")
    command = [sys.executable, "-m", "bench.quantised", "--model", str(tmp_path / "tiny.gguf"), "--weights", "keep"]
    done = subprocess.run([*command, "--rounds", "1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["row"] for row in rows if row["weights"] == "keep"] == [
        "decode 1",
        "decode 8",
        "prompt of 128",
        "prompt of 512",
    ]
    for row in rows:
        if row["weights"] == "in full":
            assert "relative_error" not in row
        elif row["weights"] == "keep":
            assert row["relative_error"] <= 1e-5
        else:  # llama.cpp, where it is installed
            assert 0 < row["relative_error"] <= 0.1


def test_moe_ends_in_a_json_line_of_its_active_experts(records: Path):
    result = smoke("moe", records, "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING
    assert [(row["rows"], row["experts"]) for row in result["rows"]] == [(1, 16), (8, 16)]
    for row in result["rows"]:
        assert 2 <= row["active"] <= min(16, 2 * row["rows"])
        assert row["layer_over_floor"] == pytest.approx(row["layer_ms"] / row["floor_ms"])
        assert row["every_over_layer"] == pytest.approx(row["every_ms"] / row["layer_ms"])


@pytest.mark.skipif(native.instruction_set() is None, reason="there are no kernels to measure")
def test_kernels_ends_in_a_json_line_of_every_family(records: Path):
    result = smoke("kernels", records, "--rounds", "1")
    assert len(set(result["card"]["model"])) == len(result["card"]["weight_bytes"]) == 5
    assert [row["model"] for row in result["rows"]] == [
        "qwen3-30b-a3b",
        "qwen3-30b-a3b, experts in Q4_1",
        "gpt-oss-20b, experts in MXFP4",
        "deepseek-v2-lite",
        "gemma-3-1b",
    ]
    for row in result["rows"]:
        assert row["step_over_floor"] == pytest.approx(row["step_ms"] / row["floor_ms"])
        assert 0 < row["relative_error"] <= 1e-5


def test_requests_end_in_a_json_line_of_answers_that_are_alike(records: Path):
    result = smoke("requests", records, "--rounds", "1")
    ours, *theirs = result["rows"]
    assert (ours["engine"], ours["over_ours"], ours["alike"]) == ("ours", 1, 1)
    assert all(row["alike"] > 0.5 for row in theirs)


def test_overhead_ends_in_a_json_line(records: Path):
    result = smoke("overhead", records, "--rounds", "1")
    assert result["card"]["model"] == ["tiny random, 1 layers", "tiny random, 2 layers"]
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
    result = smoke("layouts", records, "--rounds", "1")
    assert [row["layout"] for row in result["rows"]] == ["checkpoint", "fused", "scanned"] * 2
    assert all(row["step_ms"] > 0 for row in result["rows"])


def test_serve_ends_in_a_json_line(records: Path):
    result = smoke("serve", records)
    assert [beside["temperature"] for beside in result["generate"]] == [0, 0.8]
    for beside in result["generate"]:
        step = beside["rows"] / beside["tokens_per_second"] * 1e6
        assert beside["over_step"] == pytest.approx(beside["step_us"] / step)
        assert beside["over_step_and_sampler"] == pytest.approx(beside["step_and_sampler_us"] / step)
    for row in result["rows"]:
        assert row["requests"] == 8
        assert row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
        assert row["goodput"] <= row["requests_per_second"]


def test_http_ends_in_a_json_line_with_both_paths(records: Path):
    result = smoke("http", records)
    paths = [(row["path"], row["share"]) for row in result["rows"]]
    assert paths == [(path, share) for share in (None, 0.5) for path in ("in process", "HTTP")]
    own, over = (row["tokens_per_second"] for row in result["rows"][:2])
    assert result["overhead_us"] == pytest.approx((1 / over - 1 / own) * 1e6)
    assert result["loop_us"] > 0
    assert all(row["requests"] == 8 for row in result["rows"])


def test_structured_ends_in_a_json_line_with_none_one_all_and_drafted_rows_of_a_form(records: Path):
    result = smoke("structured", records)
    rows = result["rows"]
    assert 0 < result["acceptance"] <= 1
    assert [row["formed_rows"] for row in rows] == [0, 1, 2, 2]
    assert all(row["ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"]) for row in rows)


def test_a_soak_compiles_nothing_and_loses_no_block(records: Path):
    result = smoke("soak", records)
    assert (result["compiles"], result["lost_blocks"]) == (0, 0)
    assert sum(row["finished"] for row in result["rows"]) > 0


def test_speculative_ends_in_a_json_line(records: Path):
    result = smoke("speculative", records, "--rounds", "1")
    assert set(result["card"]) == CARD
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert set(row) == SPECULATIVE
        assert row["answers_equal"]
        assert 0 <= row["accepted"] <= row["drafted"]


def test_compile_time_ends_in_a_json_line(records: Path):
    result = smoke("compile_time", records)
    assert set(result["card"]) == CARD | {"persistent_cache"}
    assert result["steps"] == len(result["rows"]) > 0
    assert result["seconds_per_step"] * result["steps"] == pytest.approx(result["seconds"])


def test_start_ends_in_a_json_line_and_its_second_start_compiles_nothing(records: Path):
    result = smoke("start", records)
    first, second = result["rows"]
    assert first["compiles"] > first["compiled"] > 0
    assert first["loaded"] == 0
    assert (second["compiles"], second["traces"], second["compiled"]) == (0, 0, 0)
    assert second["loaded"] >= 1
    assert result["artifact_bytes"] > 0


def test_memory_ends_in_a_json_line(records: Path):
    result = smoke("memory", records)
    assert set(result["card"]) == CARD
    stages = ["start", "weights", "KV", "warm", "one prompt"]
    expected = [(start, stage) for start in ("first", "later") for stage in stages]
    assert [(row["start"], row["stage"]) for row in result["rows"]] == expected
    assert result["rows"][2]["expected_bytes"] == result["card"]["kv_bytes"]
    assert 0 < result["later_ratio"] <= result["first_ratio"] < 1
