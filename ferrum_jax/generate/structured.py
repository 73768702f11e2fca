"""Structured output: answers in the form of a JSON schema, a regular expression, a grammar, or one of given texts.

After every token, llguidance (Microsoft; Earley's algorithm over derivatives of regular expressions) computes which
tokens may follow. The sampler applies these as a mask on the device, for greedy and sampled tokens.
"""

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.contract.checks import renew_after_fork
from ferrum_jax.contract.errors import (
    InvalidParameterError,
    RequestValidationError,
    UnsupportedError,
    first_line,
    safe_repr,
)
from ferrum_jax.generate.token_bytes import GrammarVocabulary
from ferrum_jax.generate.tokenizer import Tokenizer

Mask: TypeAlias = NDArray[np.int32]  # [V / 32]: a bit for each token, the lowest first
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # a rule, which Lark begins with a colon
_LARGEST_DOUBLE = int(sys.float_info.max)
_VALUES = ("const", "enum", "default", "examples")  # keywords of a schema that hold no schemas
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # hold schemas by other names
MAX_CACHED_FORMS = 64  # of one model
_FORMS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, kw_only=True)
class Structured:
    """The form of an answer: exactly one of these. Names are those of vLLM's `StructuredOutputsParams`.

    Args:
        json: a JSON schema, as a mapping or as text. Whitespace is free, unless the schema has the key
            `"x-guidance": {"whitespace_flexible": False}`.
        json_object: True for any JSON object.
        regex: a regular expression that the whole answer matches, in Rust's syntax.
        choice: the texts that the answer may be.
        grammar: a grammar in Lark's syntax or GBNF.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self):
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidParameterError(f"structured output has {given or 'nothing'}, expected one of {_FORMS}")
        if not isinstance(self.json_object, bool):
            raise InvalidParameterError(f"json_object is {safe_repr(self.json_object)}, expected True or False")
        for name in ("regex", "grammar"):
            if not isinstance(text := getattr(self, name), str | None) or text == "":
                raise InvalidParameterError(f"{name} is {safe_repr(text)}, expected a text that is not empty")
        if self.choice is not None and not (
            isinstance(self.choice, (list, tuple))
            and self.choice
            and all(isinstance(one, str) and one for one in self.choice)
        ):
            raise InvalidParameterError(f"choice is {safe_repr(self.choice)}, expected texts, none of them empty")
        if self.json is not None and not isinstance(self.json, (str, Mapping)):
            raise InvalidParameterError(f"json is {safe_repr(self.json)}, expected a JSON schema")

    @property
    def definition(self) -> tuple[Any, str]:
        """Kind and text of the grammar, as llguidance takes them."""
        if self.json is not None:
            return "json_schema", self.json if isinstance(self.json, str) else _as_json(self.json)
        if self.json_object:
            return "json_schema", '{"type": "object"}'
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", _as_json(list(self.choice))
        assert self.grammar is not None
        return ("gbnf" if _GBNF.search(self.grammar) else "lark"), self.grammar


class AnswerForm:
    """The form of one answer and its progress: computes which tokens may come next. One thread at a time uses it."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._size = matcher, vocab_size
        self._mask: Mask | None = None

    def copy(self) -> Self:
        """Returns the same form for another answer."""
        return type(self)(self._matcher.deep_copy(), self._size)

    @property
    def is_complete(self) -> bool:
        """True once only the end may follow; never true for a form that failed."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """True if the answer may end here."""
        return self._matcher.is_accepting()

    @property
    def everything(self) -> Mask:
        """The mask of every token."""
        return np.full(-(-self._size // 32), -1, np.int32)

    @property
    def mask(self) -> Mask:
        """The tokens that may come next; raises RequestValidationError if none fits, or if the form is too complex."""
        if (mask := self._mask) is None:
            import llguidance.numpy

            table = llguidance.numpy.allocate_token_bitmask(1, self._size)
            llguidance.numpy.fill_next_token_bitmask(self._matcher, table, 0)
            if self._matcher.is_error():  # the mask is then that of an answer that has ended
                found = first_line(self._matcher.get_error())  # `stop_reason` does not say it
                raise RequestValidationError("no token of the vocabulary fits" if found == "NoExtensionBias" else found)
            self._mask = mask = table[0]
        return mask

    @property
    def forced(self) -> list[int]:
        """Tokens of the text that must come next; empty if there is a choice."""
        return self._matcher.deep_copy().compute_ff_tokens()

    def count_fitting(self, tokens: Sequence[int]) -> int:
        """Returns how many of these tokens, from the first, may follow one after the other."""
        return self._matcher.deep_copy().validate_tokens(list(tokens))

    def masks_along(self, tokens: Sequence[int]) -> list[Mask]:
        """Returns the mask now and after each of these tokens, which must fit.

        After a token that completes the form, the mask allows every token: the choice there is not used.
        """
        masks, later = [self.mask], self.copy()
        for token in tokens:
            later.take(token)
            masks.append(later.everything if later.is_complete else later.mask)
        return masks

    def take(self, token: int) -> None:
        """Takes the answer's next token.

        Raises:
            RequestValidationError: the token does not fit, because a bias or `allowed_token_ids` excluded all that do,
                or the form is too complex.
        """
        self._mask = None
        if not self._matcher.consume_token(token):
            raise RequestValidationError(
                f"the token {token} does not fit the form of the answer: {first_line(self._matcher.get_error())}"
            )


class FormCompiler:
    """Compiles the forms of one vocabulary; any thread may use it."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int):
        self._tokenizer, self._size = tokenizer, vocab_size
        self._lock = threading.Lock()
        renew_after_fork(self, "_lock", threading.Lock)
        self._vocabulary: Any = None
        self._forms: OrderedDict[tuple[Any, str], AnswerForm] = OrderedDict()  # by definition, last used last

    def compile(self, structured: Structured) -> AnswerForm:
        """Returns the form of an answer that has no token yet; the last forms are kept, as many requests share one.

        Raises:
            UnsupportedError: there is no tokenizer, its kind is not supported, or llguidance is not installed.
            RequestValidationError: the schema, expression or grammar is malformed or too complex.
        """
        if self._tokenizer is None:
            raise UnsupportedError("structured output needs a tokenizer, and this LLM has none")
        try:
            import llguidance  # an extra
        except ImportError as problem:
            raise UnsupportedError(
                "structured output needs the package llguidance, the extra `structured`"
            ) from problem
        kind, text = definition = structured.definition
        with self._lock:
            if (kept := self._forms.get(definition)) is not None:
                self._forms.move_to_end(definition)
                return kept.copy()
        if kind == "json_schema":
            _check_text(text)
        with self._lock:
            if self._vocabulary is None:
                vocabulary = GrammarVocabulary(self._tokenizer, self._size)
                ends = [token for token in self._tokenizer.eos_token_ids if token < self._size]
                if not ends:  # llguidance would take token 0 for the end
                    raise UnsupportedError("structured output needs a token that ends answers, the tokenizer has none")
                self._vocabulary = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(vocabulary), n_vocab=self._size, eos_token=ends
                )
        try:
            matcher = llguidance.LLMatcher(self._vocabulary, llguidance.grammar_from(kind, text), log_level=0)
        except ValueError as problem:
            raise RequestValidationError(f"this {kind} cannot be read: {problem}") from None
        if matcher.is_error():
            lines = matcher.get_error().splitlines()
            reasons = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
            raise RequestValidationError(f"this {kind} cannot be followed: {' '.join([*lines[:1], *reasons])}")
        form = AnswerForm(matcher, self._size)
        with self._lock:
            self._forms[definition] = form.copy()
            if len(self._forms) > MAX_CACHED_FORMS:
                self._forms.popitem(last=False)
        return form


def _check_text(text: str) -> None:
    """Checks what llguidance would follow otherwise; it reports a text that is not JSON itself."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return
    check_schema(schema)


def check_schema(schema: Any) -> None:
    """Raises RequestValidationError for a JSON schema that llguidance would follow otherwise than it is meant.

    An `$id` below the root is the base of the references inside it, but llguidance resolves every reference from the
    root. It reads integers as float64, so that those of `const` and `enum` come out rounded. It rounds bounds, too, but
    int64's largest is one of them, so these are not refused.
    """
    inner, has_references = "", False
    waiting = [(schema, True)]
    while waiting:
        value, is_root = waiting.pop()
        if isinstance(value, dict):
            for name, inside in value.items():
                if name in ("$id", "id") and isinstance(inside, str) and not is_root:
                    inner = inside
                has_references = has_references or (name == "$ref" and isinstance(inside, str))
                if name in ("const", "enum") and (rounded := _first_rounded(inside)) is not None:
                    raise RequestValidationError(
                        f"this json_schema cannot be followed: {name} has {str(rounded)[:24]}, which float64 does not "
                        "hold: write it as a text"
                    )
                if name in _MAPS and isinstance(inside, dict):  # its keys are no keywords
                    waiting += [(one, False) for one in inside.values()]
                elif name not in _VALUES:
                    waiting.append((inside, False))
        elif isinstance(value, list):
            waiting += [(one, False) for one in value]
    if inner and has_references:
        raise RequestValidationError(
            f"this json_schema cannot be followed: $ref and, inside of it, an $id ({safe_repr(inner)}) are not "
            "supported together"
        )


def _first_rounded(value: Any) -> int | None:
    """Returns the first integer in a JSON value that float64 does not hold."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int) and (abs(one) > _LARGEST_DOUBLE or int(float(one)) != one):
            return one
    return None


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, default=_plain)
    except (RecursionError, TypeError, ValueError) as problem:
        raise InvalidParameterError(f"structured output is not JSON: {problem}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")
