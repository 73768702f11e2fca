"""The sizes that steps are compiled for, and the programs that follow from them."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.compile.block_programs import CopyKey, GatherKey
from ferrum_jax.compile.buckets import Buckets, bucket_sizes, choose_bucket
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.compile.sampler import ConfigureKey, DistributionKey, SampleKey, VerifyKey
from ferrum_jax.compile.step import StepKey

COLUMNS, CAPACITY = 6, 90
SIZES = st.sets(st.integers(1, 9), min_size=1, max_size=3).map(lambda sizes: tuple(sorted(sizes)))


@st.composite
def drawn_buckets(draw: st.DrawFn) -> Buckets:
    """Any sizes that go together."""
    rows, blocks, size = draw(SIZES), draw(SIZES), draw(st.integers(1, 12))
    return Buckets(
        decode_rows=rows,
        query_blocks=blocks,
        mixed_blocks=tuple(sorted(draw(st.sets(st.sampled_from(blocks), min_size=1)))),
        block_tokens=size,
        verify_blocks=draw(SIZES),
        verify_tokens=draw(st.integers(1, min(size, 6))),
        table_columns=COLUMNS,
        kv_capacity=CAPACITY,
        max_rows=draw(st.integers(rows[-1], 12)),
        logit_blocks=draw(st.integers(1, min(3, blocks[-1]))),
        step_overhead=draw(st.sampled_from([0, 16, 256])),
    )


GOOD = Buckets(
    decode_rows=(1, 4),
    query_blocks=(1, 2, 6),
    mixed_blocks=(2, 6),
    block_tokens=8,
    verify_blocks=(1, 2),
    verify_tokens=3,
    table_columns=COLUMNS,
    kv_capacity=CAPACITY,
    max_rows=4,
)


@given(maximum=st.integers(1, 5000), start=st.integers(1, 40), factor=st.integers(2, 4))
def test_a_ladder_ascends_by_its_factor_and_ends_in_its_maximum(maximum: int, start: int, factor: int):
    sizes = bucket_sizes(maximum, start, factor)
    assert sizes[-1] == maximum
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == min(start, maximum)
    assert all(big == small * factor for small, big in itertools.pairwise(sizes[:-1]))
    assert len(sizes) == 1 or sizes[-1] <= sizes[-2] * factor


def test_ladders_as_they_are_used():
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(10, factor=4) == (1, 4, 10)
    assert bucket_sizes(100, start=16) == (16, 32, 64, 100)
    assert bucket_sizes(1) == (1,)


@given(sizes=SIZES, needed=st.integers(0, 12))
def test_a_bucket_is_the_smallest_that_holds_or_the_largest_there_is(sizes: tuple[int, ...], needed: int):
    assert choose_bucket(sizes, needed) == min((s for s in sizes if s >= needed), default=max(sizes))


@given(buckets=drawn_buckets())
def test_steps_are_declared_once_and_the_largest_first(buckets: Buckets):
    keys = buckets.steps()
    assert len(set(keys)) == len(keys)
    assert all(key.table_columns == COLUMNS for key in keys)
    sizes = [key.num_tokens for key in keys]
    assert sizes == sorted(sizes, reverse=True)
    last = [key for key in keys if key.outputs == "last"]
    assert max(key.blocks * key.block_tokens for key in last) == buckets.max_step_tokens


@given(buckets=drawn_buckets())
def test_a_step_has_logits_for_every_row_that_can_end_in_it(buckets: Buckets):
    for key in buckets.steps():
        if key.outputs != "last":
            assert key.logit_rows == key.num_tokens
        else:
            assert key.logit_rows in (*buckets.decode_rows, buckets.max_rows)
            assert key.logit_rows >= min(key.decode_rows + key.blocks, buckets.max_rows)


@given(buckets=drawn_buckets(), drafts=st.booleans(), adapters=st.booleans())
def test_what_follows_on_a_declared_step_is_declared(buckets: Buckets, drafts: bool, adapters: bool):
    declared = buckets.declared(adapters=adapters, drafts=drafts)
    assert len(set(declared)) == len(declared)
    for key in buckets.steps(adapters=adapters):
        assert key in declared
        assert key.outputs != "last" or SampleKey(key.logit_rows) in declared
        if drafts and key.outputs == "all" and key.block_tokens == buckets.verify_tokens:
            assert key.blocks not in buckets.verify_blocks or VerifyKey(key.blocks, key.block_tokens) in declared


@given(buckets=drawn_buckets(), count=st.integers(1, CAPACITY))
def test_what_one_sequence_needs_alone_is_declared(buckets: Buckets, count: int):
    assert set(buckets.needed(count)) <= set(buckets.steps())
    assert set(buckets.needed(count, adapters=True)) <= set(buckets.steps(adapters=True))


def test_the_programs_of_some_buckets_by_name():
    assert [str(key) for key in GOOD.declared()] == [
        "step D4 P6x8 M6 R4", "step D0 P6x8 M6 R4", "step D0 P6x8 M6 R48 scores", "step D4 P2x8 M6 R4",
        "step D0 P2x8 M6 R4",
        "step D0 P1x8 M6 R1", "step D0 P1x8 M6 R8 all", "step D0 P2x3 M6 R6 all", "step D4 P0x0 M6 R4",
        "step D0 P1x3 M6 R3 all", "step D1 P0x0 M6 R1",
        *map(str, [SampleKey(1), SampleKey(4)]),
        *map(str, [ConfigureKey(90), CopyKey(4), GatherKey(6)]),
    ]  # fmt: skip
    judged = {VerifyKey(1, 3), VerifyKey(2, 3)}
    drawn_from = {DistributionKey(1, 8), DistributionKey(1, 3), DistributionKey(2, 3)}
    assert set(GOOD.declared(drafts=True)) - set(GOOD.declared()) == judged | drawn_from


def test_adapters_double_the_steps_and_nothing_else():
    both, steps = GOOD.steps(adapters=True), GOOD.steps()
    assert {key for key in both if not key.adapters} == set(steps)
    assert len(both) == 2 * len(steps)
    assert len(GOOD.declared(adapters=True)) == len(GOOD.declared()) + len(steps)


def test_multi_step_programs_are_declared_where_they_are_asked_for():
    assert GOOD.multi_steps() == []
    many = replace(GOOD, multi_step_tokens=5)
    assert many.multi_steps() == [MultiStepKey(1, 5, COLUMNS), MultiStepKey(4, 5, COLUMNS)]
    assert set(many.multi_steps(adapters=True)) <= set(many.declared(adapters=True))


def test_a_request_past_the_largest_bucket_takes_the_largest():
    assert GOOD.decode(9) == GOOD.decode(4) == StepKey(4, 0, 0, COLUMNS, 4)
    assert GOOD.blocks(50, mixed=False).blocks == GOOD.blocks(50, mixed=True).blocks == 6
