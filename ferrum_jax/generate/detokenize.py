"""Text from ids that arrive one at a time.

`tokenizers.decoders.DecodeStream` does nearly this, but it raises "Invalid prefix" when byte tokens are not UTF-8, and
it cannot be flushed.
"""

import re
from collections.abc import Sequence

from ferrum_jax.generate.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_WINDOW_LIMIT = 64  # tokens
_RESYNC_TOKENS = 8  # UTF-8 decoding no longer depends on its start after three bytes, so after three tokens


class Detokenizer:
    """Turns one sequence's ids into text, piece by piece.

    All pieces, the flushed one included, concatenate to the text after the prompt's in `tokenizer.decode` of the prompt
    and all ids. A character that the prompt leaves incomplete is returned whole with the ids that complete it. A piece
    never ends inside a character. Each id costs the decoding of a bounded number of tokens, however long the sequence.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._special_ids = frozenset(token_id for token_id, token in tokenizer.added.items() if token.special)
        self._window = self._last_of(prompt)  # ids whose text is not yet final, after those that affect their decoding
        before = self._decode(self._window)
        self._num_emitted = len(before.rstrip(REPLACEMENT))  # characters of the window's text already returned
        self._num_settled = 0  # ids at the front of the window whose whole text is returned
        self._num_open = len(before) - self._num_emitted  # characters of the prompt that may still be completed

    def push(self, token_id: int) -> str:
        """Takes the next id and returns the text that is now final, which may be empty.

        Byte tokens (`<0x0A>`) are held back until another token follows: a later byte may turn the whole run into
        U+FFFD.
        """
        token = self._visible(token_id)
        if token is None:
            if self._begins_run(token_id, self._window):
                self._window.append(token_id)
            return ""
        self._window.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            # Only the last character can still change: it may be the first bytes of a longer one.
            piece = text[self._num_emitted : -1]
            self._num_emitted = max(self._num_emitted, len(text) - 1)
            if len(self._window) > _WINDOW_LIMIT:
                self._cut(_RESYNC_TOKENS)
            return self._without_open(piece)
        piece = text[self._num_emitted :]
        if piece:
            self._cut(len(self._window) - self._num_settled)
            self._num_settled = len(self._window)
        return self._without_open(piece)

    @property
    def held(self) -> str:
        """The text so far that is not returned yet; a later id may still change it."""
        piece = self._decode(self._window)[self._num_emitted :]
        return piece[min(self._num_open, len(piece) - len(piece.lstrip(REPLACEMENT))) :]

    def flush(self) -> str:
        """Returns the text still held back, and resets the detokenizer."""
        piece = self.held
        self._window, self._num_emitted, self._num_settled, self._num_open = [], 0, 0, 0
        return piece

    def _visible(self, token_id: int) -> str | None:
        """Returns the vocabulary's spelling of a token; None if it has no text."""
        is_skipped = self._skip_special_tokens and token_id in self._special_ids
        return None if is_skipped else self._tokenizer.id_to_token(token_id)

    def _last_of(self, prompt: Sequence[int]) -> list[int]:
        """Returns the last ids of a prompt that have text; ids after them decode as after the whole prompt.

        The first of them is not a byte token.
        """
        last: list[int] = []
        for token_id in reversed(prompt):
            token = self._visible(token_id)
            if token is not None:
                last.append(token_id)
                if len(last) >= _RESYNC_TOKENS and not _BYTE_TOKEN.fullmatch(token):
                    break
            elif self._begins_run(token_id, last):
                last.append(token_id)
        return last[::-1]

    def _begins_run(self, token_id: int, beside: list[int]) -> bool:
        """Whether a token without text changes the text of the next one, and no such token is beside it already."""
        is_special = self._tokenizer.prefixes_runs and token_id in self._special_ids
        return is_special and not (beside and beside[-1] in self._special_ids)

    def _without_open(self, piece: str) -> str:
        """Drops the replacement characters of the prompt's characters that no later id has completed."""
        while self._num_open and piece.startswith(REPLACEMENT):
            piece, self._num_open = piece[1:], self._num_open - 1
        if piece:
            self._num_open = 0
        return piece

    def _cut(self, num_kept: int) -> None:
        """Drops all but the last `num_kept` ids of the window; later ids decode after these as after all of them."""
        self._window = self._window[-num_kept:]
        text = self._decode(self._window)
        self._num_emitted = len(text) - text.endswith(REPLACEMENT)
        self._num_settled = 0

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
