"""Times on the device, and the device's ceilings: those of the package."""

from omni_async.measure.timing import copy_bandwidth, matrix_rate, random, samples_ms

__all__ = ["copy_bandwidth", "matrix_rate", "random", "samples_ms"]
