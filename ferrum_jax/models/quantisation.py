"""Parameter trees with quantised weights: their formats, specs and values."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.config import DTYPES, ModelConfig
from ferrum_jax.contract.checks import check_int
from ferrum_jax.contract.errors import InvalidParameterError, safe_repr
from ferrum_jax.models import specs
from ferrum_jax.models.layout import CHECKPOINT, checkpoint_leaves, lay_out, layout_of, layout_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.ops.quantised import (
    FLOAT4,
    LARGEST,
    NARROW,
    PACKED,
    POWERS,
    UINTS,
    QuantisedWeight,
    activation_dtype,
    dequantise_weight,
    is_quantised,
    quantise_weight,
    values_dtype,
)

# Jitted, so that XLA keeps no float32 intermediate of a weight in memory.
_quantise = jax.jit(quantise_weight, static_argnums=(1, 2))
_dequantise = jax.jit(dequantise_weight, static_argnums=1)


@dataclass(frozen=True)
class Format:
    """How one weight is stored."""

    dtype: str  # of the values; those of up to six bits are packed; 16-bit values have no scales
    groups: int = 1  # scales per output channel
    scales: "str | Format" = "float32"  # their dtype; those of four-bit floats are POWERS; or how they are quantised
    offsets: "str | Format | None" = None  # the same; None: no offsets

    def __post_init__(self):
        known = (*LARGEST, *PACKED, *NARROW)
        if self.dtype not in known:
            raise InvalidParameterError(f"weights are kept in {' or '.join(known)}, not {self.dtype!r}")
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise InvalidParameterError(f"groups are {self.groups!r}, expected an integer of at least 1")
        scales = (POWERS,) if self.dtype == FLOAT4 else DTYPES
        self._check("scales", self.scales, scales)
        self._check("offsets", self.offsets, (None,) if self.dtype == FLOAT4 else (*DTYPES, None))

    def _check(self, part: str, given: "str | Format | None", known: Sequence[str | None]) -> None:
        if not isinstance(given, Format):
            if given not in known:
                raise InvalidParameterError(f"{part} are {given!r}, expected {' or '.join(map(str, known))}")
            return
        if self.dtype not in ("int8", *UINTS) or given.dtype != "int8" or not isinstance(given.scales, str):
            raise InvalidParameterError(f"{part} of values in {self.dtype} are quantised as {given}")
        if given.offsets is not None or self.groups % given.groups:
            raise InvalidParameterError(f"{part} of {self.groups} groups are quantised as {given}")


Formats = Mapping[str, Format]  # by name of weight, of quantised weights only


def choose_formats(
    cfg: ModelConfig, dtype: str, *, group_size: int | None = None, vocabulary: bool = True
) -> dict[str, Format]:
    """Returns the format of every matrix of a model in `dtype`, by name; norms, biases and routers stay unquantised.

    With `vocabulary`, embeddings and head (one matrix if tied) are quantised too.

    Raises:
        InvalidParameterError: there is no such format, or `group_size` is not an integer that divides the columns of
            every matrix.
    """
    if group_size is not None:
        group_size = check_int("group_size", group_size, 1, InvalidParameterError)
    if not isinstance(dtype, str) or dtype not in LARGEST:
        raise InvalidParameterError(f"weights are quantised to {' or '.join(LARGEST)}, not {dtype!r}")
    found = {}
    for name, spec in specs.named_leaves(family(cfg).param_specs(cfg)).items():
        is_matrix = len(spec.shape) - ("expert" in spec.axes) >= 2
        if not is_matrix or "router" in spec.axes or ("vocab" in spec.axes and not vocabulary):
            continue
        columns = spec.shape[-1]
        if group_size is not None and columns % group_size:
            raise InvalidParameterError(f"{name} has {columns} columns, which groups of {group_size} do not divide")
        found[name] = Format(dtype, 1 if group_size is None else columns // group_size)
    return found


def quantised_specs(plain: ParamTree, formats: Formats) -> ParamTree:
    """Specs of the tree in which the weights named in `formats` are quantised.

    Scales are sharded like the output channels; with several groups per channel, also like the inputs.
    """

    def kept(name: str, spec: ParamSpec) -> ParamSpec | QuantisedWeight[ParamSpec]:
        return _quantised_spec(spec, formats[name]) if name in formats else spec

    return specs.map_specs(kept, plain)


def _quantised_spec(spec: ParamSpec, form: Format) -> QuantisedWeight[ParamSpec]:
    if form.dtype in NARROW:
        return QuantisedWeight(values=replace(spec, dtype=form.dtype))
    values, high = replace(spec, dtype=form.dtype), None
    if form.dtype in PACKED:
        values = replace(spec, dtype="uint8", shape=(*spec.shape[:-1], spec.shape[-1] // 2))
    if (more := UINTS.get(form.dtype, 4) - 4) > 0:
        high = replace(spec, dtype="uint8", shape=(*spec.shape[:-1], spec.shape[-1] * more // 8))
    last = spec.axes[-1] if form.groups > 1 else "group"

    def part(kept: str | Format, init: str) -> ParamSpec | QuantisedWeight[ParamSpec]:
        own = ParamSpec((*spec.shape[:-1], form.groups), (*spec.axes[:-1], last), init)
        return _quantised_spec(own, kept) if isinstance(kept, Format) else replace(own, dtype=kept)

    offsets = None if form.offsets is None else part(form.offsets, "zeros")
    return QuantisedWeight(values=values, scales=part(form.scales, "ones"), offsets=offsets, high=high)


def formats_of(params: ParamTree) -> dict[str, Format]:
    """Returns the formats of the quantised weights of a tree, by name; leaves may be shapes."""
    named = specs.named_leaves(params, is_quantised)
    return {name: _format_of(leaf) for name, leaf in named.items() if is_quantised(leaf)}


def specs_like(params: ParamTree, cfg: ModelConfig) -> ParamTree:
    """Specs of given parameters of a model, in their own layout and quantisation; leaves may be shapes."""
    leaves = jax.eval_shape(lambda tree: checkpoint_leaves(tree, cfg), params)
    plain = family(cfg).param_specs(cfg)
    return layout_specs(quantised_specs(plain, formats_of(leaves)), cfg, layout_of(params))


def _format_of(leaf: QuantisedWeight[Any]) -> Format:
    dtype = values_dtype(leaf)
    if leaf.scales is None:
        return Format(dtype)
    scales, offsets = (
        _format_of(part) if is_quantised(part) else None if part is None else part.dtype.name
        for part in (leaf.scales, leaf.offsets)
    )
    assert scales is not None
    return Format(dtype, leaf.scales.shape[-1], scales, offsets)


def quantise(
    params: ParamTree, cfg: ModelConfig, dtype: str, *, group_size: int | None = None, vocabulary: bool = True
) -> ParamTree:
    """Quantises the matrices of a plain tree by `quantise_weight`; the other leaves are shared with `params`.

    Args:
        params: arrays, as `load_params` returns them; the result has the same layout.
        cfg: the model's configuration.
        dtype: of the values, `int8` or `float8_e4m3fn`.
        group_size: adjacent input columns that share a scale; None: one scale per output channel.
        vocabulary: whether embeddings and head are quantised, too.

    Raises:
        InvalidParameterError: as `choose_formats`, or a weight is quantised already.
    """
    layout, params = layout_of(params), lay_out(params, cfg, CHECKPOINT)
    formats, given = choose_formats(cfg, dtype, group_size=group_size, vocabulary=vocabulary), formats_of(params)
    if given:
        raise InvalidParameterError(f"{next(iter(given))} and {len(given) - 1} more are quantised already")

    def kept(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        form = formats.get(specs.name_of(path))
        if form is None:
            return leaf
        quantised = quantise_weight if isinstance(leaf, np.ndarray) else _quantise  # jit would move it to a device
        return quantised(leaf, form.dtype, form.groups)

    return lay_out(jax.tree_util.tree_map_with_path(kept, params), cfg, layout)


def float_dtype(dtype: Any, expected: str, names: Sequence[str] = DTYPES) -> jnp.dtype:
    """Returns one of the dtypes of plain parameters; raises InvalidParameterError for another."""
    with contextlib.suppress(TypeError, ValueError):
        if (found := jnp.dtype(dtype)).name in names:
            return found
    raise InvalidParameterError(f"dtype is {safe_repr(dtype)}, {expected} {', '.join(names[:-1])} or {names[-1]}")


def dequantise(params: ParamTree, dtype: str | None = None) -> ParamTree:
    """Dequantises the weights of a tree to `dtype`; if None, to the dtype of the other parameters.

    Raises:
        InvalidParameterError: `dtype` is none of float32, float16, bfloat16 and float64.
    """
    wanted = activation_dtype(params)
    if dtype is not None:
        wanted = float_dtype(dtype, "weights are dequantised to", (*DTYPES, "float64"))

    def plain(leaf: Any) -> Any:
        if not is_quantised(leaf):
            return leaf
        return (dequantise_weight if isinstance(leaf.values, np.ndarray) else _dequantise)(leaf, wanted)

    return jax.tree.map(plain, params, is_leaf=is_quantised)
