"""Hook points: named arrays inside a forward that can be captured or changed.

The points and their names are TransformerLens's (Nanda and Bloom 2022), which also writes ("z", 3) as
`blocks.3.attn.hook_z`; both forms are accepted. `capture` lists the points to return, `interventions` maps points to
changes of their arrays.

| point | array | what it is |
|---|---|---|
| `resid_pre`, `resid_mid`, `resid_post` | `[X, D]` | the residual stream before, inside and after a layer |
| `attn_out`, `mlp_out` | `[X, D]` | what attention and the feed-forward block add to it, norms and factors included |
| `q` | `[X, N, H]` | queries as projected, before norms and rotation |
| `k`, `v` | `[X, K, H]` | keys and values as projected; latent attention has none |
| `z` | `[X, N, H]` | each head's weighted sum of values, before the output projection |
| `attn_scores`, `pattern` | float32 `[B, N, T, S]` | scores before the softmax, -inf where masked; weights after it |
| `mlp_pre`, `mlp_pre_linear`, `mlp_post` | `[X, F]` | gate and up projections; the down projection's input |
| `router_logits` | `[X, E]` | the router's logits over the experts |
| `expert_indices`, `expert_weights` | int32, float32 `[X, U]` | the experts each token goes through, and their shares |

Functions at `attn_scores` are given -1e30 where masked. X counts all tokens of a step; in `models.run` the axis X is
the two axes `[B, T]`. Where `expert_indices` are replaced, the shares of the new experts come from the router's logits,
so that a trainer that replays a sampler's routing still has the router's gradients. An id that no expert has is refused
or, where it is known under `jit` only, makes its token NaN.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import InvalidParameterError, UnsupportedError, safe_repr
from ferrum_jax.models.arrays import as_array, check_bits, check_shape
from ferrum_jax.sharding.types import vary_like

Leaf = TypeVar("Leaf")
_RESIDUAL = "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"
_HEADS = "q", "k", "v", "z"
ATTENTION = "attn_scores", "pattern"
_DENSE = "mlp_pre", "mlp_pre_linear", "mlp_post"
_SPARSE = "router_logits", "expert_indices", "expert_weights"
NAMES = (*_RESIDUAL, *_HEADS, *ATTENTION, *_DENSE, *_SPARSE)
_LONG = re.compile(r"blocks\.(\d{1,9})\.(?:attn\.hook_(q|k|v|z|attn_scores|pattern)"
                   r"|mlp\.hook_(pre|pre_linear|post|router_logits|expert_indices|expert_weights)"
                   r"|hook_(resid_pre|resid_mid|resid_post|attn_out|mlp_out))")  # fmt: skip


class Point(NamedTuple):
    """A hook point; equal to the plain tuple."""

    name: str
    layer: int | None  # from 0; None for interventions in all layers, whose arrays have a first axis of layers


@flax.struct.dataclass
class Edit(Generic[Leaf]):
    """A change at a point: `scale * x + add`, computed in float32 (expert ids in integers).

    Both broadcast against the point's array; None counts as 1 and 0. Where `scale` is 0, `add` replaces the array's
    number, even a NaN. Both are arguments of a compiled forward: new values do not recompile it.
    """

    scale: Leaf | None = None
    add: Leaf | None = None


Change = Callable[[jax.Array, jax.Array], jax.Array]  # a traced function of the array and its tokens' positions
Intervention = Edit[Any] | Change
Captured = dict[Point, Any]  # arrays; for `attn_scores` and `pattern` tuples of one array for each group of rows


def replace_with(value: Any, where: Any = True) -> Edit[jax.Array]:
    """Returns the edit that puts `value` where the mask `where` is True; both broadcast against the point's array."""
    check_bits("value", value)
    mask, value = as_array("where", where), as_array("value", value)
    if mask.dtype != jnp.bool_:
        raise InvalidParameterError(f"where is {mask.dtype}, expected True and False")
    kind = jnp.float32 if jnp.issubdtype(value.dtype, jnp.floating) else jnp.int32  # floats have gradients
    return Edit(scale=jnp.where(mask, 0, 1).astype(kind), add=jnp.where(mask, value, jnp.zeros((), value.dtype)))


class Taps(NamedTuple):
    """What one layer captures and changes."""

    layer: int | jax.Array = 0
    wanted: frozenset[str] = frozenset()  # names to capture
    interventions: tuple[tuple[Point, Intervention], ...] = ()
    positions: jax.Array | None = None  # int32 [X], for functions

    def wants(self, *names: str) -> bool:
        """True where one of these points is captured."""
        return not self.wanted.isdisjoint(names)

    def changes(self, *names: str) -> bool:
        """True where one of these points may have an intervention."""
        return any(point.name in names for point, _ in self._here)

    def changed(self, name: str, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Returns an array after the interventions at a point; `positions` default to those of the layer's tokens."""
        at = self.positions if positions is None else positions
        for point, intervention in self._here:
            if point.name != name:
                continue
            if point.layer is None:
                intervention = jax.tree.map(lambda leaf: jnp.asarray(leaf)[self.layer], intervention)
                x = _apply(point, intervention, x, at)
            elif isinstance(self.layer, int):
                x = _apply(point, intervention, x, at)
            elif isinstance(intervention, Edit):  # inside a loop over the layers
                x = jnp.where(self.layer == point.layer, _apply(point, intervention, x, at), x)
            else:  # a function is not called in other layers: it may have no finite slope there
                change = functools.partial(_apply, point, intervention, positions=at)
                x = lax.cond(self.layer == point.layer, change, lambda x: x, vary_like(x, jax.eval_shape(change, x)))
        return x

    def captured(self, **arrays: Any) -> dict[str, Any]:
        """Returns the wanted ones of the arrays, by name."""
        return {name: array for name, array in arrays.items() if name in self.wanted}

    @property
    def _here(self) -> tuple[tuple[Point, Intervention], ...]:
        layer = self.layer
        if not isinstance(layer, int):
            return self.interventions
        return tuple(one for one in self.interventions if one[0].layer in (None, layer))


NO_TAPS = Taps()


def _apply(point: Point, intervention: Intervention, x: jax.Array, positions: jax.Array | None) -> jax.Array:
    if not isinstance(intervention, Edit):
        assert positions is not None
        found = _returned(point, intervention(x, positions), x.shape)
        _check_kind(f"the function's result at {point.name!r}", found.dtype, x.dtype)
        return vary_like(found.astype(x.dtype), x)  # as a branch beside x must
    for name, leaf in (("scale", intervention.scale), ("add", intervention.add)):
        if leaf is None:
            continue
        leaf = jnp.asarray(leaf)
        if not _broadcasts(leaf.shape, x.shape):
            of, first = ("", 0) if point.name in ATTENTION else ("a token's ", 1)  # rows and positions are one axis
            own, each = list(leaf.shape[-(x.ndim - first) :]), list(x.shape[first:])
            raise InvalidParameterError(
                f"{name} at {point.name!r} has shape {own}, which does not broadcast to {of}{each}"
            )
        _check_kind(f"{name} at {point.name!r}", leaf.dtype, x.dtype)
    return edited(x, intervention)


def _check_kind(what: str, dtype: Any, own: Any) -> None:
    """Raises InvalidParameterError for numbers that a point's array, of dtype `own`, cannot hold."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise InvalidParameterError(f"{what} is {dtype}, expected real numbers")
    if not jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(dtype, jnp.floating):
        raise InvalidParameterError(f"{what} is {dtype}, expected integers")


def _returned(point: Point, found: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns the result of a function at a point as an array of this shape; a scalar is broadcast."""
    try:
        y = jnp.asarray(found)
    except (TypeError, ValueError):
        raise InvalidParameterError(
            f"the function at {point.name!r} returns {safe_repr(found)}, expected an array {list(shape)}"
        ) from None
    if y.shape not in ((), shape):
        raise InvalidParameterError(
            f"the function at {point.name!r} returns shape {list(y.shape)}, expected {list(shape)}"
        )
    return jnp.broadcast_to(y, shape)


def edited(x: jax.Array, edit: Edit[Any]) -> jax.Array:
    """Computes `scale * x + add` in float32 and rounds once; integers are computed in their own dtype.

    The slope along `scale` is `x`, also at 0, but for numbers of `x` that are not finite and that a scale of 0 removes.
    """
    wide = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    if edit.scale is not None:
        scale = jnp.asarray(edit.scale).astype(wide.dtype)
        wide = jnp.where((scale == 0) & ~jnp.isfinite(wide), jnp.zeros((), wide.dtype), wide) * scale
    if edit.add is not None:
        wide = wide + jnp.asarray(edit.add).astype(wide.dtype)
    return wide.astype(x.dtype)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def hidden_points(hidden: object, attention: object, cfg: ModelConfig) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Returns the points of hidden states, given as layers passed (0 to L), and of the attention weights of layers.

    Raises:
        InvalidParameterError: a layer does not exist; the message names it.
    """
    last = cfg.num_hidden_layers - 1
    states = [
        Point("resid_post", at - 1) if at else Point("resid_pre", 0) for at in _layers("hidden", hidden, last + 1)
    ]
    return tuple(states), tuple(Point("pattern", at) for at in _layers("attention_weights", attention, last))


def state_number(point: Point) -> int:
    """Returns how many layers a hidden state has passed: its number in `hidden_points`."""
    assert point.layer is not None
    return point.layer + (point.name == "resid_post")


def _layers(name: str, given: object, most: int) -> list[int]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InvalidParameterError(f"{name} is {safe_repr(given)}, expected layers from 0 to {most}")
    layers = list(given)
    for layer in layers:
        is_number = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
        if not is_number or not 0 <= layer <= most:
            raise InvalidParameterError(f"{name} has the layer {safe_repr(layer)}, expected 0 to {most}")
    return sorted({int(layer) for layer in layers})


def check_points(given: object, cfg: ModelConfig, first_layer: int = 0) -> tuple[Point, ...]:
    """Returns hook points, each once, in order; raises as `check_point`. A layer None stands for every layer that runs.

    A single point counts as a list of one. Raises InvalidParameterError for a layer before `first_layer`.
    """
    if isinstance(given, (tuple, str)) and _parse(given) is not None:
        given = [given]
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InvalidParameterError(f"capture is {safe_repr(given)}, expected points such as ('resid_post', 3)")
    points: set[Point] = set()
    for one in given:
        name, layer = check_point(one, cfg)
        if layer is not None and layer < first_layer:
            raise InvalidParameterError(f"layer {layer} has no {name!r}: the first layer that runs is {first_layer}")
        layers = range(first_layer, cfg.num_hidden_layers) if layer is None else [layer]
        points |= {at for at in (Point(name, layer) for layer in layers) if _has(at, cfg)}
    return tuple(sorted(points))


def check_point(given: object, cfg: ModelConfig) -> Point:
    """Parses a hook point and checks that the model has it.

    Raises:
        InvalidParameterError: it is neither a known name with a layer nor a name in TransformerLens's long form.
        UnsupportedError: the model has no such point, or this layer has none; of all layers, those that have it count.
    """
    point = _parse(given)
    if point is None or point.name not in NAMES:
        raise InvalidParameterError(
            f"{safe_repr(given)} is no hook point, expected such as ('z', 3) or 'blocks.3.attn.hook_z'; "
            f"names are {', '.join(NAMES)}"
        )
    last = cfg.num_hidden_layers - 1
    if point.layer is not None and not 0 <= point.layer <= last:
        raise InvalidParameterError(f"hook point {safe_repr(given)}: the layer is {point.layer}, expected 0 to {last}")
    if point.name in ("k", "v") and cfg.latent is not None:
        raise UnsupportedError(
            f"{cfg.model_type!r} has no keys and values of heads, but latents: no point {point.name!r}"
        )
    return point if point.layer is None else _checked(point, [point.layer], cfg)


def _checked(point: Point, layers: Iterable[int], cfg: ModelConfig) -> Point:
    """Returns a point; raises UnsupportedError if none of some layers has it."""
    if not any(_has(Point(point.name, layer), cfg) for layer in layers):
        kind = "a mixture of experts" if point.name in _DENSE else "no mixture of experts"
        which = "every layer" if point.layer is None else f"layer {point.layer}"
        raise UnsupportedError(f"{which} of this {cfg.model_type} is {kind}: it has no {point.name!r}")
    return point


def _parse(given: object) -> Point | None:
    if isinstance(given, str):
        found = _LONG.fullmatch(given)
        if found is None:
            return None
        layer, attention, mlp, other = found.groups()
        name = attention or other or (f"mlp_{mlp}" if mlp in ("pre", "pre_linear", "post") else mlp)
        return Point(name, int(layer))
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[0], str):
        return None
    name, layer = given
    if layer is None:
        return Point(name, None)
    is_number = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
    return Point(name, int(layer)) if is_number else None


def _has(point: Point, cfg: ModelConfig) -> bool:
    if point.name not in (*_DENSE, *_SPARSE):
        return True
    assert point.layer is not None
    is_sparse = cfg.experts is not None and cfg.experts.sparse_layers[point.layer]
    return is_sparse == (point.name in _SPARSE)


def check_interventions(given: object, cfg: ModelConfig, first_layer: int = 0) -> dict[Point, Intervention]:
    """Returns interventions by point; raises as `check_points`, and InvalidParameterError for a malformed one."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidParameterError(f"interventions are {safe_repr(given)}, expected a mapping from hook points")
    checked: dict[Point, Intervention] = {}
    for at, intervention in given.items():
        point = _checked(check_point(at, cfg), range(cfg.num_hidden_layers), cfg)
        if isinstance(intervention, Edit):
            intervention = Edit(*(_numbers(point, name, getattr(intervention, name)) for name in ("scale", "add")))
            points = [point] if point.layer is None else check_points([point], cfg, first_layer)
            for leaf in jax.tree.leaves(intervention) if point.layer is None else ():
                if jnp.ndim(leaf) == 0 or len(leaf) != cfg.num_hidden_layers:
                    raise InvalidParameterError(
                        f"the edit of {point.name!r} in all layers has shape {list(jnp.shape(leaf))}, "
                        f"expected a first axis of {cfg.num_hidden_layers}"
                    )
            _check_experts(point, intervention, cfg)
        elif callable(intervention):
            _check_arguments(at, intervention)
            points = check_points([point], cfg, first_layer)
        else:
            raise InvalidParameterError(
                f"the intervention at {safe_repr(at)} is {safe_repr(intervention)}, expected an Edit or a function"
            )
        for one in points:
            if one in checked:
                raise InvalidParameterError(f"interventions have {one.name!r} of layer {one.layer} twice")
            checked[one] = cast(Intervention, intervention)
    return checked


def _check_arguments(at: object, function: Callable[..., Any]) -> None:
    """Raises InvalidParameterError unless a function can be called with two arguments, where its signature is known."""
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # some functions have no signature
        return
    except TypeError as problem:
        raise InvalidParameterError(
            f"the function at {safe_repr(at)} cannot be called with (x, positions): {problem}"
        ) from None


def _check_experts(point: Point, edit: Edit[Any], cfg: ModelConfig) -> None:
    """Raises InvalidParameterError if an edit sets ids that no expert has; traced values are not checked."""
    leaves = edit.scale, edit.add
    if point.name != "expert_indices" or any(leaf is None or isinstance(leaf, Tracer) for leaf in leaves):
        return
    if cfg.experts is None or not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return
    scale, ids = (np.atleast_1d(np.asarray(leaf)) for leaf in leaves)
    if point.layer is None:  # the first axis is that of the layers, the others are aligned at the end
        most = max(scale.ndim, ids.ndim)
        scale, ids = (leaf.reshape(len(leaf), *(1,) * (most - leaf.ndim), *leaf.shape[1:]) for leaf in (scale, ids))
    wrong = (scale == 0) & ((ids < 0) | (ids >= cfg.experts.num_experts))
    if wrong.any():
        found = np.broadcast_to(ids, wrong.shape)[wrong][0]
        raise InvalidParameterError(
            f"expert_indices are replaced by {found}, experts go from 0 to {cfg.experts.num_experts - 1}: "
            "replace_with(..., where=) leaves padding as it is"
        )


def _numbers(point: Point, name: str, given: Any) -> Any:
    """Returns an edit's scale or add: arrays and numbers as they are, lists as an array."""
    check_bits(f"{name} at {point.name!r}", given)
    is_numpy = isinstance(given, (np.ndarray, np.generic)) and given.dtype.kind not in "SUOMm"
    if given is None or is_numpy or isinstance(given, (jax.Array, int, float)):
        return given
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise InvalidParameterError(f"{name} at {point.name!r} is {safe_repr(given)}, expected an array of numbers")
    return array


def edits_of(interventions: Mapping[Point, Intervention]) -> tuple[Edit[Any] | None, ...]:
    """Returns the edits among interventions, in their order; None where one is a function."""
    return tuple(one if isinstance(one, Edit) else None for one in interventions.values())


def with_edits(
    interventions: Mapping[Point, Intervention], edits: Iterable[Edit[Any] | None]
) -> dict[Point, Intervention]:
    """Returns interventions with their edits replaced by `edits`, in the order of `edits_of`."""
    own = zip(interventions.items(), edits, strict=True)
    return {point: function if edit is None else edit for (point, function), edit in own}


def check_supported(points: Iterable[Point], cfg: ModelConfig, *, has_window_cache: bool, is_divided: bool) -> None:
    """Raises UnsupportedError for points that this cache, or a model divided over devices, does not have.

    A sliding-window cache does not hold the keys of the whole sequence.
    """
    for point in points:
        layers = range(cfg.num_hidden_layers) if point.layer is None else [point.layer]
        for layer in layers:
            if has_window_cache and point.name in ATTENTION and cfg.layer_windows[layer] is not None:
                raise UnsupportedError(
                    f"layer {layer} has a sliding-window cache, its attention weights cannot be captured or changed; "
                    "window_kv=False keeps all positions"
                )
        if is_divided and point.name not in (*_RESIDUAL, "pattern"):
            raise UnsupportedError(f"hook point {point.name!r} is not available on a model divided over devices")


def rows_as_tokens(interventions: Mapping[Point, Intervention], batch: int, length: int) -> dict[Point, Intervention]:
    """Converts interventions on `[B, T, ...]` for a forward whose tokens are one axis, X = B * T."""
    return {point: _of_tokens(point, one, batch, length) for point, one in interventions.items()}


def _of_tokens(point: Point, intervention: Intervention, batch: int, length: int) -> Intervention:
    if point.name in ATTENTION:  # [B, N, T, S] as it is
        return intervention
    if not isinstance(intervention, Edit):

        def change(x: jax.Array, positions: jax.Array) -> jax.Array:
            rows = intervention(x.reshape(batch, length, *x.shape[1:]), positions.reshape(batch, length))
            return _returned(point, rows, (batch, length, *x.shape[1:])).reshape(x.shape)

        return change
    tail = 1 if point.name not in _HEADS else 2  # axes of one token

    def flat(leaf: Any) -> jax.Array:
        array = jnp.asarray(leaf)
        first = () if point.layer is not None else array.shape[:1]
        own = array.shape[len(first) :]
        if len(own) <= tail:
            if not first:
                return array
            return array.reshape(*first, *(1,) * (1 + tail - len(own)), *own)
        own = (1,) * (2 + tail - len(own)) + own
        if not _broadcasts(own[:2], (batch, length)) or len(own) != 2 + tail:
            raise InvalidParameterError(
                f"an edit at {point.name!r} has shape {list(array.shape)}, which does not broadcast to "
                f"[{batch}, {length}, ...]"
            )
        array = jnp.broadcast_to(array.reshape(*first, *own), (*first, batch, length, *own[2:]))
        return array.reshape(*first, batch * length, *own[2:])

    return jax.tree.map(flat, intervention)


def partitions_of_edit(point: Point, edit: Edit[Any] | None, rows: Any, batch: int) -> Edit[Any] | None:
    """Returns how to partition an edit on `[B, T, ...]` if rows lie on the mesh axes `rows`; None for a function."""
    after = 3 if point.name in (*ATTENTION, *_HEADS) else 2  # axes after that of rows

    def spec(leaf: Any) -> PartitionSpec:
        first = 0 if point.layer is not None else 1  # the axis of layers
        has_rows = jnp.ndim(leaf) == first + 1 + after and jnp.shape(leaf)[first] == batch > 1
        return PartitionSpec(*(None,) * first, rows) if has_rows else PartitionSpec()

    return None if edit is None else jax.tree.map(spec, edit)


def steered(
    steering: object, interventions: Mapping[Point, Intervention], cfg: ModelConfig, each: tuple[int, ...]
) -> dict[Point, Intervention]:
    """Adds an intervention that adds `steering`, `[L, D]` or `[L, *each]`, to the output of each layer."""
    layers, width = cfg.num_hidden_layers, cfg.hidden_size
    meaning = "[L, D] or [L, B, T, D]" if len(each) == 3 else "[L, D]"
    steering = as_array("steering", steering)
    check_shape("steering", steering, meaning, (layers, width), *([(layers, *each)] if len(each) == 3 else []))
    point = Point("resid_post", None)
    if point in interventions:
        raise InvalidParameterError("steering and an intervention at 'resid_post' in all layers: give one of them")
    return {**interventions, point: Edit(add=steering)}
