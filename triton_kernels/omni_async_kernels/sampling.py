"""Draws one token for each row of logits: four launches, whatever the rows ask for.

Each row's parameters are read on the device, so one captured graph serves all mixtures of rows.
"""

import torch
import triton
from torch import Tensor

from omni_async_kernels.candidates import CAPACITY
from omni_async_kernels.launch import launch
from omni_async_kernels.logprobs import logprobs
from omni_async_kernels.philox import CODEBOOK_BITS
from omni_async_kernels.sampling_adjust import adjust_kernel
from omni_async_kernels.sampling_choose import choose_kernel
from omni_async_kernels.sampling_scan import scan_kernel
from omni_async_kernels.sampling_tables import SamplingTables, table_arguments
from omni_async_kernels.sampling_tiling import Tiling
from omni_async_kernels.sampling_wide import wide_kernel

__all__ = ["SamplingTables", "logprobs", "sample"]


def sample(
    logits: Tensor, slots: Tensor, lengths: Tensor, tokens: Tensor, tables: SamplingTables
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of raw `logits [S, V]` (rows contiguous) as the parameters of its slot say.

    `slots [S] int64`; -1 is padding. `lengths [S] int64` are the tokens known before the one to be drawn, and
    `tokens [slots, max_len] int32` holds them. Returns ids `[S] int64` and `finite [S] bool`: false where raw logits
    hold NaN or +inf, or no token can be drawn; the id is then 0.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return ids, finite
    tiling = Tiling.of(num_rows, vocab_size)
    by_tile, by_span = (num_rows, tiling.num_tiles), (num_rows, tiling.num_spans)
    num_words = triton.cdiv(vocab_size, 32)
    adjusted = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=device)
    counts = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=device)
    changed = torch.empty((num_rows, num_words), dtype=torch.int32, device=device)
    tops, sums = torch.empty((2, *by_tile), dtype=torch.float32, device=device)
    winners = torch.empty(by_tile, dtype=torch.int32, device=device)
    peaks = torch.empty(by_span, dtype=torch.float32, device=device)
    spans = torch.empty(by_span, dtype=torch.int32, device=device)
    found = torch.empty((num_rows, CAPACITY.value), dtype=torch.int64, device=device)
    wide = torch.empty(num_rows, dtype=torch.int32, device=device)
    arguments = table_arguments(tables)
    place = tables.stage << CODEBOOK_BITS
    padded_tiles = triton.next_power_of_2(tiling.num_tiles)
    launch(
        adjust_kernel,
        (num_rows,),
        logits,
        logits.stride(0),
        slots,
        lengths,
        tokens,
        tokens.stride(0),
        arguments,
        vocab_size,
        num_words,
        adjusted,
        changed,
        counts,
        num_warps=8,
        # Products are to be rounded before they are subtracted, as they are elsewhere.
        enable_fp_fusion=False,
    )
    launch(
        scan_kernel,
        by_tile[::-1],
        logits,
        logits.stride(0),
        slots,
        lengths,
        arguments,
        place,
        vocab_size,
        num_words,
        adjusted,
        changed,
        tops,
        peaks,
        sums,
        winners,
        TILE=tiling.tile,
        SPAN=tiling.span,
        num_warps=tiling.num_warps,
        maxnreg=64,
    )
    launch(
        choose_kernel,
        (num_rows,),
        logits,
        logits.stride(0),
        slots,
        lengths,
        arguments,
        place,
        vocab_size,
        num_words,
        tiling.num_tiles,
        adjusted,
        changed,
        tops,
        peaks,
        winners,
        spans,
        found,
        ids,
        finite,
        wide,
        TILE=tiling.tile,
        SPAN=tiling.span,
        TILES=padded_tiles,
        num_warps=8,
        # Two programs fit on a multiprocessor, so 256 rows run at once.
        maxnreg=128,
    )
    launch(
        wide_kernel,
        (num_rows,),
        logits,
        logits.stride(0),
        slots,
        lengths,
        arguments,
        place,
        vocab_size,
        num_words,
        tiling.num_tiles,
        adjusted,
        changed,
        tops,
        sums,
        winners,
        ids,
        wide,
        TILE=tiling.tile,
        TILES=padded_tiles,
        num_warps=16,
        maxnreg=64,
    )
    return ids, finite
