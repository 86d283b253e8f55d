"""What models that draw tokens from logits share."""

from abc import ABC, abstractmethod

from torch import Tensor

from omni_async.backend.ops import Sampled, StepContext


class SamplesLogits(ABC):
    """Gives a model `sample` from its `logits`."""

    @abstractmethod
    def logits(self, h: Tensor, step: StepContext) -> Tensor:
        """Raw logits `[S, vocab_size]` of hidden rows `[S, H]`."""

    def sample(self, h: Tensor, step: StepContext) -> Sampled:
        """Choose one token for each hidden row `[S, H]` under the step's sampling batch.

        Raises:
            ValueError: no row of the step is to be sampled.
        """
        if step.sampling is None:
            raise ValueError("sample was called in a step that samples no row")
        return step.ops.sample(self.logits(h, step), step.sampling)
