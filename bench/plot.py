"""Draws reports of `bench.engine.text_on_cuda`: `python -m bench.plot FILE.json ... --out FILE.png`."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_async.measure.plot import check_plotting, plot_lines

INTER_TOKEN = re.compile(r"batch (\d+), greedy: inter-token(: limit)?")


def latency_lines(name: str, report: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Time between tokens by batch: measured, aimed at, and the limit."""
    lines: dict[str, dict[int, float]] = {name: {}, f"{name}: aim": {}, f"{name}: limit": {}}
    for figure in report["figures"]:
        found = INTER_TOKEN.fullmatch(figure["name"])
        if found is None:
            continue
        batch = int(found[1])
        if found[2]:
            lines[f"{name}: limit"][batch] = figure["median"]
        else:
            lines[name][batch] = figure["median"]
            if figure["aim"] is not None:
                lines[f"{name}: aim"][batch] = figure["aim"]
    return {label: points for label, points in lines.items() if points}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the reports that the command line names into one plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, metavar="FILE", help="JSON of bench.engine.text_on_cuda")
    parser.add_argument("--out", type=Path, default=Path("latency.png"), help="the plot (%(default)s)")
    options = parser.parse_args(arguments)
    check_plotting(options.out)
    lines: dict[str, dict[int, float]] = {}
    for path in options.reports:
        lines |= latency_lines(path.stem.removeprefix("text_on_cuda_"), json.loads(path.read_text()))
    plot_lines(options.out, "Time between tokens, greedy", "requests at the same time", "ms", lines)


if __name__ == "__main__":
    main()
