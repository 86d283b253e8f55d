"""Traces of what the process and the device do, for https://ui.perfetto.dev."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


@contextmanager
def tracing(path: Path) -> Iterator[None]:
    """Write a Chrome trace of what happens inside, on every thread and the CUDA device; `.gz` at its end packs it.

    Raises:
        OSError: the file cannot be written.
    """
    path.touch()
    # As torch does for graphs of its own: to set up CUPTI anew after it was taken down crashes with graphs.
    os.environ["DISABLE_CUPTI_LAZY_REINIT"], os.environ["TEARDOWN_CUPTI"] = "1", "0"
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    # A model runs on threads of its engine, which the profiler would leave out.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread, acc_events=True) as profiler:
        yield
        if on_cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
