"""The text of one answer as it may be shown: held back where a stop string may have begun, cut where one ends."""

from omni_async.text.detokenizer import Detokenizer


class TextStream:
    """Text that is ready to be given out, token by token.

    The joined results of `push` and `finish` are the answer's text up to its first stop string (the one that ends
    first; among those, the one that begins first). A stop string is heeded only if its end lies in text that a token
    after the first `min_tokens` completed.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: tuple[str, ...] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._detokenizer = detokenizer
        self._searches = [StopSearch(stop) for stop in stops]
        self._include_stop = include_stop
        self._tokens_left = min_tokens
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take in a token; returns the text that is now certain to be shown. Nothing more comes after a match."""
        if self.matched is not None:
            return ""
        text = self._detokenizer.push(token_id)
        heeded = self._tokens_left <= 0
        self._tokens_left -= 1
        if not self._searches:
            return text
        return self._release(text, heeded) if text else ""

    def finish(self) -> str:
        """The answer ends here for another reason: returns all text that is left; a stop string in it still cuts."""
        if self.matched is not None:
            return ""
        shown = self._release(self._detokenizer.flush(), self._tokens_left < 0)
        if self.matched is None:
            shown += self._held
        self._held = ""
        return shown

    def _release(self, text: str, heeded: bool) -> str:
        """Look for stop strings in new text and split off what none of them can begin in."""
        whole = self._held + text
        ends: list[tuple[int, int, str]] = []
        possible = 0
        for search in self._searches:
            end = search.advance(text, heeded)
            if end is not None:
                ends.append((end, -len(search.stop), search.stop))
            elif search.length > possible:
                possible = search.length
        if ends:
            end, _, self.matched = min(ends)
            end += len(self._held)
            self._held = ""
            return whole[: end if self._include_stop else end - len(self.matched)]
        cut = len(whole) - possible
        self._held = whole[cut:]
        return whole[:cut]


class StopSearch:
    """Finds one stop string in text that comes in pieces, looking at each character about once.

    Source: Knuth, Morris, Pratt: Fast Pattern Matching in Strings. SIAM J. Comput. 6 (1977). The table of borders is
    made only as far as the text has matched.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """The text so far ends with this many of the stop string's first characters, and no more."""
        self._borders = [0]
        """By prefix length - 1: the longest shorter prefix that also ends it."""

    def advance(self, text: str, heeded: bool) -> int | None:
        """Read on; returns where in `text` the stop string first ends, if that is to be heeded."""
        stop, length = self.stop, self.length
        at = 0
        while at < len(text):
            if length == 0:  # the usual case, left to the interpreter's own search
                at = text.find(stop[0], at)
                if at < 0:
                    break
            char = text[at]
            while length and stop[length] != char:
                length = self._border(length)
            if stop[length] == char:
                length += 1
            at += 1
            if length == len(stop):
                if heeded:
                    return at
                length = self._border(length)
        self.length = length
        return None

    def _border(self, length: int) -> int:
        """The border of the stop string's first `length` characters."""
        stop, borders = self.stop, self._borders
        while len(borders) < length:
            char, border = stop[len(borders)], borders[-1]
            while border and stop[border] != char:
                border = borders[border - 1]
            borders.append(border + 1 if stop[border] == char else 0)
        return borders[length - 1]
