"""Laws 2, 3 and 6: a state machine drives the runner and compares every logit with the cache-free forward."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ferrum_jax.contract.errors import RequestValidationError, ResourceExhaustedError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CAPACITY, CFG, ENGINE, Oracle, late_compiles, make_runner, poison

IDS = st.sampled_from("abcdef")  # more than the 4 slots
TOKENS = st.lists(st.integers(0, CFG.vocab_size - 1), min_size=1, max_size=CAPACITY)
TOLERANCE = 1e-4  # float32 sums in another order; logits are of order 10


def _machine(runner: ModelRunner, oracle: Oracle) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            runner.reset()
            poison(runner)
            self.sequences: dict[str, list[int]] = {}

        def agree(self, sequence: list[int], logits: np.ndarray) -> None:
            expected = oracle(sequence)
            logits = np.atleast_2d(logits)
            np.testing.assert_allclose(logits, expected[len(sequence) - len(logits) :], atol=TOLERANCE, rtol=0)

        def attempt(self, targets: dict[str, list[int]], call):
            """Runs a call that appends `targets`; says whether it had to be, and was, refused."""
            grown = {key: self.sequences.get(key, []) + tokens for key, tokens in targets.items()}
            blocks = {key: -(-len(tokens) // 8) for key, tokens in {**self.sequences, **grown}.items()}
            if any(len(tokens) > CAPACITY for tokens in grown.values()):
                with pytest.raises(RequestValidationError, match="capacity"):
                    call()
                return None
            if len(blocks) > 4 or sum(blocks.values()) > 18:
                with pytest.raises(ResourceExhaustedError) as caught:
                    call()
                assert caught.value.needed is not None
                assert caught.value.free is not None
                assert caught.value.needed > caught.value.free
                return None
            result = call()
            self.sequences.update(grown)
            return result

        @rule(key=IDS, tokens=TOKENS)
        def prefill(self, key: str, tokens: list[int]):
            logits = self.attempt({key: tokens}, lambda: runner.prefill(key, tokens))
            if logits is not None:
                self.agree(self.sequences[key], logits)

        @rule(key=IDS, tokens=TOKENS)
        def verify(self, key: str, tokens: list[int]):
            logits = self.attempt({key: tokens}, lambda: runner.forward_verify(key, tokens))
            if logits is not None:
                assert logits.shape == (len(tokens), CFG.vocab_size)
                self.agree(self.sequences[key], logits)

        @rule(keys=st.sets(IDS), token=st.integers(0, CFG.vocab_size - 1))
        def decode(self, keys: set[str], token: int):
            batch = [
                (key, (token + i) % CFG.vocab_size, len(self.sequences.get(key, []))) for i, key in enumerate(keys)
            ]
            rows = self.attempt({key: [t] for key, t, _ in batch}, lambda: runner.decode_batch(batch))
            for (key, _, _), row in zip(batch, rows or [], strict=rows is not None):
                self.agree(self.sequences[key], row)

        @rule(work=st.dictionaries(IDS, st.tuples(TOKENS, st.booleans())))
        def unified(self, work: dict[str, tuple[list[int], bool]]):
            items = [(key, tokens, len(self.sequences.get(key, [])), last) for key, (tokens, last) in work.items()]
            rows = self.attempt({key: t for key, (t, _) in work.items()}, lambda: runner.unified_forward(items))
            for (key, _, _, last), row in zip(items, rows or [], strict=rows is not None):
                assert (row is not None) == last
                if row is not None:
                    self.agree(self.sequences[key], row)

        @rule(key=IDS, length=st.integers(0, CAPACITY + 3))
        def truncate(self, key: str, length: int):
            runner.truncate_kv(key, length)
            if key in self.sequences:
                self.sequences[key] = self.sequences[key][:length]

        @rule(key=IDS)
        def release(self, key: str):
            runner.release(key)
            self.sequences.pop(key, None)

        @rule(key=IDS, off=st.integers(1, 5))
        def decode_at_a_wrong_position(self, key: str, off: int):
            with pytest.raises(RequestValidationError, match="positions"):
                runner.decode(key, 0, len(self.sequences.get(key, [])) + off)

        @rule(key=IDS, token=st.sampled_from([-1, CFG.vocab_size, 2**40]))
        def prefill_a_wrong_token(self, key: str, token: int):
            with pytest.raises(RequestValidationError, match=str(token)):
                runner.prefill(key, [1, token])

        @invariant()
        def every_length_and_block_is_accounted_for(self):
            for key in "abcdef":
                sequence = self.sequences.get(key)
                assert runner.kv_len(key) == (None if sequence is None else len(sequence))
            held = sum(-(-len(sequence) // 8) for sequence in self.sequences.values())
            assert runner.kv_slot_capacity_snapshot().free_blocks == 18 - held

        def teardown(self):
            for key in "abcdef":
                runner.release(key)
            assert runner.kv_slot_capacity_snapshot().free_blocks == 18

    return Machine


def _run(runner: ModelRunner, oracle: Oracle, examples: int, steps: int) -> None:
    machine = _machine(runner, oracle)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )


def test_any_sequence_of_calls_gives_the_logits_of_the_cache_free_forward(runner: ModelRunner, oracle: Oracle):
    before = late_compiles(runner)
    _run(runner, oracle, examples=16, steps=25)
    assert late_compiles(runner) == before


@pytest.mark.slow
@pytest.mark.parametrize("window_kv", [True, False])
def test_very_many_sequences_of_calls_do(window_kv: bool, params: ParamTree, oracle: Oracle):
    with make_runner(params, replace(ENGINE, window_kv=window_kv)) as runner:
        _run(runner, oracle, examples=400, steps=50)
