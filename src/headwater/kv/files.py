"""The files of a checkpoint: which ones count, and the state that each is in, so that changes between two moments show.

Nothing here reads their bytes: see `file_hash` for that, and `checkpoint` for the name that results.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from headwater.errors import IdentityError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
INDEX_SUFFIX = ".index.json"
MAX_LINKS = 40

KEEPS_TIMES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "nfs", "nfs4", "ceph", "lustre"}
)
"""File systems that give a file another ctime whenever its bytes change, with one exception: of writes through a shared
mapping, only the first to each page since that page went to disk (`DigestCache.settle` sends it there). tmpfs and ramfs
note none of those, and an overlay does what its layers do, which a container cannot see; so these are not here."""
OWN_CLOCK = KEEPS_TIMES - {"nfs", "nfs4", "ceph", "lustre"} | {"overlay", "tmpfs", "ramfs"}
"""File systems whose times come from this machine's clock."""
FOREIGN_CLOCK_NS = 900_000_000_000
"""How far the clock of another machine, which serves files to this one, may be behind."""


class NamedFile(NamedTuple):
    """A file of a checkpoint: its relative POSIX name, "" where the checkpoint is one file, and where it lies."""

    name: str
    path: Path


class LinkState(NamedTuple):
    """A symbolic link on the way to a file."""

    path: str
    inode: int
    ctime_ns: int


class FileState(NamedTuple):
    """One file at one moment. Two states are equal only if the path led to the same bytes all the time between them.

    (Or if a directory was moved away and back, or somebody set the clock back: neither leaves a trace.)
    """

    name: str
    path: str
    real_path: str
    links: tuple[LinkState, ...]
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def changed_ns(self) -> int:
        """When the file, or a link to it, was changed last."""
        return max(self.mtime_ns, self.ctime_ns, *(link.ctime_ns for link in self.links))

    @property
    def cache_key(self) -> str:
        """Device, inode, size and mtime, as usual, and two more: the ctime, since in images and package stores every
        mtime is the same, and the real path, since some network mounts hand out inode numbers anew each time."""
        place = hashlib.sha256(os.fsencode(self.real_path)).hexdigest()[:32]
        return f"{self.device}:{self.inode}:{self.size}:{self.mtime_ns}:{self.ctime_ns}:{place}"


def list_weights(root: Path) -> list[NamedFile]:
    """Every weight file and index below `root`, or `root` itself if it is a file. Each directory is entered once, so
    loops of links end. Raises IdentityError where there are no weights, OSError where a directory cannot be read."""
    if not root.is_dir():
        if root.suffix == ".json":
            raise IdentityError(f"{str(root)!r} holds no weights; pass the directory that it lies in")
        return [NamedFile("", root)]
    files = []
    entered: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise):
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in entered:
            subfolders.clear()
            continue
        entered.add((here.st_dev, here.st_ino))
        subfolders.sort()
        for name in names:
            if name.lower().endswith((*WEIGHT_SUFFIXES, INDEX_SUFFIX)):
                path = Path(folder, name)
                files.append(NamedFile(path.relative_to(root).as_posix(), path))
    if all(file.name.lower().endswith(INDEX_SUFFIX) for file in files):
        raise IdentityError(f"{str(root)!r} holds no weight files; expected some of {', '.join(WEIGHT_SUFFIXES)}")
    return files


def take_states(files: Iterable[NamedFile]) -> tuple[FileState, ...]:
    """The state of each file now, sorted by name. Raises IdentityError for one that is missing, unreadable, empty or
    not a regular file. Costs an open and a few calls per file."""
    states = []
    for file in files:
        with reading(file.path):
            states.append(_take_state(file))
    return tuple(sorted(states, key=lambda state: name_bytes(state.name)))


def retake_states(states: Iterable[FileState]) -> tuple[FileState, ...]:
    """The states of the same names and paths now."""
    return take_states(NamedFile(state.name, Path(state.path)) for state in states)


def first_change(before: Sequence[FileState], after: Sequence[FileState]) -> str:
    """The path of a file that is not the same in both, or "" where nothing changed."""
    return min((state.path for state in set(before) ^ set(after)), default="")


def last_change(states: Iterable[FileState]) -> tuple[str, int]:
    """(path, moment) of the last change on the way to these files, by this machine's clock: of a file, of a link, or
    the move of a directory. Where another machine's clock gave the time, it may have been so much later."""
    mounts, found = list_mounts(), ("", 0)
    for state in states:
        late_ns = 0 if file_system(state.real_path, mounts) in OWN_CLOCK else FOREIGN_CLOCK_NS
        places = {Path(state.real_path), *(Path(link.path) for link in state.links)}
        direct = {place.parent for place in places if place.parent.name != "blobs"}
        moved = [_moved_ns(folder) for folder in {folder for place in places for folder in place.parents} - direct]
        moved += [folder.stat().st_ctime_ns for folder in direct]  # a file that is made there hides a move
        found = max(found, (state.path, max(state.changed_ns, *moved) + late_ns), key=lambda entry: entry[1])
    return found


def file_system(path: str, mounts: Sequence[tuple[str, str]]) -> str:
    """The type of the file system that a real path lies on; "" if that is not known."""
    found = ("", "")
    for point, kind in mounts:  # in the order of mounting: a later one hides an earlier one at the same point
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


def list_mounts() -> list[tuple[str, str]]:
    """(mount point, type) of everything that this process has mounted; nothing where the system does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split(" ")[4]
        for code in ("\\040", "\\011", "\\012", "\\134"):
            point = point.replace(code, chr(int(code[1:], 8)))
        mounts.append((point, right.split(" ")[0]))
    return mounts


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system says about a path into an IdentityError that names it."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links, in Python before 3.13
        raise IdentityError(f"cannot read {os.fspath(path)!r}: {error}") from error


def name_bytes(name: str) -> bytes:
    """A file's name as it is hashed: names on disk are bytes, and not always text."""
    return name.encode("utf-8", "surrogateescape")


def _take_state(file: NamedFile) -> FileState:
    real, links = _follow(file.path)
    if not stat.S_ISREG(real.stat().st_mode):
        raise IdentityError(f"{str(file.path)!r} is not a regular file, so its bytes cannot name the weights")
    # A network file system asks its server for the times when a file is opened, and may answer from memory otherwise.
    handle = os.open(real, os.O_RDONLY | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
    finally:
        os.close(handle)
    if not info.st_size:
        raise IdentityError(f"the weight file {str(file.path)!r} is empty; is it still being downloaded?")
    times = (info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    return FileState(file.name, str(file.path), str(real), links, info.st_dev, info.st_ino, *times)


def _follow(path: Path) -> tuple[Path, tuple[LinkState, ...]]:
    """The real path, and every link on the way to it."""
    links: list[LinkState] = []
    here, rest = Path("/"), list(reversed(path.absolute().parts[1:]))
    while rest:
        part = rest.pop()
        if part == "..":
            here = here.parent
            continue
        info = os.lstat(here / part)
        if not stat.S_ISLNK(info.st_mode):
            here /= part
            continue
        if len(links) == MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        links.append(LinkState(str(here / part), info.st_ino, info.st_ctime_ns))
        target = Path(os.readlink(here / part))
        if target.is_absolute():
            here = Path("/")
        rest.extend(reversed([name for name in target.parts if name != "/"]))
    return here, tuple(links)


def _moved_ns(folder: Path) -> int:
    """A moment after which a directory was not moved: a move changes it and the directory that it is moved into.
    Either alone changes with its entries, too."""
    return min(folder.stat().st_ctime_ns, folder.parent.stat().st_ctime_ns) if folder != folder.parent else 0


def _raise(error: OSError) -> None:
    raise error
