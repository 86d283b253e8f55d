"""The cosines and sines by which a kernel turns the pairs of a head, by the positions of its tokens."""

import triton
import triton.language as tl


@triton.jit
def load_rotation(positions_ptr, axes_ptr, cos_ptr, sin_ptr, token, pair, num_tokens, present, HALF: tl.constexpr):
    """`cos` and `sin` of each pair of each token, 0 where not `present`.

    `positions [num_tokens]`, or `[A, num_tokens]` where `axes [HALF]` names the row that turns each pair (`axes_ptr`
    is None: there is but one); `cos`, `sin [P, HALF]`. `token` and `pair` broadcast against each other, and `present`
    with them; a token past `num_tokens` is never present. Positions are read past the L1 cache, as kernels that
    overlap require (see `launch`).
    """
    if axes_ptr is None:
        position = tl.load(positions_ptr + token, mask=token < num_tokens, other=0, cache_modifier=".cg")
    else:
        axis = tl.load(axes_ptr + pair, mask=pair < HALF, other=0)
        position = tl.load(positions_ptr + axis * num_tokens + token, mask=present, other=0, cache_modifier=".cg")
    at = position.to(tl.int64) * HALF + pair
    cos = tl.load(cos_ptr + at, mask=present, other=0.0)
    sin = tl.load(sin_ptr + at, mask=present, other=0.0)
    return cos, sin
