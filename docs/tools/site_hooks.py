"""What the site needs beyond MkDocs: pages that lie outside docs/, and links that leave it.

SECURITY.md and its like belong at the top of a repository, where GitHub looks for them; the site has them as pages of
its own. Links from a page to anything else outside docs/ (a program in examples/, a source file) go to the repository.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
TOP_PAGES = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
# What a browser fetches without a click: a page must bring all of it along.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?https?://[^\"'\s>]+|<link\b[^>]*stylesheet[^>]*https?://[^>]*"
)
_LINK = re.compile(r"(\]\(|^\[[^\]\n]+\]:\s+)([^)\s]+)(?=[)\s]|$)", re.MULTILINE)
_LABEL = re.compile(r"^\[([^\]\n]+)\]:", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's top."""
    for name in TOP_PAGES:
        if (ROOT / name).exists():
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite links that leave docs/, outside of code blocks."""
    source = PurePosixPath(page.file.src_uri)
    folder = (
        PurePosixPath()
        if source.name in TOP_PAGES and len(source.parts) == 1
        else PurePosixPath("docs") / source.parent
    )
    repository = config.repo_url.rstrip("/") + "/blob/main/"

    def rewritten(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            own = match[2].removeprefix(repository)
            if own == match[2]:
                return match[0]
            target, _, anchor = own.partition("#")
            path = target
        else:
            path = normpath(str(folder / target))
        suffix = f"#{anchor}" if anchor else ""
        if path.startswith("docs/"):
            return f"{match[1]}{relpath(path, str(PurePosixPath('docs') / source.parent))}{suffix}"
        if path in TOP_PAGES:
            return f"{match[1]}{relpath(path, str(source.parent))}{suffix}"
        return f"{match[1]}{repository}{path}{suffix}"

    labels = {label.lower() for label in _LABEL.findall(markdown)}

    def outside_code(text: str) -> str:
        # A plain `[layer][head]` is text on GitHub; here it would be looked up as a name of the API.
        plain = re.sub(r"\](?=\[([^\]]+)\])", lambda m: "]" if m[1].lower() in labels else "]\\", text)
        return _LINK.sub(rewritten, plain)

    parts = re.split(r"(^```.*?^```[^\n]*$|`[^`\n]+`)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("`") else outside_code(part) for part in parts)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that fetches anything from another host."""
    if found := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} would make its readers fetch from another host: {found[0]}")
    return output
