"""Stop texts in a stream: text that may be the beginning of one is held back."""

from collections.abc import Sequence


class StopWatcher:
    """Passes text on until a stop text is complete, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False):
        """Watches for `stops`; with `includes_stop`, the stop text that is found is passed on, too."""
        self._stops = tuple(dict.fromkeys(stops))
        self._includes_stop = includes_stop
        self._held = ""
        self._num_exempt = 0  # characters at the front of `_held` in which no stop text may end
        self.found = ""  # the stop text that ended the text, once there is one

    def push(self, piece: str, *, is_exempt: bool = False) -> str:
        """Takes the next piece and returns the text that is certainly not part of a stop text.

        A stop text may begin in an exempt piece, but does not end in it.
        """
        if not self._stops:
            return piece
        if self.found or not piece:
            return ""
        self._held += piece
        if is_exempt:
            self._num_exempt = len(self._held)
        hits = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))) >= 0
        ]
        if hits:
            end, at, self.found = min(hits)  # the one that ends first, as if the text had come character by character
            out, self._held = self._held[: end if self._includes_stop else at], ""
            return out
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        self._num_exempt = max(0, self._num_exempt - cut)
        return out

    def flush(self) -> str:
        """Returns the text that was held back; to be called at the end of the text."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
