"""Options that a benchmark cannot follow are refused before it runs, and its result is printed before it is written."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from bench import card, http, replicas, research, shares, speculative, start, structured


def _options(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *options])


@pytest.mark.parametrize("path", ["", "absent/record.json", "file/record.json"])
def test_a_record_that_cannot_be_written_is_refused_when_options_are_read(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    _options(monkeypatch, "--smoke", "--json", str(tmp_path / path))
    with pytest.raises(SystemExit):
        card.options("")
    assert "--json" in capsys.readouterr().err


def test_a_result_is_printed_also_if_it_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = argparse.Namespace(smoke=True, json=tmp_path / "removed meanwhile" / "record.json")
    with pytest.raises(FileNotFoundError):
        card.finish("decode", found, {}, [])
    assert json.loads(capsys.readouterr().out)["benchmark"] == "decode"


@pytest.mark.parametrize("count", ["0", "-3", "two"])
def test_no_round_and_no_text_are_refused(
    count: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for option in ("--rounds", "--texts"):
        _options(monkeypatch, "--smoke", option, count)
        with pytest.raises(SystemExit):
            research.main()
        assert f"argument {option}: {count} is not " in capsys.readouterr().err


def test_research_is_refused_where_it_would_not_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    _options(monkeypatch, "--smoke")
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(SystemExit, match="on a CPU, not on a gpu"):
        research.main()


@pytest.mark.parametrize("benchmark", [replicas, shares])
def test_a_model_is_refused_where_the_benchmark_has_its_own(benchmark: object, monkeypatch: pytest.MonkeyPatch):
    _options(monkeypatch, "--model", "llama-3.1-8b")
    with pytest.raises(SystemExit, match=r"--model llama-3.1-8b contradicts"):
        benchmark.main()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("benchmark", "options"),
    [(speculative, ()), (start, ()), (structured, ()), (http, ("--llama-server", "server"))],
)
def test_random_weights_are_refused_before_they_are_drawn_where_files_are_needed(
    benchmark: object, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bench.models.random", lambda *_: pytest.fail("they were drawn"))
    _options(monkeypatch, "--model", "llama-3.1-8b", *options)
    with pytest.raises(SystemExit, match=r"llama-3.1-8b has random weights and no files"):
        benchmark.main()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_record_of_several_models_says_which_they_are():
    conditions = {"date": "2026-12-01", "read_rate": 5}
    cards = [conditions | {"model": f"m{at}", "dtype": "float32", "weight_bytes": at} for at in (1, 2)]
    together = card.together(cards)
    assert together == conditions | {"model": ["m1", "m2"], "dtype": "float32", "weight_bytes": [1, 2]}
    assert card.together(cards[:1]) == cards[0]
