"""The largest numbers of a long row, found through the largest of each of its spans."""

import triton
import triton.language as tl

from omni_async_kernels.sampling_row import load_row, scaled

CAPACITY = tl.constexpr(1024)
"""Candidates that are sorted at most."""

LEAST = tl.constexpr(-(2**63))
"""Less than all packed numbers."""

BLOCK = tl.constexpr(4096)
"""Numbers of several spans that are read together."""


@triton.jit
def to_key(x):
    """An int32 in the order of the floats; the two zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_key(key):
    """The float of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def pack(x, ids):
    """An int64 in the order of the floats; among equals the lowest id is largest."""
    return (to_key(x).to(tl.int64) << 32) | (2147483647 - ids).to(tl.int64)


@triton.jit
def unpack(packed):
    """The floats and the ids."""
    return from_key((packed >> 32).to(tl.int32)), 2147483647 - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def collect(
    line,
    best,
    temperature,
    wanted,
    size,
    peaks_ptr,
    num_spans,
    list_ptr,
    found_ptr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Write, packed and in no order of size, all of a row's numbers from some bound on, at least `wanted` of them.

    `peaks_ptr` points to the largest of each span of the unscaled row, `list_ptr` to scratch of `num_spans` int32,
    `found_ptr` to `CAPACITY` int64. Returns how many there are; above `CAPACITY`, not all of them are written.
    """
    ROWS: tl.constexpr = BLOCK // SPAN
    span = tl.arange(0, SPANS)
    inside = span < num_spans
    peaks = to_key(scaled(tl.load(peaks_ptr + span, mask=inside, other=float("-inf")), best, temperature))
    # If enough spans reach a bound, enough numbers do. Such a bound is lifted until not many more reach it.
    bound = tl.where(num_spans < wanted, -2147483648, tl.min(tl.where(inside, peaks, 2147483647), 0))
    reaching = num_spans
    above = tl.max(peaks, 0) + 1
    while (reaching > wanted + wanted // 8 + 4) & (bound + 1 < above):
        middle = (bound >> 1) + (above >> 1) + (bound & above & 1)
        count = tl.sum((inside & (peaks >= middle)).to(tl.int32), 0)
        if count >= wanted:
            bound = middle
            reaching = count
        else:
            above = middle
    chosen = (inside & (peaks >= bound)).to(tl.int32)
    tl.store(list_ptr + tl.cumsum(chosen, 0) - chosen, span, mask=chosen != 0)
    num_chosen = tl.sum(chosen, 0)
    tl.debug_barrier()
    num_found = 0
    first = 0
    while (first < num_chosen) & (num_found <= CAPACITY):
        at = first + tl.arange(0, ROWS)
        spans = tl.load(list_ptr + at, mask=at < num_chosen, other=0)
        column = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        valid = (at < num_chosen)[:, None] & (column < size)
        s = scaled(load_row(line, column, valid), best, temperature)
        hit = tl.reshape((valid & (to_key(s) >= bound)).to(tl.int32), [BLOCK])
        place = num_found + tl.cumsum(hit, 0) - hit
        packed = tl.reshape(pack(s, column), [BLOCK])
        tl.store(found_ptr + place, packed, mask=(hit != 0) & (place < CAPACITY))
        num_found += tl.sum(hit, 0)
        first += ROWS
    tl.debug_barrier()
    return num_found


@triton.jit
def load_sorted(found_ptr, num_found, SIZE: tl.constexpr):
    """The packed numbers `[SIZE]`, largest first; places from `num_found` on hold `LEAST`."""
    at = tl.arange(0, SIZE)
    packed = tl.load(found_ptr + at, mask=at < num_found, other=LEAST)
    return tl.sort(packed, descending=True)
