"""How rows of logits are cut: into tiles, one program each, and tiles into spans."""

from dataclasses import dataclass

import triton

LARGE_TILE, SMALL_TILE = 4096, 1024
ENOUGH_PROGRAMS = 512
"""So many large tiles keep the device busy; with fewer, small ones are quicker."""

SPANS_WANTED = 1024
"""Of a row: more than top-k usually is, so that the largest of each span tell where the best k lie."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes, all but `num_tiles` powers of 2."""

    tile: int
    span: int
    num_tiles: int
    """Of a row."""

    @classmethod
    def of(cls, num_rows: int, vocab_size: int) -> "Tiling":
        """Choose by shape."""
        busy = num_rows * triton.cdiv(vocab_size, LARGE_TILE) >= ENOUGH_PROGRAMS
        tile = LARGE_TILE if busy else SMALL_TILE
        span = min(max(triton.next_power_of_2(triton.cdiv(vocab_size, SPANS_WANTED)), 16), 128)
        return cls(tile, span, triton.cdiv(vocab_size, tile))

    @property
    def num_spans(self) -> int:
        """Of a row, those past the vocabulary's end included."""
        return self.num_tiles * (self.tile // self.span)

    @property
    def num_warps(self) -> int:
        """Of a program that works on one tile: 16 or 8 logits a thread."""
        return 8 if self.tile == LARGE_TILE else 4
