"""The pool of cache blocks, and the index by which full blocks are found again."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Owns the ids `1 .. num_blocks`; block 0 is never owned, it stays zero on the device.

    A block whose last owner leaves keeps its digest and can be found again until it is handed out anew; the
    least recently freed goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._owners = [0] * (num_blocks + 1)
        self._digests: list[bytes | None] = [None] * (num_blocks + 1)
        self._by_digest: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_free(self) -> int:
        """Blocks without an owner, findable or not."""
        return len(self._free)

    @property
    def num_findable(self) -> int:
        """Blocks that the prefix index knows."""
        return len(self._by_digest)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has seen that `count <= num_free`."""
        taken: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._owners[block] = 1
            taken.append(block)
        self.unregister(taken)
        return taken

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix; they are not owned until `share`."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Become one more owner of found blocks."""
        for block in blocks:
            if self._owners[block] == 0:
                del self._free[block]
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Stop owning `blocks`, given in order of position; the ends of prefixes are handed out before their starts."""
        for block in reversed(blocks):
            owners = self._owners[block] - 1
            if owners < 0:
                raise AssertionError(f"block {block} was released more often than it was taken")
            self._owners[block] = owners
            if owners == 0:
                self._free[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Make an owned full block findable, unless an equal one is already."""
        if digest not in self._by_digest and self._digests[block] is None:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def unregister(self, blocks: Iterable[int]) -> None:
        """Let these blocks never be found again; their owners are not disturbed."""
        for block in blocks:
            digest = self._digests[block]
            if digest is not None:
                del self._by_digest[digest]
                self._digests[block] = None

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless exactly the given lists own the blocks."""
        expected = [0] * (self.num_blocks + 1)
        for blocks in owned:
            for block in blocks:
                expected[block] += 1
        if expected[0]:
            raise AssertionError("block 0 is owned")
        if expected != self._owners:
            wrong = [b for b, n in enumerate(expected) if n != self._owners[b]]
            raise AssertionError(f"blocks {wrong[:8]} have other owner counts than the sequences that name them")
        free = {block for block in range(1, self.num_blocks + 1) if not expected[block]}
        if free != set(self._free):
            raise AssertionError("the free list is not the set of blocks without owners")
        for digest, block in self._by_digest.items():
            if self._digests[block] != digest:
                raise AssertionError(f"block {block} is found by a digest that it does not carry")
