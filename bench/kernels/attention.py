"""Paged attention: decoding against the copy bandwidth, prompts against torch's own attention."""

from dataclasses import dataclass
from functools import partial
from statistics import median

import omni_async_kernels as kernels
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels.timing import copy_bandwidth, matrix_rate, random, samples_ms
from bench.report import Figure, Ratio, Report
from bench.settings import Settings

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
DECODE = ((64, 4096, 0.85), (1, 32768, 0.75))
"""Rows, context, and the share of the copy bandwidth that is aimed at."""
PROMPTS = ((8192, 0.65), (512, 0.5))
"""Tokens, and the share of the best of torch's backends that is aimed at."""
PEERS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


@dataclass(frozen=True, slots=True)
class Paged:
    """Rows of equal shape with scattered blocks."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    query_len: int
    context_len: int

    @classmethod
    def random(cls, num_rows: int, query_len: int, context_len: int, seed: int) -> "Paged":
        """Random numbers everywhere."""
        per_row = context_len // BLOCK_SIZE
        num_blocks = num_rows * per_row + 1
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        return cls(
            q=random(num_rows * query_len, NUM_HEADS, HEAD_SIZE, seed=seed),
            k_cache=random(*shape, seed=seed + 1),
            v_cache=random(*shape, seed=seed + 2),
            query_starts=torch.arange(num_rows + 1, device="cuda") * query_len,
            context_lens=torch.full((num_rows,), context_len, device="cuda"),
            block_tables=order.view(num_rows, per_row).cuda(),
            query_len=query_len,
            context_len=context_len,
        )

    def attend(self) -> Tensor:
        """Our kernel."""
        return kernels.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.query_starts,
            self.context_lens,
            self.block_tables,
            HEAD_SIZE**-0.5,
            self.query_len,
            self.context_len,
        )


def _peer_ms(paged: Paged, repeats_ms: int) -> float:
    """The best of torch's backends on contiguous keys and values of the same size."""
    q = paged.q.transpose(0, 1)[None].contiguous()
    shape = (1, NUM_KV_HEADS, paged.context_len, HEAD_SIZE)
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
    for num_rows, context, aim in DECODE:
        paged = Paged.random(num_rows, 1, context, settings.seed)
        times = samples_ms(paged.attend, repeats_ms)
        name = f"decode, {num_rows} x {context}"
        figures.append(Figure.of(name, "us", times, 1e3))
        moved = 2 * num_rows * context * NUM_KV_HEADS * HEAD_SIZE * paged.q.element_size()
        ratios.append(
            Ratio(f"{name}: bytes / time / copy bandwidth", moved / median(times) * 1e3 / bandwidth, aim, "at least")
        )
    for length, aim in PROMPTS:
        paged = Paged.random(1, length, length, settings.seed)
        times = samples_ms(paged.attend, repeats_ms)
        peer = _peer_ms(paged, repeats_ms)
        name = f"prompt, {length}"
        figures += [Figure.of(name, "us", times, 1e3), Figure.of(f"{name}: best of torch", "us", [peer], 1e3)]
        operations = 2 * 2 * NUM_HEADS * HEAD_SIZE * length * (length + 1) / 2
        ratios += [
            Ratio(f"{name}: torch / ours", peer / median(times), aim, "at least"),
            Ratio(f"{name}: operations / time / matrix rate", operations / median(times) * 1e3 / rate),
        ]
    conditions = {
        "dtype": "bfloat16",
        "heads": [NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE],
        "block_size": BLOCK_SIZE,
        "excluded": "launches: each time is one graph replay by device events, L2 overwritten before it",
    }
    return Report(name="attention", figures=figures, ratios=ratios, conditions=conditions)
