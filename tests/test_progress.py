"""Bars move with the work, and stay away where nobody watches."""

import pytest

from ferrum_jax.progress import track


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_every_item_comes_once_and_in_order(capsys: pytest.CaptureFixture[str]):
    with track("counting")(iter(range(5))) as items:
        assert list(items) == [0, 1, 2, 3, 4]
    with track("counting")([]) as items:
        assert list(items) == []
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.usefixtures("terminal")
def test_a_terminal_sees_a_bar_on_standard_error(capsys: pytest.CaptureFixture[str]):
    with track("counting sheep")(range(3)) as items:
        for _ in items:
            pass
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "counting sheep" in captured.err
    assert "100%" in captured.err


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("problem", [KeyError, KeyboardInterrupt])
def test_a_bar_ends_with_an_error_inside_it(problem: type[BaseException], capsys: pytest.CaptureFixture[str]):
    def walk() -> None:
        with track("walking")([1, 2, 3]) as items:
            for item in items:
                if item == 2:
                    raise problem(item)

    with pytest.raises(problem) as caught:
        walk()
    assert caught.value.args == (2,)  # whose traceback is alive here
    assert "\x1b[?25h" in capsys.readouterr().err  # the cursor is shown again
