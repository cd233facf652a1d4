"""Results that survive a killed run: one line of JSON for everything that was measured, written at once.

A record says what it is by its key; of several with one key the last one counts. Figures are computed from records
alone (`figures`), so results of several runs can be put together later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headwater.errors import EngineConfigError

Record = dict[str, Any]
FORMAT = 1

RUN = "run"
"""The first record of a run: its machine, versions and sizes."""
MEASURED = "measured"
FAILED = "failed"
ABSENT = "absent"
"""A side that cannot be run here."""

_KEY = ("mode", "stage", "measure", "tokens", "side")


def key_of(record: Record) -> tuple[Any, ...]:
    """The subject of a record, without its sides."""
    return tuple(record.get(name) for name in _KEY)


def _sides(record: Record) -> frozenset[str]:
    return frozenset(record.get("sides", ()))


class Journal:
    """The records of this run, and of those before it that used the same file."""

    def __init__(self, path: Path | None, run: Record, *, again: bool = False) -> None:
        """Raises EngineConfigError where the file holds results of another machine, or of other sizes."""
        self._path = path
        earlier = read_records([path]) if path is not None and path.exists() else []
        if path is not None and path.exists():
            _drop_cut_line(path)
        for record in earlier:
            if record["kind"] == RUN:
                _check_same(run, record, str(path))
        self.records: list[Record] = list(earlier)
        self._done = [] if again else [record for record in earlier if record["kind"] == MEASURED]
        self._run_id = run["run"]
        self._append(run)

    def is_done(self, record: Record) -> bool:
        """Whether an earlier run, or this one, has measured what this record is to say, with all its sides."""
        return any(key_of(done) == key_of(record) and _sides(done) >= _sides(record) for done in self._done)

    def add(self, record: Record) -> None:
        """Keep a result, on disk if there is a file."""
        record = {**record, "run": self._run_id}
        if record["kind"] == MEASURED:
            self._done.append(record)
        self._append(record)

    def _append(self, record: Record) -> None:
        self.records.append(record)
        if self._path is None:
            return
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_records(paths: Iterable[Path]) -> list[Record]:
    """All records of these files. A last line that was cut off is left out. Raises EngineConfigError for others."""
    records: list[Record] = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise EngineConfigError(f"results cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or "kind" not in record:
                    raise ValueError("no record")
            except ValueError as error:
                if number == len(lines):
                    break  # the run was killed while it wrote
                raise EngineConfigError(f"{path}, line {number}, is not a result of this benchmark") from error
            if record["kind"] == RUN and record.get("format") != FORMAT:
                raise EngineConfigError(f"{path} has results in format {record.get('format')}; this is {FORMAT}")
            records.append(record)
    return records


def check_together(records: Sequence[Record], *, mixed: bool = False) -> None:
    """Raises EngineConfigError where results of different sizes are together, or (unless `mixed`) of machines."""
    runs = [record for record in records if record["kind"] == RUN]
    if not runs:
        raise EngineConfigError("there are no results in these files")
    for run in runs[1:]:
        _check_same(runs[0], {**run, "machine_id": runs[0]["machine_id"]} if mixed else run, "these files")


def latest(records: Sequence[Record]) -> list[Record]:
    """Of records of one thing with the same sides the last; a failure counts only where nothing was measured."""
    last: dict[tuple[Any, ...], Record] = {}
    for record in records:
        if record["kind"] != RUN:
            key = (record["kind"], key_of(record), _sides(record))
            last.pop(key, None)
            last[key] = record
    measured = {key_of(record) for record in last.values() if record["kind"] == MEASURED}
    return [record for record in last.values() if record["kind"] != FAILED or key_of(record) not in measured]


def _drop_cut_line(path: Path) -> None:
    """A run that was killed while it wrote leaves half a line, to which the next record must not be added."""
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)


def _check_same(run: Record, other: Record, where: str) -> None:
    for name in ("machine_id", "sizes"):
        if run[name] != other[name]:
            what = "another machine" if name == "machine_id" else "other sizes"
            raise EngineConfigError(
                f"{where}: results of {what} are there ({other[name]}, expected {run[name]}); use another file"
            )
