"""Rows of a bare step are sequences of their own, also in a sliding-window cache."""

from dataclasses import replace

import numpy as np

from bench import models
from bench.bare import BareStep
from bench.models import TINY
from ferrum_jax.config import EngineConfig


def test_a_row_of_a_sliding_window_cache_does_not_see_what_another_row_writes():
    cfg = replace(TINY, layer_windows=(16, None))
    sizes = {"max_seqs": 2, "kv_capacity": 64, "block_size": 16, "max_step_tokens": 16, "decode_rows": (2,)}
    engine = EngineConfig(**sizes, window_kv=True)
    with models.run(models.random("windowed", cfg, "float32"), engine) as runner:
        assert runner.plan.cache.window_blocks
        step = BareStep.of(runner, 2)
        one, other = (np.asarray(step.at(20, np.array([[1], [token]]))().logits) for token in (2, 3))
        np.testing.assert_array_equal(one[0], other[0])
        assert (one[1] != other[1]).any()
