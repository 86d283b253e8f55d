"""What is aimed at for text models on one NVIDIA H200, in bfloat16."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Aims:
    """What is aimed at for one model on an H200, with greedy sampling."""

    inter_token_ms: Mapping[int, float]
    """By batch."""
    first_token_ms: Mapping[int, float]
    """By length of the prompt, for one request alone."""
    tokens_per_s: Mapping[int, float] = field(default_factory=dict)
    """By batch."""


AIMS: Mapping[str, Aims] = {
    "Qwen3-0.6B": Aims(
        inter_token_ms={1: 0.65, 16: 0.75, 64: 1.3, 256: 3.5},
        first_token_ms={128: 2.0, 2048: 6.0},
        tokens_per_s={256: 70_000},
    ),
    "Qwen3-8B": Aims(
        inter_token_ms={1: 4.3, 16: 4.6, 64: 5.2, 256: 9.5},
        first_token_ms={128: 7.0, 2048: 46.0},
        tokens_per_s={256: 26_500},
    ),
    "Qwen3-30B-A3B": Aims(
        inter_token_ms={1: 2.2, 16: 11.5, 64: 17.5, 256: 20.0}, first_token_ms={128: 18.0, 2048: 30.0}
    ),
}
NO_AIMS = Aims(inter_token_ms={}, first_token_ms={})
