#!/bin/sh
# From a fresh clone to tested: `sh scripts/test.sh`. Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
. scripts/environment.sh
make_environment "[test]"

step "Checking style and types"
.venv/bin/ruff check || stop "ruff found faults; they are listed above."
.venv/bin/ruff format --check || stop "These files are not formatted: run .venv/bin/ruff format"
.venv/bin/mypy || stop "mypy found faults; they are listed above."

step "Running the tests"
.venv/bin/python -m pytest "$@"
