"""Products of a block with its parameters: fused or not, and with what adapters add to them."""

import jax

from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.ops.linear import linear
from ferrum_jax.ops.lora import low_rank

Lora = tuple[ParamTree, jax.Array] | None  # stacks of one block, and bool [X, A]: which adapter each token uses


def linear_specs(out: tuple[int, str], into: tuple[int, str], bias: bool = False) -> ParamTree:
    """Describes a product by the size and the axis of its outputs and inputs."""
    specs: ParamTree = {"weight": ParamSpec((out[0], into[0]), (out[1], into[1]))}
    if bias:
        specs["bias"] = ParamSpec((out[0],), (out[1],), "zeros")
    return specs


def project(x: jax.Array, block: ParamTree, lora: Lora, name: str) -> jax.Array:
    """One product of a block, `[X, in]` to `[X, out]`, and what each token's adapter adds to it."""
    return _adapt(linear(x, block[name]["weight"], block[name].get("bias")), x, lora, name)


def project_all(
    x: jax.Array, block: ParamTree, lora: Lora, fused: str, names: tuple[str, ...], shares: tuple[int, ...]
) -> list[jax.Array]:
    """Several products of one input, which are one product where their weight is: it is cut by `shares`."""
    if fused not in block:
        return [project(x, block, lora, name) for name in names]
    y = linear(x, block[fused]["weight"], block[fused].get("bias"))
    if lora is not None and fused in lora[0]:  # of a checkpoint that is fused itself
        y, lora = _adapt(y, x, lora, fused), None
    share, parts, start = y.shape[1] // sum(shares), [], 0
    for name, count in zip(names, shares, strict=True):
        parts.append(_adapt(y[:, start * share : (start + count) * share], x, lora, name))
        start += count
    return parts


def _adapt(y: jax.Array, x: jax.Array, lora: Lora, name: str) -> jax.Array:
    """Adds what each token's adapter adds to a product of `x`."""
    if lora is None:
        return y
    stacks, used = lora
    return y + low_rank(x, stacks[name]["down"], stacks[name]["up"], used)
