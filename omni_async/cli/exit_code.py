"""What the command tells the shell."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes, as `--help` explains them."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    INTERRUPTED = 130
    """128 + SIGINT, as shells do it."""


EXPLANATION = "exit codes: 0 done; 1 something failed (the message says what); 2 a flag is wrong; 130 ended by Ctrl-C"
