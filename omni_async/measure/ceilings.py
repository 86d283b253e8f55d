"""What a device reaches at best, and the least time that follows from it."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates measured in the run whose figures they are compared with."""

    bandwidth: float
    """Bytes a second, read and written, of a large copy."""
    rate: float
    """Operations a second of a large bfloat16 matrix product."""

    @classmethod
    def measure(cls, repeats_ms: int) -> Self:
        """Measure them on the current CUDA device, each for `repeats_ms`."""
        from omni_async.measure.timing import copy_bandwidth, matrix_rate  # needs Triton

        return cls(copy_bandwidth(repeats_ms), matrix_rate(repeats_ms))

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least time for work that moves so many bytes and computes so many operations at the same time."""
        return max(num_bytes / self.bandwidth, flops / self.rate)
