"""CUDA graphs of whole steps: one for each shape, captured once, replayed for every plan that fits it."""

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from omni_async.backend.ops import Logprobs
from omni_async.errors import CaptureError
from omni_async.progress import track
from omni_async.runner.step_shape import Buckets, StepShape
from omni_async.runner.stream_lane import StreamLane

LOG = logging.getLogger(__name__)

MAX_LOGPROBS = 20
"""Most log-probabilities of a position that a graph makes; steps that need more run without one."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew, on the device."""

    token_ids: Tensor
    """`[S] int32`; -1 where the logits were not finite."""
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One captured step."""

    rows: Tensor
    """Where the packed rows are read from."""
    drawn: Drawn
    """Where the results are; the next replay of any graph overwrites them."""
    graph: torch.cuda.CUDAGraph

    def take(self, num_sampled: int, num_logprobs: int) -> Drawn | None:
        """The results of a replay: of its first rows, and as many log-probabilities as are asked for."""
        if not num_sampled:
            return None
        found = self.drawn.logprobs
        logprobs = None
        if found is not None and num_logprobs >= 0:
            logprobs = Logprobs(
                found.chosen[:num_sampled],
                found.rank[:num_sampled],
                found.top_ids[:num_sampled, :num_logprobs],
                found.top[:num_sampled, :num_logprobs],
            )
        return Drawn(self.drawn.token_ids[:num_sampled], logprobs)


Compute = Callable[[StepShape, Tensor], Drawn | None]
"""A step on the device, from packed rows."""


class StepGraphs:
    """The graphs of one stage, in one memory pool."""

    def __init__(self, max_tokens: int, max_rows: int, lane: StreamLane, device: torch.device) -> None:
        self._lane = lane
        self._buckets = Buckets(max_tokens, max_rows)
        self._graphs: dict[StepShape, StepGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        room = max(shape.packed_size for shape in self._buckets.shapes)
        self._rows = torch.empty(room, dtype=torch.int32, device=device)

    def find(self, num_tokens: int, num_rows: int, num_sampled: int) -> tuple[StepShape, StepGraph] | None:
        """The smallest graph that has room for a step, and its shape."""
        shape = self._buckets.find(num_tokens, num_rows, num_sampled)
        return None if shape is None else (shape, self._graphs[shape])

    def capture(self, compute: Compute, *, progress: bool) -> None:
        """Capture a step of padding for each shape, the largest first, since smaller ones find room in its memory.

        Raises:
            CaptureError: a step cannot be captured; the message names the shape.
        """
        began, free = perf_counter(), torch.cuda.mem_get_info()[0]
        # A collection amid a capture could destroy the graphs of an engine that is gone.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            for shape in track(self._buckets.shapes, label="capturing graphs", enabled=progress):
                try:
                    self._graphs[shape] = self._capture(shape, compute)
                except BaseException as error:
                    raise CaptureError(f"the step of {shape} cannot be captured as a CUDA graph: {error}") from error
        finally:
            if collects:
                gc.enable()
        occupied = free - torch.cuda.mem_get_info()[0]
        LOG.info(
            "captured %d graphs in %.1f s; they occupy %.0f MiB",
            len(self._graphs),
            perf_counter() - began,
            occupied / 2**20,
        )

    def _capture(self, shape: StepShape, compute: Compute) -> StepGraph:
        rows = self._rows[: shape.packed_size]
        rows.copy_(torch.from_numpy(shape.pack(())))
        self._lane.compute.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._lane.compute):
            compute(shape, rows)  # compiles kernels, makes the libraries' workspaces
            self._lane.compute.synchronize()
            # Callers may use the device on their own threads meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                drawn = compute(shape, rows)
            except BaseException:
                with suppress(RuntimeError):  # says only that the capture failed, not why
                    graph.capture_end()
                raise
            graph.capture_end()
        if drawn is None:
            raise ValueError("a captured step samples at least one row")
        return StepGraph(rows, drawn, graph)
