"""`transformers` on the same weights: what the engine is measured against."""

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from bench.engine.streams import Trace


class _Arrivals(BaseStreamer):
    """Notes when `generate` has a token."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with each token."""
        if self._has_prompt:
            self._trace.mark(value.numel())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is left to do."""


class Peer:
    """A model of `transformers`, greedy, one request at a time."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None  # never ends early
        self._model.generation_config.pad_token_id = 0

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._model.config.vocab_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, a tied one counted once."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def generate(self, prompt_ids: list[int], max_tokens: int, streamer: BaseStreamer | None = None) -> list[int]:
        """The continuation of one prompt."""
        ids = torch.tensor([prompt_ids])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                streamer=streamer,
            )
        answer: list[int] = output[0, len(prompt_ids) :].tolist()
        return answer

    def trace(self, prompt_ids: list[int], max_tokens: int) -> Trace:
        """When each token was there."""
        trace = Trace()
        self.generate(prompt_ids, max_tokens, _Arrivals(trace))
        return trace

    def seconds(self, prompt_ids: list[int], max_tokens: int) -> float:
        """How long one whole answer takes."""
        began = perf_counter()
        self.generate(prompt_ids, max_tokens)
        return perf_counter() - began
