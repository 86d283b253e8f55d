"""What a benchmark reports: figures with their spread, ratios with their aims, and the conditions of both."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from bench.environment import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured quantity: the median of its repeats after warm-up, with the least and the 99th percentile."""

    name: str
    unit: str
    median: float
    min: float
    p99: float
    max: float
    count: int
    aim: float | None = None
    """The most that the median should be."""

    @classmethod
    def of(
        cls, name: str, unit: str, samples: Sequence[float], scale: float = 1.0, aim: float | None = None
    ) -> "Figure":
        """Summarise samples, each multiplied by `scale`."""
        values = np.asarray(samples) * scale
        return cls(
            name=name,
            unit=unit,
            median=float(np.median(values)),
            min=float(values.min()),
            p99=float(np.percentile(values, 99)),
            max=float(values.max()),
            count=len(values),
            aim=aim,
        )


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two figures of one run divided by each other, and what the quotient should be."""

    name: str
    value: float
    aim: float | None = None
    direction: Literal["at most", "at least"] = "at most"

    @property
    def is_met(self) -> bool | None:
        """Whether the aim is reached; `None` without one."""
        if self.aim is None:
            return None
        return self.value <= self.aim if self.direction == "at most" else self.value >= self.aim


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one benchmark."""

    name: str
    figures: Sequence[Figure]
    ratios: Sequence[Ratio] = ()
    conditions: Mapping[str, object]
    """Sizes, options and what the figures exclude: a figure without its conditions is not a result."""
    profile: Sequence[str] = field(default=())
    """Lines of a profiler, if one ran."""

    def write(self, folder: Path, environment: Environment) -> Path:
        """Write `<name>.json` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        content = {"environment": asdict(environment), **asdict(self)}
        content["ratios"] = [{**asdict(ratio), "is_met": ratio.is_met} for ratio in self.ratios]
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    def table(self) -> str:
        """The report as text."""
        width = max(len(name) for name in [f.name for f in self.figures] + [r.name for r in self.ratios])
        lines = [f"== {self.name}", f"{'':{width}} {'median':>10} {'min':>10} {'p99':>10} {'max':>10}"]
        for f in self.figures:
            aim = "" if f.aim is None else f"  (aim <= {f.aim:g})"
            lines.append(f"{f.name:{width}} {f.median:10.3f} {f.min:10.3f} {f.p99:10.3f} {f.max:10.3f} {f.unit}{aim}")
        for r in self.ratios:
            aim = "" if r.aim is None else f"  (aim {r.direction} {r.aim:g}: {'met' if r.is_met else 'MISSED'})"
            lines.append(f"{r.name:{width}} {r.value:10.3f} x{aim}")
        return "\n".join([*lines, *self.profile])
