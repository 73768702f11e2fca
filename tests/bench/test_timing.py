"""Contestants take turns, compiles among the times are refused, and the figures are what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.timing import Contestant, alternate, count_compiles, fit_line, forbid_compiles, percentile, summarise


def test_a_compile_among_the_times_is_refused():
    with pytest.raises(RuntimeError, match="1 compiles"), forbid_compiles():
        jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    with forbid_compiles():
        pass


def test_contestants_take_turns_and_are_put_back_before_every_call():
    seen: list[str] = []
    contestants = {
        name: Contestant(lambda name=name: seen.append(name), lambda name=name: seen.append(f"restore {name}"), burst)
        for name, burst in (("a", 1), ("b", 2))
    }
    times = alternate(contestants, rounds=2, pause=0)
    assert seen == ["restore a", "a", *["restore b", "b"] * 2] * 3
    assert {name: timing.count for name, timing in times.items()} == {"a": 2, "b": 4}


def test_arrays_of_jax_are_waited_for_and_what_is_on_the_host_is_not_searched(monkeypatch: pytest.MonkeyPatch):
    waited: list[object] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda result: waited.append(result) or result)
    device, host = {"a": jnp.zeros(2)}, [np.zeros(2)]
    alternate({"device": Contestant(lambda: device), "host": Contestant(lambda: host)}, rounds=3, pause=0)
    assert [result is device for result in waited] == [True, False, True, True, True]  # one of each to warm up


def test_a_summary_is_the_median_and_two_percentiles():
    timing = summarise([float(value) for value in range(11, 0, -1)])
    assert (timing.median, timing.p90, timing.p10, timing.count) == (6.0, 10.0, 2.0, 11)


def test_compiles_are_counted_and_not_refused():
    with count_compiles() as compiled:
        jax.jit(jnp.cos).lower(jax.ShapeDtypeStruct((5,), jnp.float32)).compile()
    assert len(compiled) == 1


def test_a_percentile_is_a_value_that_was_measured():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0, 0.5, 0.9, 1)] == [1.0, 3.0, 5.0, 5.0]
    assert percentile([7.0], 0.99) == 7.0


def test_a_line_is_found_and_what_is_off_it_is_told():
    line = fit_line([1, 2, 4], [5.0, 7.0, 11.0])
    assert (line.slope, line.intercept) == (pytest.approx(2.0), pytest.approx(3.0))
    assert line.residual == pytest.approx(0.0, abs=1e-9)
    assert fit_line([0, 1, 2], [0.0, 3.0, 0.0]).residual == pytest.approx(2**0.5)
