"""One model's KV on its device: compiled steps in, logits on the host out."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import packing, steps
from ferrum_jax.compile.buckets import Outputs, Piece, StepKey, StepPlan
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import BackendError, DeviceError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec, KvState
from ferrum_jax.models.batch import Rows
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.devices import JaxDevice


@dataclass(frozen=True)
class Row:
    """New tokens of one sequence, and where it lies."""

    tokens: NDArray[np.int32]  # [n]
    length: int  # positions before these tokens
    table: NDArray[np.int32]  # [M]
    wanted: bool  # whether its logits are wanted


class DeviceKv:
    """Owns the KV: every step's input dies at dispatch and its output takes the place."""

    def __init__(self, params: ParamTree, cfg: ModelConfig, spec: CacheSpec, device: JaxDevice):
        placed = jax.sharding.SingleDeviceSharding(device)
        self._shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), state.shapes(spec)
        )
        empty = jax.jit(state.empty, static_argnums=0, out_shardings=placed)
        self._empty = empty.lower(spec).compile()
        self._params = params
        self._cfg = cfg
        self._kv: KvState[jax.Array] | None = self._empty()

    @property
    def kv(self) -> KvState[jax.Array]:
        """The KV as of the last step."""
        if self._kv is None:
            raise BackendError("the KV was lost in a failed step, reset() allocates it anew")
        return self._kv

    @property
    def is_lost(self) -> bool:
        """True after a step that took the KV and did not give it back."""
        return self._kv is None

    def lower(self, key: StepKey) -> jax.stages.Lowered:
        """Lowers one step for these parameters and this KV."""
        return steps.lower_step(self._cfg, self._params, self._shapes, key)

    def reallocate(self) -> None:
        """Drops the KV and allocates it anew."""
        self._kv = None
        self._kv = self._empty()

    def drop(self) -> None:
        """Frees the KV and forgets the parameters."""
        self._kv, self._params = None, {}

    def run(
        self, plan: StepPlan, executable: jax.stages.Compiled, rows: Sequence[Row]
    ) -> dict[int, NDArray[np.float32]]:
        """Runs one step; gives, by row, the float32 logits of rows whose last token it held, if wanted.

        For steps with the outputs `ALL`, every piece's logits come back, `[n, V]`.

        Raises:
            DeviceError: the device failed; the KV is lost.
        """
        buffer, groups = packing.blank(plan.key)
        for at, piece in enumerate(plan.decodes):
            _fill(groups[0], at, piece, rows[piece.row])
        for at, piece in enumerate(plan.chunks):
            _fill(groups[-1], at, piece, rows[piece.row])
        kv, self._kv = self.kv, None
        try:
            outputs, self._kv = executable(self._params, kv, buffer)
            return self._fetch(plan, outputs, rows)
        except jax.errors.JaxRuntimeError as problem:
            self._kv = None
            raise DeviceError(f"step {plan.key} failed on the device: {problem}") from problem

    def _fetch(self, plan: StepPlan, outputs: steps.StepOutputs, rows: Sequence[Row]) -> dict[int, NDArray[np.float32]]:
        wanted = []
        for offset, members in ((0, plan.decodes), (plan.key.decode_rows, plan.chunks)):
            for at, piece in enumerate(members):
                row = rows[piece.row]
                if row.wanted and (
                    plan.key.outputs == Outputs.ALL.value or piece.start + piece.count == len(row.tokens)
                ):
                    wanted.append((offset + at, piece))
        if not wanted:
            jax.block_until_ready(outputs)
            return {}
        host = np.asarray(outputs.logits)
        if plan.key.outputs == Outputs.ALL.value:
            return {piece.row: host[: piece.count].copy() for _, piece in wanted}
        return {piece.row: host[at].copy() for at, piece in wanted}


def _fill(group: Rows[NDArray[np.int32]], at: int, piece: Piece, row: Row) -> None:
    group.tokens[at, : piece.count] = row.tokens[piece.start : piece.start + piece.count]
    group.lengths[at] = row.length + piece.start
    group.counts[at] = piece.count
    group.tables[at] = row.table
