"""The documents agree with the code."""

import ast
import re
from pathlib import Path

import pytest

import omni_async
from omni_async import EngineOptions, SamplingParams, StageStats

ROOT = Path(omni_async.__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text_of(page))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_python_blocks_use_names_that_exist(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL):
        tree = compile(block, shown(page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert imported == {"omni_async"}
        assert names <= set(omni_async.__all__)


def test_the_api_page_names_everything_public() -> None:
    text = text_of(ROOT / "docs" / "api.md")
    assert [name for name in omni_async.__all__ if name != "__version__" and f"`{name}" not in text] == []
    for kind in (EngineOptions, SamplingParams, StageStats):
        assert [name for name in kind.__slots__ if f"`{name}`" not in text] == []


def test_the_readme_s_commands_exist() -> None:
    commands = re.findall(r"^sh (\S+)$", text_of(ROOT / "README.md"), re.MULTILINE)
    assert commands == ["scripts/quickstart.sh", "scripts/test.sh"]
    assert all((ROOT / command).is_file() for command in commands)
    assert commands[1] in text_of(ROOT / ".ci" / "run")


def test_the_cases_name_tests_that_exist() -> None:
    named = re.findall(r"`(\w+/test_\w+\.py)(?:::(\w+))?`", text_of(ROOT / "docs" / "cases.md"))
    assert len(named) > 50
    for path, name in named:
        source = text_of(ROOT / "tests" / path)
        assert re.search(rf"^(async )?(def|class) {name}\b", source, re.MULTILINE), (path, name)
