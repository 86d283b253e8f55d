"""The router of a mixture of experts: softmax over all experts, then the best few of them for each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_async_kernels.launch import launch_overlapping, wait_for_predecessor


@triton.jit
def _route_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    num_experts,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_predecessor(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    exists = expert < num_experts
    logit = tl.load(logits_ptr + token * num_experts + expert, mask=exists, other=float("-inf")).to(tl.float32)
    probability = tl.exp(logit - tl.max(logit, axis=0))
    total = tl.sum(probability, axis=0)
    # The bits of numbers from 0 on order as the numbers do, and a warp finds the largest integer in one instruction.
    # NaN counts as 0: the ids of such a row stay in range, its weights become NaN by `total`.
    key = tl.where(probability >= 0, probability, 0.0).to(tl.int32, bitcast=True)
    key = tl.where(exists, key, -1)
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    chosen_key = tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        best_key = tl.max(key, axis=0)
        best = tl.min(tl.where(key == best_key, expert, BLOCK_E), axis=0)
        chosen = tl.where(slot == k, best, chosen)
        chosen_key = tl.where(slot == k, best_key, chosen_key)
        key = tl.where(expert == best, -1, key)
    weight = chosen_key.to(tl.float32, bitcast=True) / total
    if RENORMALISE:
        weight = weight / tl.sum(weight, axis=0)
    tl.store(experts_ptr + token * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(weights_ptr + token * TOP_K + slot, weight, mask=slot < TOP_K)


def route(router_logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The best `top_k` of contiguous `router_logits [T, E]`: ids `[T, top_k] int32`, weights `[T, top_k] f32`.

    Best first, the lowest id first among equals. `renormalise` makes a token's weights sum to 1. A row with NaN gets
    distinct ids in range and NaN weights.
    """
    num_tokens, num_experts = router_logits.shape
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=router_logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=router_logits.device)
    if num_tokens:
        launch_overlapping(
            _route_kernel,
            (num_tokens,),
            router_logits,
            experts,
            weights,
            num_experts,
            TOP_K=top_k,
            RENORMALISE=renormalise,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            num_warps=1,
        )
    return experts, weights
