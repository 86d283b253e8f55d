"""Measuring the engine and the device: ceilings, kernels, traces, plots."""
