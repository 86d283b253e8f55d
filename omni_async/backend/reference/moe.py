"""A mixture of experts: tokens sorted by expert, one pair of matrix products for each expert in use."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from omni_async.backend.reference.linear import linear


def moe(x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalise: bool) -> Tensor:
    """See `Ops.moe`; without the residual."""
    weights, experts = router_logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    experts = experts.flatten()
    order = experts.argsort(stable=True)
    counts = experts.bincount(minlength=len(gate_up)).tolist()
    routed = torch.empty((len(order), x.shape[1]), dtype=x.dtype, device=x.device)
    first = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        chosen = order[first : first + count]
        gate, up = linear(x[chosen // top_k], gate_up[expert]).chunk(2, dim=-1)
        routed[chosen] = linear(F.silu(gate) * up, down[expert])
        first += count
    # Summed in float32 and in the router's order, so that a token's result does not depend on its neighbours'.
    return (routed.view(len(x), top_k, -1) * weights[..., None]).sum(dim=1).to(x.dtype)
