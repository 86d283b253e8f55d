"""Writing to and reading from the paged cache, whose dtype may be float8_e4m3fn where the run dtype is another."""

import torch
from torch import Tensor


def write(part: Tensor, slots: Tensor, x: Tensor) -> None:
    """Store `x [T, Hk, D]` at the places `slots [T]` of `part [N, B, Hk, D]`; float8 saturates, NaN stays NaN."""
    if part.dtype == x.dtype:
        part.flatten(0, 1).index_copy_(0, slots, x)
        return
    limit = torch.finfo(part.dtype).max
    stored = x.clamp(-limit, limit).to(part.dtype)
    # As bytes: indexing does not know float8.
    part.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, stored.view(torch.uint8))


def read(part: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks `[n]` of `part [N, B, Hk, D]`, `[n, B, Hk, D]` in the run dtype."""
    if part.dtype == dtype:
        return part.index_select(0, blocks)
    return part.view(torch.uint8).index_select(0, blocks).view(part.dtype).to(dtype)
