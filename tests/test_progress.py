"""Bars move with the work, and stay away where nobody watches."""

import pytest

from ferrum_jax.progress import track


def test_every_item_comes_once_and_in_order(capsys: pytest.CaptureFixture[str]):
    assert list(track("counting")(iter(range(5)))) == [0, 1, 2, 3, 4]
    assert list(track("counting")([])) == []
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_terminal_sees_a_bar_on_standard_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)
    for _ in track("counting sheep")(range(3)):
        pass
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "counting sheep" in captured.err
    assert "100%" in captured.err


def test_an_error_inside_the_walk_is_not_swallowed():
    walked = []

    def walk() -> None:
        for item in track("walking")([1, 2, 3]):
            walked.append(item)
            if item == 2:
                raise KeyError(item)

    with pytest.raises(KeyError):
        walk()
    assert walked == [1, 2]
