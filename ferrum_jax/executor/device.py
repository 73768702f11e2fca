"""One model's KV on its device: compiled steps in, answers on the host out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import packing
from ferrum_jax.compile.artifacts import Artifacts, build
from ferrum_jax.compile.buckets import AnyKey, CopyKey, GatherKey, LoopKey, Outputs, Piece, SelectKey, StepPlan
from ferrum_jax.compile.looping import LoopRow, pack_loop
from ferrum_jax.compile.lowering import lower
from ferrum_jax.compile.selecting import Greedy, packed_rows
from ferrum_jax.compile.steps import StepOutputs
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.decoding import DecodedRun
from ferrum_jax.contract.errors import BackendError, DeviceError, ResourceExhaustedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec, KvState
from ferrum_jax.models.batch import Rows
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.devices import JaxDevice

T = TypeVar("T")
EMPTY_KV = "empty KV"  # what the call that makes it is kept as
Answer = NDArray[np.float32] | int
GetStep = Callable[[AnyKey], jax.stages.Compiled]


@dataclass(frozen=True, eq=False)
class Row:
    """New tokens of one sequence, where it lies, and how it answers."""

    tokens: NDArray[np.int32]  # [n]
    length: int  # positions before these tokens
    table: NDArray[np.int32]  # [M]
    wanted: bool  # whether it answers
    policy: Greedy | None = None  # how, if not with all logits
    adapter: int = -1  # row of the adapters' stacks, -1 for none


class DeviceKv:
    """Owns the KV: every step's input dies at dispatch and its output takes the place."""

    def __init__(
        self,
        params: ParamTree,
        cfg: ModelConfig,
        spec: CacheSpec,
        device: JaxDevice,
        artifacts: Artifacts | None = None,
    ):
        placed = jax.sharding.SingleDeviceSharding(device)
        self._shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), state.shapes(spec)
        )
        empty = jax.jit(state.empty, static_argnums=0, out_shardings=placed)
        try:
            self._empty = build(EMPTY_KV, lambda: empty.lower(spec), artifacts)
        except jax.errors.JaxRuntimeError as problem:
            raise ResourceExhaustedError(
                f"a KV of {spec.num_blocks} blocks ({spec.num_bytes:,} bytes) cannot be compiled for: {problem}"
            ) from problem
        self._spec = spec
        self._params = params
        self._cfg = cfg
        self._kv: KvState[jax.Array] | None = None
        self.fetched_bytes = 0  # that crossed to the host
        self.last_fetched_bytes = 0  # of them in the last call
        self.reallocate()

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

    def lower(self, key: AnyKey, loras: ParamTree | None = None) -> jax.stages.Lowered:
        """Lowers one call for these parameters and this KV, and for stacks of adapters."""
        return lower(self._cfg, self._params, self._shapes, loras, key, self._spec.attention)

    def reallocate(self) -> None:
        """Drops the KV and allocates it anew.

        Raises:
            ResourceExhaustedError: the device has not so much memory left.
        """
        self._kv = None
        try:
            self._kv = jax.block_until_ready(self._empty())
        except jax.errors.JaxRuntimeError as problem:
            raise ResourceExhaustedError(
                f"a KV of {self._spec.num_blocks} blocks ({self._spec.num_bytes:,} bytes) cannot be allocated: "
                f"{problem}"
            ) from problem

    def give_up(self) -> None:
        """Counts the KV as lost: what the host knows of it may no longer be true."""
        self._kv = None

    def drop(self) -> None:
        """Frees the KV and forgets the parameters."""
        self._kv, self._params = None, {}

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], key: CopyKey, get: GetStep) -> None:
        """Copies blocks, (source, destination) each."""
        padded = np.zeros((key.blocks, 2), np.int32)
        padded[: len(pairs)] = pairs
        copy = get(key)
        self._kv = self._replacing(lambda kv: jax.block_until_ready(copy(kv, padded, np.int32(len(pairs)))), key)

    def gather(
        self, layer: int, table: NDArray[np.int32], length: int, get: GetStep
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies one layer's keys and values of a sequence to the host: `[length, K, H]` each."""
        executable = get(GatherKey(len(table)))
        try:
            k, v = executable(self.kv, np.int32(layer), table)
            return np.asarray(k)[:length].copy(), np.asarray(v)[:length].copy()
        except jax.errors.JaxRuntimeError as problem:
            self._kv = None
            raise DeviceError(f"layer {layer} of a sequence cannot be read: {problem}") from problem

    def run(
        self, plan: StepPlan, rows: Sequence[Row], get: GetStep, loras: ParamTree | None = None
    ) -> dict[int, Answer]:
        """Runs one step; gives, by row, the answer of rows whose last token it held, if wanted.

        For steps with the outputs `ALL`, every piece's logits come back, `[n, V]`.

        Raises:
            DeviceError: the device failed; the KV is lost.
        """
        buffer, groups = packing.blank(plan.key)
        for at, piece in enumerate(plan.decodes):
            _fill(groups[0], at, piece, rows[piece.row])
        for at, piece in enumerate(plan.chunks):
            _fill(groups[-1], at, piece, rows[piece.row])
        answers: dict[int, Answer] = {}

        def step(kv: KvState[jax.Array]) -> KvState[jax.Array]:
            outputs, written = get(plan.key)(self._params, kv, buffer, *([loras] if plan.key.adapters else []))
            answers.update(self._fetch(plan, outputs, rows, get))
            return written

        self._kv = self._replacing(step, plan.key)
        return answers

    def run_loop(
        self, key: LoopKey, rows: Sequence[LoopRow], get: GetStep, loras: ParamTree | None, *, until_one_ends: bool
    ) -> list[DecodedRun]:
        """Runs one loop; gives what was chosen for each row.

        Raises:
            DeviceError: the device failed; the KV is lost.
        """
        buffer = pack_loop(rows, key, self._cfg.vocab_size, until_one_ends=until_one_ends)
        found: list[NDArray[Any]] = []

        def step(kv: KvState[jax.Array]) -> KvState[jax.Array]:
            chosen, written = get(key)(self._params, kv, buffer, *([loras] if key.adapters else []))
            self.last_fetched_bytes = 0
            found.append(self._to_host(chosen))
            return written

        self._kv = self._replacing(step, key)
        ids, logprobs = found[0][0], found[0][1].view(np.float32)  # [N, D] each
        counts = (ids[:, : len(rows)] >= 0).sum(axis=0)
        return [DecodedRun(ids[:n, at].tolist(), logprobs[:n, at].tolist()) for at, n in enumerate(counts)]

    def _replacing(self, call: Callable[[KvState[jax.Array]], T], key: AnyKey) -> T:
        """Runs a call that takes the KV and gives another."""
        kv, self._kv = self.kv, None
        try:
            return call(kv)
        except jax.errors.JaxRuntimeError as problem:
            raise DeviceError(f"step {key} failed on the device: {problem}") from problem

    def _fetch(self, plan: StepPlan, outputs: StepOutputs, rows: Sequence[Row], get: GetStep) -> dict[int, Answer]:
        """Copies what was asked for to the host."""
        assert outputs.logits is not None
        self.last_fetched_bytes = 0
        wanted = _wanted(plan, rows)
        if not wanted:
            jax.block_until_ready(outputs)
            return {}
        if plan.key.outputs == Outputs.ALL.value:
            host, width = self._to_host(outputs.logits), plan.key.chunk_tokens
            return {piece.row: host[at * width : at * width + piece.count].copy() for at, piece in wanted.items()}
        chosen = {at: piece for at, piece in wanted.items() if rows[piece.row].policy is not None}
        if not chosen:
            host = self._to_host(outputs.logits)
            return {piece.row: host[at].copy() for at, piece in wanted.items()}
        return self._select(outputs.logits, wanted, rows, get(SelectKey(plan.key.num_logit_rows)))

    def _select(
        self, logits: jax.Array, wanted: dict[int, Piece], rows: Sequence[Row], select: jax.stages.Compiled
    ) -> dict[int, Answer]:
        """Chooses on the device; only ids, and the logits of rows that want all of them, cross to the host."""
        policies = [rows[wanted[at].row].policy if at in wanted else None for at in range(len(logits))]
        full = [at for at, piece in wanted.items() if rows[piece.row].policy is None]
        answers: dict[int, Answer] = {}

        def choose(taken: int) -> tuple[jax.Array, jax.Array]:
            return select(logits, packed_rows(policies, len(logits), self._cfg.vocab_size, taken))

        ids, taken = choose(full[0] if full else 0)
        for at in full:
            answers[wanted[at].row] = self._to_host(taken if at == full[0] else choose(at)[1]).copy()
        host = self._to_host(ids)
        for at, piece in wanted.items():
            if policies[at] is not None:
                answers[piece.row] = int(host[at])
        return answers

    def _to_host(self, array: jax.Array) -> NDArray[Any]:
        host = np.asarray(array)
        self.fetched_bytes += host.nbytes
        self.last_fetched_bytes += host.nbytes
        return host


def expected(answer: Answer | None) -> Answer:
    """Gives the answer of a row that wanted one."""
    assert answer is not None, "a row that wants an answer got none"
    return answer


def expected_logits(answer: Answer | None) -> NDArray[np.float32]:
    """Gives the logits `[V]` of a row that wanted them."""
    assert isinstance(answer, np.ndarray), "a row that wants logits got none"
    return answer


def _wanted(plan: StepPlan, rows: Sequence[Row]) -> dict[int, Piece]:
    """Logit rows that are wanted: all of a step for verifying, else those of rows that end in it."""
    found = {}
    for offset, members in ((0, plan.decodes), (plan.key.decode_rows, plan.chunks)):
        for at, piece in enumerate(members):
            ends = piece.start + piece.count == len(rows[piece.row].tokens)
            if rows[piece.row].wanted and (plan.key.outputs == Outputs.ALL.value or ends):
                found[offset + at] = piece
    return found


def _fill(group: Rows[NDArray[np.int32]], at: int, piece: Piece, row: Row) -> None:
    group.tokens[at, : piece.count] = row.tokens[piece.start : piece.start + piece.count]
    group.lengths[at] = row.length + piece.start
    group.counts[at] = piece.count
    group.tables[at] = row.table
    if group.adapters is not None:
        group.adapters[at] = row.adapter
