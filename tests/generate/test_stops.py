"""However the text comes in pieces, what is let out is the text before the first stop text, and never more."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ferrum_jax.generate.stops import StopWatcher

# Two letters make overlaps, repeats and near misses common.
TEXT = st.text("ab", max_size=25)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def cut(text: str, places: list[int]) -> list[str]:
    """Cuts a text at the given places; empty pieces are kept."""
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def before_the_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """What may be let out: up to the earliest stop that is complete first."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 25), max_size=8))
@example(text="abb", stops=["abb", "b"], places=[])
def test_any_cutting_gives_the_text_before_the_stop_that_is_complete_first(
    text: str, stops: list[str], places: list[int]
):
    watcher = StopWatcher(stops)
    out = ""
    expected, found = before_the_first_stop(text, stops)
    for piece in cut(text, places):
        out += watcher.push(piece)
        assert expected.startswith(out)
    assert (out + watcher.flush(), bool(watcher.found)) == (expected, found)
    assert not found or (watcher.found in stops and text[len(expected) :].startswith(watcher.found))


@given(text=TEXT, stop=st.text("ab", min_size=1, max_size=4), places=st.lists(st.integers(0, 25), max_size=8))
def test_with_one_stop_the_text_ends_at_its_first_occurrence(text: str, stop: str, places: list[int]):
    watcher = StopWatcher([stop])
    out = "".join([*(watcher.push(piece) for piece in cut(text, places)), watcher.flush()])
    assert out == text.partition(stop)[0]


@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 25), max_size=8))
def test_nothing_is_let_out_that_may_begin_a_stop_and_nothing_else_is_held(
    text: str, stops: list[str], places: list[int]
):
    watcher = StopWatcher(stops)
    taken = out = ""
    for piece in cut(text, places):
        taken += piece
        out += watcher.push(piece)
        if watcher.found:
            return
        held = taken[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        open_ends = [n for n in range(len(taken) + 1) if any(stop.startswith(taken[n:]) for stop in stops)]
        assert len(out) <= min(open_ends, default=len(taken))


@pytest.mark.parametrize("stops", [[], ["x"], ["ab", "bc"]])
def test_after_the_stop_nothing_is_let_out(stops: list[str]):
    watcher = StopWatcher(stops)
    outs = [watcher.push("aab"), watcher.push("ccx"), watcher.push("more"), watcher.flush()]
    assert "".join(outs) == {0: "aabccxmore", 1: "aabcc", 2: "a"}[len(stops)]


@given(
    text=TEXT,
    stops=STOPS,
    places=st.lists(st.integers(0, 25), max_size=8),
    exempt=st.integers(0, 9),
    includes=st.booleans(),
)
def test_only_a_stop_that_ends_after_the_exempt_pieces_counts(
    text: str, stops: list[str], places: list[int], exempt: int, includes: bool
):
    pieces = cut(text, places)
    first = len("".join(pieces[:exempt]))
    watcher = StopWatcher(stops, includes_stop=includes)
    ends = [end for end in range(first + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text
    if ends:
        begin = min(ends[0] - len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        expected = text[: ends[0] if includes else begin]
    out = ""
    for at, piece in enumerate(pieces):
        out += watcher.push(piece, is_exempt=at < exempt)
        assert expected.startswith(out)
    assert (out + watcher.flush(), bool(watcher.found)) == (expected, bool(ends))


def test_equal_stops_are_looked_for_once_and_not_at_all_in_nothing():
    watcher = StopWatcher(["ab", "b", "ab"])
    assert watcher._stops == ("ab", "b")
    assert watcher.push("ca") == "c"
    watcher._stops = None  # type: ignore[assignment]  whoever looks for a stop fails
    assert watcher.push("") == ""
