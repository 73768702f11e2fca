"""Arrays that callers give: conversion, and checks that name what was given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ferrum_jax.contract.errors import InvalidParameterError


def as_array(name: str, given: object) -> jax.Array:
    """Returns an array; raises InvalidParameterError for what JAX makes none of."""
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError, OverflowError) as problem:
        raise InvalidParameterError(f"{name} is no array: {problem}") from None


def as_integers(name: str, values: object) -> jax.Array:
    """Returns an array of integers, which the caller checks to have a shape and to be in a range.

    Raises:
        InvalidParameterError: the values are no array of integers, or one is beyond 32 bits with a sign, of which JAX
            would silently keep the lower ones.
    """
    try:
        are_on_device = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values))
        given = jnp.asarray(values) if are_on_device else np.asarray(values)
    except (TypeError, ValueError) as problem:
        raise InvalidParameterError(f"{name} are no array: {problem}") from None
    if not given.size and not isinstance(values, (jax.Array, np.ndarray)):
        given = given.astype(np.int32)  # NumPy takes an empty list for one of floats
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise InvalidParameterError(f"{name} are {given.dtype}, expected integers")
    if isinstance(given, np.ndarray) and (wrong := given.astype(np.int32) != given).any():
        raise InvalidParameterError(f"{name} have {given[wrong][0]}, expected integers of 32 bits with a sign")
    return jnp.asarray(given)


def as_numbers(name: str, given: object) -> jax.Array:
    """Returns an array of floating-point numbers; raises InvalidParameterError for anything else."""
    found = as_array(name, given)
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise InvalidParameterError(f"{name} has numbers of {found.dtype}, expected floating-point ones")
    return found


def check_bits(name: str, given: Any) -> None:
    """Raises InvalidParameterError for integers beyond 32 bits, whose upper bits `jnp.asarray` drops or refuses."""
    for leaf in jax.tree.leaves(given) if isinstance(given, (list, tuple)) else [given]:
        is_numpy = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype in (np.int64, np.uint64)
        numbers = np.asarray(leaf if is_numpy or isinstance(leaf, int) else 0)
        if numbers.size and not -(2**31) <= numbers.min() <= numbers.max() < 2**31:
            raise InvalidParameterError(
                f"{name} has integers from {numbers.min()} to {numbers.max()}, expected 32 bits"
            )


def check_shape(name: str, given: jax.Array, meaning: str, *shapes: tuple[int, ...]) -> None:
    """Raises InvalidParameterError for an array of another shape, even one that a reshape would accept."""
    if given.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidParameterError(f"{name} has shape {list(given.shape)}, expected {meaning}: {expected}")


def check_range(
    name: str, values: jax.Array, least: int, most: int, lengths: jax.Array | None = None, hint: str = ""
) -> None:
    """Raises InvalidParameterError for integers out of bounds, in each row up to its length.

    Traced arrays, and arrays that lie partly on other processes' devices, are not checked.
    """
    if isinstance(values, Tracer) or isinstance(lengths, Tracer) or not values.is_fully_addressable:
        return
    found = np.asarray(values)
    wrong = (found < least) | (found > most)
    if lengths is not None:
        wrong &= np.arange(found.shape[1]) < np.asarray(lengths)[:, None]
    if wrong.any():
        raise InvalidParameterError(f"{name} have {found[wrong][0]}, expected {least} to {most}{hint}")
