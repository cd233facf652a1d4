"""The whole invariant of an embedded store's index, checked from the records up. Under the write lock."""

from __future__ import annotations

from headwater.stores.embedded.core import Core
from headwater.stores.embedded.janitor import PENDING_SHARE, orphans
from headwater.stores.embedded.layout import CHUNK, COMPLETE, LIMBO, PENDING, SPACE, Word
from headwater.stores.embedded.units import ABSENT_UNIT, FREE_UNIT, USED_UNIT


def audit(core: Core) -> list[str]:
    """Everything that is wrong, in words; empty where all is well.

    Every record is findable under its key, hangs under a living parent and owns its cells and units alone; maps,
    child counts and counters say what the records say; nothing lies outside the capacity.
    """
    index, geometry, words = core.index, core.geometry, core.index.words
    problems: list[str] = []
    cells = bytearray(geometry.num_cells)
    units = bytearray(index.units.snapshot().replace(b"\1", b"\0"))
    children: dict[tuple[int, int], int] = {}
    pending = chunks = used_units = used_cells = 0
    entries = core.janitor.entries()
    for entry in entries:
        record, name = entry.record, f"record {entry.record.key.hex()[:12]} at cell {entry.cell}"
        span = slice(entry.cell, entry.cell + record.num_cells)
        used_cells += record.num_cells
        if any(cells[span]):
            problems.append(f"{name} shares cells with another")
        cells[span] = bytes((USED_UNIT,)) * record.num_cells
        if record.length:
            start, need = record.offset // geometry.unit_bytes, core.janitor.units_for(record.length)
            used_units += need
            if record.offset + record.length > geometry.data_bytes:
                problems.append(f"{name} lies outside the data area")
            elif any(units[start : start + need]):
                problems.append(f"{name} shares bytes with another, or has no storage")
            units[start : start + need] = bytes((USED_UNIT,)) * need
        if entry.state == LIMBO:
            continue
        found = index.find(record.key)
        if found is None or found.cell != entry.cell:
            problems.append(f"{name} cannot be found under its key")
        if entry.state not in (PENDING, COMPLETE):
            problems.append(f"{name} is in state {entry.state}")
        if entry.state == COMPLETE and index.payload(entry) is None:
            problems.append(f"{name} has a payload that does not verify")
        if record.kind != SPACE:
            above = (record.parent_cell, record.parent_id)
            children[above] = children.get(above, 0) + 1
        pending += record.length if entry.state == PENDING else 0
        chunks += entry.state == COMPLETE and record.kind == CHUNK
    for entry in entries:
        if entry.state != LIMBO:
            counted = index.counts(entry.cell)[0]
            actual = children.get((entry.cell, entry.record.id), 0)
            if counted != actual:
                problems.append(f"cell {entry.cell} counts {counted} children and has {actual}")
    problems += [f"record {entry.record.key.hex()[:12]} has no living parent" for entry in orphans(entries)]
    if bytes(cells) != index.cells.snapshot():
        problems.append("the cell map differs from the records")
    if bytes(units) != index.units.snapshot():
        problems.append("the unit map differs from the records")
    present = min(words[Word.BACKED] * geometry.units_per_segment, geometry.num_units)
    if not index.units.is_all(present, geometry.num_units - present, ABSENT_UNIT):
        problems.append("units without storage are not marked absent")
    if any(byte not in (FREE_UNIT, USED_UNIT) for byte in set(bytes(units[:present]))):
        problems.append("units with storage are marked absent")
    for counter, expected, what in (
        (Word.PENDING, pending, "pending bytes"),
        (Word.CHUNKS, chunks, "chunks"),
        (Word.USED_UNITS, used_units, "used units"),
        (Word.USED_CELLS, used_cells, "used cells"),
    ):
        if words[counter] != expected:
            problems.append(f"{what}: counted {words[counter]}, actually {expected}")
    if pending > geometry.data_bytes // PENDING_SHARE:
        problems.append("more bytes are pending than allowed")
    return problems
