"""An engine whose model computes nothing: what is left is the engine."""

from collections.abc import Iterable
from typing import Unpack

import torch
from torch import Tensor

from omni_async import Engine, EngineOptions
from omni_async.backend.ops import Logprobs, Sampled, StepContext
from omni_async.loading.loaded import GenerationDefaults, Loaded
from omni_async.models.protocol import CacheLayout, ModelSpec, Weight
from omni_async.options import OptionFields

VOCAB_SIZE = 1000


class NullModel:
    """Draws token 1, whatever came before; its hidden size is 1."""

    @property
    def spec(self) -> ModelSpec:
        """The least that a model may be."""
        return ModelSpec(hidden_size=1, vocab_size=VOCAB_SIZE, max_positions=8192, cache=CacheLayout(1, 1, 1))

    def load(self, weights: Iterable[Weight]) -> None:
        """Nothing to load."""

    def embed(self, step: StepContext) -> Tensor:
        """`[T, 1]`, not filled."""
        return torch.empty((len(step.inputs.token_ids), 1))

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """Give `x` back."""
        return x

    def logits(self, h: Tensor, step: StepContext) -> Tensor:
        """Zeros `[S, V]`."""
        return torch.zeros((len(h), VOCAB_SIZE))

    def sample(self, h: Tensor, step: StepContext) -> Sampled:
        """Token 1 for each row, with made-up log-probabilities where they are asked for."""
        count = len(h)
        logprobs = None
        if step.sampling is not None and step.sampling.num_logprobs >= 0:
            top = step.sampling.num_logprobs
            logprobs = Logprobs(
                chosen=torch.zeros(count),
                rank=torch.ones(count, dtype=torch.int64),
                top_ids=torch.arange(top).expand(count, top),
                top=torch.zeros((count, top)),
            )
        return Sampled(torch.ones(count, dtype=torch.int64), torch.ones(count, dtype=torch.bool), logprobs)


def null_engine(**options: Unpack[OptionFields]) -> Engine:
    """An engine over the null model, without a tokenizer."""

    def load(options: EngineOptions) -> Loaded:
        return Loaded(
            model=NullModel(),
            tokenizer=None,
            defaults=GenerationDefaults(),
            name="null",
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    return Engine(load, EngineOptions(**options))
