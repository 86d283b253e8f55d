"""The operations in plain torch: the specification of every other backend, and what CPU users run."""

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from omni_async.backend.ops import (
    AttentionBatch,
    HeadNorm,
    LayerCache,
    Logprobs,
    Rotary,
    Sampled,
    SamplingBatch,
    StepInputs,
    StepRows,
)
from omni_async.backend.reference.attention import AttentionPlan, attend, plan_attention
from omni_async.backend.reference.inputs import prepare
from omni_async.backend.reference.linear import linear
from omni_async.backend.reference.moe import moe
from omni_async.backend.reference.rotary import rotate_and_cache
from omni_async.backend.reference.sampling.draw import logprobs, sample


class ReferenceOps:
    """`omni_async.backend.ops.Ops` in plain torch."""

    def __init__(self) -> None:
        # All layers of a step share one batch, hence one plan.
        self._planned: tuple[AttentionBatch, AttentionPlan] | None = None

    @property
    def capturable(self) -> bool:
        """See `Ops.capturable`: attention, experts and sampling choose their work on the host."""
        return False

    def compiling(self) -> AbstractContextManager[object]:
        """See `Ops.compiling`: nothing is compiled here."""
        return nullcontext()

    def prepare(self, rows: StepRows, tokens: Tensor, block_tables: Tensor, block_size: int) -> StepInputs:
        """See `Ops.prepare`."""
        return prepare(rows, tokens, block_tables, block_size)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.embedding`."""
        return F.embedding(token_ids, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """See `Ops.linear`."""
        product = linear(x, weight, bias)
        return product if residual is None else product.add_(residual)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def norm_linear(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gated: bool,
    ) -> Tensor:
        """See `Ops.norm_linear`."""
        product = self.linear(self.rms_norm(x, norm_weight, eps), weight, bias)
        return self.silu_and_mul(product) if gated else product

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def attention(
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary: Rotary,
        norm: HeadNorm | None,
        cache: LayerCache,
        batch: AttentionBatch,
        num_heads: int,
        scale: float,
    ) -> Tensor:
        """See `Ops.attention`."""
        q = rotate_and_cache(qkv, positions, rotary, norm, cache, batch.slot_mapping, num_heads)
        planned = self._planned
        if planned is None or planned[0] is not batch:
            planned = self._planned = (batch, plan_attention(batch, cache[0].shape[1], q.dtype))
        return attend(q, cache, planned[1], scale)

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        gate_up: Tensor,
        down: Tensor,
        top_k: int,
        renormalise: bool,
        residual: Tensor,
    ) -> Tensor:
        """See `Ops.moe`."""
        return moe(x, router_logits, gate_up, down, top_k, renormalise).add_(residual)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """See `Ops.sample`."""
        return sample(logits, batch)

    def append(self, drawn: Sampled, batch: SamplingBatch) -> Tensor:
        """See `Ops.append`."""
        ids = drawn.token_ids.int()
        batch.tokens[batch.slots, batch.lengths] = ids.where(drawn.finite, 0)
        return ids.where(drawn.finite, -1)

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
        """See `Ops.logprobs`."""
        return logprobs(logits, token_ids, num_top)
