"""Digests by which equal prefixes are recognised."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

ROOT = b"omni_async.prefix"


def block_digest(parent: bytes, tokens: "array[int]") -> bytes:
    """The digest of one full block of token ids, chained to that of the block before it (`ROOT` for the first)."""
    return blake2b(tokens.tobytes(), key=parent, digest_size=16).digest()


def block_digests(tokens: Iterable[int], block_size: int) -> list[bytes]:
    """The chained digests of all full blocks of `tokens`."""
    ids = array("i", tokens)
    digests: list[bytes] = []
    parent = ROOT
    for end in range(block_size, len(ids) + 1, block_size):
        parent = block_digest(parent, ids[end - block_size : end])
        digests.append(parent)
    return digests
