"""`redis://` and `rediss://`: Redis or Valkey as a place for chunks.

A prompt is looked up in one round trip, a batch of ranges read in one, a batch of chunks written in three (the pieces,
then the manifests, then what other hosts are told). Values go from and to the caller's memory. Expiry is set on all but
the log, so that what a crashed writer left behind goes by itself; what the server evicts is a miss; when it says that
it is full, nothing is stored.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections import deque
from collections.abc import Iterator, Sequence

from headwater.errors import BackendError, StorePermissionError, UrlError
from headwater.locks import ForkSafeLock
from headwater.redaction import show_value
from headwater.stores.base import Status
from headwater.stores.remote.base import (
    LOG_ENTRIES,
    MAX_TAILS,
    BackendUsage,
    Landed,
    LogEntries,
    NewManifest,
    NewObject,
    Notice,
    ObjectRange,
    Position,
    Survey,
)
from headwater.stores.remote.resp import Command, RedisConnection, RedisRefusal, Reply
from headwater.stores.url import StoreUrl

DEFAULT_TTL_S = 86400
_WINDOW_BYTES = 16 << 20
"""Ranges asked for and not yet received: enough to keep the wire busy, little for the server to hold ready."""
_SCAN_COUNT = 1000
_LOG_FIELD = "v"
_LOG_VALUE_LIMIT = 4096
_FULL_CODES = ("OOM", "MISCONF", "-OOM")


class RedisClient:
    """A few connections to one server. See `base.ObjectClient`."""

    num_writers = 1
    has_log = True

    def __init__(self, url: StoreUrl) -> None:
        self._host, self._port = url.host, url.port
        self._database = int(url.path.lstrip("/") or 0)
        self._user, self._password = url.user, url.password or _secret(url)
        ttl = url.options.get("ttl")
        self._ttl_s = 0 if ttl == "0" else round(url.seconds("ttl", DEFAULT_TTL_S)) or 1
        self._tls = _tls_context(url) if url.scheme == "rediss" else None
        self._most_idle = url.count("connections", 8)
        self._idle: deque[RedisConnection] = deque()
        self._lock = ForkSafeLock()
        self._pid = os.getpid()

    # ---- finding ------------------------------------------------------------------------------------------------
    def ping(self, deadline: float) -> None:
        """See `base.ObjectClient`."""
        with self._connection(deadline) as connection:
            _ask(connection, [("PING",)], deadline)

    def survey(self, names: Sequence[str], tail_lists: Sequence[str], deadline: float) -> Survey:
        """See `base.ObjectClient`. One round trip: a command for each."""
        commands: list[tuple[str | int, ...]] = [("EXISTS", name) for name in names]
        commands += [("ZREVRANGE", name, 0, MAX_TAILS - 1) for name in tail_lists]
        with self._connection(deadline) as connection:
            replies = _ask(connection, commands, deadline)
        present = [reply == 1 for reply in replies[: len(names)]]
        return Survey(present, [_lengths(reply) for reply in replies[len(names) :]])

    def fetch(self, names: Sequence[str], limit: int, deadline: float) -> list[bytes | None]:
        """See `base.ObjectClient`."""
        with self._connection(deadline) as connection:
            replies = _ask(connection, [("GET", name) for name in names], deadline, limit)
        return [reply if isinstance(reply, bytes) else None for reply in replies]

    # ---- moving bytes -------------------------------------------------------------------------------------------
    def read(self, spans: Sequence[ObjectRange], deadline: float, landed: Landed) -> None:
        """See `base.ObjectClient`. The next ranges are asked for before the last ones are here."""
        with self._connection(deadline) as connection:
            asked = on_their_way = 0
            for i, span in enumerate(spans):
                if asked == i or (on_their_way < _WINDOW_BYTES // 2 and asked < len(spans)):
                    command = Command()
                    while asked < len(spans) and (on_their_way < _WINDOW_BYTES or asked == i):
                        wanted = spans[asked]
                        if wanted.is_whole:
                            command.add("GET", wanted.name)  # no copy on the server's side
                        else:
                            command.add("GETRANGE", wanted.name, wanted.offset, wanted.offset + wanted.length - 1)
                        on_their_way += wanted.length
                        asked += 1
                    connection.send(command.take(), deadline)
                here = connection.bulk_into(span.targets, span.length, deadline)
                on_their_way -= span.length
                landed(i, range(len(span.targets) if here else 0))

    def write(self, objects: Sequence[NewObject], deadline: float) -> list[Status]:
        """See `base.ObjectClient`."""
        expiry = ("EX", self._ttl_s) if self._ttl_s else ()
        with self._connection(deadline) as connection:
            command = Command()
            for new in objects:
                command.add("SET", new.name, new.parts, *expiry)
            connection.send(command.take(), deadline)
            return [_stored(connection.reply(deadline)) for _ in objects]

    def publish(self, manifests: Sequence[NewManifest], deadline: float, log: str = "") -> list[Status]:
        """See `base.ObjectClient`. Tail lists are kept sorted by time, and short. A second round trip for the log: only
        after the first is it known who has something to tell."""
        expiry = ("EX", self._ttl_s) if self._ttl_s else ()
        now = time.time_ns() // 1000
        with self._connection(deadline) as connection:
            command, counts = Command(), list[int]()
            for new in manifests:
                before = command.num_commands
                command.add("SET", new.name, new.value, "NX", *expiry)
                if new.tail_list is not None:
                    command.add("ZADD", new.tail_list, now, new.num_tokens)
                    command.add("ZREMRANGEBYRANK", new.tail_list, 0, -MAX_TAILS - 1)
                    if self._ttl_s:
                        command.add("EXPIRE", new.tail_list, self._ttl_s)
                counts.append(command.num_commands - before)
            connection.send(command.take(), deadline)
            statuses = []
            for count in counts:
                first, *_ = [connection.reply(deadline) for _ in range(count)]
                statuses.append(Status.EXISTS if first is None else _stored(first))
            told = [new.told for new, status in zip(manifests, statuses, strict=True) if status == Status.OK]
            _log(connection, Notice(log, [value for value in told if value]), deadline)
        return statuses

    # ---- keeping and forgetting ---------------------------------------------------------------------------------
    def remove(self, names: Sequence[str], deadline: float, notice: Notice | None = None) -> None:
        """See `base.ObjectClient`."""
        with self._connection(deadline) as connection:
            for start in range(0, len(names), _SCAN_COUNT):
                _ask(connection, [("UNLINK", *names[start : start + _SCAN_COUNT])], deadline)
            if notice is not None:
                _log(connection, notice, deadline)

    def read_log(self, log: str, after: Position | None, limit: int, deadline: float) -> LogEntries | None:
        """See `base.ObjectClient`. The log is a stream; one round trip."""
        start = "-" if after is None else f"({after[0]}-{after[1]}"
        command = Command()
        command.add("XRANGE", log, "-", "+", "COUNT", 1)
        command.add("XREVRANGE", log, "+", "-", "COUNT", 1)
        command.add("XRANGE", log, start, "+", "COUNT", 1 if after is None else limit)
        command.add("XLEN", log)
        with self._connection(deadline) as connection:
            connection.send(command.take(), deadline)
            replies = [connection.reply(deadline, _LOG_VALUE_LIMIT, depth=3) for _ in range(4)]
        if any(isinstance(reply, RedisRefusal) for reply in replies):
            return None
        first, last, new = map(_entries, replies[:3])
        is_cut = isinstance(replies[3], int) and replies[3] >= LOG_ENTRIES
        end = last[0][0] if last else (0, 0)
        if after is None:
            return LogEntries([], end, False)
        if end < after:  # forgotten by the server, or by another one that took its place
            return LogEntries([], end, True)
        # A log that was empty when it was last looked at begins after that; it has lost some only if it was cut since.
        missed = bool(first) and first[0][0] > after and (after != (0, 0) or is_cut)
        return LogEntries([value for _, value in new], new[-1][0] if new else after, missed)

    def keep(self, names: Sequence[str], pinned: bool, deadline: float) -> None:
        """See `base.ObjectClient`: the expiry begins anew, or goes."""
        if pinned:
            commands: list[tuple[str | int, ...]] = [("PERSIST", name) for name in names]
        elif self._ttl_s:
            commands = [("EXPIRE", name, self._ttl_s) for name in names]
        else:
            return
        with self._connection(deadline) as connection:
            _ask(connection, commands, deadline)

    def remove_prefix(self, prefix: str, deadline: float, *, but: str = "") -> int:
        """See `base.ObjectClient`. Names that expire meanwhile are counted."""
        names = [name for name in dict.fromkeys(self.scan(prefix, deadline)) if name != but]
        self.remove(names, deadline)
        return len(names)

    def contribute(self) -> None:
        """See `base.ObjectClient`: a server has memory of its own."""

    def scan(self, prefix: str, deadline: float) -> Iterator[str]:
        """See `base.ObjectClient`. Looks at every key of the server, some at a time."""
        cursor = b"0"
        while True:
            with self._connection(deadline) as connection:
                command = Command()
                command.add("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", _SCAN_COUNT)
                connection.send(command.take(), deadline)
                reply = connection.reply(deadline, limit=64 * _SCAN_COUNT, depth=2)
            if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
                raise BackendError("the server's answer to SCAN is malformed")
            cursor = reply[0] if isinstance(reply[0], bytes) else b"0"
            yield from (name.decode("ascii", "replace") for name in reply[1] if isinstance(name, bytes))
            if cursor == b"0":
                return

    def usage(self, deadline: float) -> BackendUsage:
        """See `base.ObjectClient`."""
        with self._connection(deadline) as connection:
            (info,) = _ask(connection, [("INFO", "memory")], deadline)
        fields = dict(
            line.split(":", 1)
            for line in (info if isinstance(info, bytes) else b"").decode().splitlines()
            if ":" in line
        )
        used, most = (_whole(fields.get(name)) for name in ("used_memory", "maxmemory"))
        return BackendUsage(used, most)

    def close(self) -> None:
        """See `base.ObjectClient`."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        if self._pid == os.getpid():
            for connection in idle:
                connection.close()

    # ---- connections --------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[RedisConnection]:
        """A connection that nobody else uses. It is kept for the next one only if everything went well."""
        connection = self._take_idle() or self._connect(deadline)
        try:
            yield connection
        except BaseException:  # also GeneratorExit: answers may still be on their way
            connection.close()
            raise
        with self._lock:
            if len(self._idle) < self._most_idle:
                self._idle.append(connection)
                return
        connection.close()

    def _take_idle(self) -> RedisConnection | None:
        if self._pid != os.getpid():
            self._pid, self._idle = os.getpid(), deque()  # the parent's: neither used nor closed here
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None or not connection.is_stale:
                return connection
            connection.close()

    def _connect(self, deadline: float) -> RedisConnection:
        connection = RedisConnection(self._host, self._port, deadline, self._tls)
        try:
            account = (self._user, self._password) if self._user else (self._password,)
            hello: list[tuple[str | int, ...]] = [("AUTH", *account)] if self._password else []
            hello += [("SELECT", self._database)] if self._database else []
            if hello:
                try:
                    _ask(connection, hello, deadline)
                except StorePermissionError:
                    raise
                except BackendError as error:
                    raise BackendError(f"{self._host}:{self._port} refused the login: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection


def _ask(
    connection: RedisConnection, commands: Sequence[tuple[str | int, ...]], deadline: float, limit: int = 1 << 16
) -> list[Reply]:
    """Commands and their answers in one round trip. Raises BackendError for a refusal."""
    command = Command()
    for words in commands:
        command.add(*words)
    connection.send(command.take(), deadline)
    replies = [connection.reply(deadline, limit) for _ in commands]
    for reply in replies:
        if isinstance(reply, RedisRefusal):
            # The server's words may quote a command, and a command may hold a password: only the first one is shown.
            kind = StorePermissionError if reply.code in ("NOAUTH", "WRONGPASS", "NOPERM") else BackendError
            raise kind(f"the server refused: {reply.code}")
    return replies


def _stored(reply: Reply) -> Status:
    if reply == b"OK":
        return Status.OK
    if isinstance(reply, RedisRefusal) and reply.code in _FULL_CODES:
        return Status.FULL
    raise BackendError(f"the server refused a write: {reply.code if isinstance(reply, RedisRefusal) else type(reply)}")


def _log(connection: RedisConnection, notice: Notice, deadline: float) -> None:
    """Append the entries of a notice. The oldest go when the server likes. A refusal is no matter."""
    if not notice.values:
        return
    command = Command()
    for value in notice.values:
        command.add("XADD", notice.log, "MAXLEN", "~", LOG_ENTRIES, "*", _LOG_FIELD, value)
    connection.send(command.take(), deadline)
    for _ in notice.values:
        connection.reply(deadline)


def _entries(reply: Reply) -> list[tuple[Position, bytes]]:
    """What a stream holds: one value each, empty for what has none of ours. Raises BackendError for nonsense."""
    found: list[tuple[Position, bytes]] = []
    for entry in reply if isinstance(reply, list) else []:
        name, fields = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        numbers = name.split(b"-") if isinstance(name, bytes) else []
        if len(numbers) != 2 or not all(number.isdigit() and len(number) <= 20 for number in numbers):
            raise BackendError("the server's answer to XRANGE is malformed")
        value = fields[1] if isinstance(fields, list) and len(fields) == 2 else b""
        found.append(((int(numbers[0]), int(numbers[1])), value if isinstance(value, bytes) else b""))
    return found


def _lengths(reply: Reply) -> tuple[int, ...]:
    items = reply if isinstance(reply, list) else []
    return tuple(int(item) for item in items if isinstance(item, bytes) and item.isdigit() and len(item) < 10)


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.strip().isdecimal() else 0


def _secret(url: StoreUrl) -> str:
    """The password from the file that the URL names, without the line's end."""
    path = url.options.get("password_file")
    if path is None:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(4096).strip()
    except (OSError, UnicodeError) as error:
        raise UrlError(
            f"{url}: the password file {show_value(path)!r} cannot be read ({type(error).__name__})"
        ) from error


def _tls_context(url: StoreUrl) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=url.options.get("ca"))
    except OSError as error:
        raise UrlError(
            f"{url}: the certificates in ca={show_value(url.options.get('ca', ''))!r} cannot be read"
        ) from error
