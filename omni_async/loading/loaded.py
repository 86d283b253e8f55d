"""What loading hands to the engine."""

from dataclasses import dataclass

import torch

from omni_async.loading.tokenizer import TextTokenizer
from omni_async.models.protocol import StageModel

__all__ = ["GenerationDefaults", "Loaded", "TextTokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The sampling parameters that a checkpoint recommends, used where a request leaves them open.

    What a checkpoint does not recommend is neutral: plain sampling from the model's own distribution.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    """The tokens that end an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to run."""

    model: StageModel
    tokenizer: TextTokenizer | None
    """`None`: the checkpoint has none, and the engine serves token ids."""
    defaults: GenerationDefaults
    name: str
    """The checkpoint's last path component, or its name on the hub."""
    dtype: torch.dtype
    """The run dtype: of the weights and the cache."""
    device: torch.device
