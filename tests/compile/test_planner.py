"""Which steps serve a batch: every token of every row exactly once and in order, in declared programs, cheaply."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ferrum_jax.compile.buckets import Buckets, choose_bucket
from ferrum_jax.compile.planner import StepPlan, cost, plan_all_logits, plan_scores, plan_steps
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor import plan_engine
from tests.compile.test_buckets import GOOD, drawn_buckets
from tests.shipped import SMOLLM2

COUNTS = st.lists(st.one_of(st.just(1), st.integers(1, 50)), max_size=12)
MOST_COMPUTED = 1.2  # token rows that steps compute, over those that were asked for
RANDOM_BATCHES = 200


@functools.cache
def defaults() -> Buckets:
    """What a CPU is given for 8 sequences of 2,048 positions."""
    settings = EngineConfig(max_seqs=8, kv_capacity=2048)
    return plan_engine(settings, SMOLLM2, platform="cpu", free_bytes=1 << 40).buckets


def served(steps: Sequence[StepPlan], num_rows: int) -> list[int]:
    """Tokens of each row that the steps take, which must come in order; every step must be able to hold its pieces."""
    done = [0] * num_rows
    for step in steps:
        assert step.decodes or step.blocks
        assert len(step.decodes) <= step.key.decode_rows
        assert len(step.blocks) <= step.key.blocks
        assert len({piece.row for piece in step.decodes}) == len(step.decodes)
        for piece in (*step.decodes, *step.blocks):
            assert 1 <= piece.size <= (step.key.block_tokens if piece in step.blocks else 1)
            assert piece.start == done[piece.row]
            done[piece.row] += piece.size
    return done


def computed(steps: Sequence[StepPlan]) -> int:
    """Token rows that the steps' products run over."""
    return sum(step.key.num_tokens for step in steps)


@given(counts=COUNTS, buckets=drawn_buckets())
def test_a_plan_serves_every_token_of_every_row_once_and_in_order(counts: list[int], buckets: Buckets):
    assert served(plan_steps(counts, buckets), len(counts)) == counts


@given(counts=COUNTS, buckets=drawn_buckets())
def test_every_step_of_a_plan_is_declared(counts: list[int], buckets: Buckets):
    declared = set(buckets.declared())
    plans = plan_steps(counts, buckets), plan_all_logits(counts, buckets), plan_scores(counts, buckets)
    assert {step.key for plan in plans for step in plan} <= declared


@given(counts=COUNTS, buckets=drawn_buckets())
def test_a_step_has_a_row_of_logits_for_every_row_that_ends_in_it(counts: list[int], buckets: Buckets):
    counts = counts[: buckets.max_rows]
    for step in plan_steps(counts, buckets):
        ends = sum(piece.start + piece.size == counts[piece.row] for piece in (*step.decodes, *step.blocks))
        assert ends <= step.key.logit_rows


@given(buckets=drawn_buckets(), data=st.data())
def test_decode_rows_run_beside_the_first_blocks_or_after_all_of_them(buckets: Buckets, data: st.DataObject):
    longer = data.draw(st.lists(st.integers(2, 50), min_size=1, max_size=5))
    singles = data.draw(st.integers(1, buckets.decode_rows[-1]))
    steps = plan_steps([*longer, *[1] * singles], buckets)
    decoding = steps[0] if steps[0].decodes else steps[-1]
    assert len(decoding.decodes) == singles
    assert not any(step.decodes for step in steps if step is not decoding)
    assert bool(decoding.blocks) == (decoding is steps[0])
    apart = (*plan_steps(longer, buckets), *plan_steps([1] * singles, buckets))
    assert sum(cost(step.key, buckets) for step in steps) <= sum(cost(step.key, buckets) for step in apart)


def test_a_short_prompt_is_not_padded_to_a_large_step_for_the_rows_that_decode_beside_it():
    buckets = defaults()
    assert [(step.key.decode_rows, step.key.blocks) for step in plan_steps([1] * 8 + [20], buckets)] == [(0, 1), (8, 0)]
    (step,) = plan_steps([1] * 8 + [250], buckets)
    assert (step.key.decode_rows, step.key.blocks * step.key.block_tokens) == (8, 256)


@given(buckets=drawn_buckets(), count=st.integers(1, 40))
def test_decode_rows_alone_take_the_smallest_bucket_that_holds_them(buckets: Buckets, count: int):
    steps, most = plan_steps([1] * count, buckets), buckets.decode_rows[-1]
    assert len(steps) == -(-count // most)
    for step in steps:
        assert step.key.blocks == 0
        assert step.key.decode_rows == choose_bucket(buckets.decode_rows, len(step.decodes))


@given(counts=st.lists(st.integers(2, 50), min_size=1, max_size=8), buckets=drawn_buckets())
def test_no_single_size_of_step_serves_the_same_prompts_cheaper(counts: list[int], buckets: Buckets):
    plan = sum(cost(step.key, buckets) for step in plan_steps(counts, buckets))
    blocks = sum(-(-count // buckets.block_tokens) for count in counts)
    assume(blocks < 2 * buckets.query_blocks[-1])  # past that, the largest step is taken without looking further
    for size in buckets.query_blocks:
        assert plan <= -(-blocks // size) * cost(buckets.blocks(size, mixed=False), buckets)


def test_where_a_step_costs_much_few_large_ones_run_and_where_it_costs_little_many_tight_ones():
    cheap, dear = replace(GOOD, step_overhead=0), replace(GOOD, step_overhead=10_000)
    prompt = [3 * GOOD.block_tokens]
    assert [step.key.blocks for step in plan_steps(prompt, cheap)] == [2, 1]
    assert [step.key.blocks for step in plan_steps(prompt, dear)] == [6]


@given(counts=COUNTS, buckets=drawn_buckets())
def test_a_plan_for_all_logits_serves_every_token_once_and_in_order(counts: list[int], buckets: Buckets):
    steps = plan_all_logits(counts, buckets)
    assert served(steps, len(counts)) == counts
    assert all(step.key.outputs == "all" and not step.decodes for step in steps)


@given(counts=COUNTS, buckets=drawn_buckets())
def test_a_plan_for_scores_serves_every_token_once_and_in_order(counts: list[int], buckets: Buckets):
    steps = plan_scores(counts, buckets)
    assert served(steps, len(counts)) == counts
    assert all(step.key.outputs != "last" and not step.decodes for step in steps)


@given(counts=COUNTS, buckets=drawn_buckets(), overhead=st.sampled_from([0, 16, 256]))
def test_scores_cost_no_more_than_all_logits_or_than_blocks_of_one_size(
    counts: list[int], buckets: Buckets, overhead: int
):
    buckets = replace(buckets, step_overhead=overhead)
    plan = sum(cost(step.key, buckets) for step in plan_scores(counts, buckets))
    blocks = sum(-(-count // buckets.block_tokens) for count in counts)
    assume(blocks < 2 * buckets.score_blocks[-1])  # past that, the largest step is taken without looking further
    for size in buckets.score_blocks:
        assert plan <= -(-blocks // size) * cost(buckets.scores(size), buckets)
    if buckets.verify_tokens < buckets.block_tokens and buckets.logit_blocks == 1:  # else two ends may fit one step
        assert plan <= sum(cost(step.key, buckets) for step in plan_all_logits(counts, buckets))


def test_long_rows_are_scored_together_and_what_is_left_of_a_row_as_a_short_one():
    size, small = GOOD.block_tokens, GOOD.verify_tokens
    steps = plan_scores([3 * size, 2 * size + small, size + small + 1], replace(GOOD, step_overhead=0))
    assert [(step.key.outputs, step.key.blocks, len(step.blocks)) for step in steps] == [
        ("scores", 6, 6), ("all", 1, 1), ("all", 1, 1),
    ]  # fmt: skip
    assert [piece.size for piece in steps[1].blocks] == [small + 1]
    assert [(piece.row, piece.start, piece.size) for piece in steps[2].blocks] == [(1, 2 * size, small)]


@given(buckets=drawn_buckets(), data=st.data())
def test_short_rows_have_all_their_logits_in_one_step(buckets: Buckets, data: st.DataObject):
    size = st.integers(1, buckets.verify_tokens)
    counts = data.draw(st.lists(size, min_size=1, max_size=buckets.verify_blocks[-1]))
    (step,) = plan_all_logits(counts, buckets)
    assert step.key == buckets.all_logits(choose_bucket(buckets.verify_blocks, len(counts)), buckets.verify_tokens)


@given(buckets=drawn_buckets(), data=st.data())
def test_every_declared_step_is_needed_by_some_traffic(buckets: Buckets, data: st.DataObject):
    buckets = replace(buckets, step_overhead=10_000)  # so that what fits in one step takes one
    key, size = data.draw(st.sampled_from(buckets.steps())), buckets.block_tokens
    if key.outputs == "scores":
        steps = plan_scores([key.blocks * size], buckets)
    elif key.outputs == "all":
        short, long = [key.block_tokens] * key.blocks, [buckets.logit_blocks * size + 1]
        steps = plan_all_logits(short, buckets) + plan_all_logits(long, buckets)
    else:
        singles = min(1, key.decode_rows) if key.blocks else key.decode_rows
        prompt = [max(2, key.blocks * size)] if key.blocks else []
        steps = plan_steps([1] * singles + prompt, buckets)
        assume(key.blocks * size != 1)  # a row of one token decodes
        assert len(steps) == 1
    assert key in {step.key for step in steps}


def test_two_prompts_of_512_tokens_are_one_step_by_default():
    (step,) = plan_steps([512, 512], defaults())
    assert step.key.num_tokens == 1024


def test_257_tokens_cost_at_most_320_rows_by_default():
    assert computed(plan_steps([257], defaults())) <= 320


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_eight_sequences_of_2048_positions_take_20_programs_or_26_on_a_gpu(platform: str):
    settings = EngineConfig(max_seqs=8, kv_capacity=2048)
    plan = plan_engine(settings, SMOLLM2, platform=platform, free_bytes=1 << 40)
    # A GPU has two more that choose tokens for each of three numbers of rows, without branches.
    more = 0 if platform == "cpu" else 2 * len(plan.buckets.decode_rows)
    assert len(plan.declared()) <= 20 + more


def test_steps_compute_at_most_a_fifth_more_token_rows_than_were_asked_for():
    draw = random.Random(0)
    asked = done = 0
    for _ in range(RANDOM_BATCHES):
        counts = [draw.randint(16, 700) for _ in range(draw.randint(1, 8))] + [1] * draw.randint(0, 8)
        asked += sum(counts)
        done += computed(plan_steps(counts, defaults()))
    print(f"{done / asked:.3f} token rows computed for each one asked for")
    assert done <= MOST_COMPUTED * asked
