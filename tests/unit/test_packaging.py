"""What is distributed."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import omni_async

ROOT = Path(omni_async.__file__).parent.parent


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source archive, and a wheel that was made from nothing else."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_holds_the_packages_and_nothing_else(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "omni_async",
        "omni_async_kernels",
        f"omni_async-{omni_async.__version__}.dist-info",
    }
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "omni_async").rglob("*.py")}
    assert sources <= set(names)
    assert {"omni_async/py.typed", "omni_async_kernels/py.typed", "omni_async_kernels/__init__.py"} <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_source_archive_can_be_tested(dist: Path) -> None:
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "tests/unit/test_packaging.py", "scripts/test.sh"} <= names
    assert "triton_kernels/omni_async_kernels/__init__.py" in names


def test_an_unpacked_wheel_works(dist: Path, tmp_path: Path) -> None:
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        metadata = archive.read(f"omni_async-{omni_async.__version__}.dist-info/METADATA").decode()
        entry_points = archive.read(f"omni_async-{omni_async.__version__}.dist-info/entry_points.txt").decode()
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import omni_async, omni_async_kernels; from omni_async.cli import main\n"
        "print(omni_async.__file__, omni_async_kernels.__file__, omni_async.__version__)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    package, kernels, version = done.stdout.split()
    assert Path(package).is_relative_to(tmp_path)
    assert Path(kernels).is_relative_to(tmp_path)
    assert f"\nVersion: {version}\n" in metadata
    assert "omni-async = omni_async.cli:main" in entry_points
