"""The operations with the project's own Triton kernels; those without one yet are the reference's."""

import omni_async_kernels as kernels
from torch import Tensor

from omni_async.backend.ops import AttentionBatch, HeadNorm, LayerCache, Rotary
from omni_async.backend.reference.ops import ReferenceOps


class TritonOps(ReferenceOps):
    """`omni_async.backend.ops.Ops` for CUDA devices."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        return kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_rms_norm`."""
        return kernels.add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_and_mul`."""
        return kernels.silu_and_mul(gate_up)

    def rotate_and_cache(
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary: Rotary,
        norm: HeadNorm | None,
        cache: LayerCache,
        slot_mapping: Tensor,
        num_heads: int,
    ) -> Tensor:
        """See `Ops.rotate_and_cache`."""
        return kernels.rotate_and_cache(
            qkv,
            positions,
            rotary.cos,
            rotary.sin,
            None if norm is None else norm.query,
            None if norm is None else norm.key,
            0.0 if norm is None else norm.eps,
            *cache,
            slot_mapping,
            num_heads,
        )

    def paged_attention(self, q: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> Tensor:
        """See `Ops.paged_attention`."""
        return kernels.paged_attention(
            q,
            *cache,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            scale,
            batch.max_query_len,
            batch.max_context_len,
        )
