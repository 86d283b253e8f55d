"""Rules of the code base that no tool checks."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import omni_async

ROOT = Path(omni_async.__file__).parent.parent
PACKAGE = ROOT / "omni_async"
KERNELS = ROOT / "triton_kernels"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *KERNELS.rglob("*.py")])
FAMILIES = (
    *("qwen", "llama", "smollm", "cosyvoice", "mimo", "glm", "hunyuan", "voxcpm", "mammoth", "dynin", "covo"),
    *("mistral", "gemma", "whisper"),
)
VAGUE_NAMES = re.compile(r"utils?\b|utils?_|manager|helper", re.IGNORECASE)
PROBES = ("getattr", "hasattr", "setattr", "delattr")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), shown(path))


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports anywhere, with each imported name as if it were a module too."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}:{node.lineno}: relative import"
            module = node.module or ""
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def run_python(code: str) -> str:
    """Run code in a fresh interpreter, and return what it printed."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 50
    assert PACKAGE / "api.py" in SOURCES
    assert KERNELS / "omni_async_kernels" / "__init__.py" in SOURCES


# -- the public names ---------------------------------------------------------------------------------------------


def test_all_is_sorted_and_complete() -> None:
    tree = tree_of(PACKAGE / "__init__.py")
    names = [alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names]
    assert sorted(omni_async.__all__) == omni_async.__all__
    assert set(omni_async.__all__) == {*names, "__version__"}


def test_every_exception_and_event_is_public() -> None:
    from omni_async import errors, types

    for module in (errors, types):
        defined = {n.name for n in tree_of(Path(module.__file__)).body if isinstance(n, ast.ClassDef)}
        assert defined <= set(omni_async.__all__)


def test_importing_is_light_and_quick() -> None:
    printed = run_python(
        "import sys, time; start = time.perf_counter(); import omni_async, omni_async.cli\n"
        "print(time.perf_counter() - start, sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    seconds, heavy = printed.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 3  # a tenth of it on a quiet machine


# -- directions of imports ----------------------------------------------------------------------------------------


def test_the_scheduler_works_without_torch() -> None:
    modules = [f"omni_async.scheduler.{p.stem}" for p in (PACKAGE / "scheduler").glob("*.py") if p.stem != "__init__"]
    assert len(modules) >= 5
    run_python(f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}")


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("omni_async/scheduler", ("torch", "asyncio", "threading", "omni_async.stage", "omni_async.runner")),
        (
            "omni_async/models",
            ("stage", "api", "stream", "mailbox", "live", "scheduler", "runner", "host", "intake", "loading"),
        ),
        ("omni_async/backend", ("stage", "api", "stream", "mailbox", "scheduler", "runner", "models", "loading")),
        ("omni_async/runner", ("stage", "api", "stream", "mailbox", "intake", "loading", "models.registry")),
        ("omni_async/sampling", ("stage", "api", "stream", "mailbox", "runner", "models", "loading")),
        ("omni_async/text", ("torch", "stage", "api", "stream", "mailbox", "scheduler", "runner", "models", "loading")),
        ("omni_async/loading", ("stage", "api", "stream", "mailbox", "scheduler", "runner")),
        ("triton_kernels", ("",)),
    ],
)
def test_dependencies_point_one_way(folder: str, forbidden: tuple[str, ...]) -> None:
    outside = ("torch", "asyncio", "threading")
    names = tuple(n if n in outside or n.startswith("omni_async") else f"omni_async.{n}".rstrip(".") for n in forbidden)
    files = [path for path in SOURCES if path.is_relative_to(ROOT / folder)]
    assert files
    wrong = {f"{shown(path)}: {name}" for path in files for name in imports_of(path) if is_within(name, names)}
    assert not wrong


# -- wording ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=shown)
def test_a_file_keeps_the_house_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    faults = faults_of(text)
    if VAGUE_NAMES.search(shown(path)):
        faults.append("a vague file name")
    if len(lines) > 400:
        faults.append(f"{len(lines)} lines are above the limit of 400")
    for number, line in enumerate(lines, 1):
        if re.search(r"#\s*type:\s*ignore(?!\[)", line):
            faults.append(f"line {number}: `type: ignore` without a code")
        if re.search(r"#\s*noqa(?!:)", line):
            faults.append(f"line {number}: `noqa` without a code")
    if not may_name_families(path):
        faults += [f"names the model family {family}" for family in FAMILIES if family in text.lower()]
    assert not faults


def may_name_families(path: Path) -> bool:
    return any(path.is_relative_to(PACKAGE / folder) for folder in ("models", "loading", "cli"))


def faults_of(code: str) -> list[str]:
    """What a file's syntax tree shows."""
    tree = ast.parse(code)
    return [*probes(tree), *broad_handlers(tree), *undocumented(tree, code.splitlines()), *vague_names(tree)]


def vague_names(tree: ast.Module) -> Iterator[str]:
    """Classes and functions that are not named after what they are or do."""
    for node in ast.walk(tree):
        if isinstance(node, Definition) and VAGUE_NAMES.search(node.name):
            yield f"line {node.lineno}: a vague name: {node.name}"


def probes(tree: ast.Module) -> Iterator[str]:
    """Attributes looked up by name; a frozen dataclass's `object.__setattr__` is an attribute of `object`, no probe."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PROBES:
            yield f"line {node.lineno}: {node.func.id}"


def broad_handlers(tree: ast.Module) -> Iterator[str]:
    """`except:` and `except Exception:`; one that takes BaseException must pass it on, by name or by `raise`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = [] if node.type is None else [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)]
            passes_on = node.name is not None or any(isinstance(n, ast.Raise) and n.exc is None for n in node.body)
            if node.type is None or "Exception" in kinds or ("BaseException" in kinds and not passes_on):
                yield f"line {node.lineno}: a broad `except`"


def undocumented(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """The module and its public classes, functions and methods that have no docstring, nor `noqa: D102` beside them."""
    if tree.body and ast.get_docstring(tree) is None:
        yield "the module has no docstring"
    waiting: list[ast.Module | ast.ClassDef] = [tree]
    while waiting:
        for node in waiting.pop().body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                if ast.get_docstring(node) is None and "noqa: D102" not in lines[node.lineno - 1]:
                    yield f"line {node.lineno}: {node.name} has no docstring"
                if isinstance(node, ast.ClassDef):
                    waiting.append(node)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("'''M.'''\nhasattr(1, 'a')", "line 2: hasattr"),
        ("'''M.'''\ntry: pass\nexcept: pass", "line 3: a broad `except`"),
        ("'''M.'''\ntry: pass\nexcept (OSError, Exception) as e: raise", "line 3: a broad `except`"),
        ("'''M.'''\ntry: pass\nexcept BaseException: pass", "line 3: a broad `except`"),
        ("'''M.'''\nclass A:\n  '''A.'''\n  def b(self): pass", "line 4: b has no docstring"),
        ("'''M.'''\nclass _IdHelper: pass", "line 2: a vague name: _IdHelper"),
        ("def _a(): pass", "the module has no docstring"),
    ],
)
def test_the_rules_see_faults(code: str, fault: str) -> None:
    assert faults_of(code) == [fault]
