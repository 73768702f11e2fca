"""The state of one model on its devices: parameters, KV and sampler, and the calls of programs that change them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile import sampler
from ferrum_jax.compile.artifacts import Artifacts, build
from ferrum_jax.compile.block_programs import CopyKey, GatherKey
from ferrum_jax.compile.multi_step import MultiStepKey
from ferrum_jax.compile.program_cache import ProgramCache
from ferrum_jax.compile.sampler import (
    ConfigureKey,
    DistributionKey,
    MaskKey,
    Sampled,
    SampleKey,
    SamplerSpec,
    SamplerState,
    VerifyKey,
)
from ferrum_jax.compile.scores import ProcessedScoreKey
from ferrum_jax.compile.step import ProgramContext, StepKey, StepOutputs
from ferrum_jax.config import ModelConfig
from ferrum_jax.config.engine import CompilerOptions
from ferrum_jax.contract.errors import (
    BackendError,
    ConfigError,
    DeviceError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.executor.adapters import Adapters, call
from ferrum_jax.executor.sizing import context_of
from ferrum_jax.executor.weights import (
    brought_to,
    check_like_specs,
    check_same_shapes,
    laid_out_like,
    moving,
    served_shapes,
    strongly_typed,
)
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec, KvState
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.specs import ParamTree, as_plain, is_spec, is_weight_spec
from ferrum_jax.sharding.mesh import Placement

T = TypeVar("T")
EMPTY_KV = "empty KV"  # name on disk of the program that allocates it
PINNED_BYTES = 1 << 16  # smallest array for which copying by way of pinned memory is faster
DONATED = "the served parameters were donated to another function: call set_params with the new ones"


class KvMemory:
    """Allocates KVs of one size on the devices of a model."""

    def __init__(
        self,
        spec: CacheSpec,
        placement: Placement,
        artifacts: Artifacts | None = None,
        options: CompilerOptions = None,
    ):
        """Compiles the program; allocates nothing.

        Raises:
            ConfigError: `jax_disable_jit` is set.
            ResourceExhaustedError: the program does not compile.
        """
        _check_jit()
        self.spec = spec
        self.shapes = state.shapes_on(placement, spec)
        specs = state.partitions(self.shapes, placement.axes)
        self._ahead: KvState[jax.Array] | None = None
        make = placement.spread(functools.partial(state.empty, spec), (), specs)
        empty = jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self.shapes))
        try:
            self._empty = build(EMPTY_KV, empty.lower, artifacts, options)
        except jax.errors.JaxRuntimeError as problem:
            raise ResourceExhaustedError(
                f"cannot compile a KV of {spec.num_blocks} blocks ({spec.num_bytes:,} bytes): {problem}"
            ) from problem

    def allocate_ahead(self) -> None:
        """Allocates now the KV that the next `allocate` returns; raises as `allocate`."""
        self._ahead = self.allocate()

    def allocate(self) -> KvState[jax.Array]:
        """Returns a KV of zeros.

        Raises:
            ResourceExhaustedError: the device has too little memory left.
        """
        ready, self._ahead = self._ahead, None
        if ready is not None:
            return ready
        try:
            return jax.block_until_ready(self._empty())
        except jax.errors.JaxRuntimeError as problem:
            raise ResourceExhaustedError(
                f"a KV of {self.spec.num_blocks} blocks ({self.spec.num_bytes:,} bytes) cannot be allocated: {problem}"
            ) from problem


class DeviceState:
    """The arrays of one runner. A donated input is dead once its program is dispatched; the output replaces it.

    A device failure loses the donated arrays: `is_lost` until `reallocate`. Methods that change the devices run in
    every process, each on its own devices (`Hosts.run`).
    """

    def __init__(
        self,
        params: ParamTree,
        cfg: ModelConfig,
        memory: KvMemory,
        sampler_spec: SamplerSpec,
        placed: ModelPlacement,
        programs: ProgramCache,
        adapters: Adapters,
        specs: ParamTree | None = None,
    ):
        """Allocates the KV and the sampler's state; `specs` are those of the undivided parameters, needed on a mesh."""
        self._hosts = adapters.hosts
        self._keep_params(params)
        self.placed = placed
        self._platform = placed.placement.first.platform
        self._specs = specs
        self.adapters = adapters
        self.sampler_spec = sampler_spec
        self._cfg = cfg
        self._memory = memory
        self.programs = programs
        self._kv: KvState[jax.Array] | None = None
        self._sampler: SamplerState[jax.Array] | None = None
        self.fetched_bytes = 0  # copied to the host
        self.last_fetched_bytes = 0  # for the last batch that was read
        self.losses = 0  # calls of `lose`
        self._put: dict[int, Any] = {}  # leaves that `put_param` has put on the devices, until `take_params`
        self._reallocate()

    def set_params(self, params: ParamTree) -> None:
        """Serves the parameters that `check_params` returned; sends them to other processes leaf by leaf."""
        if not self._hosts.are_several:
            self._keep_params(params)
            return
        for at, leaf in enumerate(jax.tree.leaves(params, is_leaf=is_weight_spec)):
            parts = [np.asarray(part) for part in jax.tree.leaves(leaf)]
            put = functools.partial(self.put_param, at, parts)
            self._guarded(put, "put_param", None, *parts, is_answered=True, at=at)
        self._guarded(self.take_params, "take_params")

    def _keep_params(self, params: ParamTree) -> None:
        self.params, self._leaves, self._shapes = params, jax.tree.leaves(params), served_shapes(params)

    def check_params_live(self) -> None:
        """Raises RequestValidationError if a parameter was donated, for example to a trainer's function."""
        for leaf in self._leaves:  # 6 µs for 200 leaves
            if leaf.is_deleted():
                raise RequestValidationError(DONATED)

    def check_params(self, params: ParamTree) -> ParamTree:
        """Returns new parameters, placed and laid out like the served ones; unchanged for several processes.

        On one device they may have another layout than the served ones: they are copied into that.

        Raises:
            InvalidParameterError: they differ from the served ones in more than their values.
            ResourceExhaustedError: there is no memory to move them.
            UnsupportedError: they lie on devices of several processes.
        """
        params = strongly_typed(as_plain(params))
        if self._specs is None:
            with moving():
                params = brought_to(self.placed.placement.first, params)
            params = laid_out_like(self._shapes, params, self._cfg)
            check_same_shapes(params, self._shapes)
            return params
        check_like_specs(params, self._specs, self._shapes)
        if self._hosts.are_several:
            if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
                raise UnsupportedError("these weights lie on devices of several processes: give process 0 all of them")
            return params
        with moving():
            params = self.placed.divide(params, self._specs)
        check_same_shapes(params, self._shapes)
        return params

    def put_param(self, at: int, parts: Sequence[NDArray[Any]]) -> None:
        """Puts this process's part of a leaf on its devices, for `take_params`; `parts` are the leaf's whole arrays."""
        spec = jax.tree.leaves(self._specs, is_leaf=is_weight_spec)[at]
        leaf = jax.tree.unflatten(jax.tree.structure(spec, is_leaf=is_spec), parts)
        self._put[at] = self.placed.put(lambda part: part(leaf, spec), spec)

    def take_params(self) -> None:
        """Serves the parameters that `put_param` has put on the devices."""
        tree = jax.tree.structure(self._specs, is_leaf=is_weight_spec)
        self._keep_params(jax.tree.unflatten(tree, [self._put[at] for at in range(tree.num_leaves)]))
        self._put.clear()

    def undivided_params(self) -> ParamTree:
        """Returns the parameters in their layout, joined where a mesh divides them."""
        if self._hosts.are_several:
            raise UnsupportedError("parameters that several processes share cannot be read back")
        return self.params if self._specs is None else self.placed.join(self.params, self._specs)

    @property
    def is_lost(self) -> bool:
        """True after a failure, until `reallocate`; for good once another process is lost."""
        return self._kv is None or bool(self._hosts.lost)

    @property
    def kv(self) -> KvState[jax.Array]:
        """The KV as of the last step."""
        if self._kv is None:
            raise BackendError("the KV was lost in a failed step, reset() allocates another")
        return self._kv

    def context(self) -> ProgramContext:
        """Returns what programs are lowered for; raises ConfigError under `jax_disable_jit`."""
        _check_jit()
        return context_of(
            self._cfg, self.params, self._memory.spec, self.sampler_spec, self.placed, self.adapters.stacks
        )

    def reallocate(self) -> None:
        """Drops the KV and the sampler's state and allocates new ones.

        Raises:
            ResourceExhaustedError: the device has too little memory left.
            DeviceError: another process is lost.
        """
        self._hosts.run(self._reallocate, "reallocate")

    def _reallocate(self) -> None:
        self._kv = self._sampler = None
        kv = self._memory.allocate()
        try:
            self._sampler = self.placed.placement.put(sampler.initial(self.sampler_spec))
        except jax.errors.JaxRuntimeError as problem:
            size = self.sampler_spec.num_bytes
            raise ResourceExhaustedError(f"the sampler's {size:,} bytes cannot be allocated: {problem}") from problem
        self._kv = kv

    def lose(self) -> None:
        """Counts the KV and the sampler's state as lost: lengths and block tables may no longer describe them."""
        self._kv = None
        self.losses += 1

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Calls `lose` if the block within fails or is interrupted: half of the bookkeeping may be written.

        A refusal changes nothing, and neither does a failure to compile a program or to place an adapter. The KV is
        donated to programs that change it, so that it is lost without this if one of them fails.
        """
        try:
            yield
        except (RequestValidationError, ResourceExhaustedError, DeviceError, BackendError):
            raise
        except GeneratorExit:  # garbage collection, after an interrupt on entry and perhaps after a reset
            raise
        except BaseException:
            self.lose()
            raise

    def free(self) -> None:
        """Frees the KV."""
        kv, self._kv = self._kv, None
        self._hosts.run(lambda: [leaf.delete() for leaf in jax.tree.leaves(kv)], "free")

    def drop(self) -> None:
        """Frees the KV, forgets the parameters, and tells other processes to end."""
        self._hosts.close()
        self._kv = self._sampler = None
        self._keep_params({})
        self.adapters.stacks = None

    def step(self, key: StepKey, buffer: NDArray[np.int32], *edits: Any) -> StepOutputs:
        """Begins a step; `edits` are the stacks of edits, where the key has any."""
        program, sampled = self.programs.get(key), self._sampler
        assert sampled is not None
        loras = (self.adapters.stacks,) if key.adapters else ()
        kv, self._kv = self.kv, None
        run = program if not self._hosts.are_several else functools.partial(call, program)
        begin = functools.partial(run, self._leaves, kv, sampled.last_tokens, buffer, *loras, *edits)
        begin = self._hosts.everywhere(begin, "step", key, buffer)
        try:
            with jax.transfer_guard_host_to_device("allow"):  # what `call` does, without the cost of its frame
                outputs, self._kv = begin()
        except jax.errors.JaxRuntimeError as problem:
            raise DeviceError(f"{key} failed on the device: {problem}") from problem
        except (RuntimeError, ValueError) as problem:  # a parameter was deleted after the batch was planned
            if any(leaf.is_deleted() for leaf in self._leaves):
                raise DeviceError(DONATED) from problem
            raise
        return outputs

    def sample(
        self, key: SampleKey | VerifyKey, outputs: StepOutputs, masks: NDArray[np.int32] | None = None
    ) -> Sampled[jax.Array]:
        """Begins to choose tokens from the logits of the last step; `masks` are those of `sampler.verify`."""
        program, state = self.programs.get(key), self._sampler
        more = () if masks is None else (masks,)
        run = program if masks is None else functools.partial(call, program)
        self._sampler, found = self._guarded(
            lambda: run(state, outputs.logits, outputs.rows, *more), "sample", key, *more
        )
        if self._platform != "cpu":  # the copy is queued now: after the next step it would wait for that
            with jax.transfer_guard_device_to_host("allow"):
                found.packed.copy_to_host_async()
        return found

    def distributions(self, key: DistributionKey, outputs: StepOutputs) -> jax.Array:
        """Begins to compute the distributions that tokens are drawn from, from the logits of the last step."""
        program = self.programs.get(key)
        return self._guarded(lambda: program(self._sampler, outputs.logits, outputs.rows), "distributions", key)

    def score_processed(self, key: ProcessedScoreKey, outputs: StepOutputs, buffer: NDArray[np.int32]) -> jax.Array:
        """Begins to score given tokens under the settings of their slots, from the logits of the last step."""
        program, state = self.programs.get(key), self._sampler
        self._sampler, found = self._guarded(
            lambda: call(program, state, outputs.logits, buffer), "score_processed", key, buffer
        )
        return found

    def write(self, key: ConfigureKey | MaskKey, buffer: NDArray[np.int32]) -> None:
        """Writes the sampler settings of a slot, or the allowed tokens of some slots."""
        program, state = self.programs.get(key), self._sampler
        self._sampler = self._guarded(lambda: call(program, state, buffer), "write", key, buffer)

    def multi_step(self, key: MultiStepKey, buffer: NDArray[np.int32]) -> jax.Array:
        """Begins many decode steps; returns their choices, int32 `[N, D, 3]`, as `compile.multi_step.multi_step`."""
        program, sampled = self.programs.get(key), self._sampler
        loras = (self.adapters.stacks,) if key.adapters else ()
        kv, self._kv = self.kv, None
        chosen, self._kv, self._sampler = self._guarded(
            lambda: call(program, self._leaves, kv, sampled, buffer, *loras), "multi_step", key, buffer
        )
        return chosen

    def copy_blocks(self, key: CopyKey, pairs: Sequence[tuple[int, int]]) -> None:
        """Begins to copy blocks, (source, destination) each."""
        program = self.programs.get(key)
        for start in range(0, len(pairs), key.blocks):
            part = np.array(pairs[start : start + key.blocks], np.int32)
            padded = np.zeros((key.blocks, 2), np.int32)
            padded[: len(part)] = part
            kv, self._kv = self.kv, None
            self._kv = self._guarded(
                lambda kv=kv, padded=padded, n=len(part): call(program, kv, padded, np.int32(n)),
                "copy_blocks",
                key,
                part,
            )

    def gather(self, layer: int, table: NDArray[np.int32], length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies one layer's keys and values of a sequence to the host: `[length, K, H]` each."""
        pair = self.begin_gather(GatherKey(len(table)), layer, table)
        k, v = (self.of_heads(self.fetch(side)[:length], 1, "kv_heads") for side in pair)
        return k, v

    def begin_gather(self, key: GatherKey, layer: int, table: NDArray[np.int32]) -> tuple[jax.Array, jax.Array]:
        """Begins to copy one layer's keys and values of a sequence out of the KV."""
        program, kv = self.programs.get(key), self.kv
        return self._guarded(lambda: call(program, kv, np.int32(layer), table), "gather", key, table, layer=layer)

    def fetch(self, array: jax.Array) -> NDArray[Any]:
        """Waits for an array and copies it to the host.

        Raises:
            DeviceError: the device failed; everything is lost.
        """
        host = self._guarded(functools.partial(_to_host, array, is_pinned=self._platform == "gpu"))
        self.fetched_bytes += host.nbytes
        self.last_fetched_bytes += host.nbytes
        return host

    def of_heads(self, array: NDArray[Any], axis: int, logical: str) -> NDArray[Any]:
        """Copies an array without the heads (`logical`: `heads` or `kv_heads`) that a mesh has padded or duplicated.

        A latent KV has one head, whole on every device.
        """
        if (self.placed.division is not None and self._cfg.latent is None) or logical == "heads":
            array = self.placed.without_padding(array, axis, logical)
        return array.copy()

    def wait(self, outputs: Any) -> None:
        """Waits for a program; raises as `fetch`."""
        self._guarded(lambda: jax.block_until_ready(outputs))

    def _guarded(self, call: Callable[[], T], op: str = "", key: Any = None, *arrays: NDArray[Any], **facts: Any) -> T:
        try:
            return self._hosts.run(call, op, key, *arrays, **facts)
        except jax.errors.JaxRuntimeError as problem:
            self.lose()
            raise DeviceError(f"the device failed: {problem}") from problem
        except (RuntimeError, ValueError) as problem:
            if not any(leaf.is_deleted() for leaf in self._leaves):
                raise
            self.lose()
            raise DeviceError(DONATED) from problem


def _to_host(array: jax.Array, *, is_pinned: bool) -> NDArray[Any]:
    """Copies an array to the host; a large one by way of pinned memory, which a GPU writes five times as fast."""
    with jax.transfer_guard_device_to_host("allow"):
        if is_pinned and array.nbytes >= PINNED_BYTES and array.is_fully_addressable:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no pinned memory is left
                return np.asarray(jax.device_put(array, array.sharding.with_memory_kind("pinned_host")))
        return np.asarray(array)


def _check_jit() -> None:
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]  # JAX adds it when it is imported
        raise ConfigError("jax_disable_jit is True, expected False: every step is compiled ahead of time")
