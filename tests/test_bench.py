"""Benchmarks run on a tiny model and end in one JSON object; what they count and refuse is what they say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.floor import decode_work, prefill_work
from bench.machine import Machine
from bench.models import TINY
from bench.timing import Contestant, alternate, refuse_compiles, summarise

ROOT = Path(__file__).parents[1]
CARD = {"device", "processor", "cores", "load_average", "versions", "model", "dtype", "weight_bytes",
        "kv_bytes_per_position", "kv_bytes"}  # fmt: skip
CEILING = {"product_rate", "read_rate"}
DECODE = {"rows", "context", "call_ms", "call_p90_ms", "step_ms", "host_ms", "tokens_per_second", "read_gb_per_second",
          "floor_ms", "call_over_floor"}  # fmt: skip
PREFILL = {"tokens", "steps", "call_ms", "call_p90_ms", "tokens_per_second", "gflop_per_second", "floor_ms",
           "call_over_floor"}  # fmt: skip
COMPARE = {"row", "ours_ms", "ours_p90_ms", "floor_ms", "floor_limit", "product_rate", "read_rate", "ours_over_floor",
           "calls"}  # fmt: skip
SPECULATIVE = {"task", "batch", "num_tokens", "drafted", "accepted", "acceptance_rate", "plain_tokens_per_second",
               "tokens_per_second", "plain_over_speculative", "answers_equal"}  # fmt: skip
THEIRS = {"transformers_ms", "transformers_p90_ms", "transformers_cache", "transformers_all_ms",
          "transformers_over_ours", "logits_difference"}  # fmt: skip


def _smoke(name: str, path: Path, *options: str) -> dict[str, Any]:
    """Runs a benchmark and gives its last line, which must be what it wrote to `--json`."""
    command = [sys.executable, "-m", f"bench.{name}", "--smoke", "--json", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert path.read_text(encoding="utf-8") == line + "\n"
    result = json.loads(line)
    assert (result["benchmark"], result["smoke"]) == (name, True)
    return result


@pytest.mark.parametrize(("name", "row", "count"), [("decode", DECODE, 4), ("prefill", PREFILL, 3)])
def test_a_sweep_ends_in_a_json_line(name: str, row: set[str], count: int, tmp_path: Path):
    result = _smoke(name, tmp_path / "out.json", "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING
    assert len(result["rows"]) == count
    for found in result["rows"]:
        assert set(found) == row
        assert found["call_ms"] > 0


def test_prefix_ends_in_a_json_line_that_counts_what_was_reused(tmp_path: Path):
    row = _smoke("prefix", tmp_path / "out.json", "--rounds", "1")["rows"][0]
    assert (row["tokens"], row["reused"]) == (128, 112)
    assert row["ratio"] == pytest.approx(row["cold_ms"] / row["reused_ms"])


def test_adapters_ends_in_a_json_line(tmp_path: Path):
    row = _smoke("adapters", tmp_path / "out.json", "--rounds", "1")["rows"][0]
    assert (row["rows"], row["adapters"], row["rank"]) == (8, 5, 8)
    assert row["ratio"] == pytest.approx(row["mixed_ms"] / row["bare_ms"])


def test_compare_ends_in_a_json_line_with_or_without_the_peer(tmp_path: Path):
    result = _smoke("compare", tmp_path / "out.json", "--rounds", "1")
    assert set(result["card"]) == CARD | CEILING
    keys = COMPARE if result["note"] else COMPARE | THEIRS
    assert [set(row) for row in result["rows"]] == [keys] * 6
    assert result["farthest_from_floor"] in {row["row"] for row in result["rows"]}
    for aim in result["aims"]:
        assert (aim["ratio"] is None) == bool(result["note"])


def test_speculative_ends_in_a_json_line(tmp_path: Path):
    result = _smoke("speculative", tmp_path / "out.json", "--rounds", "1")
    assert set(result["card"]) == CARD
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert set(row) == SPECULATIVE
        assert row["answers_equal"]
        assert 0 <= row["accepted"] <= row["drafted"]


def test_compile_time_ends_in_a_json_line(tmp_path: Path):
    result = _smoke("compile_time", tmp_path / "out.json")
    assert set(result["card"]) == CARD | {"persistent_cache"}
    assert result["steps"] == len(result["rows"]) > 0
    assert result["seconds_per_step"] * result["steps"] == pytest.approx(result["seconds"])


def test_start_ends_in_a_json_line_and_its_second_start_compiles_nothing(tmp_path: Path):
    result = _smoke("start", tmp_path / "out.json")
    first, second = result["rows"]
    assert first["compiles"] > first["compiled"] > 0 == first["loaded"]
    assert (second["compiles"], second["traces"], second["compiled"]) == (0, 0, 0)
    assert second["loaded"] >= 1
    assert result["artifact_bytes"] > 0


def test_memory_ends_in_a_json_line(tmp_path: Path):
    result = _smoke("memory", tmp_path / "out.json")
    assert set(result["card"]) == CARD
    assert [row["stage"] for row in result["rows"]] == ["start", "weights", "KV", "compiled steps", "one prompt"]
    assert result["rows"][2]["expected_bytes"] == result["card"]["kv_bytes"]


def test_a_compile_among_the_times_is_refused():
    with pytest.raises(RuntimeError, match="1 compiles"), refuse_compiles():
        jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    with refuse_compiles():
        pass


def test_contestants_take_turns_and_are_put_back_before_every_call():
    seen: list[str] = []
    contestants = {
        name: Contestant(lambda name=name: seen.append(name), lambda name=name: seen.append(f"restore {name}"), burst)
        for name, burst in (("a", 1), ("b", 2))
    }
    times = alternate(contestants, rounds=2, pause=0)
    assert seen == ["restore a", "a", *["restore b", "b"] * 2] * 3
    assert {name: timing.count for name, timing in times.items()} == {"a": 2, "b": 4}


def test_a_summary_is_the_median_and_two_percentiles():
    timing = summarise([float(value) for value in range(11, 0, -1)])
    assert (timing.median, timing.p90, timing.p10, timing.count) == (6.0, 10.0, 2.0, 11)


def test_the_work_of_a_token_is_what_the_configuration_says():
    # TINY: q and o 48 x 48, k and v 48 x 16, gate, up and down 48 x 112, two layers; a head of 193 x 48
    products, head = 2 * (2 * 48 * 48 + 2 * 48 * 16 + 3 * 48 * 112), 193 * 48
    work = decode_work(TINY, rows=3, context=9, itemsize=4)
    assert work.operations == 3 * (2 * (products + head) + 2 * 10 * 4 * 48)
    assert work.num_bytes == 4 * (products + head + 3 * 2 * 10 * 2 * 16)


def test_a_prompt_of_one_token_is_a_decode_step_from_nothing():
    assert prefill_work(TINY, tokens=1, itemsize=4) == decode_work(TINY, rows=1, context=0, itemsize=4)


def test_the_floor_is_whichever_limit_is_higher():
    work = decode_work(TINY, rows=1, context=0, itemsize=4)
    by_reading = Machine(product_rate=1e15, read_rate=1e6)
    assert work.floor_ms(by_reading) == pytest.approx(work.num_bytes / 1e3)
    assert (work.limit(by_reading), work.limit(Machine(1e6, 1e15))) == ("reading", "products")
