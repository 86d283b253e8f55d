"""Triton kernels of omni_async: one operation a file, a kernel and its launcher. They know nothing of the engine."""

from omni_async_kernels.paged_attention import paged_attention
from omni_async_kernels.rms_norm import add_rms_norm, rms_norm
from omni_async_kernels.rotate_and_cache import rotate_and_cache
from omni_async_kernels.silu_and_mul import silu_and_mul

__all__ = ["add_rms_norm", "paged_attention", "rms_norm", "rotate_and_cache", "silu_and_mul"]
