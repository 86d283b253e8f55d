"""`python -m omni_async` is the command `omni-async`."""

import sys

from omni_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
