"""The model under test is called what the option calls it."""

import argparse
from pathlib import Path

import pytest

from bench import models
from bench.models import TINY


@pytest.mark.parametrize(
    ("model", "name"), [("org/tiny", "org/tiny"), ("org/tiny@main", "org/tiny@main"), (None, "f7a3"), ("here", "f7a3")]
)
def test_a_model_of_the_hub_has_its_id_as_its_name(
    model: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("bench.models.hub.resolve", lambda _: Path("models--org--tiny/snapshots/f7a3"))
    monkeypatch.setattr("bench.models.load_params", lambda *_, **__: ({}, TINY))
    assert models.read(argparse.Namespace(smoke=False, model=model), "float32").name == name
