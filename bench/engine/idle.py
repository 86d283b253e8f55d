"""What a device did in a trace of torch's profiler: `python -m bench.engine.idle FILE` prints it.

Idle is the time between the first and the last activity in which no kernel, copy or fill ran on any stream.
"""

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LONG_GAP_US = 5.0
"""Longer than the way from one node of a graph to the next: here the device waited for the host."""
LISTED_KERNELS = 20
NAME_WIDTH = 60

Interval = tuple[float, float]
"""Start and end, in microseconds."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One kernel, copy or fill."""

    name: str
    stream: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class KernelSum:
    """All runs of one kernel."""

    name: str
    count: int
    total_us: float


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """How the time of a window was spent."""

    span_us: float
    """From the first start to the last end."""
    busy_us: float
    """Of it, with something running."""
    gaps_us: Sequence[float]
    """The times with nothing running, longest first."""
    stream_busy_us: Mapping[int, float]
    kernels: Sequence[KernelSum]
    """By name, those first that took the most time; a name may stand for a copy or a fill."""

    @classmethod
    def of(cls, activities: Iterable[Activity]) -> "DeviceTime":
        """Add up activities of any order and any number of streams.

        Raises:
            ValueError: there is no activity.
        """
        streams: dict[int, list[Interval]] = defaultdict(list)
        names: dict[str, list[float]] = defaultdict(list)
        for activity in activities:
            streams[activity.stream].append((activity.start_us, activity.end_us))
            names[activity.name].append(activity.end_us - activity.start_us)
        if not streams:
            raise ValueError("the trace holds no activity of a device")
        busy = union(interval for intervals in streams.values() for interval in intervals)
        sums = [KernelSum(name, len(times), sum(times)) for name, times in names.items()]
        return cls(
            span_us=busy[-1][1] - busy[0][0],
            busy_us=length(busy),
            gaps_us=sorted((after[0] - before[1] for before, after in pairwise(busy)), reverse=True),
            stream_busy_us={stream: length(union(streams[stream])) for stream in sorted(streams)},
            kernels=sorted(sums, key=lambda kernel: -kernel.total_us),
        )

    @property
    def idle_share(self) -> float:
        """Of the span."""
        return 1 - self.busy_us / self.span_us

    @property
    def long_gaps_us(self) -> Sequence[float]:
        """Those above `LONG_GAP_US`."""
        return [gap for gap in self.gaps_us if gap > LONG_GAP_US]

    def lines(self) -> list[str]:
        """A summary for people."""
        long, longest = self.long_gaps_us, max(self.gaps_us, default=0.0)
        return [
            f"device: {self.span_us / 1e3:.2f} ms, idle {self.idle_share:.1%}; {len(long)} gaps above "
            f"{LONG_GAP_US:g} us are {sum(long) / self.span_us:.1%}, the longest {longest:.1f} us",
            *[f"stream {stream}: busy {busy / self.span_us:.1%}" for stream, busy in self.stream_busy_us.items()],
            *[
                f"{kernel.total_us / self.span_us:6.1%} {kernel.count:7} x {kernel.total_us / kernel.count:8.2f} us  "
                f"{kernel.name[:NAME_WIDTH]}"
                for kernel in self.kernels[:LISTED_KERNELS]
            ],
        ]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; those that touch are one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Of intervals that do not overlap, together."""
    return sum(end - start for start, end in disjoint)


def read_activities(path: Path) -> list[Activity]:
    """A device's activities in a Chrome trace, packed or not."""
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [
        Activity(event["name"], event["args"]["stream"], event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the summary of a trace."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.idle", description=__doc__)
    parser.add_argument("file", type=Path, help="a trace, .json or .json.gz")
    path = parser.parse_args(arguments).file
    try:
        time = DeviceTime.of(read_activities(path))
    except (OSError, ValueError) as error:
        parser.error(f"{path}: {error}")
    print("\n".join(time.lines()))


if __name__ == "__main__":
    main()
