"""Triton kernels of omni_async; empty until the device backend lands."""
