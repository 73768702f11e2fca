"""Converts an adapter that a caller has as arrays to the form of a row of the stacks; arrays on a device stay there."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import check_no_problems, is_integer, is_real
from ferrum_jax.contract.errors import InvalidParameterError, RequestValidationError, safe_repr
from ferrum_jax.models import adapters, specs
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.devices import JaxDevice
from ferrum_jax.sharding.mesh import joined

Halves = dict[str, tuple[Any, Any]]  # down [r, D] or [A, r, D], and up [F, r] or [F, A, r], by projection
_PREFIX, _PEFT = "base_model.model.", {".lora_A.weight": 0, ".lora_B.weight": 1}
_OWN = {".down": 0, ".up": 1}
_LARGEST = float(np.finfo(np.float32).max)


def lay_out_arrays(
    tree: Any, cfg: ModelConfig, spec: LoraSpec, dtype: str, device: JaxDevice, *, scale: float, index: int
) -> ParamTree:
    """Returns the tree of `models.adapters.adapter_specs`: ranks padded with zeros, missing projections zero.

    Tree, scale and index are those of `ModelRunner.set_lora`. Arrays on several devices are moved to `device`.

    Raises:
        InvalidParameterError: the arrays are not those of an adapter of this model, or not finite in `dtype`, which
            would spoil rows without adapters, too; the message lists where.
        RequestValidationError: the rank is above `spec.max_rank`.
    """
    if not is_real(scale) or not abs(scale) <= _LARGEST:
        raise InvalidParameterError(f"scale is {safe_repr(scale)}, expected a finite float32")
    if not is_integer(index) or not 0 <= index < 2**31:
        raise InvalidParameterError(f"index is {safe_repr(index)}, expected an integer from 0 to {2**31 - 1}")
    halves = _halves(tree)
    rank = _check(halves, cfg, index)
    if rank > spec.max_rank:
        raise RequestValidationError(f"the adapter has rank {rank}, more than max_lora_rank, which is {spec.max_rank}")
    with jax.transfer_guard_host_to_device("allow"):  # for the two numbers, and for NumPy's arrays
        halves = jax.tree.map(lambda half: joined(half, device) if isinstance(half, jax.Array) else half, halves)
        arrays = [half for half in jax.tree.leaves(halves) if isinstance(half, jax.Array)]
        if all(half.is_fully_addressable for half in arrays) and len({one for x in arrays for one in x.devices()}) > 1:
            halves = jax.device_put(halves, device)
        found, are_finite = _lay_out(halves, np.float32(scale), np.int32(index), cfg=cfg, spec=spec, dtype=dtype)
    with jax.transfer_guard_device_to_host("allow"):
        problems = [f"{name} has values that are not finite in {dtype}" for name, ok in are_finite.items() if not ok]
    check_no_problems("this adapter, its scale included, cannot be served", problems)
    return found


@functools.partial(jax.jit, static_argnames=("cfg", "spec", "dtype"))
def _lay_out(
    halves: Halves, scale: Any, index: Any, *, cfg: ModelConfig, spec: LoraSpec, dtype: str
) -> tuple[ParamTree, dict[str, jax.Array]]:
    """Returns the tree, and whether each projection's arrays are finite."""
    wanted = adapters.adapter_specs(cfg, spec)
    leaves = {name: jnp.zeros(leaf.shape, dtype) for name, leaf in specs.named_leaves(wanted).items()}
    are_finite = {}
    for name, (down, up) in halves.items():
        if down.ndim == 3:
            down, up = lax.dynamic_index_in_dim(down, index, 0, False), lax.dynamic_index_in_dim(up, index, 1, False)
        rank, down, up = down.shape[0], down.astype(dtype), (up.astype(jnp.float32) * scale).astype(dtype)
        are_finite[name] = jnp.isfinite(down).all() & jnp.isfinite(up).all()
        leaves[f"{name}.down"] = leaves[f"{name}.down"].at[:rank].set(down)
        leaves[f"{name}.up"] = leaves[f"{name}.up"].at[:, :rank].set(up)
    return specs.from_names(wanted, leaves), are_finite


def _halves(tree: Any) -> Halves:
    """Sorts the arrays of a tree by projection."""
    if not isinstance(tree, Mapping) or not tree:
        raise InvalidParameterError(f"an adapter is {safe_repr(tree)}, expected a tree or PEFT's names to arrays")
    is_flat = any(isinstance(name, str) and ".lora_" in name for name in tree)
    given = dict(tree) if is_flat else specs.named_leaves(dict(tree))
    found: dict[str, list[Any]] = {}
    problems = []
    for name, leaf in given.items():
        short = str(name).removeprefix(_PREFIX).replace(".lora_A.default.", ".lora_A.")
        short = short.replace(".lora_B.default.", ".lora_B.")
        for ending, half in (_PEFT if is_flat else _OWN).items():
            if short.endswith(ending):
                pair = found.setdefault(short.removesuffix(ending), [None, None])
                problems += [f"{name} is there twice"] if pair[half] is not None else []
                pair[half] = leaf
                break
        else:
            problems.append(f"{name} is unknown")
    problems += [f"{name} lacks one of its two halves" for name, pair in found.items() if any(x is None for x in pair)]
    check_no_problems("these are not the arrays of an adapter", problems or ([] if found else ["there are none"]))
    return {name: (down, up) for name, (down, up) in found.items()}


def _check(halves: Halves, cfg: ModelConfig, index: int) -> int:
    """Returns the largest rank; raises InvalidParameterError for arrays that do not fit the model."""
    known, problems, ranks = adapters.projections(cfg), [], [0]
    for name, (down, up) in halves.items():
        if name not in known:
            problems.append(f"{name} is no projection that has adapters")
            continue
        if not all(isinstance(half, (jax.Array, np.ndarray)) for half in (down, up)):
            problems.append(f"{name} has {type(down).__name__} and {type(up).__name__}, expected arrays")
            continue
        if not all(jnp.issubdtype(half.dtype, jnp.floating) for half in (down, up)):
            problems.append(f"{name} has {down.dtype} and {up.dtype}, expected floating-point numbers")
            continue
        if any(isinstance(half, jax.Array) and half.is_deleted() for half in (down, up)):
            problems.append(f"{name} has an array that was donated or deleted")
            continue
        out_size, in_size = known[name].shape
        expected = f"[r, {in_size}] and [{out_size}, r]"
        rank, count = down.shape[-2] if down.ndim > 1 else 0, down.shape[:-2]
        if (down.shape, up.shape) != ((*count, rank, in_size), (out_size, *count, rank)) or len(count) > 1:
            problems.append(f"{name} has shapes {list(down.shape)} and {list(up.shape)}, expected {expected}")
        elif count and not 0 <= index < count[0]:
            problems.append(f"{name} has {count[0]} adapters, number {index} is not among them")
        ranks.append(rank)
    check_no_problems("these arrays are no adapter of this model", problems)
    return max(ranks)
