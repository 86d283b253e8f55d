"""Holds a scripted model before a step, so that a test knows what the engine is doing."""

import threading
from dataclasses import dataclass, field

import anyio

from omni_async import Engine


@dataclass
class Gate:
    """For `ScriptedModel.on_step`: every step from number `at` on waits until the gate is open."""

    at: int
    opened: threading.Event = field(default_factory=threading.Event)
    reached: bool = False

    def __call__(self, step: int) -> None:
        if step >= self.at and not self.opened.is_set():
            self.reached = True
            if not self.opened.wait(20):
                raise TimeoutError("the test never opened the gate")

    def open(self) -> None:
        self.opened.set()

    async def closed(self) -> None:
        """Return when a step waits at the gate."""
        with anyio.fail_after(10):
            while not self.reached:
                await anyio.sleep(0.001)


async def all_submitted(engine: Engine, count: int) -> None:
    """Return when the stage knows `count` requests, though it may wait at a gate and not have looked at them."""
    stage = engine._stage
    assert stage is not None
    with anyio.fail_after(10):
        while len(stage._active) + len(stage._submitted) < count:
            await anyio.sleep(0.001)
