"""Sides that do not compute the same are refused before they are timed."""

import numpy as np
import pytest

from bench.agreement import check_logits
from bench.timing import Contestant

OURS = [[1.0, -4.0, 2.0], [0.0, 3.0, 1.0]]


def _sides(change: float) -> dict[str, Contestant]:
    theirs = np.array(OURS)
    theirs[1, 2] += change
    return {"ours": Contestant(lambda: OURS), "theirs": Contestant(lambda: theirs)}


def test_an_error_is_the_largest_difference_over_the_references_largest_logit():
    assert check_logits("decode 2", _sides(-0.04), "ours", {"theirs": 0.011}) == {"theirs": pytest.approx(0.01)}


@pytest.mark.parametrize("change", [0.04, -0.04, np.nan, np.inf])
def test_a_side_beyond_its_limit_ends_the_run(change: float):
    with pytest.raises(RuntimeError, match=r"decode 2: .*ours.*theirs by .*\(limit 0.009\)"):
        check_logits("decode 2", _sides(change), "ours", {"theirs": 0.009})


def test_a_side_is_put_back_before_it_is_run():
    state = [7.0]
    side = Contestant(lambda: [state.pop()], lambda: state.append(2.0))
    assert check_logits("row", {"ours": Contestant(lambda: [2.0]), "side": side}, "ours", {"side": 0}) == {"side": 0}
