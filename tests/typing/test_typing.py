"""The types that users' checkers see."""

import subprocess
import sys
from pathlib import Path

import pytest

import omni_async

ROOT = Path(omni_async.__file__).parent.parent


@pytest.mark.timeout(300)  # reads torch's types when nothing is cached
def test_a_user_program_has_the_types_it_relies_on() -> None:
    command = [sys.executable, "-m", "mypy", "tests/typing/user_program.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Success"), done.stdout + done.stderr
