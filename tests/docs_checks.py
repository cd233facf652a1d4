"""What the tests of the documentation hold against each page.

Every function returns problems as lines of text that name the page, the line, and what to do; an empty list is a page
without problems.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from docs_commands import VLLM_FLAGS, all_options, check, commands_of, head_of, is_checked, words_of
from docs_pages import ROOT, Block, Page, Spot, target_of

# Flags of other programs that our pages name in running text.
OTHERS_FLAGS = frozenset(["--shm-size", "--ipc", "--no-deps", "--gpus", "--cap-add", "--device", "--build-arg"])
_PATH = re.compile(r"^[\w./-]*/[\w.-]+\.(?:py|md|toml|json|yaml|yml|svg)$")
_PLACES = (ROOT, ROOT / "src", ROOT / "src/headwater", ROOT / "docs", ROOT / "tests")


class Verdict(NamedTuple):
    """What was done with one block."""

    kind: str
    done: str
    """executed, excerpt (of an example, which has a test of its own), parsed, text, or skipped."""
    note: str
    problem: str


def link_problems(page: Page) -> list[str]:
    """Links whose file or anchor is not there."""
    problems = []
    for link in page.links:
        found = target_of(page, link.text)
        if found is None:
            continue
        path, anchor = found
        if not path.exists():
            problems.append(f"{link.place}: the link {link.text} leads to {_short(path)}, which does not exist")
        elif anchor and path.suffix == ".md" and anchor not in Page(path).anchors:
            has = ", ".join(sorted(Page(path).anchors))
            problems.append(f"{link.place}: {_short(path)} has no heading #{anchor}; it has: {has}")
    return problems


def inline_problems(page: Page) -> list[str]:
    """Commands, options, make targets and files in running text that do not exist. The changelog may name old ones."""
    if page.name == "CHANGELOG.md":
        return []
    problems = []
    for spot in page.inline_code:
        if wrong := _inline_problem(spot, page):
            problems.append(f"{spot.place}: `{spot.text}`: {wrong}")
    return problems


def _inline_problem(spot: Spot, page: Page) -> str:
    words = words_of(spot.text)
    if head_of(spot.text) in ("headwater", "make") and len(words) > 1 and "_" not in words[0]:
        return check(spot.text)
    if spot.text.startswith("--") and len(spot.text) > 2:
        option = re.split(r"[ =,]", spot.text)[0]
        if "…" not in option and option not in all_options() | VLLM_FLAGS | OTHERS_FLAGS | _foreign(page):
            return "no command of ours has it (flags of others: OTHERS_FLAGS in tests/docs_checks.py)"
    if not _PATH.match(spot.text) or spot.text.startswith(("/", "~")) or page.name in _ABOUT_OTHERS:
        return ""
    there = any((place / spot.text).exists() for place in (*_PLACES, page.path.parent))
    return "" if there else "there is no such file"


# Pages that name options and files of other projects.
_ABOUT_OTHERS = {"docs/coming-from.md"}


def _foreign(page: Page) -> frozenset[str]:
    if page.name not in _ABOUT_OTHERS:
        return frozenset()
    return frozenset(spot.text.split()[0] for spot in page.inline_code if spot.text.startswith("--"))


def judge(block: Block) -> Verdict:
    """What kind of block it is, and whether it parses. Python is run elsewhere, all blocks of a page together."""
    if block.not_run:
        return Verdict(block.language or "text", "skipped", block.not_run, "")
    match block.language:
        case "python":
            example = excerpt_of(block)
            return Verdict("python", "excerpt" if example else "executed", example, "")
        case "json":
            return _parsed(block, "json", _json)
        case "yaml" | "yml":
            return _parsed(block, "yaml", lambda text: list(yaml.safe_load_all(text)))
        case "toml":
            return _parsed(block, "toml", tomllib.loads)
        case "" | "text" | "sh" | "bash" | "shell" | "console":
            return _shell(block)
        case "dockerfile" | "Dockerfile" | "ini" | "promql":
            return Verdict(block.language, "text", "no parser for it here", "")
    what = "use python, json, yaml, toml, console, sh or text, or teach judge() in tests/docs_checks.py the new kind"
    return Verdict(block.language, "unknown", "", f"{block.place}: a block of kind {block.language!r}: {what}")


def excerpt_of(block: Block) -> str:
    """The program in examples/ that has all lines of a block, in their order, maybe with others between them; empty if
    there is none. The tests of the examples run these."""
    lines = [line.strip() for line in block.text.splitlines() if line.strip()]
    for path in sorted((ROOT / "examples").glob("*.py")):
        remaining = iter([line.strip() for line in path.read_text().splitlines()])
        if all(line in remaining for line in lines):
            return str(path.relative_to(ROOT))
    return ""


def _shell(block: Block) -> Verdict:
    commands = commands_of(block)
    problems = [f"{block.place}: `{_first(line)}`: {wrong}" for line in commands if (wrong := check(line))]
    if not commands:
        if block.language in ("sh", "bash", "shell", "console"):
            return Verdict("shell", "text", _first(block.text), f"{block.place}: a shell block without a command")
        return Verdict("text", "text", _first(block.text), "")
    names = sorted({head_of(line) for line in commands if not is_checked(line)})
    note = f"named only: {', '.join(names)}" if names else ""
    return Verdict("shell", "parsed", note, "\n".join(problems))


def _parsed(block: Block, kind: str, parse: Any) -> Verdict:
    try:
        parse(block.text)
    except (ValueError, yaml.YAMLError) as error:
        return Verdict(kind, "parsed", "", f"{block.place}: no {kind.upper()}: {error}")
    return Verdict(kind, "parsed", "", "")


def _json(text: str) -> Any:
    """An object, or the part of one: `"name": value`."""
    return json.loads(text if text.lstrip()[:1] in "[{" else f"{{{text}}}")


def nav_pages(nav: list[Any]) -> Iterator[str]:
    """The files that a site's navigation names."""
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from nav_pages(value)
        else:
            yield value


def read_site() -> dict[str, Any]:
    """mkdocs.yml; Python objects in it are read as None."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    return dict(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader))


def _first(text: str) -> str:
    line = text.strip().splitlines()[0]
    return line if len(line) < 72 else line[:70] + " …"


def _short(path: Any) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
