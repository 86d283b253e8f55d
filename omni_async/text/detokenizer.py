"""Text from token ids, one at a time.

Whatever the ids, the joined results of `push` and a last `flush` are what one decode of all ids gives. The ids of a
prompt are never pushed: an answer is decoded by itself, even if the prompt ends inside a character.
"""

from codecs import utf_8_decode
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\ufffd"
"""Stands for bytes that are no character, or not yet one."""


class Detokenizer(Protocol):
    """Decodes one answer."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty if it completes none."""
        ...

    def flush(self) -> str:
        """The end of the answer: what its incomplete rest becomes."""
        ...


class ByteLevelDetokenizer:
    """For vocabularies whose tokens are byte strings, and whose text is their concatenation as UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes], texts: dict[int, str]) -> None:
        self._token_bytes = token_bytes
        self._texts = texts
        """The text of tokens that begin and end at characters, found so far; shared by all answers."""
        self._pending = b""

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        if not self._pending:
            known = self._texts.get(token_id)
            if known is not None:
                return known
        data = self._pending + self._token_bytes(token_id)
        text, used = utf_8_decode(data, "replace", False)
        if used == len(data):
            if not self._pending:
                self._texts[token_id] = text
            self._pending = b""
        else:
            self._pending = data[used:]
        return text

    def flush(self) -> str:
        """See `Detokenizer`."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class WindowDetokenizer:
    """For decoders in which a token's text depends on its neighbours only.

    It decodes a window of the last tokens as a whole, and gives out what none of the `probes` changes when it comes
    next: tokens that stand for all kinds of continuations. When nothing is open, the last token alone is enough of a
    window for the next one.
    """

    def __init__(self, decode: Callable[[list[int]], str], probes: tuple[int, ...]) -> None:
        self._decode = decode
        self._probes = probes
        self._window: list[int] = []
        self._shown = 0
        """Characters of the window's text that have been given out, or belong to tokens before it."""

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        # A replacement character at the end may yet become another one.
        settled = len(text.rstrip(REPLACEMENT))
        for probe in self._probes:
            settled = _common_prefix(text, self._decode([*window, probe]), settled)
        gained = text[self._shown : settled]
        self._shown = max(self._shown, settled)
        if settled == len(text) and len(window) > 1:
            alone = self._decode([token_id])
            if alone:  # else what a decoder strips at the start would be stripped from the next token
                self._window = [token_id]
                self._shown = len(alone)
        return gained

    def flush(self) -> str:
        """See `Detokenizer`."""
        text = self._decode(self._window)[self._shown :]
        self._window = []
        self._shown = 0
        return text


class WholeDetokenizer:
    """For decoders of which too little is known: all text comes at the end."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        self._ids.append(token_id)
        return ""

    def flush(self) -> str:
        """See `Detokenizer`."""
        text = self._decode(self._ids)
        self._ids = []
        return text


def _common_prefix(text: str, other: str, limit: int) -> int:
    """How many characters two texts share at the start, up to a limit."""
    if other.startswith(text[:limit]):
        return limit
    return next(i for i, (a, b) in enumerate(zip(text, other + "\0", strict=False)) if a != b)
