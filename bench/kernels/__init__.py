"""Kernels against the limits of the device and against torch's own operations."""
