"""`bench.kernels` measures kernels on numbers that could tell them apart, or does not run."""

import sys
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from bench import kernels
from bench.bare import random_kv
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec, Layout
from ferrum_jax.ops import native

SIZES = {"num_layers": 2, "num_blocks": 3, "block_size": 4, "num_kv_heads": 5, "head_dim": 6, "dtype": "float32"}


def test_a_random_kv_is_the_same_in_every_layout_and_has_no_zeros():
    blocks, reference = jnp.arange(3), random_kv(CacheSpec(**SIZES), seed=1)
    keys, values = zip(*[state.read(reference, layer, blocks) for layer in range(2)], strict=True)
    numbers = np.concatenate([np.ravel(one) for one in (*keys, *values)])
    assert np.isfinite(numbers).all()
    assert (numbers != 0).all()
    assert len(np.unique(numbers)) > 0.99 * numbers.size  # layers, blocks and heads have numbers of their own
    for layout in get_args(Layout):
        kv = random_kv(CacheSpec(**SIZES, layout=layout), seed=1)
        for layer in range(2):
            k, v = state.read(kv, layer, blocks)
            np.testing.assert_array_equal(k, keys[layer])
            np.testing.assert_array_equal(v, k.swapaxes(2, 3) if layout in state.LATENTS else values[layer])


def test_a_machine_without_kernels_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "library", lambda: "that takes a C++ compiler")
    monkeypatch.setattr(sys, "argv", ["kernels", "--smoke"])
    with pytest.raises(SystemExit, match=r"no kernels .*: that takes a C\+\+ compiler"):
        kernels.main()
