"""Command lines of the documentation, taken out of their blocks and compared with the programs they name.

Every check returns what is wrong as text, empty if nothing is; nothing here starts a process.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import certifi
import typer

from headwater.cli.app import app
from headwater.errors import HeadwaterError
from headwater.integrations.vllm.options import read_options

from docs_pages import ROOT, Block

PROMPT = re.compile(r"^(?:[a-z0-9@-]*[$#]|>>>) ")
PLACEHOLDER = re.compile(r"^(?:[A-Z][A-Z0-9_.]*\S*|<.*>|\[.*\]|.*…|\.\.\.|[a-z]+\|.*)$")
_EXTRA = re.compile(r"(?:headwater|\.)\[([\w,-]+)\]")

# Flags of `vllm serve` that our pages name. Each was looked up in vLLM 0.32; add one here when you have done so.
VLLM_FLAGS = frozenset(
    [
        "--code-revision",
        "--compilation-config",
        "--config-format",
        "--disable-hybrid-kv-cache-manager",
        "--disable-sliding-window",
        "--dtype",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "--hf-overrides",
        "--host",
        "--kv-events-config",
        "--kv-transfer-config",
        "--load-format",
        "--lora-dtype",
        "--max-model-len",
        "--enable-prompt-tokens-details",
        "--max-num-batched-tokens",
        "--mm-processor-kwargs",
        "--model-impl",
        "--nnodes",
        "--pipeline-parallel-size",
        "--port",
        "--prefix-caching-hash-algo",
        "--quantization",
        "--runner",
        "--served-model-name",
        "--tensor-parallel-size",
        "-tp",
    ]
)


def commands_of(block: Block) -> list[str]:
    """The command lines of a block: after prompts if it has any, else all of its lines; none if it is no shell."""
    lines = block.text.splitlines()
    prompted = any(PROMPT.match(line) for line in lines)
    found = []
    for line in _joined(_without_explanations(lines), prompted):
        bare = PROMPT.sub("", line).strip()
        if (prompted and not PROMPT.match(line)) or not bare or bare.startswith("#"):
            continue
        found.append(bare)
    if block.language in ("", "text") and not prompted:
        found = [line for line in found if head_of(line) in HEADS]
    return found


def _without_explanations(lines: list[str]) -> list[str]:
    """A synopsis (three or more lines of one program) has explanations in a column of their own: they are cut off.
    Where a second command stands there, it becomes a line."""
    synopsis = [line for line in lines if line.startswith("headwater ")]
    if len(synopsis) < 3:
        return lines
    gaps = Counter(match.end() for line in synopsis if (match := re.search(r"\S\s{2,}(?=\S)", line)))
    column = gaps.most_common(1)[0][0] if gaps else 0
    cut: list[str] = []
    for line in lines:
        gap = re.search(r"\s{2,}", line)
        ends = [gap.start()] if gap else []
        ends += [column] if line[column - 1 : column] == " " else []
        if not line.startswith("headwater ") or not column or not ends:
            cut.append(line)
            continue
        end = min(ends)
        cut.append(line[:end].rstrip())
        if line[end:].strip().startswith("headwater "):
            cut.append(line[end:].strip())
    return cut


def _joined(lines: list[str], prompted: bool) -> Iterator[str]:
    """Lines with what continues them: after a backslash, or inside quotes."""
    whole = ""
    for line in lines:
        begins = not whole
        whole = f"{whole}\n{line}" if whole else line
        if whole.endswith("\\"):
            whole = whole[:-1] + " "
            continue
        if begins and prompted and not PROMPT.match(line):
            yield whole
            whole = ""
            continue
        if _open_quotes(whole):
            continue
        yield whole
        whole = ""
    if whole:
        yield whole


def _open_quotes(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def words_of(line: str) -> list[str]:
    """The words of the first command of a line, without variables before it and what it is piped into."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return line.split()
    for index, word in enumerate(words):
        if word in ("|", "&&", ";", "&", ">", ">>", "<"):
            words = words[:index]
            break
    while words and re.match(r"^[A-Z_][A-Z0-9_]*=", words[0]):
        words.pop(0)
    return [word for word in words if word != "\n"]


def head_of(line: str) -> str:
    """The program of a command line: its name without a folder; `python -m headwater` is `headwater`."""
    words = words_of(line)
    if not words:
        return ""
    name = words[0].rsplit("/", 1)[-1]
    return "headwater" if name.startswith("python") and words[1:3] == ["-m", "headwater"] else name


def check(line: str) -> str:
    """What is wrong with a command line."""
    head = head_of(line)
    if head not in HEADS:
        return f"nobody knows how to check `{head}`: add it to HEADS in tests/docs_commands.py"
    words = words_of(line)
    words = words[3:] if head == "headwater" and words[1:2] == ["-m"] else words[1:]
    return HEADS[head](words)


@cache
def command_tree() -> Any:
    """Typer's own tree of the CLI."""
    return typer.main.get_command(app)


@cache
def all_options() -> frozenset[str]:
    """Every option of every `headwater` command."""
    found: set[str] = set()
    waiting = [command_tree()]
    while waiting:
        command = waiting.pop()
        found.update(option for param in command.params for option in [*param.opts, *param.secondary_opts])
        waiting += getattr(command, "commands", {}).values()
    return frozenset(option for option in found | {"--help"} if option.startswith("-"))


def check_headwater(words: list[str]) -> str:
    """Whether the command and its options exist, and whether values that are no placeholders can be meant."""
    command, path = command_tree(), "headwater"
    words = list(words)
    arguments: list[str] = []
    while words:
        word = words.pop(0)
        if word.startswith("-") and word != "-" and not re.match(r"^-\d", word):
            name, has_value, value = word.partition("=")
            params = {option: param for param in command.params for option in [*param.opts, *param.secondary_opts]}
            if name == "--help":
                continue
            if name not in params:
                return f"`{path}` has no option {name}; it has {' '.join(sorted(o for o in params if o[0] == '-'))}"
            param = params[name]
            if getattr(param, "is_flag", False) or getattr(param, "count", False):
                continue
            if not has_value:
                if not words:
                    return ""  # `--share` of …: named, without its value
                value = words.pop(0)
            if wrong := _value_problem(param, value):
                return f"`{path} {name}`: {wrong}"
        elif hasattr(command, "commands"):
            if PLACEHOLDER.match(word):
                return ""
            if word not in command.commands:
                return f"`{path}` has no command {word}; it has {' '.join(sorted(command.commands))}"
            command, path = command.commands[word], f"{path} {word}"
        else:
            arguments.append(word)
    taken = [param for param in command.params if param.param_type_name == "argument"]
    if not hasattr(command, "commands") and not any(param.nargs == -1 for param in taken):
        room = sum(param.nargs for param in taken)
        if len(arguments) > room and path not in _TAKES_MORE:
            return f"`{path}` takes {room} arguments, and gets {' '.join(arguments)}"
    return ""


_TAKES_MORE = {"headwater proxy"}  # several values after --prefill and --decode


def _value_problem(param: Any, value: str) -> str:
    """Only numbers are judged, and by the type of their default: Typer's own types change with its versions."""
    if PLACEHOLDER.match(value) or "$" in value or isinstance(param.default, bool):
        return ""
    if isinstance(param.default, int | float) and not re.fullmatch(r"-?[\d_]+(?:\.\d+)?", value):
        return f"{value} is no number"
    return ""


def check_make(words: list[str]) -> str:
    """Whether the targets exist."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [word for word in words if "=" not in word and not word.startswith("-")]
    unknown = [word for word in named if word not in targets and not PLACEHOLDER.match(word)]
    return f"the Makefile has no target {' '.join(unknown)}" if unknown else ""


def check_vllm(words: list[str]) -> str:
    """Whether flags are known, JSON is JSON, and the connector's options are those of our connector."""
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        name, has_value, inner = flag.partition("=")
        if not name.startswith("-"):
            continue
        if name not in VLLM_FLAGS:
            return f"`vllm serve` is not known to have {name}: look it up, and add it to VLLM_FLAGS"
        text = inner if has_value else value
        if name.endswith("-config") or name in ("--hf-overrides", "--mm-processor-kwargs"):
            try:
                parsed = json.loads(text)
            except ValueError as error:
                return f"{name} is no JSON: {error}"
            if name == "--kv-transfer-config" and (wrong := check_connector(parsed)):
                return wrong
    return ""


def check_connector(config: Mapping[str, Any]) -> str:
    """Whether vLLM would start with this `--kv-transfer-config`, as far as our connector decides that."""
    extra = dict(config.get("kv_connector_extra_config", {}))
    if config.get("kv_connector") == "MultiConnector":
        return next((wrong for inner in extra.get("connectors", []) if (wrong := check_connector(inner))), "")
    if config.get("kv_connector") != "HeadwaterConnector":
        return ""  # somebody else's, on a page that compares
    if config.get("kv_connector_module_path") != "headwater.integrations.vllm":
        return "kv_connector_module_path must be headwater.integrations.vllm"
    if "peer_secret_file" in extra:
        extra["peer_secret_file"] = str(ROOT / "LICENSE")  # a file that exists, and is long enough
    if isinstance(extra.get("pool"), str):
        extra["pool"] = re.sub(r"(secret_file|password_file|ca)=[^&,]+", rf"\1={ROOT / 'LICENSE'}", extra["pool"])
    try:
        read_options(extra, config.get("kv_role"))
    except HeadwaterError as error:
        return str(error)
    return ""


def check_curl(words: list[str]) -> str:
    """Whether the body is JSON and one of our servers has the path."""
    source = _served_paths()
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word in ("-d", "--data", "--json") and value.startswith(("{", "[")):
            try:
                json.loads(value)
            except ValueError as error:
                return f"the body is no JSON: {error}"
        if match := re.match(r"^(?:https?://)?[\w.{}$-]+(?::[\w$]+)(/[\w/.-]*)", word):
            path = match.group(1)
            if path not in source and path != "/":
                return f"no server of ours answers {path}"
    return ""


@cache
def _served_paths() -> frozenset[str]:
    files = [*(ROOT / "src/headwater/serve").rglob("*.py"), *(ROOT / "src/headwater/proxy").rglob("*.py")]
    own = {path for file in files for path in re.findall(r"[\"'](/[\w/.-]+)[\"']", file.read_text())}
    return frozenset(own | {"/reset_prefix_cache", "/metrics", "/collective_rpc"})  # vLLM's, in vllm.md


def check_pip(words: list[str]) -> str:
    """Whether the extras exist."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [extra for word in words for names in _EXTRA.findall(word) for extra in names.split(",")]
    unknown = [extra for extra in named if extra not in known]
    return f"pyproject.toml has no extra {' '.join(unknown)}" if unknown else ""


def check_python(words: list[str]) -> str:
    """Whether the program is there."""
    if words[:1] == ["-m"]:
        return check_pip(words[2:]) if words[1:2] == ["pip"] else ""
    missing = [word for word in words[:1] if word.endswith(".py") and not (ROOT / word).exists()]
    return f"there is no {missing[0]}" if missing else ""


def _named_only(words: list[str]) -> str:
    return ""


HEADS: dict[str, Callable[[list[str]], str]] = {
    "headwater": check_headwater,
    "make": check_make,
    "vllm": check_vllm,
    "curl": check_curl,
    "pip": check_pip,
    "pip3": check_pip,
    "python": check_python,
    "python3": check_python,
    "pytest": _named_only,
    **dict.fromkeys(
        [
            "apt-get",
            "cat",
            "cd",
            "chmod",
            "chown",
            "cp",
            "docker",
            "export",
            "git",
            "grep",
            "helm",
            "ip",
            "jq",
            "kill",
            "kubectl",
            "ls",
            "mkdir",
            "mount",
            "mv",
            "openssl",
            "podman",
            "redis-cli",
            "redis-server",
            "rm",
            "sleep",
            "source",
            "systemctl",
            "tar",
            "mooncake_master",
            "umount",
            "uv",
            "watch",
        ],
        _named_only,
    ),
}
"""Programs that a shell block may name, and what checks their words. Those of others are named only."""


def is_checked(line: str) -> bool:
    """Whether more than the program's name is looked at."""
    return HEADS.get(head_of(line), _named_only) is not _named_only


def config_file(text: str, folder: Path) -> str:
    """A configuration of the documentation with its secrets and certificates put where they exist."""
    secret = folder / "secret"
    secret.write_text("x" * 32)
    text = re.sub(r'(ca = )"[^"]*"', rf'\1"{certifi.where()}"', text)
    return re.sub(r'(_file = )"[^"]*"', rf'\1"{secret}"', text)
