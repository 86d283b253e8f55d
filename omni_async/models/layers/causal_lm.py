"""A text model: embedding, decoder, head."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from omni_async.backend.ops import StepContext
from omni_async.errors import UnsupportedModel
from omni_async.models.layers.attention import AttentionShape
from omni_async.models.layers.decoder import Decoder
from omni_async.models.layers.feed_forward import FeedForward
from omni_async.models.layers.rope import make_rotary
from omni_async.models.layers.sampling import SamplesLogits
from omni_async.models.layers.weights import Destinations, Tie, load_weights
from omni_async.models.protocol import CacheLayout, ModelSpec, Weight

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class CausalLM(SamplesLogits):
    """The `StageModel` that the text families share; they differ in attention and feed-forward blocks."""

    def __init__(
        self,
        config: PretrainedConfig,
        attention: AttentionShape,
        feed_forward: Callable[[int], FeedForward],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        require(config, "hidden_act", "silu")
        rotary = make_rotary(config, attention.head_size, device)
        self._spec = ModelSpec(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=len(rotary.cos),
            cache=CacheLayout(config.num_hidden_layers, attention.num_kv_heads, attention.head_size),
        )
        self.embedding = torch.empty((config.vocab_size, config.hidden_size), dtype=dtype, device=device)
        self._tied: bool = config.tie_word_embeddings
        self.head = self.embedding if self._tied else torch.empty_like(self.embedding)
        self.decoder = Decoder(
            config.num_hidden_layers,
            config.hidden_size,
            config.rms_norm_eps,
            attention,
            rotary,
            feed_forward,
            dtype=dtype,
            device=device,
        )

    @property
    def spec(self) -> ModelSpec:
        """The model's declared facts."""
        return self._spec

    def destinations(self) -> Destinations:
        """Where the checkpoint's tensors belong."""
        yield EMBEDDING, self.embedding
        yield from self.decoder.destinations("model.")
        if not self._tied:
            yield HEAD, self.head

    def load(self, weights: Iterable[Weight]) -> None:
        """Copy checkpoint tensors into place; a head that differs from the embedding it is tied to is not used.

        Raises:
            CheckpointError: a tensor is missing, unexpected, repeated or of the wrong shape.
        """
        load_weights(self.destinations(), weights, Tie(EMBEDDING, HEAD) if self._tied else None)

    def embed(self, step: StepContext) -> Tensor:
        """The embeddings of the step's tokens, `[T, H]`."""
        return step.ops.embedding(step.inputs.token_ids, self.embedding)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """Run all layers on `[T, H]`, which may be overwritten; writes the step's keys and values to the cache."""
        return self.decoder(x, step)

    def logits(self, h: Tensor, step: StepContext) -> Tensor:
        """Raw logits `[S, vocab_size]`, in the run dtype, of hidden rows `[S, H]`."""
        return step.ops.linear(h, self.head)


def require(config: PretrainedConfig, field: str, value: object) -> None:
    """See that a config's field has the only value that is built in.

    Raises:
        UnsupportedModel: it has another.
    """
    found = config.to_dict().get(field)
    if found != value:
        raise UnsupportedModel(f"{config.model_type}: {field}={found!r} is not supported, only {value!r}")
