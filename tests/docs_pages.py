"""What the tests of the documentation read: Markdown pages, taken apart into links, headings and code blocks.

The parser is markdown-it-py, which Rich brings along: what it takes for a block, a reader on GitHub sees as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "examples", "deploy", ".github")
OWN_URLS = re.compile(
    r"https://(?:github\.com/headwater-kv/headwater/(?:blob|tree|raw)|raw\.githubusercontent\.com/headwater-kv/headwater)/main/"
)
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(.*?)\s*-->", re.DOTALL)
_HTML_LINK = re.compile(r"""\b(?:src|href|srcset)=["']([^"'\s]+)""")
_ANCHOR = re.compile(r"""\b(?:id|name)=["']([^"'\s]+)""")


@dataclass(frozen=True)
class Block:
    """A code block: fenced, or indented by four spaces."""

    page: str
    line: int
    language: str
    text: str
    not_run: str
    """Why nothing runs it, from a comment `<!-- not run: … -->` right before it; empty: something must."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Spot:
    """A link's target, or a piece of inline code, and where it stands."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


class Page:
    """One Markdown file, parsed once."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self.name = str(path.relative_to(ROOT))
        self._text = text

    @cached_property
    def tokens(self) -> list[Token]:
        return (
            MarkdownIt("commonmark").enable("table").parse(self.path.read_text() if self._text is None else self._text)
        )

    @cached_property
    def anchors(self) -> set[str]:
        """As GitHub makes them from headings; the site is told to make the same."""
        found: dict[str, int] = {}
        named = set()
        for token, following in zip(self.tokens, self.tokens[1:], strict=False):
            if token.type == "heading_open":
                slug = slugify("".join(part.content for part in following.children or [] if part.type != "html_inline"))
                seen = found.get(slug, 0)
                found[slug] = seen + 1
                named.add(f"{slug}-{seen}" if seen else slug)
            if token.type in ("html_block", "inline"):
                named.update(_ANCHOR.findall(token.content))
        return named

    @cached_property
    def blocks(self) -> list[Block]:
        blocks = []
        not_run = ""
        for token in self.tokens:
            if token.type in ("fence", "code_block"):
                line = (token.map or [0])[0] + 1
                language = token.info.split()[0] if token.info.strip() else ""
                blocks.append(Block(self.name, line, language, token.content, not_run))
            if token.level == 0 or token.type == "html_block":
                match = _NOT_RUN.search(token.content) if token.type == "html_block" else None
                not_run = match.group(1) if match else ""
        return blocks

    @property
    def links(self) -> Iterator[Spot]:
        for token in self.tokens:
            line = (token.map or [0])[0] + 1
            if token.type == "html_block":
                yield from (Spot(self.name, line, url) for url in _HTML_LINK.findall(token.content))
            for part in token.children or []:
                if part.type == "html_inline":
                    yield from (Spot(self.name, line, url) for url in _HTML_LINK.findall(part.content))
                target = part.attrs.get("href") or part.attrs.get("src")
                if isinstance(target, str):
                    yield Spot(self.name, line, target)

    @property
    def inline_code(self) -> Iterator[Spot]:
        for token in self.tokens:
            line = (token.map or [0])[0] + 1
            yield from (Spot(self.name, line, p.content) for p in token.children or [] if p.type == "code_inline")


def slugify(heading: str) -> str:
    """GitHub's: lower case, no punctuation, one hyphen for each space."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def pages() -> list[Page]:
    """Every page that a reader may open: those at the top, in docs, and beside examples and deployments."""
    paths = sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        paths += sorted((ROOT / folder).rglob("*.md"))
    return [Page(path) for path in paths]


def target_of(page: Page, link: str) -> tuple[Path, str] | None:
    """The file and the anchor that a link names; None for a link that leaves the repository."""
    own = OWN_URLS.match(link)
    if own is None and re.match(r"[a-z][a-z+.-]*:", link):
        return None
    path, _, anchor = (link[own.end() :] if own else link).partition("#")
    start = ROOT if own else page.path.parent
    return ((start / path).resolve() if path or own else page.path), anchor
