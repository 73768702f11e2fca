"""Layers with a sliding-window cache give the logits of layers that keep everything, for any division of a prompt."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import models
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models import Batch, Rows
from ferrum_jax.models.sliding_window import num_window_blocks
from tests import tiny
from tests.oracle import oracle
from tests.tiers import by_default

TOLERANCE = 2e-5  # float32 sums in another order; logits are of the order of one
NAME, BLOCK, WINDOW = "qwen2_layer_types", 4, 7
CFG = tiny.model_config(NAME)


def batch(tokens: list[int], start: int, size: int, table: list[int]) -> Batch[jax.Array]:
    """Tokens of one sequence from position `start` on, as rows of up to `size`, the last of them padding."""
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)] + [[]]
    rows = Rows(
        tokens=jnp.array([part + [0] * (size - len(part)) for part in parts]),
        lengths=start + jnp.arange(len(parts)) * size,
        counts=jnp.array([len(part) for part in parts]),
        tables=jnp.array([table] * len(parts)),
    )
    return Batch(groups=(rows,), logit_rows=jnp.arange(len(tokens)))


@pytest.mark.parametrize(("size", "step_tokens"), by_default([(5, 12), (18, 36)], (5, 12)))
def test_rows_of_one_sequence_in_a_step_equal_the_forward_without_a_cache(size: int, step_tokens: int):
    params = tiny.tiny_params(tiny.CONFIGS[NAME])
    tokens = np.random.default_rng(1).integers(CFG.vocab_size, size=72).tolist()
    blocks, window_blocks = -(-len(tokens) // BLOCK), num_window_blocks(WINDOW, step_tokens, BLOCK)
    spec = CacheSpec(
        num_layers=CFG.layer_windows.count(None), num_blocks=blocks, block_size=BLOCK, dtype="float32",
        num_kv_heads=CFG.num_key_value_heads, head_dim=CFG.head_dim,
        window_layers=3 - CFG.layer_windows.count(None), window_blocks=window_blocks, window_slots=1,
    )  # fmt: skip
    order = np.random.default_rng(0).permutation
    table = [*order(blocks).tolist(), *order(window_blocks).tolist()]
    kv = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype), state.shapes(spec))
    run = jax.jit(functools.partial(models.family(CFG).forward, cfg=CFG))
    found = []
    for start in range(0, len(tokens), step_tokens):
        logits, kv, _ = run(params, kv, batch(tokens[start : start + step_tokens], start, size, table))
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found), oracle(params, jnp.array(tokens), CFG), rtol=0, atol=TOLERANCE)
