"""How kernels are launched: one after another or overlapping; or, to get ready for many launches, only compiled.

A step is a chain of short kernels. One that overlaps (programmatic dependent launch, CUDA programming guide) starts as
soon as every program of the kernel before it has got what it waited for, and does what depends on nothing recent. Such
a kernel keeps three rules. All of its programs call `wait_for_predecessor`, those without work too: a kernel that ended
before its predecessor would end the wait of its successor too early. Before the call nothing is written. Before the
call nothing is read that the predecessor may write; what the one before that wrote may be, since the predecessor did
not let others start before its own wait was over, but past the L1 cache (".cg"), which knows nothing of other kernels.

Kernels that are launched in the usual way, ours or not, start after all before them have ended, and end before any
that waits goes on: both kinds may follow each other.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import AsyncCompileMode
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAP = True
"""Whether `launch_overlapping` does so where it can."""

_compiling = ContextVar("_compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel; within `compiling` it is only compiled, and what it would have written is undefined."""
    if _compiling.get():
        kernel.run(*arguments, grid=grid, warmup=True, **options)
    else:
        kernel[grid](*arguments, **options)


def launch_overlapping(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, allowed: bool = True, **options: Any
) -> None:
    """Launch a kernel that may start before the one before it has ended; its parameter `OVERLAP` tells whether it may.

    `allowed`: the kernel before wrote nothing that this one reads before its wait.
    """
    overlap = OVERLAP and allowed and can_overlap()
    launch(kernel, grid, *arguments, OVERLAP=overlap, launch_pdl=overlap, **options)


@cache
def can_overlap() -> bool:
    """On devices of sm_90 and later, not in Triton's interpreter. All devices of a process are taken to be alike."""
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def wait_for_predecessor(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended and its results can be read; then let the kernel behind start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Ask for the lines of the pointers to come to the L2 cache; nothing waits for them. For the device only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@contextmanager
def compiling(num_threads: int) -> Iterator[None]:
    """Compile what is launched in this context, all at the same time; leaving it waits for the last.

    Raises:
        triton.CompilationError: a kernel cannot be compiled.
    """
    with ThreadPoolExecutor(num_threads, "omni-async-compile") as executor, AsyncCompileMode(executor):
        token = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(token)
