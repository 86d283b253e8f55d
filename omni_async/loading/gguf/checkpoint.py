"""A GGUF file as a checkpoint."""

from pathlib import Path

from omni_async.loading.checkpoint import Checkpoint
from omni_async.loading.generation import make_defaults
from omni_async.loading.gguf.config import make_config
from omni_async.loading.gguf.file import read_gguf
from omni_async.loading.gguf.tokenizer import make_tokenizer
from omni_async.loading.gguf.weights import make_weights

SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""End of text, of a turn, and of a message."""


def open_gguf(path: Path) -> Checkpoint:
    """Read all of a GGUF file but its weights.

    Raises:
        CheckpointError: the file is missing, truncated or corrupt.
        UnsupportedModel: the file asks for something that is not built in.
    """
    file = read_gguf(path)
    config = make_config(file)
    weights = list(make_weights(file, config))
    return Checkpoint(
        config=config,
        dtype=None,
        tokenizer=make_tokenizer(file),
        defaults=make_defaults(
            path,
            {name: file.metadata.get(key) for name, key in SAMPLING_KEYS.items()},
            [file.metadata[key] for key in END_KEYS if key in file.metadata],
        ),
        num_bytes=sum(weight.num_bytes for weight in weights),
        weights=lambda: iter(weights),
    )
