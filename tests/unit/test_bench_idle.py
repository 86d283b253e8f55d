"""What a trace says of a device's time."""

import gzip
import json
from pathlib import Path

import pytest

from bench.engine.idle import Activity, DeviceTime, KernelSum, length, main, read_activities, union


def test_intervals_that_overlap_or_touch_become_one() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (7, 8), (10, 11), (10.5, 10.6)]) == [(0, 3), (5, 8), (10, 11)]
    assert union([]) == []
    assert length([(0, 3), (5, 8)]) == 6


def test_idle_is_what_no_stream_covers() -> None:
    time = DeviceTime.of(
        [
            Activity("copy", 2, 18, 22),
            Activity("a", 1, 0, 10),
            Activity("b", 1, 12, 20),
            Activity("a", 1, 40, 50),
            Activity("inside", 2, 41, 42),
        ]
    )
    assert (time.span_us, time.busy_us) == (50, 30)
    assert time.idle_share == pytest.approx(0.4)
    assert time.gaps_us == [18, 2]
    assert time.long_gaps_us == [18]
    assert time.stream_busy_us == {1: 28, 2: 5}
    assert time.kernels[:2] == [KernelSum("a", 2, 20), KernelSum("b", 1, 8)]
    text = "\n".join(time.lines())
    assert "0.05 ms, idle 40.0%; 1 gaps above 5 us are 36.0%, the longest 18.0 us" in text
    assert "stream 1: busy 56.0%" in text
    assert " 40.0%       2 x    10.00 us  a" in text


def test_a_window_without_the_device_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no activity"):
        DeviceTime.of([])
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    with pytest.raises(SystemExit):
        main([str(tmp_path / "trace.json")])
    assert "trace.json: the trace holds no activity" in capsys.readouterr().err


def event(category: str, start: float, duration: float, phase: str = "X") -> dict[str, object]:
    return {
        "ph": phase,
        "cat": category,
        "name": category,
        "ts": start,
        "dur": duration,
        "args": {"device": 0, "stream": 7},
    }


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_only_the_device_s_part_of_a_trace_counts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        event("kernel", 100, 4),
        event("gpu_memcpy", 108, 2),
        event("gpu_memset", 112, 1),
        event("cuda_runtime", 0, 90),
        event("cpu_op", 0, 200),
        event("kernel", 0, 0, phase="f"),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    data = json.dumps({"traceEvents": events}).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read_activities(path) == [
        Activity("kernel", 7, 100, 104),
        Activity("gpu_memcpy", 7, 108, 110),
        Activity("gpu_memset", 7, 112, 113),
    ]
    main([str(path)])
    assert capsys.readouterr().out.startswith("device: 0.01 ms, idle 46.2%;")
