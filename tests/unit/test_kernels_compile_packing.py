"""The kernels that pack and unpack compile for an H200: as wide in memory, and in as few registers, as they are meant.

Needs no GPU: Triton brings its own assembler. The interpreter, which proves the results, accepts code that the compiler
refuses.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels are not checked here")
triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")

from test_kernels_compile import INDEX, LONG, SHARED_BYTES, compile_kernel, own_cache  # noqa: E402, F401

from headwater.kernels import pack_kernels  # noqa: E402
from headwater.kernels.pack_triton import PACK, UNPACK, PackConfig, block_constants, num_warps  # noqa: E402

TYPES = dict.fromkeys(("planes", "spans", "targets"), LONG) | {"blocks": INDEX, "address": "i64"}
REGISTERS = 65536
"""Of a multiprocessor."""


def constants(widths: tuple[int, ...], cache: int = 16, staged: int = 16) -> dict[str, Any]:
    return {"BLOCK_SIZE": 16, "COMPACT": True, **block_constants(widths, cache, staged)}


def resources(made: Any, folder: Path) -> dict[str, int]:
    """What the assembler says: registers of a thread, and bytes that did not fit into them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump: registers are not counted")
    (folder / "kernel.cubin").write_bytes(made.asm["cubin"])
    told = subprocess.run([tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", told.stdout)}


def compile_pack(widths: tuple[int, ...], config: PackConfig = PACK, rows: int = 256, **how: Any) -> Any:
    known = constants(widths, **how)
    words = min(rows, config.rows) * known["COLUMNS"]
    options = {"num_warps": num_warps(words, config), "maxnreg": config.registers}
    steps = {"ROWS": min(rows, config.rows), "HELD": rows <= config.rows}
    return compile_kernel(pack_kernels.pack_kernel, TYPES, known | steps, **options)


def compile_unpack(widths: tuple[int, ...], **how: Any) -> Any:
    known = constants(widths, **how)
    options = {"num_warps": num_warps(UNPACK.rows * known["COLUMNS"], UNPACK)}
    return compile_kernel(pack_kernels.unpack_kernel, TYPES, known | {"ROWS": UNPACK.rows}, **options)


@pytest.mark.parametrize("widths", [(128, 128), (512, 64), (64, 64), (80, 80)], ids=str)
def test_packing_holds_a_block_in_registers(widths: tuple[int, ...], tmp_path: Path) -> None:
    made = compile_pack(widths)
    used = resources(made, tmp_path)
    assert used["STACK"] == 0
    assert used["REG"] * 32 * made.metadata.num_warps * 2 <= REGISTERS  # two programs at once
    assert len(re.findall(r"ld\.global\.v4\.b32", made.asm["ptx"])) >= 16
    assert re.search(r"st\.global\.v2\.b32", made.asm["ptx"])  # signs and mantissas


@pytest.mark.parametrize("widths", [(128, 128), (512, 64), (64, 64), (80, 80)], ids=str)
def test_unpacking_stores_sixteen_bytes_at_a_time(widths: tuple[int, ...], tmp_path: Path) -> None:
    made = compile_unpack(widths)
    used = resources(made, tmp_path)
    assert used["STACK"] == 0
    assert used["REG"] * 32 * made.metadata.num_warps * 6 <= REGISTERS
    assert made.metadata.shared == 0  # nothing has to change threads on its way
    assert len(re.findall(r"st\.global\.v4\.b32", made.asm["ptx"])) == 4
    assert len(re.findall(r"ld\.global\.v2\.b32", made.asm["ptx"])) == 5  # signs and mantissas, and the bases


@pytest.mark.parametrize(("cache", "staged"), [(8, 8), (4, 4), (2, 16), (2, 1)])
def test_whatever_the_alignment(cache: int, staged: int) -> None:
    compile_pack((128, 10), cache=cache, staged=staged)
    compile_unpack((128, 10), cache=cache, staged=staged)


def test_long_spans_are_read_twice() -> None:
    compile_pack((128, 128), rows=1024)


def test_the_answer_whether_tiles_fit() -> None:
    types = {"tiles": "*u8", "out": "*u8", "blocks": INDEX}
    compile_kernel(pack_kernels.fits_kernel, types, {"NUM_BLOCKS": 2, "ALIGNMENT": 16, "TILES": 256})
