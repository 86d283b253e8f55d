"""The built-in models, by the architecture that a checkpoint's config names."""

from collections.abc import Mapping
from typing import Protocol

import torch
from transformers import PretrainedConfig

from omni_async.models.llama import LlamaForCausalLM
from omni_async.models.protocol import StageModel
from omni_async.models.qwen2 import Qwen2ForCausalLM
from omni_async.models.qwen3 import Qwen3ForCausalLM
from omni_async.models.qwen3_moe import Qwen3MoeForCausalLM


class MakesModel(Protocol):
    """Makes a model whose parameters are not loaded yet."""

    def __call__(self, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> StageModel:
        """Allocate the parameters in `dtype` on `device`.

        Raises:
            UnsupportedModel: the config asks for something that is not built in.
        """
        ...


ARCHITECTURES: Mapping[str, MakesModel] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}
