"""Changes the logits of single tokens before the draw: bias, then penalties on the tokens of a row's history.

Few tokens of a row change, so only their new values are written; a bit mask tells readers where they are.
"""

import triton
import triton.language as tl

from omni_async_kernels.sampling_tables import changes_tokens

BLOCK = tl.constexpr(2048)
"""Tokens of a history that are looked at together."""

ENTRIES = tl.constexpr(256)
"""Biases that are looked at together."""


@triton.jit
def adjust_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    lengths_ptr,
    tokens_ptr,
    tokens_stride,
    tables,
    vocab_size,
    num_words,
    adjusted_ptr,
    changed_ptr,
    counts_ptr,
):
    """One row: new logits in `adjusted [S, V] f32` and their bits in `changed [S, num_words] int32`.

    `counts [S, V] int32` is scratch of which only the places of the row's tokens are used.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    if not changes_tokens(tables, slot):
        return
    at = slot * tables.stride
    logits = logits_ptr + row * logits_stride
    adjusted = adjusted_ptr + row * vocab_size
    changed = changed_ptr + row * num_words
    counts = counts_ptr + row * vocab_size
    for first in range(0, num_words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        tl.store(changed + word, 0, mask=word < num_words)
    tl.debug_barrier()
    length = tl.load(lengths_ptr + row).to(tl.int32)
    prompt_len = tl.load(tables.prompt_len + at)
    num_bias = tl.load(tables.num_bias + at)
    if num_bias > 0:
        _add_bias(logits, tables, slot * tables.bias_stride, num_bias, length - prompt_len, adjusted, changed)
        tl.debug_barrier()
    repetition = tl.load(tables.repetition_penalty + at)
    presence = tl.load(tables.presence_penalty + at)
    frequency = tl.load(tables.frequency_penalty + at)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        tokens = tokens_ptr + slot * tokens_stride
        first = tl.where(repetition == 1.0, prompt_len, 0)
        for start in range(first, length, BLOCK):
            token, valid = _tokens(tokens, start, length, vocab_size)
            tl.store(counts + token, 0, mask=valid)
        tl.debug_barrier()
        for start in range(prompt_len, length, BLOCK):
            token, valid = _tokens(tokens, start, length, vocab_size)
            tl.atomic_add(counts + token, 1, mask=valid, sem="relaxed")
        tl.debug_barrier()
        for start in range(first, length, BLOCK):
            token, valid = _tokens(tokens, start, length, vocab_size)
            # Whoever takes a token's count changes its logit; the token's other places find -1.
            count = tl.atomic_xchg(counts + token, -1, mask=valid, sem="relaxed")
            taken = valid & (count >= 0)
            biased = taken & (num_bias > 0)
            bits = tl.load(changed + token // 32, mask=biased, other=0, cache_modifier=".cg")
            biased = ((bits >> (token % 32)) & 1) != 0
            x = tl.load(logits + token, mask=taken, other=0.0).to(tl.float32)
            x = tl.where(biased, tl.load(adjusted + token, mask=biased, other=0.0, cache_modifier=".cg"), x)
            x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where(count > 0, x - presence, x)
            x = x - frequency * count.to(tl.float32)
            tl.store(adjusted + token, x, mask=taken)
            tl.atomic_or(changed + token // 32, 1 << (token % 32), mask=taken, sem="relaxed")


@triton.jit
def _tokens(tokens_ptr, start, length, vocab_size):
    """A block of a history, and which of it are tokens."""
    place = start + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + place, mask=place < length, other=-1)
    return token, (token >= 0) & (token < vocab_size)


@triton.jit
def _add_bias(logits_ptr, tables, line, num_bias, output_index, adjusted_ptr, changed_ptr):
    for first in range(0, num_bias, ENTRIES):
        entry = line + first + tl.arange(0, ENTRIES)
        valid = first + tl.arange(0, ENTRIES) < num_bias
        token = tl.load(tables.bias_ids + entry, mask=valid, other=0)
        x = tl.load(logits_ptr + token, mask=valid, other=0.0).to(tl.float32)
        # An id may occur again: each entry adds up all values of its id, in the order of the list.
        for other in range(num_bias):
            same = token == tl.load(tables.bias_ids + line + other)
            holds = output_index < tl.load(tables.bias_until + line + other)
            x = tl.where(same & holds, x + tl.load(tables.bias_values + line + other), x)
        tl.store(adjusted_ptr + token, x, mask=valid)
        tl.atomic_or(changed_ptr + token // 32, 1 << (token % 32), mask=valid, sem="relaxed")
