"""Which adapters are loaded, in which row of the stacks, and which sequence is bound to which."""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np

from ferrum_jax.compile.block_programs import InstallKey
from ferrum_jax.compile.program_cache import ProgramCache
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import (
    AlreadyExistsError,
    DeviceError,
    IOError,
    NotFoundError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
    safe_repr,
)
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.hosts import Hosts
from ferrum_jax.executor.lora_arrays import lay_out_arrays
from ferrum_jax.models import adapters, specs
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.weights.peft import PeftAdapter, has_files, lay_out, read_adapter

T = TypeVar("T")
KeptSequences = bool | Collection[str]  # that stay live while weights change: all, none, or those of these ids
NONE = -1  # in place of a row of the stacks: no adapter


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter on the device. Each loading makes a new one, so that no prefix is reused under other weights."""

    name: str
    path: str  # as it was given, made absolute; empty if its values were set as arrays
    real_path: str  # `path` with its links resolved when it was loaded
    row: int  # in the stacks
    num_projections: int
    is_pinned: bool  # loaded by name, not because a sequence was bound to it

    def is_from(self, path: str | os.PathLike[str]) -> bool:
        """True of the path it was loaded from, wherever that leads now, of other paths to where it led, and of ""."""
        if path == "" or not self.path:
            return path == ""
        try:
            return self.path == _from_root(path) or self.real_path == os.path.realpath(_from_root(path))
        except (OSError, TypeError, ValueError):  # `path` is no path
            return False


@dataclass(eq=False)
class Adapters:
    """The stacks of adapters beside one model's parameters."""

    cfg: ModelConfig
    spec: LoraSpec | None
    dtype: str
    placed: ModelPlacement
    steps: ProgramCache
    hosts: Hosts = field(default_factory=Hosts)
    projection_applications: int = 0
    loaded: dict[str, LoadedAdapter] = field(default_factory=dict)  # least recently bound first
    bound: dict[str, LoadedAdapter] = field(default_factory=dict)  # by cache id
    stacks: ParamTree | None = None

    def __post_init__(self):
        if self.spec is not None:
            shapes = specs.shapes(stacks := adapters.stack_specs(self.cfg, self.spec), self.dtype)
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)  # JAX would compile its own
            self.stacks = self.placed.put_tree(zeros, stacks)

    def of(self, cache_id: str) -> LoadedAdapter | None:
        """Returns the adapter that an id is bound to."""
        return self.bound.get(cache_id)

    def row_of(self, cache_id: str) -> int:
        """Returns the row of the stacks that an id uses, -1 for none."""
        found = self.bound.get(cache_id)
        return NONE if found is None else found.row

    def check_enabled(self, name: str) -> None:
        """Raises UnsupportedError where no adapter can ever be loaded, RequestValidationError for an invalid name."""
        _check_name(name)
        if self.spec is None:
            raise UnsupportedError(f"adapter {name!r} cannot be used: this model was loaded with max_loras=0")

    def check_new(self, name: str) -> None:
        """Raises AlreadyExistsError for the name of an adapter that is loaded."""
        if name in self.loaded:
            raise AlreadyExistsError(f"adapter {name!r} is loaded already, from {self.loaded[name].path or 'arrays'}")

    def check_room(self, name: str, path: str = "") -> None:
        """Raises ResourceExhaustedError if a new name needs room and no loaded adapter may be evicted.

        A path where an adapter's files are missing is refused first, as by `read`.
        """
        if self.spec is not None and name not in self.loaded and len(self.loaded) >= self.spec.max_loras:
            if path and not has_files(path):
                self.read(path)
            self._first_idle()

    def read(self, path: str | os.PathLike[str]) -> PeftAdapter:
        """Reads an adapter's files; raises as `read_adapter`, with NotFoundError also for files that cannot be read."""
        if not isinstance(path, (str, os.PathLike)):
            raise RequestValidationError(f"path of an adapter is {safe_repr(path)}, expected a path")
        try:
            return read_adapter(os.fspath(path), self.cfg)
        except IOError as problem:
            raise NotFoundError(str(problem)) from problem

    def load(
        self, name: str, read: PeftAdapter, path: str | os.PathLike[str], *, is_pinned: bool
    ) -> list[LoadedAdapter]:
        """Puts an adapter on the device; returns those that were evicted for it.

        Raises:
            AlreadyExistsError: the name is in use.
            ResourceExhaustedError: `max_loras` adapters are loaded, each by name or bound to a sequence.
            RequestValidationError: its rank is above `max_lora_rank`.
            DeviceError: the device failed; nothing changed.
        """
        assert self.spec is not None
        older = self.loaded.get(name)
        if is_pinned or (older is not None and not self._is_idle(older)):
            self.check_new(name)
        places = _from_root(path), os.path.realpath(_from_root(path))
        # Only process 0 reads the files: another host may lack them, or have others under the same path.
        leaves = jax.tree.leaves(lay_out(read, self.spec, self.dtype))
        return self._place(LoadedAdapter(name, *places, NONE, len(read.projections), is_pinned), leaves)

    def check_settable(self, name: str, keep: KeptSequences) -> LoadedAdapter | None:
        """Returns the adapter of a name, or None, after checking that `set` may replace or add it.

        Raises:
            AlreadyExistsError: it was loaded from a path.
            RequestValidationError: a sequence that is not kept is bound to it.
            ResourceExhaustedError: as in `load`.
        """
        self.check_enabled(name)
        older = self.loaded.get(name)
        if older is None:
            self.check_room(name)
        elif older.path:
            raise AlreadyExistsError(f"adapter {name!r} is loaded from {older.path}: unload_lora() before it is set")
        elif users := not_kept(self.users_of(older), keep):
            raise RequestValidationError(f"adapter {name!r} is in use by {users}, release them first")
        return older

    def lay_out(self, tree: Any, scale: float, index: int) -> ParamTree:
        """Returns the arrays of an adapter in the form of a row of the stacks; raises as `lay_out_arrays`."""
        assert self.spec is not None
        device = self.placed.placement.first
        try:
            return lay_out_arrays(tree, self.cfg, self.spec, self.dtype, device, scale=scale, index=index)
        except jax.errors.JaxRuntimeError as problem:
            raise DeviceError(f"the arrays of an adapter cannot be moved to {device}: {problem}") from problem

    def set(self, name: str, laid_out: ParamTree) -> list[LoadedAdapter]:
        """Puts an adapter's arrays on the device; returns the adapter that was replaced or evicted for it, if any.

        Sequences bound to the one replaced are bound to the new one.
        """
        older = self.loaded.get(name)
        users = [] if older is None else self.users_of(older)
        leaves = jax.tree.leaves(laid_out)
        evicted = self._place(LoadedAdapter(name, "", "", NONE, len(leaves) // 2, True), leaves)
        for cache_id in users:
            self.bound[cache_id] = self.loaded[name]
        return evicted

    def users_of(self, adapter: LoadedAdapter) -> list[str]:
        """The ids that are bound to an adapter."""
        return [cache_id for cache_id, one in self.bound.items() if one is adapter]

    def _place(self, made: LoadedAdapter, leaves: Sequence[Any]) -> list[LoadedAdapter]:
        """Puts an adapter into a row of the stacks; returns the adapter that was replaced or evicted for it, if any."""
        assert self.spec is not None
        name, older = made.name, self.loaded.get(made.name)
        if older is not None:
            evicted = [older]
        else:
            evicted = [] if len(self.loaded) < self.spec.max_loras else [self._first_idle()]
        used = {one.row for one in self.loaded.values()} - {one.row for one in evicted}
        row = min(set(range(self.spec.max_loras)) - used)
        self.steps.get(self._install_key)
        for one in evicted:
            if one.path:  # forgotten first: after an interrupt its row may be the new adapter's
                del self.loaded[one.name]
        try:
            told = [np.asarray(leaf) for leaf in leaves] if self.hosts.are_several else []
            leaves = told or leaves
            self.hosts.run(lambda: self.install(row, leaves), "install", None, *told, is_answered=True, row=row)
        except jax.errors.JaxRuntimeError as problem:
            self.loaded |= {one.name: one for one in evicted}
            raise DeviceError(f"adapter {name!r} cannot be put on the device: {problem}") from problem
        for one in evicted:
            self.loaded.pop(one.name, None)
        self.loaded[name] = replace(made, row=row)
        return evicted

    def install(self, row: int, leaves: Sequence[Any]) -> None:
        """Puts an adapter's tensors into a row of the stacks on this process's devices."""
        assert self.spec is not None
        own = adapters.adapter_specs(self.cfg, self.spec)
        tree = jax.tree.unflatten(jax.tree.structure(own, is_leaf=specs.is_spec), leaves)
        if isinstance(leaves[0], jax.Array):
            tree = self.placed.divide(jax.device_put(tree, self.placed.placement.first), own)
        elif self.placed.division is not None:
            tree = self.placed.put_tree(tree, own)
        install = self.steps.get(self._install_key)
        self.stacks = jax.block_until_ready(call(install, self.stacks, tree, np.int32(row)))

    @property
    def _install_key(self) -> InstallKey:
        assert self.spec is not None
        return InstallKey(self.spec.max_loras, self.spec.max_rank)

    def unload(self, name: str) -> LoadedAdapter:
        """Forgets an adapter that no sequence is bound to."""
        self.check_unloadable(name)
        return self.loaded.pop(name)

    def drop(self, name: str) -> None:
        """Forgets an adapter, if it is loaded, whose sequences are lost."""
        found = self.loaded.pop(name, None)
        self.bound = {cache_id: one for cache_id, one in self.bound.items() if one is not found}

    def check_unloadable(self, name: str) -> None:
        """Raises NotFoundError for an adapter that is not loaded, RequestValidationError for one in use."""
        _check_name(name)
        found = self.loaded.get(name)
        if found is None:
            raise NotFoundError(f"adapter {name!r} is not loaded, {sorted(self.loaded)} are")
        if users := self.users_of(found):
            raise RequestValidationError(f"adapter {name!r} is in use by {users}, release them first")

    def find(self, adapter: ActiveLoraAdapter) -> LoadedAdapter | None:
        """Returns the loaded adapter of that name and path; None if the name is free or its adapter may be evicted.

        Raises:
            AlreadyExistsError: it came from another path, and was loaded by name or is in use.
            NotFoundError: no adapter has the name, and the path is empty.
        """
        found = self.loaded.get(adapter.name)
        if found is None and not os.fspath(adapter.path):
            raise NotFoundError(f"adapter {adapter.name!r} is not loaded, {sorted(self.loaded)} are")
        if found is None or found.is_from(adapter.path):
            return found
        if self._is_idle(found):
            return None
        raise AlreadyExistsError(
            f"adapter {adapter.name!r} is loaded from {found.path or 'arrays'}, not from {adapter.path}"
        )

    def check_binding(self, cache_id: str, adapter: ActiveLoraAdapter | None, length: int) -> None:
        """Raises RequestValidationError if a sequence with positions would change its adapter."""
        bound = self.bound.get(cache_id)
        if adapter is None or bound is None:
            is_same = adapter is bound
        else:
            is_same = bound.name == adapter.name and bound.is_from(adapter.path)
        if length and not is_same:
            raise RequestValidationError(
                f"{cache_id!r} holds {length} positions of {_called(bound)}, it cannot go on with {_called(adapter)}"
            )

    def bind(self, cache_id: str, adapter: LoadedAdapter | None) -> None:
        """Binds an id to a loaded adapter, or to none."""
        self.bound.pop(cache_id, None)
        if adapter is not None:
            self.bound[cache_id] = adapter
            self.loaded[adapter.name] = self.loaded.pop(adapter.name)

    def count(self, cache_ids: Iterable[str]) -> None:
        """Counts the projections that the rows of one call ran through."""
        bound = [found for cache_id in cache_ids if (found := self.bound.get(cache_id)) is not None]
        self.projection_applications += sum(one.num_projections for one in bound)

    def _is_idle(self, adapter: LoadedAdapter) -> bool:
        """True of an adapter that may be evicted: not loaded by name, and no sequence is bound to it."""
        return not adapter.is_pinned and all(one is not adapter for one in self.bound.values())

    def _first_idle(self) -> LoadedAdapter:
        """Returns the adapter to evict: of those that may be, the one that was bound longest ago."""
        for one in self.loaded.values():
            if self._is_idle(one):
                return one
        raise ResourceExhaustedError(
            f"need room for 1 adapter, all {len(self.loaded)} of max_loras are loaded by name or in use",
            needed=1,
            free=0,
        )


def not_kept(cache_ids: Iterable[str], keep: KeptSequences) -> list[str]:
    """Returns the ids that `keep` leaves out; raises RequestValidationError if it is neither a bool nor several ids."""
    if isinstance(keep, bool):
        return [] if keep else list(cache_ids)
    if isinstance(keep, str) or not isinstance(keep, Collection):
        raise RequestValidationError(f"keep_sequences is {safe_repr(keep)}, expected True, False or cache ids")
    return [one for one in cache_ids if one not in keep]


def call(program: Callable[..., T], *arguments: Any) -> T:
    """Calls a program with arrays of the host, an intended transfer that `jax.transfer_guard` must not refuse.

    Putting the arrays on the device first would need no exception, but takes eight times as long.
    """
    with jax.transfer_guard_host_to_device("allow"):
        return program(*arguments)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise RequestValidationError(f"adapter name {safe_repr(name)}: expected a string that is not empty")


def _from_root(path: str | os.PathLike[str]) -> str:
    given = os.path.expanduser(os.fspath(path))
    return given if os.path.isabs(given) else os.path.join(os.getcwd(), given)


def _called(adapter: LoadedAdapter | ActiveLoraAdapter | None) -> str:
    return "no adapter" if adapter is None else f"adapter {adapter.name!r} from {os.fspath(adapter.path) or 'arrays'}"
