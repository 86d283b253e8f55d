"""The one door: from a path or a name to a model that is ready to run."""

from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from omni_async.errors import CheckpointError, LoadError, OptionError
from omni_async.loading.checkpoint import Checkpoint, StoredWeight
from omni_async.loading.folder import CONFIG, open_folder
from omni_async.loading.gguf.checkpoint import open_gguf
from omni_async.loading.loaded import Loaded
from omni_async.loading.random import RandomWeights
from omni_async.models.registry import ARCHITECTURES
from omni_async.options import LoadFormat
from omni_async.progress import track_bytes

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
GGUF_SUFFIX = ".gguf"
WEIGHT_PATTERN = "*.safetensors"
HUB_PATTERNS = ("*.json", "*.jinja", "*.model", "merges.txt")
"""The files of a repository that loading reads beside its weights."""


def load_pretrained(
    path: str | Path,
    *,
    dtype: str | None = None,
    device: str = "auto",
    load_format: LoadFormat = "auto",
    progress: bool = True,
) -> Loaded:
    """Load a Hugging Face folder or a GGUF file; a string that is no local path is a name on the hub.

    `dtype=None` is the checkpoint's own; for quantised weights, and for random ones whose config names none, float32 on
    the CPU and bfloat16 elsewhere. With `load_format="random"` a folder's weights are neither read nor needed.

    Raises:
        OptionError: the dtype or the device is unknown, or the machine has no such device.
        CheckpointError: a file is missing, truncated or corrupt; the message names the file and the tensor.
        UnsupportedModel: the checkpoint asks for something that is not built in.
        LoadError: nothing can be found under that path or name.
    """
    chosen_device = _choose_device(device)
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    random = load_format == "random"
    checkpoint = _open(_find(path, with_weights=not random), with_weights=not random)
    quantised = torch.float32 if chosen_device.type == "cpu" else torch.bfloat16
    run_dtype = DTYPES[dtype] if dtype is not None else checkpoint.dtype or quantised
    if run_dtype not in DTYPES.values():
        raise OptionError(
            f"the checkpoint's dtype is {run_dtype}, which is not built in: choose one of {', '.join(DTYPES)}"
        )
    model = ARCHITECTURES[checkpoint.architecture](checkpoint.config, dtype=run_dtype, device=chosen_device)
    weights: Iterable[StoredWeight]
    if random:
        drawn = RandomWeights(model, chosen_device)
        weights, num_bytes = drawn, drawn.num_bytes
    else:
        weights, num_bytes = checkpoint.weights(), checkpoint.num_bytes
    tracked = track_bytes(
        weights, lambda weight: weight.num_bytes, total=num_bytes, label="loading weights", enabled=progress
    )
    model.load(tracked)
    return Loaded(
        model=model,
        tokenizer=checkpoint.tokenizer,
        defaults=checkpoint.defaults,
        name=Path(path).name or str(path),
        dtype=run_dtype,
        device=chosen_device,
    )


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device {name!r} is unknown: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"device must be 'auto', 'cpu' or 'cuda', got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device is {name!r}, but this machine has no CUDA device, or torch was built without it")
    return device


def _find(path: str | Path, *, with_weights: bool) -> Path:
    """The local file or folder; a name on the hub is downloaded, or found in its cache."""
    try:
        local = Path(path).expanduser()
        if local.exists():
            return local
    except (OSError, RuntimeError) as error:  # a name that is too long; the home of nobody
        raise LoadError(f"{path}: cannot be looked up: {error}") from error
    if isinstance(path, Path) or path.startswith((".", "/", "~")) or path.endswith(GGUF_SUFFIX):
        raise LoadError(f"{path}: there is no such file or folder")
    patterns = [*HUB_PATTERNS, WEIGHT_PATTERN] if with_weights else [*HUB_PATTERNS]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except HFValidationError as error:
        raise LoadError(
            f"{path}: there is no such file or folder, and it cannot be a name on the hub: {error}"
        ) from error
    except OSError as error:
        reason = " ".join(str(error).split())
        raise LoadError(f"{path}: there is no such file or folder, and the hub did not give it: {reason}") from error


def _open(path: Path, *, with_weights: bool) -> Checkpoint:
    if not with_weights:
        if not (path / CONFIG).is_file():
            raise CheckpointError(f"{path}: random weights need a folder that holds a {CONFIG}")
        return open_folder(path, with_weights=False)
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise CheckpointError(f"{path}: neither a folder nor a {GGUF_SUFFIX} file")
        return open_gguf(path)
    if (path / CONFIG).is_file():
        return open_folder(path)
    files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if len(files) == 1:
        return open_gguf(files[0])
    held = f"{len(files)} {GGUF_SUFFIX} files; name one of them" if files else f"no {GGUF_SUFFIX} file"
    raise CheckpointError(f"{path}: the folder holds no {CONFIG} and {held}")
