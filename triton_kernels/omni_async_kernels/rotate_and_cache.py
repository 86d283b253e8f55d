"""Norm and rotation of queries and keys, and the writing of keys and values to the paged cache, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor
from omni_async_kernels.rotation import load_rotation
from omni_async_kernels.saturate import saturate

HEADS = 8
"""Heads of one program."""


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_and_cache_kernel(
    qkv_ptr,
    positions_ptr,
    axes_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    slots_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_tokens,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Elements `i` and `HALF + i` of a head are turned together; those from `2 HALF` on stay."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS

    pair = tl.arange(0, BLOCK_HALF)[None, :]
    paired = exists & (pair < HALF)

    # What no recent kernel wrote.
    slot = tl.load(slots_ptr + token, cache_modifier=".cg")
    cos, sin = load_rotation(positions_ptr, axes_ptr, cos_ptr, sin_ptr, token, pair, num_tokens, pair < HALF, HALF)
    if NORM:
        low_weight = _head_weight(query_norm_ptr, key_norm_ptr, pair, pair < HALF, is_query, is_value)
        high_weight = _head_weight(query_norm_ptr, key_norm_ptr, HALF + pair, pair < HALF, is_query, is_value)
    if BLOCK_REST:
        other = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        if NORM:
            rest_weight = _head_weight(query_norm_ptr, key_norm_ptr, other, other < HEAD_SIZE, is_query, is_value)
    wait_for_predecessor(OVERLAP)

    source = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_SIZE
    low = tl.load(qkv_ptr + source + pair, mask=paired, other=0.0)
    dtype = low.dtype
    low = low.to(tl.float32)
    high = tl.load(qkv_ptr + source + HALF + pair, mask=paired, other=0.0).to(tl.float32)
    if BLOCK_REST:
        left = exists & (other < HEAD_SIZE)
        rest = tl.load(qkv_ptr + source + other, mask=left, other=0.0).to(tl.float32)

    if NORM:
        squares = tl.sum(low * low + high * high, axis=1)
        if BLOCK_REST:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.where(is_value, 1.0, (1 / tl.sqrt(squares / HEAD_SIZE + eps))[:, None])
        # Rounded to the run dtype between norm and rotation, as the reference does.
        low = (low * scale * low_weight).to(dtype).to(tl.float32)
        high = (high * scale * high_weight).to(dtype).to(tl.float32)
        if BLOCK_REST:
            rest = rest * scale * rest_weight

    turned_low = tl.where(is_value, low, low * cos - high * sin).to(dtype)
    turned_high = tl.where(is_value, high, high * cos + low * sin).to(dtype)

    to_query = (token * NUM_HEADS + head) * HEAD_SIZE
    tl.store(q_ptr + to_query + pair, turned_low, mask=paired & is_query)
    tl.store(q_ptr + to_query + HALF + pair, turned_high, mask=paired & is_query)
    is_key = (slot >= 0) & (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (slot >= 0) & is_value
    to_key = (slot * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_SIZE
    to_value = to_key - NUM_KV_HEADS * HEAD_SIZE
    stored_low = saturate(turned_low, k_cache_ptr.dtype.element_ty)
    stored_high = saturate(turned_high, k_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + to_key + pair, stored_low, mask=paired & is_key)
    tl.store(k_cache_ptr + to_key + HALF + pair, stored_high, mask=paired & is_key)
    tl.store(v_cache_ptr + to_value + pair, stored_low, mask=paired & is_value)
    tl.store(v_cache_ptr + to_value + HALF + pair, stored_high, mask=paired & is_value)
    if BLOCK_REST:
        rest = rest.to(dtype)
        stored_rest = saturate(rest, k_cache_ptr.dtype.element_ty)
        tl.store(q_ptr + to_query + other, rest, mask=left & is_query)
        tl.store(k_cache_ptr + to_key + other, stored_rest, mask=left & is_key)
        tl.store(v_cache_ptr + to_value + other, stored_rest, mask=left & is_value)


@triton.jit
def _head_weight(query_norm_ptr, key_norm_ptr, column, inside, is_query, is_value):
    """The norm's weights of each head: of queries, of keys, and 1 for values."""
    query = tl.load(query_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(key_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, query, tl.where(is_value, 1.0, key))


def rotate_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    axes: Tensor | None = None,
) -> Tensor:
    """Split `[T, (Hq + 2 Hk) D]`, norm (if weights `[D]` are given) and rotate queries and keys, write the cache.

    `positions [T] int64`, or `[A, T]` where `axes [rotary / 2] int32` names the row that turns each pair of elements;
    `cos`, `sin [P, rotary / 2] f32`; caches `[N, B, Hk, D]` in the dtype of `qkv` or float8_e4m3fn, which saturates;
    `slot_mapping [T] int64`, -1 writes nothing. Returns the queries `[T, Hq, D]`. Neither positions nor slots may be of
    the kernel launched right before.

    Raises:
        ValueError: positions of several axes without `axes`.
    """
    if positions.dim() == 2 and axes is None:
        raise ValueError("positions of several axes need axes")
    num_kv_heads, head_size = k_cache.shape[2:]
    half = cos.shape[1]
    q = qkv.new_empty((len(qkv), num_heads, head_size))
    if not len(qkv):
        return q
    rest = head_size - 2 * half
    total = num_heads + 2 * num_kv_heads
    launch_overlapping(
        _rotate_and_cache_kernel,
        (len(qkv), triton.cdiv(total, HEADS)),
        qkv,
        positions,
        axes if positions.dim() == 2 else None,
        cos,
        sin,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        slot_mapping,
        q,
        k_cache,
        v_cache,
        len(qkv),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HALF=half,
        NORM=query_norm is not None,
        HEADS=HEADS,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
    )
    return q
