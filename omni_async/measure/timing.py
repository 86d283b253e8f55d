"""Times on a CUDA device, and the rates that it reaches at best."""

from collections.abc import Callable
from statistics import median

import torch
import triton.testing
from torch import Tensor


def samples_ms(work: Callable[[], object], repeats_ms: int) -> list[float]:
    """Times of single runs after warm-up, by device events; the L2 cache is overwritten before each.

    Each run is the replay of a graph, so that the host's launches are not what is timed.
    """
    work()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = triton.testing.do_bench(graph.replay, warmup=50, rep=repeats_ms, return_mode="all")
    return times


def copy_bandwidth(repeats_ms: int) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    # Not in a graph: there a copy becomes a node of another kind, which is slower.
    time_ms: float = triton.testing.do_bench(lambda: target.copy_(source), rep=repeats_ms, return_mode="median")
    return 2 * source.nbytes / time_ms * 1e3


def matrix_rate(repeats_ms: int) -> float:
    """Operations a second of a large bfloat16 matrix product of random numbers."""
    a, b = (torch.randn((8192, 8192), device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / median(samples_ms(lambda: torch.mm(a, b), repeats_ms)) * 1e3


def random(*shape: int, seed: int, device: str = "cuda") -> Tensor:
    """Normal numbers in bfloat16 on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).bfloat16()
