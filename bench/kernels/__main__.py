"""`python -m bench.kernels [NAME ...]`: prints tables, writes JSON. Needs a CUDA device."""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import torch

from bench.environment import Environment
from bench.report import Report
from bench.settings import Settings

NAMES = ("attention", "linear", "moe", "sampling")
"""Modules of this folder, each with a function `run`."""
RESULTS = Path(__file__).parent.parent / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks that the command line names; one that fails does not keep the others from being run."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it works, not more")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of the random numbers (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    names: Sequence[str] = options.names or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"unknown benchmarks {unknown}; there are {', '.join(NAMES)}")
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and the machine has none, or torch was built without it")
    settings = Settings(seed=options.seed, quick=options.quick)
    failed: list[str] = []
    print(torch.cuda.get_device_name(), flush=True)
    for name in names:
        environment = Environment.here(settings.seed, settings.quick)
        try:
            run: Callable[[Settings], Report] = import_module(f"bench.kernels.{name}").run
            report = run(settings)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        print(f"{report.table()}\n-> {report.write(options.out, environment).name}\n", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
