"""Paged attention: decoding against the copy bandwidth, prompts against torch's own attention."""

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812
from omni_async_kernels.attention_work import AttentionWork, plan_attention
from omni_async_kernels.paged_attention import paged_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels.timing import copy_bandwidth, matrix_rate, random, samples_ms
from bench.report import Figure, Ratio, Report
from bench.settings import Settings


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model."""

    num_heads: int
    num_kv_heads: int
    size: int


LARGE, SMALL = Heads(32, 8, 128), Heads(16, 8, 128)
BLOCK_SIZE = 16
DECODE = ((64, 4096, 0.85), (1, 32768, 0.75))
"""Rows, context, and the share of the copy bandwidth that is aimed at."""
SHORT_DECODE = ((1, 3.0), (16, 3.0), (64, None), (256, None))
"""Rows, and microseconds a layer that are aimed at: with few rows, a launch and the latency of its loads."""
SHORT_CONTEXTS = (256, 400)
NUM_LAYERS = 28
PROMPTS = ((8192, 0.65), (512, 0.5))
"""Tokens, and the share of the best of torch's backends that is aimed at."""
PEERS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


@dataclass(frozen=True, slots=True)
class Paged:
    """Rows of equal shape with scattered blocks."""

    heads: Heads
    q: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    query_len: int
    context_len: int

    @classmethod
    def random(
        cls, heads: Heads, num_rows: int, query_len: int, context_len: int, seed: int, num_layers: int = 1
    ) -> "Paged":
        """Random numbers everywhere."""
        per_row = context_len // BLOCK_SIZE
        num_blocks = num_rows * per_row + 1
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        shape = (num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.size)
        return cls(
            heads=heads,
            q=random(num_rows * query_len, heads.num_heads, heads.size, seed=seed),
            layers=tuple(
                (random(*shape, seed=seed + 2 * layer + 1), random(*shape, seed=seed + 2 * layer + 2))
                for layer in range(num_layers)
            ),
            slots=torch.arange(num_rows, device="cuda"),
            query_starts=torch.arange(num_rows + 1, device="cuda") * query_len,
            context_lens=torch.full((num_rows,), context_len, device="cuda"),
            block_tables=order.view(num_rows, per_row).int().cuda(),
            query_len=query_len,
            context_len=context_len,
        )

    @property
    def cache_bytes(self) -> int:
        """What one layer reads of its cache."""
        return 2 * len(self.slots) * self.context_len * self.heads.num_kv_heads * self.heads.size * 2

    def plan(self) -> AttentionWork:
        """The work of all layers."""
        return plan_attention(
            self.slots,
            self.query_starts,
            self.context_lens,
            len(self.q),
            num_heads=self.heads.num_heads,
            num_kv_heads=self.heads.num_kv_heads,
            head_size=self.heads.size,
            dtype=self.q.dtype,
            single=self.query_len == 1,
        )

    def attend(self, work: AttentionWork) -> None:
        """All layers, one after another."""
        scale = self.heads.size**-0.5
        for index, (k_cache, v_cache) in enumerate(self.layers):
            paged_attention(self.q, k_cache, v_cache, self.block_tables, scale, work, work_is_older=index > 0)


def _peer_ms(paged: Paged, repeats_ms: int) -> float:
    """The best of torch's backends on contiguous keys and values of the same size."""
    q = paged.q.transpose(0, 1)[None].contiguous()
    shape = (1, paged.heads.num_kv_heads, paged.context_len, paged.heads.size)
    k, v = random(*shape, seed=1), random(*shape, seed=2)
    attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    times: list[float] = []
    for backend in PEERS:
        with sdpa_kernel(backend):
            times.append(median(samples_ms(attend, repeats_ms)))
    return min(times)


def run(settings: Settings) -> Report:
    """Measure in bfloat16; ceilings first, in the same run."""
    repeats_ms = settings.pick(300, 50)
    bandwidth, rate = copy_bandwidth(repeats_ms), matrix_rate(repeats_ms)
    figures = [
        Figure.of("copy bandwidth", "TB/s", [bandwidth], 1e-12),
        Figure.of("matrix product", "TFLOP/s", [rate], 1e-12),
    ]
    ratios: list[Ratio] = []
    for num_rows, context, share in DECODE:
        paged = Paged.random(LARGE, num_rows, 1, context, settings.seed)
        times = samples_ms(partial(paged.attend, paged.plan()), repeats_ms)
        name = f"decode, {num_rows} x {context}"
        figures.append(Figure.of(name, "us", times, 1e3))
        value = paged.cache_bytes / median(times) * 1e3 / bandwidth
        ratios.append(Ratio(f"{name}: bytes / time / copy bandwidth", value, share, "at least"))
    for context in SHORT_CONTEXTS:
        for num_rows, aim in SHORT_DECODE:
            paged = Paged.random(SMALL, num_rows, 1, context, settings.seed, NUM_LAYERS)
            times = [ms / NUM_LAYERS for ms in samples_ms(partial(paged.attend, paged.plan()), repeats_ms)]
            name = f"decode, {num_rows} x {context}, a layer"
            figures.append(Figure.of(name, "us", times, 1e3, aim))
            value = median(times) / 1e3 / (paged.cache_bytes / bandwidth)
            ratios.append(Ratio(f"{name}: time / (bytes / copy bandwidth)", value))
    paged = Paged.random(SMALL, 256, 1, 256, settings.seed)
    figures.append(Figure.of("planning, 256 rows", "us", samples_ms(paged.plan, repeats_ms), 1e3))
    for length, share in PROMPTS:
        paged = Paged.random(LARGE, 1, length, length, settings.seed)
        times = samples_ms(partial(paged.attend, paged.plan()), repeats_ms)
        peer = _peer_ms(paged, repeats_ms)
        name = f"prompt, {length}"
        figures += [Figure.of(name, "us", times, 1e3), Figure.of(f"{name}: best of torch", "us", [peer], 1e3)]
        operations = 2 * 2 * LARGE.num_heads * LARGE.size * length * (length + 1) / 2
        ratios += [
            Ratio(f"{name}: torch / ours", peer / median(times), share, "at least"),
            Ratio(f"{name}: operations / time / matrix rate", operations / median(times) * 1e3 / rate),
        ]
    conditions = {
        "dtype": "bfloat16",
        "heads": [LARGE.num_heads, LARGE.num_kv_heads, LARGE.size],
        "heads of a layer of many": [SMALL.num_heads, SMALL.num_kv_heads, SMALL.size],
        "layers": NUM_LAYERS,
        "block_size": BLOCK_SIZE,
        "excluded": "launches: each time is one graph replay by device events, L2 overwritten before it; planning, "
        "which is done once for all layers",
    }
    return Report(name="attention", figures=figures, ratios=ratios, conditions=conditions)
