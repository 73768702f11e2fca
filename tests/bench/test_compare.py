"""What `bench.compare` aims at is judged in rows that it runs."""

import pytest

from bench.compare import ACCELERATED, CPU, Course


@pytest.mark.parametrize("course", [CPU, ACCELERATED], ids=["cpu", "accelerated"])
def test_every_aim_is_of_a_row_that_is_run(course: Course):
    rows = {f"decode {rows} at {at}" for rows, at in course.decodes}
    rows |= {f"prefill {tokens}" for tokens in course.prefills}
    assert set(course.floors) <= rows
    for aims in course.aims.values():
        assert set(aims) <= rows


def test_on_a_cpu_decoding_is_judged_at_both_contexts():
    over_floor = {name: 1 / share for name, share in CPU.floors.items()}
    assert over_floor == pytest.approx(
        {
            "decode 1 at 256": 1.2,
            "decode 1 at 1024": 1.2,
            "decode 8 at 256": 1.6,
            "decode 8 at 1024": 1.6,
            "prefill 512": 1.4,
        }
    )
    assert CPU.aims["llama.cpp"] == {
        "decode 1 at 256": 1.05,
        "decode 1 at 1024": 1.05,
        "decode 8 at 256": 1.4,
        "decode 8 at 1024": 1.4,
    }
    assert CPU.aims["transformers"] == {"prefill 128": 1.2, "prefill 512": 1.2, "prefill 2048": 1.2}
