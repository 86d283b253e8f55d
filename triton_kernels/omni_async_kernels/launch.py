"""How kernels are launched: at once, or, to get ready for many launches, only compiled, on several threads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from triton import AsyncCompileMode

_compiling = ContextVar("_compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel; within `compiling` it is only compiled, and what it would have written is undefined."""
    if _compiling.get():
        kernel.run(*arguments, grid=grid, warmup=True, **options)
    else:
        kernel[grid](*arguments, **options)


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
