"""Who is alive: a client holds a lock on a file beside the server's socket for as long as it lives.

A lock that is free belongs to the dead: never a pid, never a timeout. The directory is one that only this user enters.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from headwater.errors import InvalidArgumentError, StoreError, StorePermissionError


def life_file(folder: Path, client: bytes) -> Path:
    """The file of one client."""
    return folder / f"client-{client.hex()}"


def hold_life(folder: Path, client: bytes) -> int:
    """A descriptor whose lock says that the client lives."""
    fd = os.open(life_file(folder, client), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock on a file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def check_folder(address: str) -> Path:
    """The directory of a server's socket. Raises StoreError unless only this user can have made it."""
    if not address.startswith("ipc:///") or not address.endswith("/socket"):
        raise InvalidArgumentError(f"{address!r} is no address of a look-up server; expected ipc:///DIRECTORY/socket")
    folder = Path(address.removeprefix("ipc://")).parent
    try:
        found = folder.lstat()
    except OSError as error:
        raise StoreError(f"nobody answers look-ups at {address}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise StorePermissionError(f"{folder} is not a directory that only this user can enter")
    return folder
