"""How benchmarks are to be run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the command line, for every benchmark."""

    seed: int = 0
    quick: bool = False
    threads: int = 2
    """CPU threads of one torch operation."""
    model: Path | None = None
    """The checkpoint to use where one is needed."""

    def pick(self, full: T, quick: T) -> T:
        """One of two sizes."""
        return quick if self.quick else full
