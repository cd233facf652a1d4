"""A look at an embedded store from outside: its figures, without becoming a member and without changing a byte.

For whoever watches for long: an open store is in use, cannot be deleted, and counts one member more.
"""

from __future__ import annotations

import os
import struct

from headwater.errors import StoreError, StorePermissionError
from headwater.stores.embedded import store_directory
from headwater.stores.embedded.admin import store_stats
from headwater.stores.embedded.layout import HEADER_BYTES, PAGE, Geometry, Word, decode_header
from headwater.stores.embedded.members import count_members
from headwater.stores.private import open_private
from headwater.stores.stats import StoreStats
from headwater.stores.url import StoreUrl

_WORDS = struct.Struct(f"<{Word.COUNT}Q")


def peek(url: StoreUrl) -> StoreStats | None:
    """The figures of a `shm://` or `file://` store; None where there is no store, or none that can be read yet. Costs
    some 100 µs. Raises StorePermissionError, and StoreError for what the operating system says."""
    directory = store_directory(url)
    try:
        fd = open_private(os.path.join(directory, "index"), os.O_RDONLY)
        try:
            geometry = _geometry(fd)
            raw = os.pread(fd, _WORDS.size, Word.offset(0))
        finally:
            os.close(fd)
        if geometry is None or len(raw) != _WORDS.size:
            return None
        return store_stats(str(url), geometry, _WORDS.unpack(raw), count_members(os.path.join(directory, "members")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise StorePermissionError(f"{url}: {error.strerror}") from error
    except OSError as error:
        raise StoreError(f"{url}: {error.strerror or error}") from error


def is_readable(url: StoreUrl) -> bool:
    """Whether the index of a `shm://` or `file://` store has a header, and the size that this says. Raises OSError."""
    fd = open_private(os.path.join(store_directory(url), "index"), os.O_RDONLY)
    try:
        return _geometry(fd) is not None
    finally:
        os.close(fd)


def _geometry(fd: int) -> Geometry | None:
    """From the first header, or from the copy at the end."""
    size = os.fstat(fd).st_size
    for offset in (0, max(0, size - PAGE)):
        found = decode_header(os.pread(fd, HEADER_BYTES, offset))
        if isinstance(found, Geometry) and found.index_bytes == size:
            return found
    return None
