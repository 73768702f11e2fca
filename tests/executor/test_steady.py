"""The usual decode step is recognised, and nothing else is taken for it."""

import numpy as np
import pytest

from ferrum_jax.contract.errors import DeviceError, RequestValidationError
from ferrum_jax.contract.slots import KvSlotRequest
from ferrum_jax.executor import ModelRunner, sequences
from ferrum_jax.executor.steady import steady_rows
from ferrum_jax.kvcache.growth import Growth, Want
from ferrum_jax.kvcache.slots import SlotTable
from tests.executor.conftest import CFG, Oracle

VOCAB = 37


@pytest.fixture
def slots() -> SlotTable:
    """Sequence a of 3 positions and b of 8, in blocks of 8: a has room, b has none."""
    table = SlotTable(max_seqs=3, kv_capacity=40, block_size=8, num_blocks=9)
    growth = Growth(table, [Want("a", np.arange(3, dtype=np.int32)), Want("b", np.arange(8, dtype=np.int32))])
    growth.apply()
    growth.commit()
    return table


@pytest.mark.parametrize("token", [0, VOCAB - 1, np.int32(5), np.int64(5)])
def test_a_row_with_room_is_recognised(slots: SlotTable, token: int):
    found = steady_rows([("a", token, 3)], slots, VOCAB)
    assert found is not None
    assert (list(found.tokens), found.lengths) == ([token], [3])
    assert found.lives == [slots.get("a")]


@pytest.mark.parametrize(
    "batch",
    [
        [],
        None,
        "a",
        iter([("a", 1, 3)]),
        [["a", 1, 3]],
        [("a", 1)],
        [("a", 1, 3, True)],
        [("a", True, 3)],
        [("a", 1.0, 3)],
        [("a", np.uint8(1), 3)],
        [("a", -1, 3)],
        [("a", VOCAB, 3)],
        [("a", 1, True)],
        [("a", 1, 3.0)],
        [("a", 1, 2)],
        [("a", 1, 4)],
        [("a", 1, 3), ("a", 1, 3)],
        [("b", 1, 8)],
        [("a", 1, 3), ("b", 1, 8)],
        [("c", 1, 0)],
        [("a", 1, 3), None],
        [(b"a", 1, 3)],
        [(["a"], 1, 3)],
    ],
)
def test_whatever_is_wrong_or_needs_more_is_left_to_others(slots: SlotTable, batch: object):
    assert steady_rows(batch, slots, VOCAB) is None  # type: ignore[arg-type]


@pytest.fixture
def only_steady(monkeypatch: pytest.MonkeyPatch):
    """From its call on, planning the growth of a sequence fails."""

    def forbid():
        def refuse(*_: object, **__: object):
            raise AssertionError("a usual step plans no growth")

        monkeypatch.setattr(sequences, "Growth", refuse)

    return forbid


def test_usual_steps_plan_no_growth_and_are_exact(runner: ModelRunner, oracle: Oracle, only_steady):
    prompts = {"a": [3, 1, 4], "b": [1, 5, 9, 2, 6], "c": [5]}
    for key, prompt in prompts.items():
        runner.prefill(key, prompt)
    runner.reserve_kv_slots([KvSlotRequest(cache_id=key, target_len=20) for key in prompts])
    only_steady()
    for token in range(12):  # past the ends of blocks
        batch = [(key, token, len(prompt)) for key, prompt in prompts.items()]
        for (key, _, _), row in zip(batch, runner.decode_batch(batch), strict=True):
            prompts[key] = [*prompts[key], token]
            np.testing.assert_allclose(row, oracle(prompts[key])[-1], atol=1e-4, rtol=0)
            row[:] = 0  # an answer is the caller's own
    for key, prompt in prompts.items():
        assert runner.kv_len(key) == len(prompt)


def test_an_interrupt_while_a_usual_step_is_counted_is_an_error_state(
    runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    runner.prefill("a", [2, 7])

    def interrupt(*_: object):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SlotTable, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.decode("a", 1, 2)
    with pytest.raises(DeviceError, match=r"only reset\(\) helps"):
        runner.kv_len("a")
    runner.reset()
    np.testing.assert_allclose(runner.prefill("a", [2, 7, 1]), oracle([2, 7, 1])[-1], atol=1e-4, rtol=0)


def test_a_refused_row_among_usual_ones_changes_nothing(runner: ModelRunner, oracle: Oracle):
    runner.prefill("a", [2, 7])
    runner.prefill("b", [1])
    with pytest.raises(RequestValidationError, match="ids go from 0"):
        runner.decode_batch([("a", 1, 2), ("b", CFG.vocab_size, 1)])
    assert (runner.kv_len("a"), runner.kv_len("b")) == (2, 1)
    np.testing.assert_allclose(runner.decode("a", 1, 2), oracle([2, 7, 1])[-1], atol=1e-4, rtol=0)
