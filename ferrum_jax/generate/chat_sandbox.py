"""The Jinja environment of chat templates, in which a template can take neither much time nor much memory.

A template comes with a model and may be hostile. It sees JSON values only, and it runs within four limits: seconds,
the size of one value, the size of all values it makes, and how deep values are nested. Time is checked wherever a
template can repeat itself: at every block, call, filter and operator. Memory is checked before an operation that can
make much out of little (`*`, `%`, `replace`, `center`, `format`, …) and after all others, whose results are not larger
than what they are given. One operation is not interrupted, so the largest value bounds its time.
"""

import functools
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.sandbox

from ferrum_jax.contract.errors import TokenizerError

SECONDS = 5.0
LARGEST_VALUE = 1 << 23  # characters, of one value; four times what is rendered is added
ALL_VALUES = 1 << 26  # characters, of all values made; a thousand times what is rendered is added
DEEPEST_VALUE = 100  # containers within containers
LARGEST_SOURCE = 1 << 20  # characters
LARGEST_INTEGER = 4096  # bits
_ITEM = 32  # characters that an item of a container, or a number, counts as
_FORBIDDEN_FILTERS = ("striptags", "urlize", "wordwrap", "xmlattr", "pprint")  # take quadratic time
_FORBIDDEN_METHODS = ("translate", "mro")


class Meter:
    """What one rendering may still take.

    Args:
        given: size of the variables that are rendered, which the limits grow with.
    """

    def __init__(self, given: int = 0):
        self._deadline = time.monotonic() + SECONDS
        self._largest = LARGEST_VALUE + 4 * given
        self._left = ALL_VALUES + 1024 * given

    def check_time(self) -> None:
        """Raises TokenizerError when time is up."""
        if time.monotonic() > self._deadline:
            raise TokenizerError(f"the chat template takes more than {SECONDS:g} seconds")

    def check_size(self, size: int) -> int:
        """Returns a size in characters that one value may have, or raises TokenizerError."""
        if size > self._largest:
            raise TokenizerError(f"the chat template makes a value of more than {self._largest:,} characters")
        return size

    def charge(self, size: int) -> None:
        """Takes the size of a new value off what is left, or raises TokenizerError."""
        self._left -= self.check_size(size)
        if self._left < 0:
            raise TokenizerError("the chat template makes too many large values")

    def measure(self, *values: Any) -> int:
        """Size of values with all that they contain; what is contained twice counts twice, as it does when printed."""
        size = 0
        for value, depth in _walk(values):
            size = self.check_size(size + (len(value) if isinstance(value, (str, bytes)) else _ITEM))
            if depth > DEEPEST_VALUE:
                raise TokenizerError(f"the chat template nests values more than {DEEPEST_VALUE} deep")
        return size


def _walk(values: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """All values and what they contain, each with the number of containers around it."""
    stack = [(value, 0) for value in values]
    while stack:
        value, depth = stack.pop()
        yield value, depth
        if (children := _children(value)) is not None:
            stack.extend((child, depth + 1) for child in children)


def _children(value: Any) -> Iterable[Any] | None:
    if isinstance(value, (str, bytes, range)):
        return None
    if isinstance(value, Mapping):
        return (one for pair in value.items() for one in pair)
    return value if isinstance(value, (Sequence, Set, KeysView, ValuesView, ItemsView)) else None


_METER: ContextVar[Meter] = ContextVar("meter")


def _meter() -> Meter:
    return _METER.get(None) or Meter()


def render_within_limits(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders a template of a `ChatEnvironment`.

    Raises:
        TokenizerError: a limit was reached.
    """
    given = sum(len(one) if isinstance(one, str) else _ITEM for one, _ in _walk(variables.values()))
    token = _METER.set(Meter(given))
    try:
        return template.render(variables)
    finally:
        _METER.reset(token)


class _MeteredCode(jinja2.compiler.CodeGenerator):
    """Code that checks the time in every block, and the size of what no other hook sees."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        self.writeline("environment.check_time()")
        super().blockvisit(nodes, frame)

    def _charge(self, visit: Callable[..., None], node: Any, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.charge(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._charge(super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._charge(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._charge(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._charge(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("environment.finalize(context, ")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a meter on everything that a template does."""

    code_generator_class = _MeteredCode
    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self, *, filters: Mapping[str, Callable[..., Any]], **options: Any):
        # Not optimised: constants would be folded when the template is compiled, outside of any meter.
        super().__init__(optimized=False, finalize=_to_text, **options)
        known = {name: one for name, one in self.filters.items() if name not in _FORBIDDEN_FILTERS} | filters
        self.filters = {name: _metered(name, one) for name, one in known.items()}
        for name in ("lipsum", "cycler"):
            del self.globals[name]

    def check_time(self) -> None:
        """Raises TokenizerError when time is up."""
        _meter().check_time()

    def charge(self, value: Any) -> Any:
        """Returns a new value, or raises TokenizerError where it is too large."""
        meter = _meter()
        if isinstance(value, (str, bytes)):
            meter.charge(len(value))
        elif _children(value) is not None:
            meter.charge(meter.measure(value))
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the parts of a text."""
        meter, listed, size = _meter(), [], 0
        for part in parts:
            size = meter.check_size(size + len(part))
            listed.append(part)
        return self.charge("".join(listed))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Numbers and bytes have no attributes here, and some methods are not there."""
        if isinstance(obj, (int, float, complex, bytes)) or attr in _FORBIDDEN_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method, a macro or a function."""
        method = getattr(called, "__wrapped__", called)  # of str.format, which Jinja wraps
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        _check_growth(name, owner, args, kwargs)
        return self.charge(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes what a binary operator says."""
        meter = _meter()
        meter.check_time()
        if isinstance(left, int) and isinstance(right, int):
            _check_integers(operator, left, right)
        elif operator == "*":
            times = next((one for one in (left, right) if isinstance(one, int)), 1)
            repeated = [one for one in (left, right) if not isinstance(one, int)]
            meter.check_size(meter.measure(*repeated) * max(1, times))
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_growth("%", left, (right,), {})
        elif operator == "+":
            meter.measure(left, right)
        return self.charge(super().call_binop(context, operator, left, right))


def _check_integers(operator: str, left: int, right: int) -> None:
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(1, right)}.get(operator, 0)
    if bits > LARGEST_INTEGER:
        raise TokenizerError(f"the chat template makes an integer of more than {LARGEST_INTEGER} bits")


@jinja2.pass_context
def _to_text(context: Any, value: Any) -> str:
    """Text of a value, whose size is checked before it is written out."""
    if not isinstance(value, str):
        _meter().measure(value)
        value = str(value)
    return value


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with its time and sizes checked."""
    at = 0 if getattr(function, "jinja_pass_arg", None) is None else 1  # of the value

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        value = list(args[at]) if isinstance(args[at], Iterator) else args[at]
        _check_growth(name, value, args[at + 1 :], kwargs)
        result = function(*args[:at], value, *args[at + 1 :], **kwargs)
        meter = _meter()
        if isinstance(result, (str, bytes)) or _children(result) is not None:
            meter.charge(meter.measure(result))
        return result

    return metered


def _check_growth(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises TokenizerError when time is up, or where an operation would make too much of what it is given."""
    meter, others = _meter(), (*args, *kwargs.values())
    meter.check_time()
    size = meter.measure(value, *others)
    if name not in _GROWING:
        return
    leaves = [one for one, _ in _walk(others)]
    texts = [one for one in leaves if isinstance(one, str)]
    numbers = sum(int(abs(one)) for one in leaves if isinstance(one, (int, float)))
    if name in ("format", "format_map", "%", "strftime_now"):  # which have widths in them
        layout = str(args[0] if name == "strftime_now" else value)
        numbers += sum(int(digits) for digits in re.findall(r"[0-9]+", layout))
    meter.check_size(size + _GROWING[name](value, numbers, texts))


def _repeats(text: Any, *parts: str) -> int:
    return max((str(text).count(part) for part in parts), default=0)


def _join(value: Any, numbers: int, texts: Sequence[str]) -> int:
    """The separator is the value of the method, whose items are its arguments, and an argument of the filter."""
    if isinstance(value, str):
        return len(value) * len(texts)
    return sum(map(len, texts)) * len(value) if _children(value) is not None else 0


# What an operation adds at most to the sizes of all it is given: of its value, the numbers and the texts beside it.
_GROWING: Mapping[str, Callable[[Any, int, Sequence[str]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "round"), lambda value, numbers, texts: numbers),
    **dict.fromkeys(("batch", "slice"), lambda value, numbers, texts: _ITEM * numbers),
    **dict.fromkeys(
        ("format", "format_map", "%", "strftime_now"),
        lambda value, numbers, texts: (_repeats(value, "{", "%") + 1) * (numbers + sum(map(len, texts))),
    ),
    "expandtabs": lambda value, numbers, texts: _repeats(value, "\t") * (numbers or 8),
    "indent": lambda value, numbers, texts: (_repeats(value, "\n") + 1) * (numbers + sum(map(len, texts))),
    "join": _join,
    "replace": lambda value, numbers, texts: _repeats(value, *texts) * sum(map(len, texts)),
    "tojson": lambda value, numbers, texts: (  # an indent, so many levels deep, before each item
        sum(1 for _ in _walk((value,))) * DEEPEST_VALUE * (numbers + sum(map(len, texts)))
    ),
}
