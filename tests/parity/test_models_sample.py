"""From hidden rows to drawn tokens: `sample` is the sampler on the model's own logits."""

import pytest
import torch
from transformers import Qwen3Config

from omni_async.backend.ops import StepContext
from omni_async.backend.reference.ops import ReferenceOps
from omni_async.models.registry import ARCHITECTURES
from tests.support.forward import step_rows_of
from tests.support.sampling import ask, batch_of
from tests.support.tiny import SIZES, as_weights, make_reference

OPS = ReferenceOps()
CONFIG = Qwen3Config(**SIZES, head_dim=16)


def test_sample_draws_from_the_logits() -> None:
    model = ARCHITECTURES["Qwen3ForCausalLM"](CONFIG, dtype=torch.float32, device=torch.device("cpu"))
    model.load(as_weights(make_reference(CONFIG).state_dict()))
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    batch = batch_of([ask(temperature=0.0), ask(temperature=0.9, seed=5), ask(temperature=0.0)], 320, num_logprobs=2)
    inputs = OPS.prepare(step_rows_of([(0, 0, 1)]), torch.zeros(1, 16).int(), torch.ones(1, 1).int(), 16)
    drawn = model.sample(hidden, StepContext(OPS, inputs, [], batch))
    logits = hidden @ make_reference(CONFIG).lm_head.weight.detach().T
    assert drawn.token_ids[[0, 2]].tolist() == logits[[0, 2]].argmax(dim=-1).tolist()
    assert drawn.logprobs is not None
    chosen = logits.log_softmax(dim=-1).gather(1, drawn.token_ids[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.chosen, chosen, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="samples no row"):
        model.sample(hidden, StepContext(OPS, inputs, [], None))
