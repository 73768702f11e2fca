"""Projections of a block: products with its weights, fused or not, plus the low-rank deltas of adapters."""

import jax

from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.ops.linear import linear, low_rank

Lora = tuple[ParamTree, jax.Array] | None  # adapter stacks of one block, and bool [X, A]: the adapter of each token


DIVIDED = ("heads", "mlp")  # logical axes of inputs that a mesh divides


def linear_specs(
    out: tuple[int, str], into: tuple[int, str], bias: bool = False, parts: tuple[tuple[str, int], ...] = ()
) -> ParamTree:
    """Specs of a projection, given size and logical axis of its outputs and inputs; weights are `[out, in]`.

    `parts` are the logical axes and sizes of fused outputs. Where inputs are divided over devices, their products are
    added, so that only one device may hold the bias: its axis is `sum`.
    """
    specs: ParamTree = {"weight": ParamSpec((out[0], into[0]), (out[1], into[1]), parts=parts)}
    if bias:
        axis = "sum" if into[1] in DIVIDED else out[1]
        specs["bias"] = ParamSpec((out[0],), (axis,), "zeros", parts=parts)
    return specs


def project(x: jax.Array, block: ParamTree, lora: Lora, name: str) -> jax.Array:
    """Multiplies `[X, in]` by one weight of a block and adds each token's adapter delta: `[X, out]`."""
    return _adapt(linear(x, block[name]["weight"], block[name].get("bias")), x, lora, name)


def project_all(
    x: jax.Array, block: ParamTree, lora: Lora, fused: str, names: tuple[str, ...], shares: tuple[int, ...]
) -> list[jax.Array]:
    """Multiplies one input by several weights, or by the one weight `fused` if the block has it, and splits its output.

    `shares` are the relative sizes of the outputs.
    """
    if fused not in block:
        return [project(x, block, lora, name) for name in names]
    y = linear(x, block[fused]["weight"], block[fused].get("bias"))
    if lora is not None and fused in lora[0]:  # the checkpoint itself is fused, and so are its adapters
        y, lora = _adapt(y, x, lora, fused), None
    share, parts, start = y.shape[1] // sum(shares), [], 0
    for name, count in zip(names, shares, strict=True):
        parts.append(_adapt(y[:, start * share : (start + count) * share], x, lora, name))
        start += count
    return parts


def _adapt(y: jax.Array, x: jax.Array, lora: Lora, name: str) -> jax.Array:
    """Adds the delta of each token's adapter to a product of `x`."""
    if lora is None:
        return y
    stacks, used = lora
    return y + low_rank(x, stacks[name]["down"], stacks[name]["up"], used)
