"""A mixture of experts for few tokens: each pair of token and expert streams its weights, nothing is sorted.

Vectors, not matrix units: at one token an expert, reading the weights is all the work. Both products keep one sum for
each position of a block and add these up at the end.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, prefetch, wait_for_predecessor
from omni_async_kernels.linear_parts import add_residual

LINE = 128
"""Bytes of a line of the L2 cache."""


@dataclass(frozen=True, slots=True)
class Strip:
    """What one program computes: `rows` results, at most `max_block` values of each row at a time."""

    rows: int
    max_block: int
    num_warps: int
    num_stages: int


GATED = Strip(rows=16, max_block=256, num_warps=4, num_stages=4)
"""Rows of gate, and as many of up: one token with 8 experts of 768 is 384 programs, three for each of 132 SMs."""

DOWN = Strip(rows=8, max_block=1024, num_warps=4, num_stages=4)
"""2048 results of one token are 256 programs, two for each of 132 SMs. Rows are short: one block an expert, even if a
quarter of it is empty, costs fewer instructions than three."""


@triton.jit
def _gated_kernel(
    x_ptr,
    weight_ptr,
    experts_ptr,
    out_ptr,
    num_columns,
    size,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_predecessor(OVERLAP)
    # Pairs run fastest: those that share an expert read its weights at the same time.
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    # Columns past the last one repeat it and are not stored.
    row = tl.minimum(column, num_columns - 1)[:, None] * size + k[None, :]
    gate_ptr = weight_ptr + expert * 2 * num_columns * size
    up_ptr = gate_ptr + num_columns.to(tl.int64) * size
    token_ptr = x_ptr + pair // TOP_K * size + k
    gate = tl.zeros([ROWS, BLOCK_K], tl.float32)
    up = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in tl.range(0, size, BLOCK_K, num_stages=NUM_STAGES):
        if EVEN_K:
            x = tl.load(token_ptr + start)
            gate_weight = tl.load(gate_ptr + row + start)
            up_weight = tl.load(up_ptr + row + start)
        else:
            inside = start + k < size
            x = tl.load(token_ptr + start, mask=inside, other=0.0)
            gate_weight = tl.load(gate_ptr + row + start, mask=inside[None, :], other=0.0)
            up_weight = tl.load(up_ptr + row + start, mask=inside[None, :], other=0.0)
        x = x.to(tl.float32)[None, :]
        gate += gate_weight.to(tl.float32) * x
        up += up_weight.to(tl.float32) * x
    run_dtype = out_ptr.dtype.element_ty
    # Rounded to the run dtype at each step, as the reference does.
    gate = tl.sum(gate, axis=1).to(run_dtype).to(tl.float32)
    up = tl.sum(up, axis=1).to(run_dtype).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(run_dtype).to(tl.float32) * up
    tl.store(out_ptr + pair * num_columns + column, activated.to(run_dtype), mask=column < num_columns)


@triton.jit
def _down_kernel(
    x_ptr,
    weight_ptr,
    experts_ptr,
    weights_ptr,
    residual_ptr,
    out_ptr,
    num_columns,
    size,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One loop over all experts of a token, so that the next expert's weights are on their way early."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(column, num_columns - 1)[:, None] * size + k[None, :]
    if OVERLAP:
        # The router's choice is older than the activations: the first weights may come meanwhile.
        line = tl.arange(0, LINES)[None, :] * (BLOCK_K // LINES)
        for block in tl.static_range(NUM_STAGES):
            if block < TOP_K * BLOCKS:
                expert = tl.load(experts_ptr + token * TOP_K + block // BLOCKS, cache_modifier=".cg").to(tl.int64)
                start = block % BLOCKS * BLOCK_K
                line_at = tl.minimum(column, num_columns - 1)[:, None] * size + tl.minimum(start + line, size - 1)
                prefetch(weight_ptr + expert * num_columns * size + line_at)
    wait_for_predecessor(OVERLAP)
    residual = tl.load(residual_ptr + token * num_columns + column, mask=column < num_columns)
    acc = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for block in tl.range(0, TOP_K * BLOCKS, num_stages=NUM_STAGES):
        pair = token * TOP_K + block // BLOCKS
        start = block % BLOCKS * BLOCK_K
        expert_ptr = weight_ptr + tl.load(experts_ptr + pair).to(tl.int64) * num_columns * size
        if EVEN_K:
            x = tl.load(x_ptr + pair * size + start + k)
            weight = tl.load(expert_ptr + row + start)
        else:
            inside = start + k < size
            x = tl.load(x_ptr + pair * size + start + k, mask=inside, other=0.0)
            weight = tl.load(expert_ptr + row + start, mask=inside[None, :], other=0.0)
        acc += weight.to(tl.float32) * (x.to(tl.float32) * tl.load(weights_ptr + pair))[None, :]
    out = add_residual(tl.sum(acc, axis=1), residual, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * num_columns + column, out.to(out_ptr.dtype.element_ty), mask=column < num_columns)


def few_tokens(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor) -> Tensor:
    """`x [T, H]` through `experts [T, top_k] int32`, summed with `weights [T, top_k] f32`, plus `residual [T, H]`.

    `gate_up [E, 2 I, H]`, `down [E, H, I]`; returns `[T, H]`. A product with `down` is not rounded before the sum over
    the experts, which is before the residual is added.
    """
    num_tokens, top_k = experts.shape
    hidden_size, size = down.shape[1:]
    activations = x.new_empty((experts.numel(), size))
    block_k = min(triton.next_power_of_2(hidden_size), GATED.max_block)
    launch_overlapping(
        _gated_kernel,
        (experts.numel(), triton.cdiv(size, GATED.rows)),
        x,
        gate_up,
        experts,
        activations,
        size,
        hidden_size,
        TOP_K=top_k,
        ROWS=GATED.rows,
        BLOCK_K=block_k,
        EVEN_K=hidden_size % block_k == 0,
        NUM_STAGES=GATED.num_stages,
        num_warps=GATED.num_warps,
    )
    out = x.new_empty((num_tokens, hidden_size))
    block_k = min(triton.next_power_of_2(size), DOWN.max_block)
    launch_overlapping(
        _down_kernel,
        (num_tokens, triton.cdiv(hidden_size, DOWN.rows)),
        activations,
        down,
        experts,
        weights,
        residual,
        out,
        hidden_size,
        size,
        TOP_K=top_k,
        BLOCKS=triton.cdiv(size, block_k),
        ROWS=DOWN.rows,
        BLOCK_K=block_k,
        LINES=max(block_k * down.element_size() // LINE, 1),
        EVEN_K=size % block_k == 0,
        NUM_STAGES=DOWN.num_stages,
        num_warps=DOWN.num_warps,
    )
    return out
