"""New tokens' queries, keys and values, as attention reads them from the product that made all three.

The numbers that `rotate_and_cache` writes, but for the last bit of a norm, whose squares threads add in another order.
"""

import triton
import triton.language as tl

from omni_async_kernels.rotation import load_rotation


@triton.jit
def partner_column(d, HALF: tl.constexpr):
    """The column that is turned together with column `d`; of those from `2 HALF` on, which stay, itself."""
    return tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))


@triton.jit
def column_rotation(
    positions_ptr, axes_ptr, cos_ptr, sin_ptr, token, num_tokens, exists, d, HALF: tl.constexpr
):  # fmt: skip
    """The factors of columns `d` and of their partners, for one token."""
    turned = exists & (d < 2 * HALF)
    pair = tl.where(d < HALF, d, d - HALF)
    cos, sin = load_rotation(positions_ptr, axes_ptr, cos_ptr, sin_ptr, token, pair, num_tokens, turned, HALF)
    return tl.where(turned, cos, 1.0), tl.where(d < HALF, -sin, sin)


@triton.jit
def column_weights(norm_ptr, d, HEAD_SIZE: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """The norm's weights of columns `d` and of their partners; without a norm nothing is read."""
    if NORM:
        weight = tl.load(norm_ptr + d, mask=d < HEAD_SIZE, other=0.0).to(tl.float32)
        partner = tl.load(norm_ptr + partner_column(d, HALF), mask=d < HEAD_SIZE, other=0.0).to(tl.float32)
    else:
        weight = tl.full(d.shape, 1.0, tl.float32)
        partner = weight
    return weight, partner


@triton.jit
def load_turned(
    heads_ptr,
    exists,
    d,
    cos,
    sin,
    weight,
    partner_weight,
    eps,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Heads at `heads_ptr [M, 1]`, normed and rotated, in their own type: `[M, BLOCK_D]`.

    `d [1, BLOCK_D]` are the columns; of them, the factors of `column_rotation` and the weights of `column_weights`.
    """
    inside = exists & (d < HEAD_SIZE)
    loaded = tl.load(heads_ptr + d, mask=inside, other=0.0)
    x = loaded.to(tl.float32)
    # Twice from memory rather than moved between threads.
    partner = tl.load(heads_ptr + partner_column(d, HALF), mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(tl.where(d < HALF, x * x + partner * partner, 0.0), axis=1)
        if BLOCK_REST:
            column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            rest = tl.load(heads_ptr + column, mask=exists & (column < HEAD_SIZE), other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        scale = (1 / tl.sqrt(squares / HEAD_SIZE + eps))[:, None]
        # Rounded to the run dtype between norm and rotation, as the reference does.
        x = (x * scale * weight).to(loaded.dtype).to(tl.float32)
        partner = (partner * scale * partner_weight).to(loaded.dtype).to(tl.float32)
    turned = x * cos + partner * sin
    return tl.where(d < 2 * HALF, turned, x).to(loaded.dtype)
