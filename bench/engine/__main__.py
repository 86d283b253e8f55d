"""`python -m bench.engine --all`, or the names of benchmarks: prints tables, writes JSON."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.engine import caller_fairness, host_step, smollm2_vs_transformers
from bench.environment import Environment
from bench.report import Report
from bench.settings import Settings

BENCHMARKS: Mapping[str, Callable[[Settings], Report]] = {
    "host_step": host_step.run,
    "caller_fairness": caller_fairness.run,
    "smollm2_vs_transformers": smollm2_vs_transformers.run,
}
RESULTS = Path(__file__).parent.parent / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}")
    parser.add_argument("--all", action="store_true", help="run every benchmark")
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that a benchmark works, not more")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of the random prompts (%(default)s)")
    parser.add_argument("--threads", type=int, default=Settings.threads, help="CPU threads of torch (%(default)s)")
    parser.add_argument("--model", type=Path, help="a GGUF file of SmolLM2-135M, if its package is not installed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    names = list(BENCHMARKS) if options.all else options.names
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        parser.error(f"unknown benchmarks {unknown}" if unknown else "give --all or the name of a benchmark")
    settings = Settings(seed=options.seed, quick=options.quick, threads=options.threads, model=options.model)
    for name in names:
        environment = Environment.here(settings.seed, settings.quick)
        report = BENCHMARKS[name](settings)
        print(f"{environment.cpu}, {environment.cores} cores; load before the run {environment.load[0]:.2f}")
        print(report.table())
        print(f"-> {report.write(options.out, environment).name}\n", flush=True)


if __name__ == "__main__":
    main()
