"""Prints how much anonymous memory the start of an engine takes at most: `load_memory CHECKPOINT THREADS`."""

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Self

# Imports are no part of loading.
import omni_async.assembly
import omni_async.loading.pretrained  # noqa: F401
from bench.engine.streams import greedy
from omni_async import Engine

INTERVAL_S = 0.001


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not report RssAnon")


class Peak:
    """Watches memory from a thread of its own."""

    def __init__(self) -> None:
        self.bytes = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self.bytes = max(self.bytes, anonymous_bytes())


async def _start(path: Path, threads: int) -> None:
    async with Engine.from_pretrained(path, threads=threads, device="cpu", dtype="float32", progress=False) as engine:
        await engine.generate(greedy([1, 2, 3], 1))


def main() -> None:
    """Start, answer one request, stop."""
    before = anonymous_bytes()
    with Peak() as peak:
        asyncio.run(_start(Path(sys.argv[1]), int(sys.argv[2])))
    print(json.dumps({"peak_bytes": peak.bytes - before}))


if __name__ == "__main__":
    main()
