"""Where and on what a benchmark ran."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "numpy", "anyio", "uvloop", "gguf")


@dataclass(frozen=True, slots=True)
class Environment:
    """The facts that a result cannot be read without."""

    date: str
    commit: str
    """The commit of the working tree, `+` appended if it was changed."""
    cpu: str
    cores: int
    """Cores that this process may use."""
    threads: int
    """Threads of one torch operation."""
    gpu: str | None
    memory_bytes: int
    load: tuple[float, float, float]
    """Running processes, averaged over 1, 5 and 15 minutes before the run: others on the machine spoil figures."""
    system: str
    versions: dict[str, str]
    seed: int
    quick: bool
    """A run with few repeats, made to see that the benchmark works."""

    @classmethod
    def here(cls, seed: int, quick: bool) -> "Environment":
        """Look around."""
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            load=os.getloadavg(),
            system=f"{platform.system()} {platform.release()}",
            versions={"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
            seed=seed,
            quick=quick,
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ("git", "-C", str(Path(__file__).parent), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or an unpacked archive
        return "unknown"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
