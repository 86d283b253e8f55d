"""A Hugging Face folder as a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from omni_async.errors import CheckpointError, UnsupportedModel
from omni_async.loading.checkpoint import Checkpoint, read_json_object
from omni_async.loading.generation import read_defaults
from omni_async.loading.safetensors import SafetensorsFiles, find_safetensors
from omni_async.loading.tokenizer import read_tokenizer
from omni_async.models.registry import ARCHITECTURES

CONFIG = "config.json"


def open_folder(folder: Path, *, with_weights: bool = True) -> Checkpoint:
    """Read all of a Hugging Face folder but its weights; `with_weights` says whether it must hold any.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt.
        UnsupportedModel: the checkpoint asks for something that is not built in.
    """
    config = _read_config(folder)
    files = find_safetensors(folder) if with_weights else SafetensorsFiles({})
    tokenizer = read_tokenizer(folder)
    eos = config.eos_token_id
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    return Checkpoint(
        config=config,
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else files.first_dtype,
        tokenizer=tokenizer,
        defaults=read_defaults(folder, eos),
        num_bytes=files.num_bytes,
        weights=files.weights,
    )


def _read_config(folder: Path) -> PretrainedConfig:
    path = folder / CONFIG
    stored = read_json_object(path)
    names = stored.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"{path}: architectures must name the model's class, got {names!r}")
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModel(f"{path}: architecture {names[0]} is not one of {', '.join(ARCHITECTURES)}")
    quantisation = stored.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise UnsupportedModel(f"{path}: quantization_config: weights quantised by {method!r} are not built in")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, StrictDataclassError) as error:
        raise CheckpointError(f"{path}: not a valid config: {error}") from error
    return config
