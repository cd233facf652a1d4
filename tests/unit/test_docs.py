"""README, docs and examples: links lead somewhere, commands and options exist, and every code block is run or checked.

Where one of these fails, the message names the page and the line. A block that cannot run says why in a comment right
before it: `<!-- not run: it needs a GPU -->`.
"""

from __future__ import annotations

import importlib
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
import headwater.connector
import headwater.transfer
from headwater.cli import run as run_cli

from docs_checks import excerpt_of, inline_problems, judge, link_problems, nav_pages, read_site
from docs_commands import check, commands_of, config_file, head_of, words_of
from docs_pages import ROOT, Block, Page, pages, slugify
from docs_python import LOCAL_POOL, run_python
from support import identity

PAGES = pages()
BY_NAME = {page.name: page for page in PAGES}
# These ask a server, and tests/integration/test_docs_server.py runs them against one.
WITH_SERVER = re.compile(r"127\.0\.0\.1:8000|\bclient\.chat\b")


@pytest.fixture
def pool_url() -> Iterator[str]:
    """A pool of this test's own, whatever name a page gives to its pool."""
    name = f"headwater-docs-{secrets.token_hex(6)}"
    yield f"shm:///{name}"
    shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


def runnable(page: Page) -> list[Block]:
    blocks = [b for b in page.blocks if b.language == "python" and not WITH_SERVER.search(b.text)]
    return [block for block in blocks if judge(block).done == "executed"]


@pytest.mark.parametrize("name", BY_NAME)
def test_links_lead_somewhere(name: str) -> None:
    problems = link_problems(BY_NAME[name])
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("name", BY_NAME)
def test_commands_options_and_files_in_running_text_exist(name: str) -> None:
    problems = inline_problems(BY_NAME[name])
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("name", [page.name for page in PAGES if page.blocks])
def test_blocks_are_of_a_known_kind_and_parse(name: str) -> None:
    problems = [verdict.problem for block in BY_NAME[name].blocks if (verdict := judge(block)).problem]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", [page.name for page in PAGES if runnable(page)])
def test_python_blocks_run_and_print_what_the_page_shows(name: str, pool_url: str, tmp_path: Path) -> None:
    blocks = runnable(BY_NAME[name])
    ran = run_python(blocks, pool_url, tmp_path)
    assert ran.returncode == 0, (
        f"{name}: {ran.error}\n(names that the page takes for granted: SETUP in tests/docs_python.py)"
    )
    for block, printed in zip(blocks, ran.printed, strict=False):
        shown = _output_after(BY_NAME[name], block)
        assert shown is None or shown.strip() == printed.strip(), f"{block.place} prints\n{printed}"


def _output_after(page: Page, block: Block) -> str | None:
    """The untyped block that begins on the line after this one, as in README: what it prints."""
    end = block.line + block.text.count("\n") + 2
    return next((b.text for b in page.blocks if b.line in (end, end + 1) and b.language in ("", "text")), None)


@pytest.mark.slow
def test_cheap_commands_of_transcripts_run(pool_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Looking at a pool, and every command's help."""
    with hw.open_pool(f"{pool_url}?capacity=8MiB") as pool:
        spec = hw.KVSpec.gqa(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float16")
        space = pool.space(identity(), spec)
        keys = space.keys(range(300))
        (shard,) = hw.Topology().shards(spec)
        space.write(keys.chunks(), shard, [space.empty(chunk, shard) for chunk in keys.chunks()])
    looked, helped = 0, set()
    for page in PAGES:
        for block in page.blocks:
            for line in commands_of(block) if judge(block).kind == "shell" else []:
                words = words_of(line)[1:]
                path = tuple(words[:2] if words[:1] in (["pool"], ["bench"], ["config"]) else words[:1])
                if head_of(line) != "headwater" or path in ((), ("--help",), ("--version",)):
                    continue
                if path[:2] in (("pool", "stats"), ("pool", "ls"), ("pool", "verify")):
                    asked = [LOCAL_POOL.sub(pool_url, word) for word in words if "://" not in word or "shm" in word]
                    asked = [pool_url if word.isupper() else word for word in asked]
                    if not any("://" in word for word in asked):
                        asked.insert(2, pool_url)
                    if any("," in word for word in asked):
                        continue  # it has a tier on another host
                    assert run_cli(asked) == 0, f"{block.place}: {line}\n{capfd.readouterr().err}"
                    looked += 1
                if path not in helped:
                    helped.add(path)
                    assert run_cli([*path, "--help"]) == 0, f"{block.place}: {line}"
    assert looked >= 2
    assert len(helped) >= 10
    assert run_cli(["--version"]) == 0


@pytest.mark.parametrize("name", [p.name for p in PAGES if any("[pools" in b.text for b in p.blocks)])
def test_configurations_can_be_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for block in BY_NAME[name].blocks:
        if block.language != "toml" or "[pools" not in block.text:
            continue
        for variable in re.findall(r'_env = "(\w+)"', block.text):
            monkeypatch.setenv(variable, "x" * 32)
        file = tmp_path / "headwater.toml"
        file.write_text(config_file(block.text, tmp_path))
        code = run_cli(["config", "check", str(file)])
        assert code == 0, f"{block.place}: {capfd.readouterr()}"


def test_the_site_has_every_page_once_and_no_other() -> None:
    """What `mkdocs build --strict` would say, without building."""
    named = Counter(nav_pages(read_site()["nav"]))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | {
        "SECURITY.md",
        "CHANGELOG.md",
    }
    if (ROOT / "CONTRIBUTING.md").exists():
        there.add("CONTRIBUTING.md")
    assert sorted(there - set(named)) == [], "pages that `nav` in mkdocs.yml does not name"
    assert sorted(set(named) - there) == [], "`nav` in mkdocs.yml names pages that do not exist"
    assert [name for name, times in named.items() if times > 1] == []


def test_the_api_reference_has_every_public_name() -> None:
    """`headwater.__all__` in api.md; exceptions come from their module as a whole. The section on connectors has
    `headwater.connector.__all__`, and what moves blocks without one."""
    before, _, rest = (ROOT / "docs/api.md").read_text().partition("\n## Connector\n")
    connector, _, after = rest.partition("\n## ")
    pattern = re.compile(r"^::: headwater\.([\w.]+)$", re.MULTILINE)
    shown = {name.rsplit(".", 1)[-1]: f"headwater.{name}" for name in pattern.findall(connector)}
    names = {*headwater.connector.__all__, *headwater.transfer.__all__}
    modes = {name for name in names if name.isupper()}
    assert sorted(shown) == sorted(names - modes)
    assert [name for name in modes if f"`{name}`" not in connector] == []
    for name, home in shown.items():
        assert hasattr(importlib.import_module(home.rpartition(".")[0]), name), home
    homes = {name.rsplit(".", 1)[-1]: f"headwater.{name}" for name in pattern.findall(before + after)}
    public = {name: f"{getattr(hw, name).__module__}.{name}" for name in hw.__all__ if name != "__version__"}
    errors = {name for name, home in public.items() if home.startswith("headwater.errors.")}
    assert {name: home for name, home in public.items() if name not in errors} == homes
    assert "::: headwater.errors" in (ROOT / "docs/errors.md").read_text()


def test_every_block_is_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Shows, for every page, what happens to its blocks; lists those that nothing checks."""
    counts: dict[str, Counter[str]] = {}
    unchecked = []
    for page in PAGES:
        for block in page.blocks:
            verdict = judge(block)
            counts.setdefault(verdict.kind, Counter())[verdict.done] += 1
            if verdict.done in ("skipped", "text") or verdict.note:
                unchecked.append(f"  {verdict.done:9} {block.place:32} {verdict.note}")
            assert verdict.done != "unknown", verdict.problem
            assert verdict.done != "skipped" or len(verdict.note.split()) >= 3, f"{block.place}: say why it is not run"
    columns = ("executed", "excerpt", "parsed", "text", "skipped")
    with capsys.disabled():
        print(f"\ncode blocks  {''.join(f'{column:>10}' for column in columns)}")
        for kind, done in sorted(counts.items()):
            print(f"{kind:13}{''.join(f'{done[column]:10}' for column in columns)}")
        print("\n".join(unchecked))
        print("Also run: looks at a pool, every command's --help; with servers: tests/integration/test_docs_server.py")
    assert counts["python"]["executed"] >= 5


class TestTheChecksThemselves:
    """Pages that are wrong in one way each, and the line that says so."""

    @staticmethod
    def page(text: str) -> Page:
        return Page(ROOT / "docs" / "wrong.md", text)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("see [this](nowhere.md)", "which does not exist"),
            ("see [this](vllm.md#no-such-heading)", "has no heading #no-such-heading"),
            ("see [this](https://github.com/headwater-kv/headwater/blob/main/docs/gone.md)", "which does not exist"),
            ('<img src="images/gone.svg">', "which does not exist"),
        ],
    )
    def test_broken_links_are_found(self, text: str, says: str) -> None:
        page = self.page(text)
        assert says in "\n".join(link_problems(page))

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("run `headwater pool stts`", "has no command stts"),
            ("run `headwater serve --prot 3`", "has no option --prot"),
            ("run `make no-such-target`", "no target no-such-target"),
            ("with `--no-such-option`", "no command of ours has it"),
            ("in `tests/unit/test_gone.py`", "no such file"),
        ],
    )
    def test_wrong_words_in_running_text_are_found(self, text: str, says: str) -> None:
        page = self.page(text)
        assert says in "\n".join(inline_problems(page))

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("```\n$ headwater pool receive --listn x\n```", "has no option --listn"),
            ("```\nheadwater serve --port eight\n```", "is no number"),
            ("```\nvllm serve M --kv-transfer-config '{\"kv_connector\": }'\n```", "no JSON"),
            (
                '```\nvllm serve M --kv-transfer-config \'{"kv_connector": "HeadwaterConnector",\n'
                '  "kv_role": "kv_both", "kv_connector_module_path": "headwater.integrations.vllm",\n'
                '  "kv_connector_extra_config": {"pol": 1}}\'\n```',
                "'pol'; known are",
            ),
            ("```\ncurl http://127.0.0.1:8000/v1/nothing -d '{}'\n```", "answers /v1/nothing"),
            ("```\npip install 'headwater[nothing]'\n```", "no extra nothing"),
            ("```json\n{1}\n```", "no JSON"),
            ("```toml\na = = 1\n```", "no TOML"),
            ("```yaml\na: [\n```", "no YAML"),
            ("```sh\nfrobnicate --all\n```", "nobody knows how to check `frobnicate`"),
            ("```cobol\nMOVE A TO B\n```", "a block of kind 'cobol'"),
        ],
    )
    def test_wrong_blocks_are_found(self, text: str, says: str) -> None:
        page = self.page(text)
        (block,) = page.blocks
        assert says in judge(block).problem

    def test_a_python_block_that_raises_is_found_with_its_line(self, pool_url: str, tmp_path: Path) -> None:
        page = self.page("text\n\n```python\nx = 1\nraise KeyError(x)\n```\n")
        ran = run_python(page.blocks, pool_url, tmp_path)
        assert ran.returncode == 1
        assert f'{page.name}", line 5' in ran.error

    def test_a_reason_counts_only_right_before_its_block(self) -> None:
        page = self.page("<!-- not run: it needs a GPU -->\n```python\na\n```\n\n```python\nb\n```\n")
        assert [block.not_run for block in page.blocks] == ["it needs a GPU", ""]

    def test_lines_of_an_example_are_an_excerpt_and_others_are_not(self) -> None:
        example = next(iter(sorted((ROOT / "examples").glob("*.py"))))
        lines = [line for line in example.read_text().splitlines() if line.strip()]
        shown = Block("p", 1, "python", f"{lines[-4].strip()}\n{lines[-2].strip()}\n", "")
        assert excerpt_of(shown) == f"examples/{example.name}"
        assert excerpt_of(Block("p", 1, "python", f"{lines[-2]}\n{lines[-4]}\nno_such_name\n", "")) == ""

    def test_headings_become_anchors_as_on_github(self) -> None:
        assert slugify("`headwater bench vllm --device cuda`, 2026") == "headwater-bench-vllm---device-cuda-2026"

    def test_a_synopsis_is_read_without_its_explanations(self) -> None:
        text = "headwater --help     headwater --version\nheadwater pool ls U  what's in it\nheadwater chat       talk"
        found = commands_of(Block("p", 1, "", text, ""))
        assert found == ["headwater --help", "headwater --version", "headwater pool ls U", "headwater chat"]
        assert not any(check(line) for line in found)


def test_the_tests_and_figures_that_a_page_names_exist() -> None:
    page = ROOT / "docs" / "disaggregation.md"
    table = page.read_text().partition("## How it is tested\n")[2]
    rows = [line for line in table.splitlines() if re.match(r"\| \d+\. ", line)]
    assert [int(row[2:].partition(".")[0]) for row in rows] == list(range(1, 21))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    bench = "\n".join(path.read_text() for path in (ROOT / "src" / "headwater" / "bench").glob("*.py"))
    for row in rows:
        names = re.findall(r"`(\w+)`", row.rpartition(" | ")[2])
        assert names, row
        for name in names:
            # A figure's name may end with that of its case.
            found = f"def {name}(" in tests if name.startswith("test_") else _is_figure(name, bench)
            assert found, f"{page.name}: there is no {name}"


def _is_figure(name: str, bench: str) -> bool:
    stem, _, case = name.partition("push_ratio_")
    return f'"{name}"' in bench or (not stem and f'PushCase("{case}"' in bench)
