"""What weights must be to take the place of others in steps that are compiled."""

import jax

from ferrum_jax.contract.errors import InvalidParameterError
from ferrum_jax.models.specs import ParamTree, named_leaves

MOST_SHOWN = 3


def refuse_other_shapes(params: ParamTree, instead_of: ParamTree) -> None:
    """Raises InvalidParameter unless two trees differ in nothing but values, naming what does."""
    given, there = named_leaves(params), named_leaves(instead_of)
    problems = [f"{name} is missing" for name in there.keys() - given.keys()]
    problems += [f"{name} is unknown" for name in given.keys() - there.keys()]
    for name in given.keys() & there.keys():
        found, expected = _described(given[name]), _described(there[name])
        if found != expected:
            problems.append(f"{name} is {found}, expected {expected}")
    if problems:
        more = f" and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
        raise InvalidParameterError(f"these weights cannot be set: {'; '.join(sorted(problems)[:MOST_SHOWN])}{more}")
    if jax.tree.structure(params) != jax.tree.structure(instead_of):
        raise InvalidParameterError("these weights cannot be set: their tree has another structure")


def _described(leaf: object) -> str:
    if not isinstance(leaf, jax.Array):
        return f"a {type(leaf).__name__}"
    if leaf.is_deleted():
        return "an array that was donated or deleted"
    places = ", ".join(sorted(str(device) for device in leaf.devices()))
    return f"{'a weakly typed ' * leaf.weak_type}{leaf.dtype}{list(leaf.shape)} on {places}"
