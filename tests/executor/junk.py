"""What nobody should hand in: strategies of values of every wrong type, rank and size, alone or amid right ones."""

import decimal
import fractions
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from ferrum_jax.contract import ActiveLoraAdapter, DataType, Device, FullLogits, GreedyArgmax, KvSlotRequest
from tests.executor.conftest import CFG

V = CFG.vocab_size


def _loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def _deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(90):
        deep = [deep]
    return deep


def _deleted() -> jax.Array:
    array = jnp.array([1, 2])
    array.delete()
    return array


class ShapedWrongly:
    """Claims to be an array, and is none."""

    shape = "none"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise ValueError("I am no array")

    def __repr__(self) -> str:
        return "ShapedWrongly()"


SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    V,
    2**31,
    -(2**31) - 1,
    2**63,
    2**64,
    -(2**70),
    10**400,
    0.0,
    1.5,
    -0.5,
    1e300,
    float("nan"),
    float("inf"),
    -float("inf"),
    1j,
    "",
    "a",
    "1",
    "\ud800",
    "\x00",
    "a\x00b",
    "/",
    "../..",
    "~nobody/there",
    "a" * 5000,
    b"",
    b"ab",
    b"\xff",
    decimal.Decimal(1),
    decimal.Decimal("NaN"),
    decimal.Decimal("sNaN"),
    fractions.Fraction(1, 2),
    ...,
    NotImplemented,
    int,
    print,
    np.int8(-1),
    np.int64(1),
    np.uint64(2**63),
    np.float16(1),
    np.float32("nan"),
    np.complex64(1j),
    np.bool_(True),
    np.str_("a"),
    np.bytes_(b"a"),
    np.datetime64("2020-01-01"),
    np.timedelta64(1, "s"),
    np.datetime64("NaT", "s"),
    DataType.FP32,
    Device("cpu"),
    FullLogits(),
    FullLogits,
    GreedyArgmax(),
    ActiveLoraAdapter(name="a", path="b"),
    KvSlotRequest(cache_id="a", target_len=1),
    object(),
    ShapedWrongly(),
    jnp.dtype("bfloat16"),
]
ARRAYS: list[Callable[[], Any]] = [
    lambda: np.array(1),
    lambda: np.array([]),
    lambda: np.array([1, 2]),
    lambda: np.array([[1, 2]]),
    lambda: np.zeros((0, 3), int),
    lambda: np.zeros((1, 0), int),
    lambda: np.ones((2, 2, 2), int),
    lambda: np.array([1.0, np.nan]),
    lambda: np.array([np.inf]),
    lambda: np.array([[np.nan] * 3]),
    lambda: np.array([1, None], object),
    lambda: np.array([["a", 1]], object),
    lambda: np.array(None),
    lambda: np.array(["a", "b"]),
    lambda: np.array([b"a"]),
    lambda: np.array([1j]),
    lambda: np.array([True, False]),
    lambda: np.array([[True]]),
    lambda: np.array([2**64 - 1], np.uint64),
    lambda: np.array([[2**40, -1]]),
    lambda: np.array(["2020-01-01"], "datetime64[D]"),
    lambda: np.array([5], "timedelta64[s]"),
    lambda: np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    lambda: np.array([10**30, 1], object),
    lambda: jnp.array([1, 2]),
    lambda: jnp.array([[1]]),
    lambda: jnp.array([1.5]),
    lambda: jnp.array(3),
    lambda: jnp.array([True]),
    lambda: jnp.array([[jnp.nan]], jnp.bfloat16),
    lambda: jax.random.key(0),
    _deleted,
    _loop,
    _deep,
    lambda: iter([1, 2]),
    lambda: (i for i in "ab"),
    lambda: range(3),
    lambda: {1, 2},
    lambda: memoryview(b"ab"),
    lambda: bytearray(b"ab"),
    lambda: [[1], [1, 2]],
    lambda: [1, [2]],
    lambda: [1, 2.5],
    lambda: [True, 1],
    lambda: [1, "a"],
    lambda: [2**70],
    lambda: [float("nan")],
    lambda: [[True, 1]],
    lambda: np.ma.masked_array([1, 2], [True, False]),
]
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(SCALARS), st.sampled_from(ARRAYS).map(lambda make: make()), st.integers(), st.floats()
)
HASHABLE = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.booleans(), st.floats(), st.just("model_type"))
JUNK: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.lists(inner, max_size=3).map(
            lambda items: np.array([*items, None], object)[:-1] if _is_flat(items) else items
        ),
    ),
    max_leaves=5,
)
# What a file can hold.
JSON: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            2**63,
            2**70,
            10**400,
            0.0,
            1.5,
            1e300,
            float("nan"),
            float("inf"),
            "",
            "a",
            "(",
            "1",
            "\x00",
        ]
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=4,
)


def _is_flat(items: list[Any]) -> bool:
    return not any(hasattr(item, "__len__") or hasattr(item, "__array__") for item in items)


def maybe(right: st.SearchStrategy[Any], wrong: st.SearchStrategy[Any] = JUNK) -> st.SearchStrategy[Any]:
    """A right value most of the time, so that what comes after it is reached."""
    return st.integers(0, 3).flatmap(lambda pick: wrong if pick == 0 else right)


def fields(**right: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments, each of them right or junk."""
    return st.fixed_dictionaries({name: maybe(strategy) for name, strategy in right.items()})


def spoiled(right: dict[str, Any], junk: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A dictionary with some values spoiled or missing; those that are dictionaries are spoiled inside as well."""
    spoilt = {
        name: maybe(spoiled(value, junk) if isinstance(value, dict) and value else st.just(value), junk)
        for name, value in right.items()
    }
    few = st.sets(st.sampled_from(sorted(right)), min_size=1, max_size=3)
    return few.flatmap(
        lambda names: st.fixed_dictionaries(
            {name: st.just(value) for name, value in right.items() if name not in names},
            optional={name: st.one_of(junk, spoilt[name]) for name in names},
        )
    )
