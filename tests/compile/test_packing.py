"""What is written through the views of a packed batch is what the step unpacks."""

import jax
import numpy as np
import pytest

from ferrum_jax.compile.buckets import Outputs, StepKey
from ferrum_jax.compile.packing import blank, packed_size, unpack

KEYS = {
    "decodes": StepKey(3, 0, 0, 5),
    "chunks": StepKey(0, 2, 7, 5),
    "both": StepKey(3, 2, 7, 5),
    "verify": StepKey(0, 1, 6, 5, Outputs.ALL.value),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_batch_survives_packing(name: str):
    key = KEYS[name]
    buffer, groups = blank(key)
    assert buffer.dtype == np.int32
    assert buffer.shape == (packed_size(key),)
    assert not buffer.any()
    shapes = [(b, t) for b, t in ((key.decode_rows, 1), (key.chunk_rows, key.chunk_tokens)) if b]
    assert [rows.tokens.shape for rows in groups] == shapes
    views = [leaf for rows in groups for leaf in (rows.tokens, rows.lengths, rows.counts, rows.tables)]
    for at, view in enumerate(views):
        view[...] = 1000 * (at + 1) + np.arange(view.size).reshape(view.shape)
    assert sum(view.size for view in views) == buffer.size
    assert np.all(buffer >= 1000)  # every element belongs to some view
    found = jax.jit(unpack, static_argnums=1)(buffer, key)
    for mine, theirs in zip(groups, found.groups, strict=True):
        for field in ("tokens", "lengths", "counts", "tables"):
            np.testing.assert_array_equal(getattr(mine, field), getattr(theirs, field), err_msg=field)


def test_logits_are_wanted_of_each_rows_last_real_token():
    buffer, (decodes, chunks) = blank(KEYS["both"])
    decodes.counts[:] = [1, 1, 0]  # the last is padding: some row of its own
    chunks.counts[:] = [7, 3]
    assert unpack(jax.numpy.asarray(buffer), KEYS["both"]).logit_rows.tolist() == [0, 1, 2, 3 + 6, 3 + 7 + 2]


def test_a_verification_wants_logits_of_every_token():
    buffer, (chunk,) = blank(KEYS["verify"])
    chunk.counts[:] = 4
    assert unpack(jax.numpy.asarray(buffer), KEYS["verify"]).logit_rows.tolist() == list(range(6))
