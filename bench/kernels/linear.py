"""Products of decoding steps, with the norm, activation or addition that they have: ours, torch's, and the limit."""

from statistics import median

from bench.kernels.linear_shapes import SHAPES, STREAMED_BYTES, Case, random_weights
from bench.kernels.timing import copy_bandwidth
from bench.report import Figure, Ratio, Report
from bench.settings import Settings

TOKENS = (1, 4, 16, 64)

SHARE, OVERHEAD_US = 0.85, 1.5
"""Aims at one token: this share of the copy bandwidth, or no more than this time above it, whichever allows more."""


def run(settings: Settings) -> Report:
    """Measure in bfloat16; the copy bandwidth first, in the same run."""
    repeats_ms = settings.pick(100, 20)
    bandwidth = copy_bandwidth(repeats_ms)
    figures = [Figure.of("copy bandwidth", "TB/s", [bandwidth], 1e-12)]
    ratios: list[Ratio] = []
    for shape in SHAPES:
        weights = random_weights(shape, settings.seed)
        for num_tokens in TOKENS:
            case = Case.random(shape, num_tokens, weights, settings.seed + 1)
            tile = case.chosen()
            name = f"{shape.name} [{shape.rows}, {shape.size}], {num_tokens} tokens"
            limit = case.moved_bytes / bandwidth * 1e6
            aim = max(limit / SHARE, limit + OVERHEAD_US) if num_tokens == 1 else None
            theirs = case.samples_us(None, repeats_ms)
            figures.append(Figure.of(f"{name}: torch", "us", theirs))
            if tile is None:
                ratios.append(Ratio(f"{name}: limit / torch, which is used", limit / median(theirs)))
                continue
            ours = case.samples_us(tile, repeats_ms)
            figures.append(Figure.of(name, "us", ours, aim=aim))
            ratios += [
                Ratio(f"{name}: limit / ours", limit / median(ours)),
                Ratio(f"{name}: torch / ours", median(theirs) / median(ours), 1.0, "at least"),
            ]
    conditions = {
        "dtype": "bfloat16",
        "limit": "bytes / copy bandwidth of the same run",
        "torch": "F.linear or Tensor.addmm_, our rms_norm before and silu_and_mul after it where the shape has them",
        "time": f"a graph of products with {STREAMED_BYTES / 1e6:.0f} MB of different weights, divided by their number",
    }
    return Report(name="linear", figures=figures, ratios=ratios, conditions=conditions)
