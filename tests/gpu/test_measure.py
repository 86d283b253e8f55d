"""Times and traces of a CUDA device."""

import json
from pathlib import Path

import pytest
import torch

from bench.engine.idle import DeviceTime, read_activities
from omni_async.cli import main
from omni_async.measure.kernels import CASES
from omni_async.measure.trace import tracing

pytestmark = pytest.mark.gpu


def test_every_kernel_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--json", "--ms", "20"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ceilings"]["bandwidth"] > 1e11
    assert [kernel["name"] for kernel in result["kernels"]] == list(CASES)
    assert all(0.05 < kernel["share"] < 1.3 for kernel in result["kernels"])


def test_traces_show_the_kernels_of_graphs_each_time(tmp_path: Path) -> None:
    x = torch.zeros(2**24, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            x += 1
    for name in ("first.json", "second.json.gz"):
        with tracing(tmp_path / name):
            for _ in range(5):
                graph.replay()
        time = DeviceTime.of(read_activities(tmp_path / name))
        assert sum(kernel.count for kernel in time.kernels) >= 50
        assert 0 <= time.idle_share < 1
