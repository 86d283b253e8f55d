"""The operations with the project's own Triton kernels; those without one are the reference's."""

import os
from contextlib import AbstractContextManager

import omni_async_kernels as kernels
from torch import Tensor

from omni_async.backend.ops import (
    AttentionBatch,
    HeadNorm,
    LayerCache,
    Logprobs,
    Rotary,
    Sampled,
    SamplingBatch,
    SamplingTables,
    StepInputs,
    StepRows,
)
from omni_async.backend.reference.ops import ReferenceOps

MANY_LOGPROBS = 512
"""More of the best tokens than this are found by sorting: the kernel would look for them one by one."""


class TritonOps(ReferenceOps):
    """`omni_async.backend.ops.Ops` for CUDA devices."""

    def __init__(self) -> None:
        super().__init__()
        # All layers of a step share one batch, hence one list of work.
        self._work: tuple[AttentionBatch, kernels.AttentionWork] | None = None

    @property
    def capturable(self) -> bool:
        """See `Ops.capturable`; all but the scoring of prompts, which no graph holds."""
        return True

    def compiling(self) -> AbstractContextManager[object]:
        """See `Ops.compiling`."""
        return kernels.compiling(os.cpu_count() or 1)

    def prepare(self, rows: StepRows, tokens: Tensor, block_tables: Tensor, block_size: int) -> StepInputs:
        """See `Ops.prepare`."""
        made = kernels.prepare(
            rows.slots,
            rows.starts,
            rows.query_starts,
            rows.new_places,
            rows.new_blocks,
            rows.sampled,
            rows.num_tokens,
            tokens,
            block_tables,
            block_size,
        )
        token_ids, positions, slot_mapping, slots, query_starts, context_lens, *sampled = made
        batch = AttentionBatch(slots, query_starts, context_lens, block_tables, slot_mapping, rows.single)
        return StepInputs(token_ids, positions, batch, *sampled)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.embedding`."""
        return kernels.embedding(token_ids, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """See `Ops.linear`."""
        return kernels.linear(x, weight, bias, residual)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        return kernels.rms_norm(x, weight, eps)

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
        return kernels.norm_linear(x, norm_weight, eps, weight, bias, gated=gated)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_and_mul`."""
        return kernels.silu_and_mul(gate_up)

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
        work, is_older = self._planned_work(qkv, cache, batch, num_heads)
        query_norm, key_norm, eps = (None, None, 0.0) if norm is None else (norm.query, norm.key, norm.eps)
        if batch.single:
            return kernels.attend_new_tokens(
                qkv,
                positions,
                rotary.cos,
                rotary.sin,
                rotary.axes,
                query_norm,
                key_norm,
                eps,
                *cache,
                batch.block_tables,
                batch.slot_mapping,
                num_heads,
                scale,
                work,
                work_is_older=is_older,
            )
        q = kernels.rotate_and_cache(
            qkv,
            positions,
            rotary.cos,
            rotary.sin,
            query_norm,
            key_norm,
            eps,
            *cache,
            batch.slot_mapping,
            num_heads,
            rotary.axes,
        )
        # The work is never of the kernel before: that is the rotation.
        return kernels.paged_attention(q, *cache, batch.block_tables, scale, work, work_is_older=True)

    def _planned_work(
        self, qkv: Tensor, cache: LayerCache, batch: AttentionBatch, num_heads: int
    ) -> tuple[kernels.AttentionWork, bool]:
        """The work of a batch, and whether it was there already."""
        if self._work is not None and self._work[0] is batch:
            return self._work[1], True
        num_kv_heads, head_size = cache[0].shape[2:]
        work = kernels.plan_attention(
            batch.slots,
            batch.query_starts,
            batch.context_lens,
            len(qkv),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=qkv.dtype,
            single=batch.single,
        )
        self._work = (batch, work)
        return work, False

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
        return kernels.moe(x, router_logits, gate_up, down, top_k, renormalise, residual)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """See `Ops.sample`."""
        tables = _tables(batch.tables, batch.stage)
        token_ids, finite = kernels.sample(logits, batch.slots, batch.lengths, batch.tokens, tables)
        scores = None
        if batch.num_logprobs > MANY_LOGPROBS:
            scores = super().logprobs(logits, token_ids, batch.num_logprobs)
        elif batch.num_logprobs >= 0:
            scores = Logprobs(*kernels.logprobs(logits, token_ids, batch.slots, tables, batch.num_logprobs))
        return Sampled(token_ids, finite, scores)

    def append(self, drawn: Sampled, batch: SamplingBatch) -> Tensor:
        """See `Ops.append`."""
        return kernels.append(drawn.token_ids, drawn.finite, batch.slots, batch.lengths, batch.tokens)


def _tables(tables: SamplingTables, stage: int) -> kernels.SamplingTables:
    return kernels.SamplingTables(
        temperature=tables.temperature,
        top_p=tables.top_p,
        min_p=tables.min_p,
        repetition_penalty=tables.repetition_penalty,
        presence_penalty=tables.presence_penalty,
        frequency_penalty=tables.frequency_penalty,
        top_k=tables.top_k,
        seed_low=tables.seed_low,
        seed_high=tables.seed_high,
        choice=tables.choice,
        prompt_len=tables.prompt_lens,
        num_bias=tables.num_bias,
        restricted=tables.restricted,
        num_logprobs=tables.num_logprobs,
        bias_ids=tables.bias_ids,
        bias_until=tables.bias_until,
        bias_values=tables.bias_values,
        allowed=tables.allowed,
        stage=stage,
    )
