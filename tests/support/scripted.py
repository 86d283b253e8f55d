"""A model that says what a test tells it to, through the real scheduler, cache and sampler.

It keeps token ids in the paged cache as keys, reads each row's whole context back through the block tables, and
puts +30 on the next id of the script whose prompt begins that context. So a fault in blocks, slots or positions
changes what it says.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from omni_async.backend.ops import Sampled, StepContext
from omni_async.models.protocol import CacheLayout, ModelSpec, Weight


@dataclass
class Script:
    """What follows a prompt; after its end the last id repeats."""

    prompt: Sequence[int]
    says: Sequence[int]
    nan_at: int = -1
    """The index of the draw whose logits are NaN."""


@dataclass
class ScriptedModel:
    scripts: Sequence[Script] = ()
    vocab_size: int = 300
    max_positions: int = 4096
    """Enough that an answer without an end outlasts whatever a test does meanwhile."""
    on_step: Callable[[int], None] = lambda step: None
    """Called with the number of the step before it is computed; may raise."""
    num_steps: int = 0
    step_tokens: list[int] = field(default_factory=list)
    """Tokens of each step so far."""

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            hidden_size=2,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            cache=CacheLayout(num_layers=1, num_kv_heads=1, head_size=1),
        )

    def load(self, weights: Iterable[Weight]) -> None:
        raise AssertionError("a scripted model has no weights")

    def embed(self, step: StepContext) -> Tensor:
        return step.inputs.token_ids.float()[:, None].expand(-1, 2)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        self.num_steps += 1
        self.step_tokens.append(len(x))
        self.on_step(self.num_steps)
        batch = step.inputs.attention
        keys = step.caches[0][0]
        block_size = keys.shape[1]
        flat = keys.view(-1)
        flat[batch.slot_mapping] = x[:, 0] + 1  # 0 is what nobody wrote
        hidden = torch.zeros(len(x), 2)
        starts = batch.query_starts.tolist()
        for row, context in enumerate(batch.context_lens.tolist()):
            at = torch.arange(context)
            slots = batch.block_tables[batch.slots[row]][at // block_size].long() * block_size + at % block_size
            ids = (flat[slots] - 1).long().tolist()
            assert -1 not in ids, "the context holds a position that nobody wrote"
            for token in range(starts[row], starts[row + 1]):
                seen = ids[: context - (starts[row + 1] - 1 - token)]
                hidden[token, 0], hidden[token, 1] = self._next(seen)
        return hidden

    def _next(self, seen: list[int]) -> tuple[int, float]:
        for script in self.scripts:
            if seen[: len(script.prompt)] == list(script.prompt):
                index = len(seen) - len(script.prompt)
                bad = torch.nan if index == script.nan_at else 0.0
                return script.says[min(index, len(script.says) - 1)], bad
        # Without a script: some function of the whole context, so that a wrong context shows.
        return (sum((i + 1) * token for i, token in enumerate(seen)) * 31 + 7) % min(self.vocab_size, 256), 0.0

    def logits(self, h: Tensor, step: StepContext) -> Tensor:
        logits = torch.sin(torch.arange(self.vocab_size, dtype=torch.float32)).expand(len(h), -1).clone()
        logits[torch.arange(len(h)), h[:, 0].long()] += 30
        return logits + h[:, 1:]

    def sample(self, h: Tensor, step: StepContext) -> Sampled:
        assert step.sampling is not None
        return step.ops.sample(self.logits(h, step), step.sampling)
