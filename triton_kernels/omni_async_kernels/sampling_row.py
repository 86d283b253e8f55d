"""A row's logits with all that changes them, as the later passes read them, and over temperature."""

import triton
import triton.language as tl

from omni_async_kernels.philox import gumbel_at
from omni_async_kernels.sampling_tables import changes_tokens


@triton.jit
def row_line(logits_ptr, logits_stride, adjusted_ptr, changed_ptr, tables, slot, row, vocab_size, num_words):
    """Where a row lies: its logits, new values and their bits, bits of allowed tokens; whether to look at these."""
    return (
        logits_ptr + row * logits_stride,
        adjusted_ptr + row * vocab_size,
        changed_ptr + row * num_words,
        tables.allowed + slot * tables.allowed_stride,
        changes_tokens(tables, slot),
        tl.load(tables.restricted + slot * tables.stride) != 0,
    )


@triton.jit
def is_different(line):
    """Whether a row's parameters change any of its logits."""
    return line[4] | line[5]


@triton.jit
def change(x, line, column, mask):
    """The logits `x` of some columns as the row's parameters change them; unchanged where `mask` is false."""
    _, adjusted, changed, allowed, is_changed, is_restricted = line
    new = _bit(changed, column, mask & is_changed, 0)
    x = tl.where(new, tl.load(adjusted + column, mask=new, other=0.0), x)
    return tl.where(_bit(allowed, column, mask & is_restricted, -1), x, float("-inf"))


@triton.jit
def _bit(words_ptr, column, mask, other: tl.constexpr):
    words = tl.load(words_ptr + column // 32, mask=mask, other=other)
    return ((words >> (column % 32)) & 1) != 0


@triton.jit
def load_row(line, column, mask):
    """The changed logits of some columns, f32; -inf where `mask` is false."""
    x = tl.load(line[0] + column, mask=mask, other=float("-inf")).to(tl.float32)
    if is_different(line):
        x = change(x, line, column, mask)
    return x


@triton.jit
def scaled(x, best, temperature):
    """The best comes to lie at 0, so that a small temperature never makes an infinity of it."""
    return tl.div_rn(x - best, temperature)


@triton.jit
def load_winners(winners_ptr, mask, line, best, temperature, key, TILES: tl.constexpr):
    """Of the Gumbel winners of a row's tiles: ids, logits over temperature, and these with noise; each `[TILES]`.

    Where `mask` is false, the latter two are -inf.
    """
    ids = tl.load(winners_ptr + tl.arange(0, TILES), mask=mask, other=0)
    s = scaled(load_row(line, ids, mask), best, temperature)
    return ids, s, s + gumbel_at(ids, key)


@triton.jit
def first_best(scores, ids):
    """The lowest id among the best scores."""
    return tl.min(tl.where(scores == tl.max(scores, 0), ids, 2147483647), 0)
