"""`omni-async bench`: measures this machine, by subject."""

from omni_async.cli import bench_engine, bench_kernels
from omni_async.cli.exit_code import EXPLANATION
from omni_async.cli.flags import Commands


def add_parser(commands: Commands) -> None:
    """Declare the command and what it can measure."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine",
        description="Measure the engine with a model, or the GPU kernels alone.",
        epilog=EXPLANATION,
    )
    subjects = parser.add_subparsers(title="what to measure", metavar="SUBJECT", required=True)
    for subject in (bench_engine, bench_kernels):
        subject.add_parser(subjects)
