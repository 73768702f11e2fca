"""Ladders, and the laws of the plans that are made with them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.compile.buckets import Ladders, Outputs, StepKey, StepPlan, choose_bucket, ladder, plan, plan_verify
from ferrum_jax.contract.errors import ConfigError

COLUMNS = 6
SIZES = st.sets(st.integers(1, 9), min_size=1, max_size=3).map(lambda sizes: tuple(sorted(sizes)))


def fits(ladders: dict[str, tuple[int, ...]], step_tokens: int) -> bool:
    rows, tokens = ladders["chunk_rows"], ladders["chunk_tokens"]
    return max(rows[0] * tokens[-1], rows[-1] * tokens[0]) <= step_tokens


def make(names: dict[str, tuple[int, ...]], step_tokens: int) -> Ladders:
    return Ladders(
        decode_rows=names["decode_rows"],
        chunk_rows=names["chunk_rows"],
        chunk_tokens=names["chunk_tokens"],
        verify_tokens=names["verify_tokens"],
        verify_rows=names.get("verify_rows", (1,)),
        max_step_tokens=step_tokens,
        table_columns=COLUMNS,
    )


LADDERS = (
    st.tuples(
        st.fixed_dictionaries(
            dict.fromkeys(("decode_rows", "chunk_rows", "verify_tokens", "verify_rows"), SIZES)
            | {"chunk_tokens": st.sets(st.integers(2, 20), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))}
        ),
        st.integers(2, 60),
    )
    .filter(lambda drawn: fits(*drawn))
    .map(lambda drawn: make(*drawn))
)
COUNTS = st.lists(st.one_of(st.just(1), st.integers(1, 50)), max_size=12)


@given(maximum=st.integers(1, 5000), start=st.integers(1, 40), factor=st.integers(2, 4))
def test_a_ladder_ascends_by_its_factor_and_ends_in_its_maximum(maximum: int, start: int, factor: int):
    sizes = ladder(maximum, start, factor)
    assert sizes[-1] == maximum
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == min(start, maximum)
    assert all(big == small * factor for small, big in itertools.pairwise(sizes[:-1]))
    assert len(sizes) == 1 or sizes[-1] <= sizes[-2] * factor


def test_ladders_as_they_are_used():
    assert ladder(8) == (1, 2, 4, 8)
    assert ladder(10, factor=4) == (1, 4, 10)
    assert ladder(100, start=16) == (16, 32, 64, 100)
    assert ladder(1) == (1,)


@given(sizes=SIZES, needed=st.integers(0, 12))
def test_a_bucket_is_the_smallest_that_holds_or_the_largest_there_is(sizes: tuple[int, ...], needed: int):
    assert choose_bucket(sizes, needed) == min((s for s in sizes if s >= needed), default=max(sizes))


def refuse_overfull(steps: list[StepPlan], ladders: Ladders) -> None:
    """Every step is declared, holds what it is given, and never a row twice."""
    declared = set(ladders.declared())
    for step in steps:
        assert step.key in declared
        assert step.decodes or step.chunks
        assert len(step.decodes) <= step.key.decode_rows
        assert len(step.chunks) <= step.key.chunk_rows
        assert all(piece.size == 1 for piece in step.decodes)
        assert all(1 <= piece.size <= step.key.chunk_tokens for piece in step.chunks)
        rows = [piece.row for piece in (*step.decodes, *step.chunks)]
        assert len(set(rows)) == len(rows)


@given(counts=COUNTS, ladders=LADDERS)
def test_a_plan_takes_every_token_of_every_row_once_and_in_order(counts: list[int], ladders: Ladders):
    steps = plan(counts, ladders)
    refuse_overfull(steps, ladders)
    done = [0] * len(counts)
    for step in steps:
        for piece in (*step.decodes, *step.chunks):
            assert piece.start == done[piece.row]
            done[piece.row] += piece.size
    assert done == counts


@given(counts=COUNTS.filter(bool), ladders=LADDERS)
def test_what_fits_in_one_step_takes_one(counts: list[int], ladders: Ladders):
    longer = [count for count in counts if count > 1]
    buckets = [rows for rows in ladders.chunk_rows if rows >= len(longer)]
    fits_rows = len(counts) - len(longer) <= ladders.decode_rows[-1]
    fits_chunks = not longer or (bool(buckets) and max(longer) <= ladders.widths(buckets[0])[-1])
    if fits_rows and fits_chunks:
        assert len(plan(counts, ladders)) == 1


@given(counts=COUNTS.filter(bool), ladders=LADDERS)
def test_a_step_is_no_larger_than_its_rows_need(counts: list[int], ladders: Ladders):
    for step in plan(counts, ladders):
        if not step.chunks:
            assert step.key.chunk_rows == 0
            assert step.key.decode_rows == choose_bucket(ladders.decode_rows, len(step.decodes))
        else:
            assert bool(step.key.decode_rows) == bool(step.decodes)
            widths = ladders.widths(step.key.chunk_rows)
            assert step.key.chunk_rows == choose_bucket(ladders.chunk_rows, len(step.chunks))
            assert step.key.chunk_tokens == choose_bucket(widths, max(piece.size for piece in step.chunks))


@given(ladders=LADDERS)
def test_no_declared_step_has_more_chunk_tokens_than_the_limit(ladders: Ladders):
    keys = ladders.steps()
    last = [key for key in keys if key.outputs == Outputs.LAST.value]
    assert all(key.chunk_rows * key.chunk_tokens <= ladders.max_step_tokens for key in last)
    assert len(set(keys)) == len(keys)
    assert all(key.table_columns == COLUMNS for key in keys)
    sizes = [key.num_tokens for key in keys]
    assert sizes == sorted(sizes, reverse=True)


@given(ladders=LADDERS, data=st.data())
def test_every_declared_step_is_needed_by_some_traffic(ladders: Ladders, data: st.DataObject):
    key = data.draw(st.sampled_from(ladders.steps()))
    if key.outputs == Outputs.ALL.value:
        steps = plan_verify([key.chunk_tokens] * key.chunk_rows, ladders)
    else:
        singles = 1 if key.chunk_rows and key.decode_rows else key.decode_rows
        steps = plan([1] * singles + [key.chunk_tokens] * key.chunk_rows, ladders)
    assert [step.key for step in steps] == [key]


@given(counts=COUNTS, ladders=LADDERS)
def test_a_verification_takes_every_token_once_and_in_order(counts: list[int], ladders: Ladders):
    steps = plan_verify(counts, ladders)
    declared = set(ladders.steps())
    done = [0] * len(counts)
    for step in steps:
        assert step.key in declared
        assert step.key.outputs == Outputs.ALL.value
        assert len({piece.row for piece in step.chunks}) == len(step.chunks) <= step.key.chunk_rows
        for piece in step.chunks:
            assert piece.start == done[piece.row]
            assert 1 <= piece.size <= step.key.chunk_tokens
            done[piece.row] += piece.size
    assert done == counts
    if counts and len(counts) <= ladders.verify_rows[-1]:
        assert len(steps) == -(-max(counts) // ladders.verify_tokens[-1])


GOOD: dict[str, tuple[int, ...]] = {
    "decode_rows": (1, 4), "chunk_rows": (1, 3), "chunk_tokens": (4, 8), "verify_tokens": (6,),
    "verify_rows": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (3, 3), (-1,)])
def test_ladders_that_do_not_ascend_from_1_are_refused(name: str, sizes: tuple[int, ...]):
    make(GOOD, 24)
    with pytest.raises(ConfigError, match=f"{name} is .* expected ascending"):
        make(GOOD | {name: sizes}, 24)


def test_sizes_that_no_step_could_have_are_refused():
    make(GOOD, 12)
    with pytest.raises(ConfigError, match=r"no step could hold 1 chunks of 8 tokens.* max_step_tokens is 7"):
        make(GOOD, 7)
    with pytest.raises(ConfigError, match=r"no step could hold 3 chunks of 4 tokens.* max_step_tokens is 11"):
        make(GOOD, 11)


def test_what_stands_beside_the_steps_is_declared():
    ladders = make(GOOD, 24)
    steps, others = ladders.steps(), [str(key) for key in ladders.declared()[len(ladders.steps()) :]]
    assert ladders.declared()[: len(steps)] == steps
    assert others == [
        "select R1", "select R3", "select R4", "select R5", "select R7",
        "score R6", "score R12", "copy 4 blocks", f"gather M{COLUMNS}",
    ]  # fmt: skip
    both = ladders.steps(adapters=True)
    assert {key for key in both if not key.adapters} == set(steps)
    assert len(both) == 2 * len(steps)


def test_a_key_says_its_shape():
    key = StepKey(4, 2, 16, 3)
    assert key.num_tokens == 36
    assert str(key) == "D4 P2x16 M3 last"
