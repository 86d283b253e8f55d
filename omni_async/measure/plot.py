"""Plots of measurements; matplotlib is imported when one is asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omni_async.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR_INCHES = 0.4
"""Height of one bar with the space around it."""


def check_plotting(path: Path) -> None:
    """See that a plot can be made, before anything is measured for it.

    Raises:
        OptionError: matplotlib is not installed, or does not write files of this kind.
    """
    kinds = _figure(1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise OptionError(f"{path}: a plot's name must end with one of {', '.join(f'.{kind}' for kind in kinds)}")


def plot_shares(path: Path, title: str, shares: Mapping[str, float]) -> None:
    """Bars of how much of its limit each thing reaches; 1 is the limit.

    Raises:
        OptionError: matplotlib is not installed.
    """
    figure = _figure(1.5 + BAR_INCHES * len(shares))
    axes = figure.add_subplot()
    bars = axes.barh(list(shares), list(shares.values()))
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(0, max(1.1, *shares.values()))
    axes.set_xlabel("limit / measured")
    axes.set_title(title)
    axes.invert_yaxis()  # the first one at the top
    figure.savefig(path)


def plot_lines(path: Path, title: str, x_label: str, y_label: str, lines: Mapping[str, Mapping[int, float]]) -> None:
    """Lines of values over numbers such as batch sizes, both axes logarithmic.

    Raises:
        OptionError: matplotlib is not installed.
    """
    figure = _figure(5)
    axes = figure.add_subplot()
    for name, points in lines.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    ticks = sorted({x for points in lines.values() for x in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _figure(height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("plots need the package matplotlib: install omni-async[plot]") from error
    return Figure(figsize=(8, height), layout="constrained")
