"""Triton kernels of omni_async: one operation a file, a kernel and its launcher. They know nothing of the engine."""

from omni_async_kernels.attention_single import attend_new_tokens
from omni_async_kernels.attention_work import AttentionWork, plan_attention
from omni_async_kernels.embedding import embedding
from omni_async_kernels.launch import compiling
from omni_async_kernels.linear import linear
from omni_async_kernels.moe import moe
from omni_async_kernels.norm_linear import norm_linear
from omni_async_kernels.paged_attention import paged_attention
from omni_async_kernels.prepare import append, prepare
from omni_async_kernels.rms_norm import rms_norm
from omni_async_kernels.rotate_and_cache import rotate_and_cache
from omni_async_kernels.sampling import SamplingTables, logprobs, sample
from omni_async_kernels.silu_and_mul import silu_and_mul

__all__ = [
    "AttentionWork",
    "SamplingTables",
    "append",
    "attend_new_tokens",
    "compiling",
    "embedding",
    "linear",
    "logprobs",
    "moe",
    "norm_linear",
    "paged_attention",
    "plan_attention",
    "prepare",
    "rms_norm",
    "rotate_and_cache",
    "sample",
    "silu_and_mul",
]
