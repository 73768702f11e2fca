"""The parts of a decode step that is scaled over devices."""

from dataclasses import replace

import pytest

from bench.weak_scaling import scale
from tests.planning.plans import TOY, deployment


def test_the_parts_of_a_scaled_step_add_up_and_nothing_is_lost_on_one_device():
    at = deployment("llama31")
    rows = scale(at, (1, 2, 4, 8), rows_per_device=2, widest=4)
    assert [(row.devices, row.data, row.model, row.rows) for row in rows] == [
        (1, 1, 1, 2), (2, 1, 2, 4), (4, 1, 4, 8), (8, 2, 4, 16)]  # fmt: skip
    one, two, four, eight = rows
    assert (one.padding_s, one.collective_s, one.efficiency) == (0.0, 0.0, 1.0)
    for row in rows:
        assert row.tokens_per_second == pytest.approx(row.rows / row.seconds)
    assert two.padding_s < four.padding_s  # two key heads have copies on four devices
    assert eight.efficiency == four.efficiency  # replicas have no collectives between them
    assert eight.tokens_per_second == pytest.approx(2 * four.tokens_per_second)
    fast = replace(TOY, memory_rate=1e13, bf16_rate=1e15)
    (waiting,) = scale(replace(at, machine=fast), (1,), rows_per_device=2, widest=1)
    assert waiting.host_s > 0.9 * waiting.seconds
