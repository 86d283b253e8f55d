"""`python -m bench.kernels`: prints a table, writes JSON. Needs a CUDA device."""

import argparse
from pathlib import Path

from bench.environment import Environment
from bench.kernels import attention
from bench.settings import Settings

RESULTS = Path(__file__).parent.parent / "results"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it works, not more")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of the random numbers (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    environment = Environment.here(options.seed, options.quick)
    report = attention.run(Settings(seed=options.seed, quick=options.quick))
    print(f"{environment.gpu}\n{report.table()}\n-> {report.write(options.out, environment).name}")


if __name__ == "__main__":
    main()
