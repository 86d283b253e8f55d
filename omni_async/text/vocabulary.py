"""What the token ids of a tokenizer stand for."""

import json
from collections.abc import Mapping
from functools import partial

from tokenizers import Tokenizer, decoders

from omni_async.text.detokenizer import (
    REPLACEMENT,
    ByteLevelDetokenizer,
    Detokenizer,
    WholeDetokenizer,
    WindowDetokenizer,
)

TOKEN_WISE = frozenset({"Replace", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "CTC", "Strip"})
"""Decoders that look at tokens and at most their neighbours."""
FUSING = frozenset({"Fuse", "ByteLevel"})
"""Decoders after which there is one piece of text and no tokens."""
CHARACTER_WISE = frozenset({"Fuse", "Metaspace", "Strip"})
"""Decoders that change a fused text at its ends or character by character."""


class Vocabulary:
    """The tokens of a tokenizer, which must not change any more. Its methods may run on any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._chain = _decoder_chain(tokenizer.decoder)
        self._kinds = [str(step["type"]) for step in self._chain]
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        self._plain = None if self._kinds == ["ByteLevel"] else self._find_plain()

    @property
    def size(self) -> int:
        """The number of tokens, added ones included."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for after another one; none for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a mark, not text."""
        return self._tokenizer.id_to_token(token_id) in self._special

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for one answer: equal to `Tokenizer.decode` with the same argument."""
        if self._kinds == ["ByteLevel"]:
            source = self._text_bytes if skip_special_tokens else self.token_bytes
            return ByteLevelDetokenizer(source, self._texts[skip_special_tokens])
        decode = partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens)
        if self._plain is None or not _is_local(self._chain):
            return WholeDetokenizer(decode)
        probes = [self._plain]
        if "ByteFallback" in self._kinds:
            # A byte that no UTF-8 text holds spoils the whole run of byte tokens that it ends.
            high = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(0xFF, 0x7F, -1))
            probes += [token for token in high if token is not None][:1]
        return WindowDetokenizer(decode, tuple(probes))

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if self.is_special(token_id) else self.token_bytes(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._kinds:
            return from_byte_level(token)
        if "ByteFallback" in self._kinds and token.startswith("<0x") and token.endswith(">") and len(token) == 6:
            return bytes.fromhex(token[3:5])
        before = [] if self._plain is None else [self._plain]
        text: str = self._tokenizer.decode([*before, token_id], skip_special_tokens=False)
        return text[len(self._tokenizer.decode(before)) :].encode()

    def _find_plain(self) -> int | None:
        """A token that is plain text wherever it stands, a letter if there is one."""
        visible: int | None = None
        for token_id in range(self.size):
            if self.is_special(token_id):
                continue
            text: str = self._tokenizer.decode([token_id])
            if text.isascii() and text.isalpha():
                return token_id
            if visible is None and text.strip() and REPLACEMENT not in text:
                visible = token_id
        return visible


def from_byte_level(token: str) -> bytes:
    """The bytes of a token in the alphabet of byte-level tokenizers; other text stands for itself."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """One printable character for each byte.

    Source: `bytes_to_unicode` of https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _decoder_chain(decoder: decoders.Decoder | None) -> list[Mapping[str, object]]:
    """The decoder's steps as `tokenizer.json` describes them."""
    if decoder is None:
        return []
    return _flatten(json.loads(decoder.__getstate__()))


def _flatten(step: Mapping[str, object]) -> list[Mapping[str, object]]:
    inner = step.get("decoders")
    if not isinstance(inner, list):
        return [step]
    return [flat for each in inner for flat in _flatten(each)]


def _is_local(chain: list[Mapping[str, object]]) -> bool:
    """Whether a token's text depends on its neighbours only."""
    fused = False
    for step in chain:
        kind = step["type"]
        if fused and not (kind in CHARACTER_WISE or _replaces_one_character(step)):
            return False
        if kind not in TOKEN_WISE | FUSING or step.get("stop"):  # the library's strip from the end fails on short texts
            return False
        fused = fused or kind in FUSING
    return True


def _replaces_one_character(step: Mapping[str, object]) -> bool:
    pattern = step.get("pattern")
    return isinstance(pattern, Mapping) and len(str(pattern.get("String", ""))) == 1
