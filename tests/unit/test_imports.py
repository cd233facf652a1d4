"""The shape of the source tree: who may import whom, what stays free of torch, and what `import headwater` costs.

The rules are read from the syntax tree, so an import inside a function or under TYPE_CHECKING counts like any other.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
ROOT = "headwater"
MAX_LINES = 500
IMPORT_DEADLINE_MS = 150

# What each package may import besides itself and the top-level modules (errors and helpers).
MAY_IMPORT: dict[str, set[str]] = {"kv": set()}
MAY_IMPORT["kernels"] = {"kv"}
MAY_IMPORT["stores"] = {"kv"}
MAY_IMPORT["pool"] = {"kv", "stores"}
MAY_IMPORT["peers"] = {"kv", "stores", "pool"}
MAY_IMPORT["transfer"] = {"kv", "stores", "pool", "peers", "kernels"}
MAY_IMPORT["connector"] = {"kv", "stores", "pool", "peers", "transfer"}
MAY_IMPORT["watch"] = {"kv", "stores", "pool", "connector"}
MAY_IMPORT["models"] = {"kv", "kernels"}
# `models` only for what names a model: two engines share where they give it one name.
MAY_IMPORT["integrations"] = {"kv", "stores", "pool", "peers", "transfer", "connector", "models"}
MAY_IMPORT["engine"] = {"kv", "stores", "pool", "peers", "transfer", "connector", "kernels", "models"}
MAY_IMPORT["serve"] = MAY_IMPORT["engine"] | {"engine", "integrations", "watch"}
# `serve` only for HTTP, `models` only for tokenizers: a proxy loads no engine (tests/unit/test_proxy_parts.py).
MAY_IMPORT["proxy"] = {"kv", "stores", "pool", "peers", "models", "serve"}
MAY_IMPORT["sim"] = {"kv", "pool"}
MAY_IMPORT["bench"] = MAY_IMPORT["serve"] | {"serve", "proxy"}
# ROOT is the facade, `from headwater import X`. Inside the library it would lead around every rule above.
MAY_IMPORT["cli"] = MAY_IMPORT["serve"] | {"serve", "proxy", "sim", "bench", ROOT}

# Top-level modules ("") are imported by the others, so what they load, kv loads.
WITHOUT_TORCH = {"", "kv", "stores", "pool", "peers"}
# The facade and `python -m headwater` exist to reach everything.
ENTRY_POINTS = {ROOT, f"{ROOT}.__main__"}


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of all that a module of `package` imports; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, resolve_name(name, package)


def violations(
    source: str, module: str, *, is_package: bool = False, helpers: frozenset[str] = frozenset({"errors"})
) -> list[str]:
    """Return a line for each import in `module` that the rules forbid; `helpers` are the top-level modules."""
    is_entry_point = module in ENTRY_POINTS
    room = "" if is_entry_point else module.split(".")[1]
    if room in helpers:
        room = ""
    if room and room not in MAY_IMPORT:
        return [f"{module}: package {room!r} has no place in MAY_IMPORT; give it one"]
    allowed = helpers | MAY_IMPORT.get(room, set()) | ({room} if room else set())

    found = []
    for line, name in imported_names(source, module if is_package else module.rpartition(".")[0]):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top == "torch" and room in WITHOUT_TORCH:
            found.append(f"{module}:{line}: imports {name}, but must work without torch")
        if top != ROOT or is_entry_point or target == "__version__":
            continue
        if target not in MAY_IMPORT.keys() | helpers:
            target = ROOT
        if target not in allowed:
            found.append(f"{module}:{line}: {room or 'a top-level module'} may not import {name}")
    return found


def sources() -> dict[str, Path]:
    """Return every module of the package by dotted name."""
    modules = {}
    for path in sorted((SRC / ROOT).rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    assert f"{ROOT}.errors" in modules, f"no source found under {SRC}"
    return modules


def test_imports_point_one_way() -> None:
    modules = sources()
    helpers = frozenset(path.stem for path in modules.values() if path.parent == SRC / ROOT) - {"__init__", "__main__"}
    found = []
    for module, path in modules.items():
        text = path.read_text(encoding="utf-8")
        found += violations(text, module, is_package=path.stem == "__init__", helpers=helpers)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headwater.kv.spec", "import headwater.pool"),
        ("headwater.kv.spec", "from headwater.stores import base"),
        ("headwater.kv.spec", "from headwater import stores"),
        ("headwater.kv.spec", "from ..pool.lease import Lease"),
        ("headwater.kv.spec", "def f():\n    from headwater.stores.memory import MemoryStore"),
        ("headwater.stores.file", "if TYPE_CHECKING:\n    from headwater.pool import Pool"),
        ("headwater.stores.file", "from headwater import Pool"),
        ("headwater.stores.file", "import headwater"),
        ("headwater.stores.file", "importlib.import_module('headwater.pool')"),
        ("headwater.stores.file", "importlib.import_module('..pool', __package__)"),
        ("headwater.sim.replay", "from headwater.stores import open_store"),
        ("headwater.bench.store", "from headwater.cli import main"),
        ("headwater.engine.step", "from headwater.integrations import vllm"),
        ("headwater.models.llama", "from headwater.engine import cache"),
        ("headwater.errors", "from headwater.kv import spec"),
        ("headwater.novel.thing", "import os"),
        ("headwater.kv.spec", "import torch"),
        ("headwater.pool.read", "def f():\n    from torch.cuda import Stream"),
        ("headwater.errors", "import torch.nn"),
        ("headwater", "import torch"),
    ],
)
def test_the_checker_catches(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headwater.kv.spec", "import torchvision_not_torch, os\nfrom headwater.errors import SpecError"),
        ("headwater.kv.spec", "from headwater.kv.hashing import key\nfrom .topology import Shard\nfrom . import x"),
        ("headwater.pool.tiers", "from ..stores.base import Store\nfrom headwater import __version__, errors, kv"),
        ("headwater.transfer.gather", "import torch\nfrom headwater.kernels import gather"),
        ("headwater.cli.main", "from headwater import Pool\nfrom headwater.bench import store"),
        ("headwater", "from headwater.pool import Pool"),
    ],
)
def test_the_checker_allows(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_relative_imports_in_an_init_start_at_its_package() -> None:
    assert violations("from .base import Store\nfrom ..kv import spec", "headwater.stores", is_package=True) == []
    assert violations("from ..pool import Pool", "headwater.stores", is_package=True)


def test_every_module_has_a_docstring_and_fits() -> None:
    found = []
    for module, path in sources().items():
        text = path.read_text(encoding="utf-8")
        if not ast.get_docstring(ast.parse(text)):
            found.append(f"{module}: no docstring")
        if (num_lines := len(text.splitlines())) > MAX_LINES:
            found.append(f"{module}: {num_lines} lines, more than {MAX_LINES}")
    assert not found, "\n".join(found)


MEASURE_IMPORT = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
import headwater
elapsed_ms = (time.perf_counter() - start) * 1000
print(json.dumps({"elapsed_ms": elapsed_ms, "loaded": sorted(set(sys.modules) - before)}))
"""


def test_import_headwater_is_cheap() -> None:
    """Best of five fresh processes: the first may compile byte code, and the machine may be busy."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-c", MEASURE_IMPORT]
    runs = [
        json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout)
        for _ in range(5)
    ]
    assert {"torch", "numpy"}.isdisjoint(runs[0]["loaded"])
    best_ms = min(run["elapsed_ms"] for run in runs)
    print(f"import headwater: {best_ms:.1f} ms")
    assert best_ms < IMPORT_DEADLINE_MS
