#!/bin/sh
# From a fresh clone to a streamed answer: `sh scripts/quickstart.sh`, or with a question of your own as the argument.
set -eu
cd "$(dirname "$0")/.."
. scripts/environment.sh
make_environment ""

question=${1:-What is the capital of France, and what is it known for?}
step "SmolLM2-135M-Instruct answers on the CPU: $question"
.venv/bin/omni-async generate --chat --stats --device cpu --temperature 0 --max-tokens 200 "$question" ||
    stop "The model did not answer; the message is above."

printf '\nNext: .venv/bin/omni-async chat\n'
