"""What is written through the views of a packed step is what the step reads, and a step writes the KV in place."""

from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.compile import sampler, step
from ferrum_jax.compile.sampler import SamplerSpec
from ferrum_jax.compile.step import PackedStep, ProgramContext, StepKey, StepOutputs, blank, packed_size, split
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models import Point, family, specs
from tests.executor.conftest import CFG

SLOTS = 9
KEYS = {
    "decode rows": StepKey(3, 0, 0, 5, 3),
    "query blocks": StepKey(0, 2, 7, 5, 2),
    "both": StepKey(3, 2, 7, 5, 4),
    "with adapters": StepKey(3, 2, 7, 5, 4, adapters=True),
    "all logits": StepKey(0, 2, 6, 5, 12, "all"),
    "all logits with adapters": StepKey(0, 2, 6, 5, 12, "all", adapters=True),
    "scores": StepKey(0, 2, 6, 5, 12, "scores"),
}
SIZES = st.integers(0, 4)


def views(packed: PackedStep[Any]) -> list[Any]:
    """Every piece, in a fixed order; None where there is none."""
    found = []
    for group in (packed.decode, packed.blocks):
        found += [None] * 5 if group is None else [getattr(group, field.name) for field in fields(group)]
    return [*found, packed.decode_slots, packed.block_slots, packed.logit_index, packed.sample_slots,
            packed.sample_positions, packed.targets, packed.scored]  # fmt: skip


def fill(packed: PackedStep[Any]) -> list[Any]:
    """Numbers every element of every piece."""
    pieces = [view for view in views(packed) if view is not None]
    start = 1
    for view in pieces:
        view[...] = start + np.arange(view.size).reshape(view.shape)
        start += view.size
    return pieces


@pytest.mark.parametrize("name", KEYS)
def test_a_step_survives_packing(name: str):
    key = KEYS[name]
    buffer, packed = blank(key, SLOTS)
    assert buffer.dtype == np.int32
    assert buffer.shape == (packed_size(key),)
    fill(packed)
    found = jax.jit(split, static_argnums=1)(buffer, key)
    for mine, theirs in zip(views(packed), views(found), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_array_equal(mine, theirs)


@given(rows=SIZES, blocks=SIZES, tokens=st.integers(1, 5), columns=st.integers(1, 6), logits=st.integers(1, 4),
       adapters=st.booleans(), outputs=st.sampled_from(["last", "all", "scores"]))  # fmt: skip
def test_the_pieces_of_a_buffer_cover_it_and_do_not_overlap(
    rows: int, blocks: int, tokens: int, columns: int, logits: int, adapters: bool, outputs: Any
):
    key = StepKey(rows, blocks, tokens, columns, logits, outputs, adapters)
    buffer, packed = blank(key, SLOTS)
    assert sum(piece.size for piece in fill(packed)) == buffer.size
    assert sorted(buffer.tolist()) == list(range(1, buffer.size + 1))


@pytest.mark.parametrize("name", KEYS)
def test_a_blank_step_is_padding_for_nobody(name: str):
    key = KEYS[name]
    _, packed = blank(key, SLOTS)
    for group, rows, tokens in (
        (packed.decode, key.decode_rows, 1),
        (packed.blocks, key.blocks, key.block_tokens),
    ):
        assert (group is not None) == bool(rows)
        if group is not None:
            assert group.tokens.shape == (rows, tokens)
            assert group.tables.shape == (rows, key.table_columns)
            assert not group.counts.any()
            assert (group.adapters is not None) == key.adapters
            assert group.adapters is None or (group.adapters == -1).all()
    assert (packed.sample_slots == SLOTS).all()
    assert (packed.block_slots == SLOTS).all()
    is_last = key.outputs == "last"
    assert packed.logit_index.shape == ((key.logit_rows,) if is_last else (0,))
    assert packed.targets.shape == ((0,) if is_last else (key.logit_rows,))
    assert packed.scored.tolist() == ([] if is_last else [0])


def test_a_key_says_its_shape_and_counts_its_tokens():
    key = StepKey(4, 2, 16, 3, 4)
    assert key.num_tokens == 36
    assert str(key) == "step D4 P2x16 M3 R4"
    assert str(StepKey(0, 1, 8, 3, 8, "all", adapters=True)) == "step D0 P1x8 M3 R8 all adapters"
    captured = StepKey(0, 1, 8, 3, 8, "all", capture=(Point("pattern", 0), Point("z", 2)))
    assert str(captured) == "step D0 P1x8 M3 R8 all capture pattern.0 z.2"


def context(spec: CacheSpec) -> ProgramContext:
    """What a step of the tiny model is lowered for."""
    sizes = SamplerSpec(num_slots=SLOTS, vocab_size=CFG.vocab_size, capacity=24)
    shapes = specs.shapes(family(CFG).param_specs(CFG), "float32")
    return ProgramContext(CFG, shapes, state.shapes(spec), sampler.shapes(sizes))


def cache(block_size: int, num_blocks: int) -> CacheSpec:
    return CacheSpec(
        num_layers=CFG.num_hidden_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=CFG.num_key_value_heads,
        head_dim=CFG.head_dim,
        dtype="float32",
    )


MIXED, VERIFY = StepKey(2, 1, 8, 2, 2), StepKey(0, 1, 5, 2, 5, "all")


@pytest.mark.parametrize(
    ("key", "block_size", "num_blocks"),
    [
        (MIXED, 64, 200),
        (VERIFY, 64, 200),
        *(pytest.param(MIXED, *sizes, marks=pytest.mark.slow) for sizes in [(4, 1), (8, 3), (64, 1)]),
    ],
)
def test_a_step_of_any_kind_writes_the_kv_in_place(key: StepKey, block_size: int, num_blocks: int):
    spec = cache(block_size, num_blocks)
    memory = key.lower(context(spec)).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= spec.num_bytes
    if num_blocks == 200:  # where the pool is large, nothing of its size is copied: not even one layer of K
        assert memory.temp_size_in_bytes < spec.num_bytes / 4


def test_a_step_of_scores_has_the_logits_of_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "SCORED_ROWS", 16)
    found = StepKey(0, 4, 8, 4, 32, "scores").lower(context(cache(8, 16))).compile()
    lines = found.as_text()
    assert lines is not None
    assert f"f32[16,{CFG.vocab_size}]" in lines
    assert f"f32[32,{CFG.vocab_size}]" not in lines


def test_a_step_of_all_logits_scores_what_is_wanted_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "SCORED_ROWS", 8)  # two parts in the step of scores
    spec, key = cache(8, 4), StepKey(0, 2, 8, 4, 16, "all")
    made = context(spec)
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype), made.params)
    targets = draw.integers(CFG.vocab_size, size=16)

    def run(outputs: Any, wanted: int) -> StepOutputs[Any]:
        program = replace(key, outputs=outputs).lower(made).compile()
        buffer, packed = blank(key, SLOTS)
        assert packed.blocks is not None
        packed.blocks.tokens[:] = np.arange(16).reshape(2, 8)
        packed.blocks.counts[:], packed.blocks.lengths[:], packed.blocks.tables[:] = 8, [0, 8], [0, 1, 2, 3]
        packed.targets[:], packed.scored[:] = targets, wanted
        return program(jax.tree.leaves(params), state.empty(spec), np.zeros(SLOTS, np.int32), buffer)[0]

    logits = np.asarray(run("all", 0).logits, np.float64)
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for outputs, wanted in (("all", 0), ("all", 1), ("all", 2), ("scores", 1), ("scores", 2)):
        packed, top_ids, top = map(np.asarray, run(outputs, wanted).scores or ())
        if wanted == 0:
            assert not packed.any()
            continue
        np.testing.assert_array_equal(packed[:, 0], logits.argmax(axis=1))
        own = packed[:, 1].copy().view(np.float32)
        np.testing.assert_allclose(own, expected[np.arange(16), targets], rtol=0, atol=1e-4)
        if wanted == 1:
            assert not top_ids.any()
            assert not top.any()
            continue
        np.testing.assert_array_equal(top_ids[:, 0], packed[:, 0])
        np.testing.assert_allclose(top, -np.sort(-expected, axis=1)[:, : top.shape[1]], rtol=0, atol=1e-4)


def test_a_decode_row_without_a_token_takes_the_one_its_slot_sampled_last():
    spec, key = cache(4, 3), StepKey(2, 0, 0, 2, 2)
    made = context(spec)
    program = key.lower(made).compile()
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype), made.params)
    last = np.zeros(SLOTS, np.int32)
    last[[2, 5]] = 3, 7

    def logits(tokens: list[int]) -> np.ndarray:
        buffer, packed = blank(key, SLOTS)
        assert packed.decode is not None
        packed.decode.tokens[:, 0] = tokens
        packed.decode.counts[:] = 1
        packed.decode.tables[:] = [[0, 0], [1, 0]]
        packed.decode_slots[:] = [5, 2]
        packed.logit_index[:] = [0, 1]
        packed.sample_slots[:], packed.sample_positions[:] = [5, 2], [1, 1]
        outputs, _ = program(jax.tree.leaves(params), state.empty(spec), last, buffer)
        assert outputs.rows.tolist() == [[5, 1], [2, 1]]
        return np.asarray(outputs.logits)

    expected = logits([7, 3])
    np.testing.assert_array_equal(logits([-1, -1]), expected)
    np.testing.assert_array_equal(logits([-1, 3]), expected)
    assert not np.array_equal(logits([-1, 4]), expected)
