"""The methods of a runner for adapters: binding, loading, setting them from arrays."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

from ferrum_jax.contract.checks import check_cache_id
from ferrum_jax.contract.errors import FerrumError, RequestValidationError, safe_repr
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.adapters import KeptSequences
from ferrum_jax.executor.observable import Observable
from ferrum_jax.executor.pipeline import Pipeline
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.weights.peft import PeftAdapter


class Adaptable(Observable):
    """The part of `ModelRunner` for adapters."""

    params_version: int
    num_replicas: int

    def set_lora_adapter_for_cache(self, cache_id: str, adapter: ActiveLoraAdapter | None) -> None:
        """Binds one id to an adapter, which is loaded from its path if it is not loaded yet, or to none.

        An adapter that was loaded so may be evicted for another when no sequence is bound to it.

        Raises:
            RequestValidationError: the sequence holds positions of another adapter, or of none.
            NotFoundError, InvalidFormatError, UnsupportedError, …: it is not loaded and cannot be.
        """
        with self._life.lock, self._life:
            if adapter is not None and not isinstance(adapter, ActiveLoraAdapter):
                raise RequestValidationError(f"adapter {safe_repr(adapter)}: expected an ActiveLoraAdapter or None")
            key, adapters = check_cache_id(cache_id), self._adapters
            if adapter is not None:
                adapters.check_enabled(adapter.name)
            adapters.check_binding(key, adapter, self._pipeline.table.length(key))
            if adapter is not None and adapters.find(adapter) is None:
                adapters.check_room(adapter.name, adapter.path)  # before it is read: schedulers ask in every step
                _install(self._pipeline, adapter.name, adapters.read(adapter.path), adapter.path, is_pinned=False)
            adapters.bind(key, None if adapter is None else adapters.find(adapter))

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads an adapter in PEFT's format until `unload_lora`; after `warmup`, compiles nothing.

        Other calls run while its files are read.

        Raises:
            AlreadyExistsError: the name is in use.
            ResourceExhaustedError: all `max_loras` adapters are loaded by name or in use.
            NotFoundError, InvalidFormatError: a file is missing or damaged.
            UnsupportedError: the adapter has an option of PEFT's that is not implemented.
            RequestValidationError: its rank is above `max_lora_rank`.
        """
        first = self._pipelines[0].adapters
        with self._life.lock, self._life:
            first.check_enabled(name)
        read = first.read(path)  # takes a while, and needs no lock
        with self._life.lock, self._life:
            for one in self._pipelines:  # a sequence may have loaded it on one replica alone
                one.adapters.check_new(name)
            try:
                for one in self._pipelines:
                    _install(one, name, read, path, is_pinned=True)
            except BaseException:  # perhaps a KeyboardInterrupt
                for one in self._pipelines:
                    _unload(one, name)
                raise

    def set_lora(
        self, name: str, tree: Any, *, scale: float = 1.0, index: int = 0, keep_sequences: KeptSequences = False
    ) -> None:
        """Sets an adapter from arrays until `unload_lora`, in place of those set under the name before.

        An `ActiveLoraAdapter` of this name, with an empty path, binds a sequence to it. Arrays on a device stay there;
        shapes that were set before compile nothing. `params_version` goes up by one.

        Args:
            name: what requests call it.
            tree: PEFT's names to arrays, `base_model.model.….lora_A.weight` `[r, D]` and `…lora_B.weight` `[F, r]`; or
                the tree of stacks that `models.forward(loras=…)` trains, or that of one adapter. Projections may be
                missing.
            scale: what the products are multiplied by: lora_alpha / r of PEFT's, 1 of stacks.
            index: which adapter of stacks.
            keep_sequences: which sequences bound to the name may be live, as in `set_params`.

        Raises:
            AlreadyExistsError: the name is that of an adapter from a path.
            InvalidParameterError: these are not the arrays of an adapter of this model; the message lists where.
            RequestValidationError: the rank is above `max_lora_rank`, or a sequence that is not kept is bound to it.
            ResourceExhaustedError: all `max_loras` adapters are loaded by name or in use.
            DeviceError: a device has no memory for the arrays, or failed. Nothing changed, unless other replicas have
                them already: then the adapter is unloaded everywhere, and the state is Error.
        """
        with self._life.lock, self._life:
            for one in self._pipelines:
                one.adapters.check_settable(name, keep_sequences)
            laid_out = self._pipelines[0].adapters.lay_out(tree, scale, index)
            for one in self._pipelines:
                one.settle()
            self._on_all(lambda one: _take(one, name, laid_out), undo=lambda one: one.adapters.drop(name))
            self.params_version += 1

    def unload_lora(self, name: str) -> None:
        """Drops an adapter and its prefixes.

        Raises:
            NotFoundError, RequestValidationError: it is not loaded, or a sequence is bound to it.
        """
        with self._life.lock, self._life:
            # Lists: what is no name, such as a dict, may not be looked up in a mapping.
            having = [one for one in self._pipelines if name in list(one.adapters.loaded)] or self._pipelines[:1]
            for one in having:
                one.adapters.check_unloadable(name)
            self._on_all(lambda one: _unload(one, name))

    def _on_all(
        self, change: Callable[[Pipeline], object], undo: Callable[[Pipeline], object] = lambda _: None
    ) -> None:
        """Makes a change on every replica.

        If it is interrupted and there are several replicas, it is made again on each, so that none lacks it. If it
        fails on one after others have it, `undo` is called for each, and all sequences are lost.
        """
        changed = []
        try:
            for one in self._pipelines:
                change(one)
                changed.append(one)
        except FerrumError:
            for one in self._pipelines if changed else ():
                undo(one)
                one.device.lose()
            raise
        except BaseException:
            for one in self._pipelines if self.num_replicas > 1 else ():
                with contextlib.suppress(Exception):  # the interrupt itself is raised
                    change(one)
            raise


def _install(on: Pipeline, name: str, read: PeftAdapter, path: str | os.PathLike[str], *, is_pinned: bool) -> None:
    for evicted in on.adapters.load(name, read, path, is_pinned=is_pinned):
        on.table.forget_adapter(evicted)


def _take(on: Pipeline, name: str, laid_out: ParamTree) -> None:
    adapters, table = on.adapters, on.table
    older = adapters.loaded.get(name)
    users = [] if older is None else adapters.users_of(older)
    with on.device.changing():
        for evicted in adapters.set(name, laid_out):
            if evicted is older:
                table.invalidate_adapter(evicted, adapters.loaded.get(name), users)
            else:
                table.forget_adapter(evicted)


def _unload(on: Pipeline, name: str) -> None:
    if name in on.adapters.loaded:
        on.table.forget_adapter(on.adapters.unload(name))
