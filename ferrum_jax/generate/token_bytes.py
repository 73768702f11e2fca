"""The bytes of single tokens, which may be parts of characters."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from ferrum_jax.contract.errors import UnsupportedError
from ferrum_jax.generate.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # as SentencePiece writes it


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's letters for bytes: printable bytes are their own letter, the others have letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


class TokenBytes:
    """How a tokenizer spells its tokens; without a tokenizer they have no bytes."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Reads from the tokenizer's decoder how it spells bytes and spaces."""
        self._tokenizer = tokenizer
        self.added: Mapping[int, tokenizers.AddedToken] = {} if tokenizer is None else tokenizer.added
        parts = {} if tokenizer is None else json.loads(tokenizer.backend.to_str())
        decoder = json.dumps(parts.get("decoder"), ensure_ascii=False)
        self._letters = _byte_of_letter() if '"ByteLevel"' in decoder else {}
        self._has_marks = _SPACE in decoder or '"Metaspace"' in decoder
        self.can_spell_all = bool(self._letters) or '"ByteFallback"' in decoder

    @functools.cached_property
    def longest(self) -> int:
        """Characters of the longest token, as the vocabulary spells it."""
        return 1 if self._tokenizer is None else max(map(len, self._tokenizer.backend.get_vocab()), default=1)

    def of(self, token_id: int) -> bytes:
        """Returns the bytes of a token, perhaps parts of characters; empty for an id beyond the vocabulary."""
        if self._tokenizer is None:
            return b""
        if token_id in self.added:
            return self.added[token_id].content.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        if self._letters and all(letter in self._letters for letter in token):
            return bytes(self._letters[letter] for letter in token)
        if self._has_marks:
            return token.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def text_of(self, token_id: int, *, by_id: bool | None = False) -> str:
        """Returns the text of a token, with U+FFFD for incomplete characters; with `by_id`, `token_id:` and the id."""
        return f"token_id:{token_id}" if by_id else self.of(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special, so that it is not part of the text."""
        return token_id in self.added and self.added[token_id].special


class GrammarVocabulary:
    """A vocabulary of `size` tokens, with the interface that llguidance needs.

    Given the tokenizer itself, llguidance would treat every added token in angle brackets as special, even text of the
    model such as Qwen's `<tool_call>`, and the spelled-out text of a special token as that token.

    Raises:
        UnsupportedError: the tokens do not spell every byte.
    """

    def __init__(self, tokenizer: Tokenizer, size: int):
        spelling = TokenBytes(tokenizer)
        if not spelling.can_spell_all:
            raise UnsupportedError(
                "structured output with this tokenizer: its decoder has neither ByteLevel nor ByteFallback"
            )
        self.tokens = [spelling.of(at) for at in range(size)]
        self.special_token_ids = [at for at in spelling.added if at < size and spelling.is_special(at)]
        ends = [token for token in tokenizer.eos_token_ids if token < size]
        self.eos_token_id, self.bos_token_id = next(iter(ends), 0), None
        parts = json.loads(tokenizer.backend.to_str())
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(_without_prefix(parts)))
        self._plain.encode_special_tokens = True
        special = set(self.special_token_ids)
        self._ids = {spelled: at for at, spelled in enumerate(self.tokens) if spelled and at not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Returns ids whose bytes are those of a text, as far as the vocabulary can spell it."""
        try:
            found = self._plain.encode(text.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            found = []
        if all(at < len(self.tokens) for at in found) and b"".join(self.tokens[at] for at in found) == text:
            return found
        found, start = [], 0
        while start < len(text):  # greedily take the longest token that fits
            size = next((n for n in range(self._longest, 0, -1) if text[start : start + n] in self._ids), 0)
            if not size:
                return found
            found.append(self._ids[text[start : start + size]])
            start += len(text[start : start + size])
        return found


def _without_prefix(parts: Any) -> Any:
    """Returns a tokenizer's JSON without the parts that put a space before a text."""
    if isinstance(parts, list):
        return [_without_prefix(one) for one in parts if not (isinstance(one, dict) and one.get("type") == "Prepend")]
    if not isinstance(parts, dict):
        return parts
    large = ("vocab", "merges", "added_tokens")
    found = {name: one if name in large else _without_prefix(one) for name, one in parts.items()}
    if parts.get("type") == "Metaspace" and "prepend_scheme" in parts:
        found["prepend_scheme"] = "never"
    if isinstance(found.get("normalizer"), dict) and found["normalizer"].get("type") == "Prepend":
        found["normalizer"] = None
    return found
