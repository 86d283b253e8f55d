"""Chooses the backend of a stage, once, by name."""

from omni_async.backend.ops import Ops
from omni_async.backend.reference.ops import ReferenceOps
from omni_async.errors import OptionError

BACKENDS: dict[str, type[Ops]] = {"reference": ReferenceOps}


def choose_ops(name: str) -> Ops:
    """Make the operations of the backend `name`.

    Raises:
        OptionError: there is no such backend.
    """
    if name not in BACKENDS:
        raise OptionError(f"backend {name!r} is not one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]()
