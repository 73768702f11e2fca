"""What an end of a sequence reminds of."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.generate.drafts import DraftWant, PromptLookup, look_up


@pytest.mark.parametrize(
    ("tokens", "max_ngram", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, [9, 1, 2]),  # what followed
        ([1, 2, 3], 3, []),  # nothing occurred before
        ([7], 3, []),
        ([1, 5, 2, 5, 3, 5], 3, [3, 5, 3]),  # the most recent; where too few follow, they go round
        ([8, 1, 2, 5, 9, 2, 4, 1, 2], 3, [5, 9, 2]),  # the longer run wins over the more recent one
        ([8, 1, 2, 5, 9, 2, 4, 1, 2], 1, [4, 1, 2]),
        ([6, 1, 2, 3, 5, 7, 1, 2, 4, 0, 7, 1, 2], 2, [4, 0, 7]),  # of equally long ones the most recent
        ([6, 6, 6, 6], 3, [6, 6, 6]),
        ([2, 1, 2], 3, [1, 2, 1]),  # the run would begin before the sequence
    ],
)  # fmt: skip
def test_the_longest_most_recent_run_is_continued(tokens: list[int], max_ngram: int, expected: list[int]):
    assert look_up(tokens, max_ngram, 3) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 6))
def test_it_is_what_a_search_from_the_end_finds(tokens: list[int], max_ngram: int, count: int):
    def search() -> list[int]:
        for n in range(min(max_ngram, len(tokens) - 1), 0, -1):
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == tokens[-n:]:
                    followed = tokens[start + n :]
                    return (followed * count)[:count]
        return []

    assert look_up(tokens, max_ngram, count) == search()


def test_each_sequence_gets_as_many_as_it_wants():
    wants = [DraftWant("a", tokens, SlotSettings(), 2) for tokens in ([1, 2, 3, 1], [5])]
    assert [draft.tokens for draft in PromptLookup().propose(wants)] == [[2, 3], []]


@pytest.mark.parametrize("name", ["max_ngram", "num_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_a_wrong_size_is_refused(name: str, value: Any):
    with pytest.raises(InvalidParameterError, match=f"{name} is {value!r}"):
        PromptLookup(**{name: value})
