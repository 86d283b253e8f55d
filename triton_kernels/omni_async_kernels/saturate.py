"""The cast of keys and values to the dtype of their cache."""

import triton
import triton.language as tl


@triton.jit
def saturate(x, dtype: tl.constexpr):
    """`x` in another dtype; in float8_e4m3fn, which knows no infinity, what is beyond +-448 becomes +-448."""
    if dtype == tl.float8e4nv:
        # NaN stays NaN, so that it is found out in the end.
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)
