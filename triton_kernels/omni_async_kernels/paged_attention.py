"""Causal attention over the paged cache, for any mix of rows, with launches that depend on shapes alone.

One launch serves rows of few tokens, another, if the shapes allow such rows, longer ones. How a row is cut depends on
its own length and the number of rows of the launch, never on its neighbours.
"""

import torch
from torch import Tensor

from omni_async_kernels.attention_attend import Scoring
from omni_async_kernels.attention_long import attend_long_rows
from omni_async_kernels.attention_short import attend_short_rows
from omni_async_kernels.attention_work import AttentionWork


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    scale: float,
    work: AttentionWork,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    work_is_older: bool = False,
) -> Tensor:
    """Attention of contiguous `q [T, Hq, D]` over contiguous caches `[N, B, Hk, D]` -> `[T, Hq, D]`.

    `block_tables [slots, n] int32`: row r's blocks are `block_tables[slots[r]]`; entries past its context may hold
    anything. `work`: of `plan_attention` for this step. A row's query i of n sees the first `context - n + i + 1` keys,
    of these the last `window`. Scores are `scale * q k`, with a soft cap `soft_cap * tanh(scale * q k / soft_cap)`
    (https://arxiv.org/abs/2408.00118). Caches may be float8_e4m3fn: a key is `stored * k_scale`, a value
    `stored * v_scale`. Float32 is computed in full precision. Tokens behind the last row's get no result.
    `work_is_older`: the kernel launched right before made neither the work nor the block tables, so they may be read
    before it has ended.

    Raises:
        ValueError: the work was planned for a smaller window.
    """
    work.check_window(window)
    out = torch.empty_like(q)
    scoring = Scoring.of(scale * k_scale, soft_cap)
    if len(work.splits):
        attend_short_rows(
            q, out, k_cache, v_cache, block_tables, work, scoring, window, v_scale, work_is_older=work_is_older
        )
    if len(work.tiles):
        attend_long_rows(q, out, k_cache, v_cache, block_tables, work, scoring, window, v_scale)
    return out
