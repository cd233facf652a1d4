"""Files that only this user (or root) can write: another one could make up KV that verifies.

Access lists need no look of their own: the most that they give to anybody shows in the group's bits of the mode.
"""

from __future__ import annotations

import errno
import os
import stat

_FOREIGN_WRITES = stat.S_IWGRP | stat.S_IWOTH


def why_shared(path: str, found: os.stat_result, *, root_may_own: bool = True) -> str | None:
    """Why somebody else could write to a file or directory, and what to do about it; None if nobody could."""
    owners = (os.geteuid(), 0) if root_may_own else (os.geteuid(),)
    if found.st_uid not in owners:
        return f"{path} belongs to another user (uid {found.st_uid}); use a directory of your own"
    if found.st_mode & _FOREIGN_WRITES:
        who = "others" if found.st_mode & stat.S_IWOTH else "its group (or an access list)"
        return (
            f"{who} may write to {path} (mode {stat.S_IMODE(found.st_mode):04o}), and could make up KV that verifies; "
            f"run `chmod go-w {path}`, or use a directory of your own"
        )
    return None


def why_no_file(path: str, found: os.stat_result) -> str | None:
    """Why a file of a pool is refused, by its `lstat`: it is no ordinary file, or somebody else could write to it."""
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link, which is not followed; put the file itself there, or use another directory"
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is not an ordinary file; remove it, or use another directory"
    return why_shared(path, found)


def open_private(path: str, flags: int) -> int:
    """`os.open` for a file that nobody else can write, whatever its directory has become meanwhile. A new one gets mode
    0600. Never waits, not for the other end of a pipe either. Raises PermissionError that says why, and what opening
    raises."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a symbolic link; a socket, a pipe that nobody reads
            raise
        raise PermissionError(errno.EPERM, why_no_file(path, os.lstat(path)) or str(error)) from error
    reason = why_no_file(path, os.fstat(fd))
    if reason is not None:
        os.close(fd)
        raise PermissionError(errno.EPERM, reason)
    return fd


def allocate(fd: int, size: int) -> None:
    """Give a file storage for all of its bytes, before it is mapped: a store into a hole of a full device (a copy may
    have holes) is a SIGBUS, not an error. Raises OSError."""
    found = os.fstat(fd)
    if found.st_size < size or found.st_blocks * 512 < size:
        os.posix_fallocate(fd, 0, size)
