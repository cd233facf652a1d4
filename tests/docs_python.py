"""Runs the Python blocks of a page: all of them in one process, in order, as a reader who follows the page would.

Pages may use names that a reader has and a test has not (`tokens`, a checkpoint): `SETUP` gives them. Pools and
directories of the page are replaced by ones of the test's own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from docs_pages import ROOT, Block
from support import WAIT_S

# What a page takes for granted, by page and by a piece of the block that needs it first; "" is before the first one.
SETUP: dict[str, dict[str, str]] = {
    "docs/library.md": {
        "": "import numpy as np\ntokens = list(range(300))\nlora_digest = b'a' * 32\n"
        "digest, offset, num_tokens = b'i' * 32, 3, 4\n"
        "request_id = 'request-1'\nserver_number = 7",
        "space.write(chunks": "tiles = [space.empty(chunk, shard) for chunk in keys.chunks()]",
        "open_pool(url": "url = 'shm:///headwater'",
    },
    "docs/serving.md": {
        "cache_salt": "messages, salt = [{'role': 'user', 'content': 'Hello'}], 'acme'",
    },
}
_PROGRAM = """import json
import pathlib

for _name, _code in json.loads(pathlib.Path(__file__).with_name("steps.json").read_text()):
    exec(compile(_code, _name, "exec"))
    if _name.endswith(".md"):
        print(end="\\x1e", flush=True)
"""
LOCAL_POOL = re.compile(r"shm:///(?!\$)[\w.-]+")
CAPACITY = re.compile(r"capacity=\d+(?:GiB|TiB)")


class Ran(NamedTuple):
    """What the blocks of a page did."""

    returncode: int
    printed: list[str]
    """Standard output, by block."""
    error: str


def run_python(blocks: Sequence[Block], pool: str, folder: Path, replaced: Mapping[str, str] | None = None) -> Ran:
    """Run a page's blocks in one process, with other words for those that are `replaced`. Never raises for what the
    blocks do."""
    checkpoint = folder / "checkpoint"
    _write_checkpoint(checkpoint)
    setup = dict(SETUP.get(blocks[0].page, {}))
    steps = [("what the page takes for granted", setup.pop("", ""))]
    for block in blocks:
        steps += [("what the page takes for granted", setup.pop(piece)) for piece in list(setup) if piece in block.text]
        code = block.text
        for theirs, ours in (replaced or {}).items():
            code = code.replace(theirs, ours)
        steps.append((block.page, "\n" * block.line + code))  # a traceback names the page and its line
    places = [(name, _own_places(code, pool, checkpoint)) for name, code in steps]
    (folder / "steps.json").write_text(json.dumps(places))
    script = folder / "page.py"
    script.write_text(_PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    return Ran(done.returncode, done.stdout.split("\x1e"), done.stderr)


def _own_places(text: str, pool: str, checkpoint: Path) -> str:
    text = LOCAL_POOL.sub(pool, text)
    return CAPACITY.sub("capacity=128MiB", text).replace("/models/llama", str(checkpoint))


def _write_checkpoint(folder: Path) -> None:
    """A checkpoint of one tensor: enough for a name."""
    folder.mkdir(exist_ok=True)
    weights = np.zeros(16, np.float32).tobytes()
    header = json.dumps({"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, len(weights)]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
