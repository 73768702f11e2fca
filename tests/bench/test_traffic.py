"""Requests are timed from when they were due, and goodput counts those that kept within both limits."""

import pytest

from bench.traffic import Arrival, Served, goodput, percentiles, poisson, serve
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.scheduler import Scheduler
from tests.fake import CountingLLM

ON_TIME = Served(1.0, 3, [1.5, 1.6, 1.8])  # 500 ms to the first, 150 ms each
LATE = Served(1.0, 3, [2.5, 2.6])
SLOW = Served(1.0, 3, [1.2, 2.2])
SINGLE = Served(1.0, 3, [1.4])


def test_times_count_from_when_a_request_was_due():
    assert (ON_TIME.ttft_ms, ON_TIME.tpot_ms) == (pytest.approx(500), pytest.approx(150))
    assert (SINGLE.ttft_ms, SINGLE.tpot_ms) == (pytest.approx(400), 0.0)


def test_goodput_counts_what_kept_within_both_limits():
    assert goodput([ON_TIME, LATE, SLOW, SINGLE], 4.0, ttft_ms=1000, tpot_ms=200) == 2 / 4


def test_percentiles_are_columns():
    values = [float(value) for value in range(101)]
    assert percentiles("ttft", values) == {"ttft_p50_ms": 50.0, "ttft_p90_ms": 90.0, "ttft_p99_ms": 99.0}


def test_arrivals_ascend_at_the_rate_and_are_the_same_again():
    times = poisson(10.0, 2000, seed=3)
    assert times == sorted(times) == poisson(10.0, 2000, seed=3)
    assert times[-1] == pytest.approx(200, rel=0.1)


def test_every_request_is_served_and_every_token_timed():
    scheduler = Scheduler(CountingLLM(), max_rows=2, chunk_tokens=4)
    arrivals = [Arrival(0.002 * at, [1, 2, 3], SamplingParams(max_tokens=1 + at)) for at in range(4)]
    served, seconds = serve(scheduler, reversed(arrivals))
    assert sorted(len(one.token_times) for one in served) == [1, 2, 3, 4]
    for one in served:
        assert one.due <= one.token_times[0] <= one.token_times[-1] <= seconds
