"""Values that are easily taken for something else, or that cannot even be shown in a message."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax.contract import (
    ActiveLoraAdapter,
    GreedyArgmax,
    GreedyRepetitionPenalty,
    KvSlotRequest,
    TokenSelectionMask,
)
from ferrum_jax.contract.errors import ConfigError, NotFoundError, RequestValidationError, safe_repr
from ferrum_jax.contract.llm import choose
from ferrum_jax.executor import ModelRunner
from tests.executor.conftest import Oracle

HUGE = 10**5000  # more digits than Python writes


GENERATED: Any = (one for one in [KvSlotRequest(cache_id="a", target_len=9)])
IDS: Any = np.array([1, 2, 30], object)
WRONG: Any = {"target_len": 1.5, "path": 3, "penalty": np.complex64(1), "mask": [1], "factor": 1.5, "model": None}


def _deleted() -> Any:
    array = jnp.array([1, 2])
    array.delete()
    return array


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda r: r.prefill(HUGE, [1]), "a int that cannot be shown"),
        (lambda r: r.prefill("a", [1, HUGE]), "position 1 is a int that cannot be shown"),
        (lambda r: r.prefill("a", _deleted()), "deleted"),
        (lambda r: r.decode("a", 1, HUGE), "pos is a int that cannot be shown"),
        (lambda r: r.decode("a", 1, _deleted()), "that cannot be shown, expected an integer"),
        (lambda r: r.truncate_kv("a", -HUGE), "a int that cannot be shown"),
        (lambda r: r.reserve_kv_slots(None), "requests is a NoneType"),
        (lambda r: KvSlotRequest(cache_id="a", target_len=WRONG["target_len"]), "target_len is 1.5"),
        (lambda r: r.load_lora([], "a"), r"adapter name \[\]"),
        (lambda r: r.unload_lora({}), "adapter name {}"),
        (lambda r: ActiveLoraAdapter(name="a", path=WRONG["path"]), "path of adapter 'a' is 3"),
        (lambda r: GreedyRepetitionPenalty(penalty=1e300, token_ids=[1]), "finite number in float32"),
        (lambda r: GreedyRepetitionPenalty(penalty=WRONG["penalty"], token_ids=[1]), "must be a positive"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_and_refused(runner: ModelRunner, call: Callable[[Any], Any], match: str):
    with pytest.raises(RequestValidationError, match=match):
        call(runner)
    assert runner.kv_len("a") is None


def test_requests_may_come_from_a_generator(runner: ModelRunner):
    done = runner.reserve_kv_slots(GENERATED)
    assert [one.new_blocks for one in done.allocations] == [2]
    assert runner.kv_len("a") == 0


def test_penalised_ids_may_be_an_array_of_objects(runner: ModelRunner, oracle: Oracle):
    penalty = GreedyRepetitionPenalty(penalty=1.7, token_ids=IDS)
    policy = GreedyArgmax(repetition_penalty=penalty)
    runner.prefill("a", [1, 2])
    (found,) = runner.decode_batch_with_logits_policy([("a", 3, 2)], [policy])
    assert found == choose(oracle([1, 2, 3])[-1], policy)


def test_only_the_contracts_own_masks_and_penalties_are_taken(runner: ModelRunner):
    mask = TokenSelectionMask(fingerprint=1, valid_token_mask=_deleted())
    for policy in (
        GreedyArgmax(token_mask=mask),
        GreedyArgmax(token_mask=WRONG["mask"]),
        GreedyArgmax(repetition_penalty=WRONG["factor"]),
    ):
        with pytest.raises(RequestValidationError, match=r"mask|penalty"):
            runner.unified_forward_with_logits_policy([("a", [1], 0, True)], [policy])
    assert runner.kv_len("a") is None


def test_paths_that_no_file_can_have_are_not_found():
    with pytest.raises(NotFoundError, match="too long"):
        ferrum_jax.load("a" * 5000)
    with pytest.raises(NotFoundError, match="home"):
        ferrum_jax.load("~nobody of that name/model")
    with pytest.raises(ConfigError, match="path is None"):
        ferrum_jax.load(WRONG["model"])


def test_what_has_no_repr_is_shown_by_its_type():
    assert safe_repr("a") == "'a'"
    assert safe_repr(HUGE) == "a int that cannot be shown"
    assert safe_repr(_deleted()) == "a ArrayImpl that cannot be shown"


def test_a_token_on_a_device_compiles_nothing_and_a_deleted_one_is_refused(runner: ModelRunner, compiles: list[str]):
    token: Any = jnp.array(3)
    gone: Any = jnp.array(4)
    gone.delete()
    mixed: Any = [token, np.array(4, np.uint16), 5]
    runner.prefill("a", mixed)
    compiles.clear()
    with jax.transfer_guard("disallow"):
        runner.decode("a", token, 3)
    for call in (lambda: runner.decode("a", gone, 4), lambda: runner.prefill("b", [1, gone])):
        with pytest.raises(RequestValidationError, match="expected an integer id"):
            call()
    assert compiles == []
    runner.release("a")
