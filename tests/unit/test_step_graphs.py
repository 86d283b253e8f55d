"""What surrounds the capture of graphs, with the device's own part left out."""

import gc
import logging
from typing import cast

import pytest
import torch

from omni_async import CaptureError
from omni_async.runner.graphs import Compute, Drawn, StepGraph, StepGraphs
from omni_async.runner.step_shape import StepShape
from omni_async.runner.stream_lane import StreamLane

COMPUTE = cast("Compute", None)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    free = iter([800 * 2**20, 500 * 2**20])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 0))
    return StepGraphs(64, 8, cast("StreamLane", None), torch.device("cpu"))


def captured(_: StepGraphs, shape: StepShape, compute: Compute) -> StepGraph:
    assert not gc.isenabled()
    nothing = torch.empty(0)
    return StepGraph(nothing, Drawn(nothing, None), cast("torch.cuda.CUDAGraph", None))


def test_number_time_and_memory_are_logged(
    graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StepGraphs, "_capture", captured)
    with caplog.at_level(logging.INFO, "omni_async"):
        graphs.capture(COMPUTE, progress=False)
    assert "they occupy 300 MiB" in caplog.text
    assert gc.isenabled()
    found = graphs.find(num_tokens=20, num_rows=3, num_sampled=1)
    assert found is not None
    assert found[0].num_tokens == 24


def test_a_failure_names_its_shape_and_keeps_its_cause(graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = RuntimeError("waited for the device")

    def fails(of: StepGraphs, shape: StepShape, compute: Compute) -> StepGraph:
        if shape.num_tokens == 48:
            raise cause
        return captured(of, shape, compute)

    monkeypatch.setattr(StepGraphs, "_capture", fails)
    with pytest.raises(CaptureError, match=r"num_tokens=48.*waited for the device") as caught:
        graphs.capture(COMPUTE, progress=False)
    assert caught.value.__cause__ is cause
    assert gc.isenabled()
