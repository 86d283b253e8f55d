"""A mixture of experts, from router logits to the weighted sum, against what it must read and compute."""

from functools import partial
from statistics import median

from omni_async_kernels.moe import moe
from omni_async_kernels.moe_routing import route
from torch import Tensor

from bench.kernels.timing import copy_bandwidth, matrix_rate, random, samples_ms
from bench.report import Figure, Ratio, Report
from bench.settings import Settings

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, SIZE = 128, 8, 2048, 768
NUM_LAYERS = 3
"""Layers with weights of their own in one run, so that the cache holds none of a layer's from the run before."""
TOKENS = ((1, 1.45), (4, 1.3), (16, 1.15), (64, 1.15), (256, 1.2), (2048, 1.9), (4096, 2.2))
"""Tokens, and the multiple of the limit that is aimed at."""

Weights = tuple[Tensor, Tensor]


def _through_layers(x: Tensor, logits: list[Tensor], layers: list[Weights]) -> None:
    for one, (gate_up, down) in zip(logits, layers, strict=True):
        moe(x, one, gate_up, down, TOP_K, True, x)


def _experts_in_use(logits: Tensor) -> int:
    return int(route(logits, TOP_K, True)[0].flatten().bincount().count_nonzero())


def run(settings: Settings) -> Report:
    """Measure in bfloat16; ceilings first, in the same run."""
    repeats_ms = settings.pick(300, 50)
    bandwidth, rate = copy_bandwidth(repeats_ms), matrix_rate(repeats_ms)
    figures = [
        Figure.of("copy bandwidth", "TB/s", [bandwidth], 1e-12),
        Figure.of("matrix product", "TFLOP/s", [rate], 1e-12),
    ]
    ratios: list[Ratio] = []
    layers = [
        (
            random(NUM_EXPERTS, 2 * SIZE, HIDDEN_SIZE, seed=settings.seed + 2 * layer) * HIDDEN_SIZE**-0.5,
            random(NUM_EXPERTS, HIDDEN_SIZE, SIZE, seed=settings.seed + 2 * layer + 1) * SIZE**-0.5,
        )
        for layer in range(NUM_LAYERS)
    ]
    values_per_expert = 3 * SIZE * HIDDEN_SIZE
    for num_tokens, aim in TOKENS:
        x = random(num_tokens, HIDDEN_SIZE, seed=settings.seed)
        logits = [random(num_tokens, NUM_EXPERTS, seed=settings.seed + layer) for layer in range(NUM_LAYERS)]
        used = sum(_experts_in_use(one) for one in logits) / NUM_LAYERS
        read_ms = used * values_per_expert * x.element_size() / bandwidth * 1e3
        compute_ms = num_tokens * TOP_K * values_per_expert * 2 / rate * 1e3
        times = [ms / NUM_LAYERS for ms in samples_ms(partial(_through_layers, x, logits, layers), repeats_ms)]
        name = f"{num_tokens} tokens"
        figures += [
            Figure.of(name, "us", times, 1e3),
            Figure.of(f"{name}: experts in use", "", [used]),
            Figure.of(f"{name}: weights / copy bandwidth", "us", [read_ms], 1e3),
            Figure.of(f"{name}: operations / matrix rate", "us", [compute_ms], 1e3),
        ]
        ratios.append(Ratio(f"{name}: time / the larger limit", median(times) / max(read_ms, compute_ms), aim))
    conditions = {
        "dtype": "bfloat16",
        "experts": [NUM_EXPERTS, TOP_K],
        "sizes": [HIDDEN_SIZE, SIZE],
        "routing": "normal random logits, others for each layer",
        "layers": NUM_LAYERS,
        "excluded": "the router's product; launches: each time is one graph replay of all layers, over their number",
    }
    return Report(name="moe", figures=figures, ratios=ratios, conditions=conditions)
