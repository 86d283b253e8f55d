"""Chooses the backend of a stage, once, by name and device."""

import torch

from omni_async.backend.ops import Ops
from omni_async.errors import OptionError
from omni_async.options import Backend


def choose_ops(name: Backend, device: torch.device) -> Ops:
    """Make the operations of the backend `name`; `auto` is `triton` on cuda and `reference` elsewhere.

    Raises:
        OptionError: the backend cannot run on this device, or Triton is not installed.
    """
    if name == "reference" or (name == "auto" and device.type != "cuda"):
        from omni_async.backend.reference.ops import ReferenceOps

        return ReferenceOps()
    if device.type != "cuda":
        raise OptionError(f"the backend 'triton' runs on cuda, and this engine's device is {device}")
    try:
        from omni_async.backend.triton import TritonOps
    except ImportError as error:
        raise OptionError(
            "the backend 'triton' needs the package triton: install omni-async[gpu], or choose the backend 'reference'"
        ) from error
    return TritonOps()
