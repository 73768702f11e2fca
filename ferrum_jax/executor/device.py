"""One model's KV on its device: compiled steps in, answers on the host out."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import packing
from ferrum_jax.compile.buckets import (
    AnyKey,
    CopyKey,
    GatherKey,
    LoopKey,
    Outputs,
    Piece,
    ScoreKey,
    SelectKey,
    StepKey,
    StepPlan,
)
from ferrum_jax.compile.looping import LoopRow, pack_loop
from ferrum_jax.compile.lowering import lower
from ferrum_jax.compile.selecting import Greedy, packed_rows
from ferrum_jax.compile.steps import StepOutputs
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.decoding import DecodedRun
from ferrum_jax.contract.errors import BackendError, DeviceError, FerrumError
from ferrum_jax.executor.kv_memory import KvMemory
from ferrum_jax.executor.steady import Steady
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.models.watching import Seen
from ferrum_jax.ops.batch import Rows

T = TypeVar("T")
Answer = NDArray[np.float32] | int
GetStep = Callable[[AnyKey], jax.stages.Compiled]


class Row(NamedTuple):
    """New tokens of one sequence, where it lies, and how it answers."""

    tokens: NDArray[np.int32]  # [n]
    length: int  # positions before these tokens
    slot: int  # row of the block tables
    wanted: bool  # whether it answers
    policy: Greedy | None = None  # how, if not with all logits
    adapter: int = -1  # row of the adapters' stacks, -1 for none
    targets: NDArray[np.int32] | None = None  # [n]: tokens to score, for steps with the outputs `ALL`


class DeviceKv:
    """Owns the KV: every step's input dies at dispatch and its output takes the place."""

    def __init__(self, params: ParamTree, cfg: ModelConfig, memory: KvMemory):
        self._memory = memory
        self.params = params  # of all steps; others of the same shapes may take their place
        self._cfg = cfg
        self._kv: KvState[jax.Array] | None = None
        self.fetched_bytes = 0  # that crossed to the host
        self.last_fetched_bytes = 0  # of them in the last call
        self._seen: list[Seen[NDArray[Any]]] = []  # what steps have shown, in order
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
        memory = self._memory
        return lower(self._cfg, self.params, memory.shapes, loras, key, memory.spec.attention)

    def reallocate(self) -> None:
        """Drops the KV and allocates it anew.

        Raises:
            ResourceExhaustedError: the device has not so much memory left.
        """
        self._kv = None
        self._kv = self._memory.allocate()

    def take_seen(self) -> list[Seen[NDArray[Any]]]:
        """Gives what steps have shown since the last time."""
        seen, self._seen = self._seen, []
        return seen

    def give_up(self) -> None:
        """Counts the KV as lost: what the host knows of it may no longer be true."""
        self._kv = None

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Counts the KV as lost if what is done within is interrupted: half of the books may be written."""
        try:
            yield
        except FerrumError:  # a refusal, before anything changed
            raise
        except BaseException:
            self.give_up()
            raise

    def free(self) -> None:
        """Frees the KV."""
        kv, self._kv = self._kv, None
        for leaf in jax.tree.leaves(kv):
            leaf.delete()

    def drop(self) -> None:
        """Frees the KV and forgets the parameters."""
        self._kv, self.params = None, {}

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
        self,
        plan: StepPlan,
        rows: Sequence[Row],
        tables: NDArray[np.int32],  # [slots, M]
        get: GetStep,
        loras: ParamTree | None = None,
    ) -> Callable[[], dict[int, Answer]]:
        """Begins one step; gives the call that waits for it, so that the host can do its own part meanwhile.

        That call gives, by row, the answer of rows whose last token the step held, if wanted. For steps with the
        outputs `ALL`, every piece's logits come back, `[n, V]`.

        Raises:
            DeviceError: the device failed, now or in that call; the KV is lost.
        """
        buffer, groups = packing.blank(plan.key)
        if plan.decodes:
            _fill(groups[0], plan.decodes, rows, tables)
            groups[0].tokens[: len(plan.decodes), 0] = [rows[one.row].tokens[one.start] for one in plan.decodes]
        if plan.chunks:
            _fill(groups[-1], plan.chunks, rows, tables)
            for at, piece in enumerate(plan.chunks):
                stop = piece.start + piece.size
                groups[-1].tokens[at, : piece.size] = rows[piece.row].tokens[piece.start : stop]
        begun: list[StepOutputs] = []

        def step(kv: KvState[jax.Array]) -> KvState[jax.Array]:
            outputs, written = get(plan.key)(self.params, kv, buffer, *([loras] if plan.key.adapters else []))
            begun.append(outputs)
            return written

        def fetch(kv: KvState[jax.Array]) -> KvState[jax.Array]:
            answers.update(self._fetch(plan, begun[0], rows, get))
            return kv

        def answer() -> dict[int, Answer]:
            self._kv = self._replacing(fetch, plan.key)
            return answers

        answers: dict[int, Answer] = {}
        self._kv = self._replacing(step, plan.key)
        return answer

    def run_steady(
        self, key: StepKey, steady: Steady, tables: NDArray[np.int32], get: GetStep
    ) -> Callable[[], list[NDArray[np.float32]]]:
        """Begins a step of decode rows; gives the call that waits for their logits, `[V]` each. Raises as `run`."""
        buffer, (rows,) = packing.blank(key)
        count = len(steady.tokens)
        rows.tokens[:count, 0], rows.lengths[:count], rows.counts[:count] = steady.tokens, steady.lengths, 1
        rows.tables[:count] = tables[[live.slot for live in steady.lives]]
        begun: list[StepOutputs] = []
        found: list[NDArray[np.float32]] = []

        def step(kv: KvState[jax.Array]) -> KvState[jax.Array]:
            outputs, written = get(key)(self.params, kv, buffer)
            begun.append(outputs)
            return written

        def fetch(kv: KvState[jax.Array]) -> KvState[jax.Array]:
            self.last_fetched_bytes = 0
            assert begun[0].logits is not None
            found.append(self._to_host(begun[0].logits))
            return kv

        def answer() -> list[NDArray[np.float32]]:
            self._kv = self._replacing(fetch, key)
            return [row.copy() for row in found[0][:count]]

        self._kv = self._replacing(step, key)
        return answer

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
            chosen, written = get(key)(self.params, kv, buffer, *([loras] if key.adapters else []))
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
        if any(rows[piece.row].targets is not None for piece in wanted.values()):
            return self._score(plan, outputs.logits, rows, get)
        if outputs.seen is not None:
            self._seen.append(jax.tree.map(self._to_host, outputs.seen))
        if plan.key.outputs == Outputs.ALL.value:
            host, width = self._to_host(outputs.logits), plan.key.chunk_tokens
            return {piece.row: host[at * width : at * width + piece.size].copy() for at, piece in wanted.items()}
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

    def _score(self, plan: StepPlan, logits: jax.Array, rows: Sequence[Row], get: GetStep) -> dict[int, Answer]:
        """Gives the bits of each piece's best tokens, and its log-probabilities: `[2, n]`."""
        targets = np.zeros((plan.key.chunk_rows, plan.key.chunk_tokens), np.int32)
        for at, piece in enumerate(plan.chunks):
            wanted = rows[piece.row].targets
            assert wanted is not None, "a step scores all of its rows or none"
            targets[at, : piece.size] = wanted[piece.start : piece.start + piece.size]
        found = self._to_host(get(ScoreKey(targets.size))(logits, targets.ravel())).view(np.float32)
        found = found.reshape(2, *targets.shape)
        return {piece.row: found[:, at, : piece.size].copy() for at, piece in enumerate(plan.chunks)}

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
    is_all = plan.key.outputs == Outputs.ALL.value
    for offset, members in ((0, plan.decodes), (plan.key.decode_rows, plan.chunks)):
        for at, piece in enumerate(members, offset):
            row = rows[piece.row]
            if row.wanted and (is_all or piece.start + piece.size == len(row.tokens)):
                found[at] = piece
    return found


def _fill(
    group: Rows[NDArray[np.int32]], pieces: Sequence[Piece], rows: Sequence[Row], tables: NDArray[np.int32]
) -> None:
    """Fills all of a group but its tokens."""
    count, mine = len(pieces), [rows[piece.row] for piece in pieces]
    group.lengths[:count] = [row.length + piece.start for row, piece in zip(mine, pieces, strict=True)]
    group.counts[:count] = [piece.size for piece in pieces]
    group.tables[:count] = tables[[row.slot for row in mine]]
    if group.adapters is not None:
        group.adapters[:count] = [row.adapter for row in mine]
