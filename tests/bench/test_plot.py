"""Images are drawn of the records that are there, and of nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

CARD = {"model": "tiny", "dtype": "float32", "device": "cpu cpu", "cores": 2, "processor": "a processor"}
TIMED = {"call_ms": 2.0, "call_p90_ms": 3.0, "floor_ms": 1.0, "operations": 40, "num_bytes": 20,
         "product_rate": 30_000, "read_rate": 20_000}  # fmt: skip
COMPARED = {"ours_ms": 1.0, "floor_ms": 0.5, "transformers_ms": 2.0}


def _record(folder: Path, name: str, setting: str, rows: list[dict[str, Any]]) -> None:
    record = {"benchmark": name, "smoke": False, "card": CARD, "rows": rows}
    (folder / f"{name}-{setting}.json").write_text(json.dumps(record), encoding="utf-8")


def test_an_image_is_drawn_where_all_of_its_records_are(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="comes with the extra `bench`")
    from bench import plot

    sweeps = [{"sweep": sweep, "rows": 1, "context": at, **TIMED} for sweep in ("batch", "context") for at in (8, 9)]
    _record(tmp_path, "decode", "one", [TIMED])
    _record(tmp_path, "prefill", "one", [TIMED])
    _record(tmp_path, "scaling", "one", sweeps)
    _record(tmp_path, "compare", "two", [{"row": "decode 1 at 8", **COMPARED}])
    _record(tmp_path, "decode", "two", [TIMED])
    _record(tmp_path, "prefix", "two", [])
    images = plot.draw_all(plot.read(tmp_path), tmp_path / "images", "svg")
    assert {path.name for path in images} == {"roofline-one.svg", "scaling-one.svg", "peers-two.svg"}
    assert all(path.read_text(encoding="utf-8").startswith("<?xml") for path in images)


def test_the_same_records_give_the_same_image(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="comes with the extra `bench`")
    from bench import plot

    _record(tmp_path, "compare", "two", [{"row": "prefill 8", **COMPARED}])
    first, second = (plot.draw_all(plot.read(tmp_path), tmp_path / name, "svg")[0] for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
