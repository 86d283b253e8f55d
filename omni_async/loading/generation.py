"""A checkpoint's recommended sampling parameters (`generation_config.json`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_async.errors import CheckpointError, RequestError
from omni_async.loading.checkpoint import read_json_object
from omni_async.loading.loaded import GenerationDefaults
from omni_async.types import SamplingParams

GENERATION_CONFIG = "generation_config.json"
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")


def read_defaults(folder: Path, fallback_eos: object) -> GenerationDefaults:
    """The recommendations of a Hugging Face folder.

    A config that says `do_sample: false`, or says neither that nor a temperature, was written for greedy decoding:
    its values for sampling are left neutral. The repetition penalty holds either way.

    Raises:
        CheckpointError: a value is illegal.
    """
    path = folder / GENERATION_CONFIG
    stored = read_json_object(path) if path.is_file() else {}
    sampled = stored.get("do_sample", stored.get("temperature") is not None)
    fields = (*SAMPLING_FIELDS, "repetition_penalty") if sampled else ("repetition_penalty",)
    eos = stored.get("eos_token_id")
    return make_defaults(path, {name: stored.get(name) for name in fields}, fallback_eos if eos is None else eos)


def make_defaults(path: Path, values: Mapping[str, Any], eos: object) -> GenerationDefaults:
    """Defaults from a file's values, of which those that are `None` are neutral; `eos` is one id, a list or `None`.

    Raises:
        CheckpointError: a value is illegal.
    """
    given = {name: value for name, value in values.items() if value is not None}
    ids: list[Any] = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise CheckpointError(f"{path}: eos_token_id holds {token!r}, which is not a token id")
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return GenerationDefaults(**given, eos_token_ids=tuple(dict.fromkeys(ids)))
