"""Interventions at hook points: bound to single sequences, applied in every step that computes their tokens.

The edits of all bound sequences lie on the device in stacks, a row for each slot and a last one that changes nothing.
New values compile nothing; a new set of points compiles a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.edits import EditStacks, tail_of
from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import check_int
from ferrum_jax.contract.errors import (
    InvalidParameterError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
    safe_repr,
)
from ferrum_jax.models.hooks import Edit, Point, check_interventions, check_supported
from ferrum_jax.models.placement import ModelPlacement

LAST = 2**31 - 1  # past every position


@dataclass(frozen=True, eq=False)
class Interventions:
    """Edits at hook points (models/hooks.py) of the tokens of one sequence."""

    edits: Mapping[Any, Any]  # an `Edit` by point, whose arrays broadcast to one token's
    start: int = 0  # the first position that is changed
    stop: int | None = None  # one past the last; None has no end


@dataclass(frozen=True, eq=False)
class Binding:
    """The edits of one sequence."""

    row: int  # of the stacks
    edits: Mapping[Point, Edit[NDArray[Any]]]
    start: int  # the first position that is changed
    stop: int  # one past the last


@dataclass(eq=False)
class BoundInterventions:
    """The interventions of one runner, by sequence."""

    cfg: ModelConfig
    max_seqs: int
    placed: ModelPlacement
    is_shared: bool  # whether several processes run the steps
    _bound: dict[str, Binding] = field(default_factory=dict)
    _stacks: dict[tuple[Point, ...], Any] = field(default_factory=dict)  # on the device, until a binding changes

    @property
    def are_used(self) -> bool:
        """True while any sequence has interventions."""
        return bool(self._bound)

    def of(self, cache_id: str) -> Binding | None:
        """Returns the edits bound to an id, or None."""
        return self._bound.get(cache_id)

    def row_of(self, cache_id: str) -> int:
        """Returns the row of the stacks that an id uses; the last one changes nothing."""
        found = self._bound.get(cache_id)
        return self.max_seqs if found is None else found.row

    def bind(self, cache_id: str, given: Mapping[Any, Any] | None, start: int, stop: int | None) -> None:
        """Binds edits to an id in place of those before; None or an empty mapping unbinds.

        Raises:
            InvalidParameterError: a point is unknown.
            RequestValidationError: an edit does not broadcast to the array there.
            UnsupportedError: a function, a point of attention weights, or on a model divided over devices a point
                whose array is divided, too.
            ResourceExhaustedError: `max_seqs` ids have interventions.
        """
        first, end = _span(start, stop)
        edits = self._check(given) if given else {}
        if not edits:
            if self._bound.pop(cache_id, None) is not None:
                self._stacks.clear()
            return
        self._bound[cache_id] = Binding(self._free_row(cache_id), edits, first, end)
        self._stacks.clear()

    def restore(self, cache_id: str, binding: Binding | None) -> None:
        """Binds again what `of` returned before, in place of the edits bound since."""
        self._stacks.clear()
        if binding is None:
            self._bound.pop(cache_id, None)
        else:
            self._bound[cache_id] = binding

    def _free_row(self, cache_id: str) -> int:
        used = {one.row for name, one in self._bound.items() if name != cache_id}
        free = set(range(self.max_seqs)) - used
        if not free:
            raise ResourceExhaustedError(f"need 1 row of interventions, all {self.max_seqs} sequences have some")
        return min(free)

    def check_copy(self, cache_id: str, new: str) -> None:
        """Raises what `copy` would; RequestValidationError where the new id has interventions of its own."""
        if new in self._bound:
            raise RequestValidationError(
                f"{new!r} has interventions, which a copy of {cache_id!r} was computed without"
            )
        if cache_id in self._bound:
            self._free_row(new)

    def copy(self, cache_id: str, new: str) -> None:
        """Binds the edits of one id to another one as well; raises ResourceExhaustedError as `bind`."""
        if (found := self._bound.get(cache_id)) is not None:
            self.bind(new, found.edits, found.start, found.stop)

    def clear(self) -> None:
        """Unbinds everything."""
        self._bound.clear()
        self._stacks.clear()

    def points_of(self, rows: Sequence[int]) -> tuple[Point, ...]:
        """Returns the points at which any of these rows of the stacks changes something, in order."""
        by_row = {one.row: one.edits for one in self._bound.values()}
        return tuple(sorted({point for row in rows for point in by_row.get(row, {})}))

    def stacks_of(self, points: tuple[Point, ...]) -> EditStacks[jax.Array]:
        """Returns the stacked edits at some points, on the device; uploads them if a binding has changed.

        Raises:
            ResourceExhaustedError: the device has no memory for them.
        """
        if points not in self._stacks:
            try:
                self._stacks[points] = self.placed.placement.put(self._stacked(points))
            except jax.errors.JaxRuntimeError as problem:
                raise ResourceExhaustedError(f"interventions cannot be put on the device: {problem}") from problem
        return self._stacks[points]

    @np.errstate(over="ignore")  # products of two edits in float64 may go beyond float32, as on the device
    def _stacked(self, points: tuple[Point, ...]) -> EditStacks[NDArray[Any]]:
        stacks = EditStacks.neutral(self.cfg, self.max_seqs, points)
        for one in self._bound.values():
            stacks.spans[one.row] = one.start, one.stop
            for point, edit in one.edits.items():
                if point in stacks.scale:
                    if edit.scale is not None:
                        stacks.scale[point][one.row] = edit.scale
                    if edit.add is not None:
                        stacks.add[point][one.row] = edit.add
        return stacks

    def _check(self, given: Mapping[Any, Any]) -> dict[Point, Edit[NDArray[Any]]]:
        if self.is_shared:
            raise UnsupportedError("interventions on a model that several processes run: serve it in one process")
        edits = check_edits(given, self.cfg)
        check_supported(edits, self.cfg, has_window_cache=False, is_divided=self.placed.division is not None)
        return edits


def check_edits(given: Mapping[Any, Any], cfg: ModelConfig) -> dict[Point, Edit[NDArray[Any]]]:
    """Returns the edits of one sequence by point and layer, on the host.

    Raises:
        InvalidParameterError: a point is unknown.
        RequestValidationError: an edit does not broadcast to the array there.
        UnsupportedError: a function, or a point of attention weights.
    """
    found: dict[Point, Edit[NDArray[Any]]] = {}
    for point, intervention in check_interventions(given, cfg).items():
        if not isinstance(intervention, Edit):
            raise UnsupportedError(
                f"the intervention at {point.name!r} is a function: steps are compiled for edits, which are arrays "
                "(models.run and generate_fn take functions)"
            )
        shape, dtype = tail_of(point, cfg)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(intervention)):
            raise InvalidParameterError(f"the edit at {point.name!r} has an array that was donated or deleted")
        edit = jax.tree.map(np.array, intervention)  # copies: the caller may write to its arrays later
        layers = range(cfg.num_hidden_layers) if point.layer is None else [point.layer]
        for layer in layers:
            own = edit if point.layer is not None else jax.tree.map(lambda leaf, at=layer: leaf[at], edit)
            for leaf in jax.tree.leaves(own):
                _check_leaf(point, leaf, shape, dtype)
            at = Point(point.name, layer)
            found[at] = _both(found[at], own) if at in found else own
    return found


@np.errstate(over="ignore", invalid="ignore")  # as on the device
def _both(first: Edit[NDArray[Any]], second: Edit[NDArray[Any]]) -> Edit[NDArray[Any]]:
    """Returns one edit equal to two in succession."""
    scales = [one.scale for one in (first, second) if one.scale is not None]
    adds = [first.add, second.add]
    if first.add is not None and second.scale is not None:
        adds[0] = np.where(second.scale == 0, np.zeros_like(first.add), first.add * second.scale)
    given = [one for one in adds if one is not None]
    return Edit(
        scale=np.multiply(*scales) if len(scales) == 2 else next(iter(scales), None),
        add=np.add(*given) if len(given) == 2 else next(iter(given), None),
    )


def check_each(given: Any, count: int, cfg: ModelConfig) -> list[Interventions | None]:
    """Returns the checked interventions of each of `count` prompts, given one for all of them or a list of `count`.

    A mapping stands for its edits at every position. Each result that is not None has the points of all of them, so
    that their steps have one set of points, however they are batched. Raises as `check_edits`; RequestValidationError
    for another type or number of them.
    """
    each = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(each) != count:
        raise RequestValidationError(f"{count} prompts need as many interventions, {len(each)} were given")
    known: dict[int, Interventions | None] = {}
    for one in each:
        if id(one) not in known:
            known[id(one)] = _checked(one, cfg)
    neutral = {point: Edit() for one in known.values() if one is not None for point in one.edits}
    known = {key: one and replace(one, edits=neutral | dict(one.edits)) for key, one in known.items()}
    return [known[id(one)] for one in each]


def _checked(given: Any, cfg: ModelConfig) -> Interventions | None:
    one = Interventions(given) if isinstance(given, Mapping) else given
    if one is None:
        return None
    if not isinstance(one, Interventions):
        raise RequestValidationError(f"interventions are {safe_repr(one)}, expected Interventions or a mapping")
    _span(one.start, one.stop)
    edits = check_edits(one.edits, cfg)
    return Interventions(edits, one.start, one.stop) if edits else None


def _span(start: int, stop: int | None) -> tuple[int, int]:
    """Checks the positions that are changed; returns them as int32 numbers."""
    first = check_int("start", start, 0)
    end = None if stop is None else check_int("stop", stop, 0)
    if end is not None and end < first:
        raise RequestValidationError(f"stop is {end}, expected at least start, which is {first}")
    return min(first, LAST), LAST if end is None else min(end, LAST)


def _check_leaf(point: Point, leaf: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> None:
    try:
        np.broadcast_to(leaf, shape)
    except ValueError:
        raise RequestValidationError(
            f"an edit at {point.name!r} has shape {list(leaf.shape)}, expected one token's: {list(shape)}"
        ) from None
    kinds = (np.integer, np.bool_) if np.issubdtype(dtype, np.integer) else (np.integer, np.bool_, np.floating)
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds):
        expected = "integers" if np.issubdtype(dtype, np.integer) else "real numbers"
        raise RequestValidationError(f"an edit at {point.name!r} is {leaf.dtype}, expected {expected}")
    with np.errstate(over="ignore"):
        beyond = np.isfinite(leaf) & ~np.isfinite(leaf.astype(np.float32))
    if beyond.any():
        raise RequestValidationError(
            f"an edit at {point.name!r} has {float(leaf[beyond][0]):.8g}, expected numbers of float32, or inf"
        )
