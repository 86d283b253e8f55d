"""`omni-async bench kernels`: the GPU kernels against what the device reaches at best."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from omni_async.cli.exit_code import EXPLANATION, ExitCode
from omni_async.cli.flags import Commands, positive
from omni_async.errors import OptionError

if TYPE_CHECKING:
    from omni_async.measure.ceilings import Ceilings
    from omni_async.measure.kernels import KernelTime

MORE = """Measures a copy and a matrix product of torch first, then each operation of the backend in bfloat16: the
median of single runs as graph replays, the L2 cache overwritten before each. The limit of an operation is what its
bytes need at the copy's bandwidth, or its arithmetic at the product's rate, whichever is more. Needs a CUDA device."""


def add_parser(subjects: Commands) -> None:
    """Declare the subject."""
    parser = subjects.add_parser(
        "kernels", help="measure the GPU kernels", description=f"Measure the GPU kernels. {MORE}", epilog=EXPLANATION
    )
    parser.add_argument("--ms", type=positive, metavar="N", default=200, help="spent on each (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw limit / time, as .png, .svg or .pdf")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, print, and draw."""
    import torch

    from omni_async.measure.plot import check_plotting, plot_shares

    if options.plot is not None:
        check_plotting(options.plot)
    if not torch.cuda.is_available():
        raise OptionError("bench kernels needs a CUDA device; this machine has none, or torch was built without it")
    from omni_async.backend.choose import choose_ops
    from omni_async.measure.ceilings import Ceilings
    from omni_async.measure.kernels import measure_kernels

    ops = choose_ops("triton", torch.device("cuda"))
    ceilings = Ceilings.measure(options.ms)
    device = torch.cuda.get_device_name()
    times = list(measure_kernels(ops, ceilings, options.ms))
    if options.json:
        kernels = [{**asdict(time), "share": time.share} for time in times]
        print(json.dumps({"device": device, "ceilings": asdict(ceilings), "kernels": kernels}))
    else:
        print(_table(device, ceilings, times))
    if options.plot is not None:
        plot_shares(options.plot, device, {time.name: time.share for time in times})
    return ExitCode.OK


def _table(device: str, ceilings: "Ceilings", times: "list[KernelTime]") -> str:
    return "\n".join(
        [
            f"{device}: copies {ceilings.bandwidth * 1e-12:.2f} TB/s (read and written), "
            f"multiplies {ceilings.rate * 1e-12:.0f} TFLOP/s (bfloat16)",
            f"  {'':42}{'time':>10} {'limit':>10} {'limit / time':>13}",
            *[f"  {t.name:42}{t.time_us:7.1f} us {t.limit_us:7.1f} us {t.share:13.2f}" for t in times],
        ]
    )
