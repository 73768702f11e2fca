"""A compiled decode step without the engine around it: its arguments are on the device before it starts."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ferrum_jax.compile.buckets import StepKey
from ferrum_jax.compile.packing import blank
from ferrum_jax.compile.steps import lower_step
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.kvcache import state


class BareStep:
    """One decode step as the runner has it, with a KV of its own that goes round."""

    def __init__(self, runner: ModelRunner, rows: int):
        self._runner = runner
        self._spec = runner.plan.cache
        self._key = StepKey(rows, 0, 0, runner.plan.ladders.table_columns)
        shapes, attention = state.shapes(self._spec), self._spec.attention
        lowered = lower_step(runner.model_config, runner.params, shapes, self._key, attention=attention)
        self._executable = lowered.compile()
        self._kv = state.empty(self._spec)

    def at(self, context: int) -> Callable[[], Any]:
        """Gives the call that decodes a token for each row after `context` positions; its outputs stay where they are.

        The rows' blocks differ as far as the pool has so many.
        """
        buffer, (group,) = blank(self._key)
        group.tokens[:], group.counts[:], group.lengths[:] = 1, 1, context
        used = -(-(context + 1) // self._spec.block_size)
        blocks = np.arange(self._key.decode_rows * used) % self._spec.num_blocks
        group.tables[:, :used] = blocks.reshape(-1, used)
        packed = jax.device_put(buffer, self._runner.device)

        def run() -> Any:
            outputs, self._kv = self._executable(self._runner.params, self._kv, packed)
            return jax.block_until_ready(outputs)

        return run
