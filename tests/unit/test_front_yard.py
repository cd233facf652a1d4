"""What a visitor sees first: links that work on every page that shows them, and one address for the project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Homepage"]
README = (ROOT / "README.md").read_text()
TEXTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.py", "src/**/*.py", "deploy/**/*", ".github/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and "__pycache__" not in path.parts
)


def links(text: str) -> list[str]:
    """Targets of Markdown links and images, outside of code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    named = re.findall(r"^\[[^\]]+\]: *(\S+)", prose, flags=re.MULTILINE)
    return named + re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"""\b(?:src|href)=["']([^"']+)""", prose)


def test_the_readme_links_work_outside_of_the_repository() -> None:
    """PyPI shows the README too, and knows no other file of ours."""
    found = links(README)
    assert found
    assert not [link for link in found if not link.startswith(("https://", "#"))]


def test_the_readme_links_to_files_that_there_are() -> None:
    raw = HOME.replace("https://github.com/", "https://raw.githubusercontent.com/")
    for link in links(README):
        for base in (f"{HOME}/blob/main/", f"{HOME}/tree/main/", f"{raw}/main/"):
            if link.startswith(base):
                path = link.removeprefix(base).partition("#")[0]
                assert (ROOT / path).exists(), link


def test_the_project_has_one_address() -> None:
    owner, name = HOME.removeprefix("https://github.com/").split("/")
    assert not [url for url in PROJECT["urls"].values() if not url.startswith(HOME)]
    for path in TEXTS:
        for found in re.findall(rf"github(?:usercontent)?\.com/([\w.-]+)/{name}\b", path.read_text(errors="replace")):
            assert found == owner, f"{path.relative_to(ROOT)} names another home of the project"


def test_nobody_has_to_guess_a_path() -> None:
    assert not [str(path.relative_to(ROOT)) for path in TEXTS if "/path/to" in path.read_text(errors="replace")]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_versions_that_are_tested_are_the_ones_that_are_promised(version: str) -> None:
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
