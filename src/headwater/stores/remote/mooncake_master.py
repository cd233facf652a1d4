"""What Mooncake's clients cannot say and its master can: which objects there are, and how much room is taken.

The master answers on the HTTP port of its metrics (9003 unless it was told otherwise). For administrators only; nothing
that an engine waits for comes this way.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator

from headwater.errors import BackendError, DeadlineError
from headwater.stores.remote.base import BackendUsage

DEFAULT_METRICS_PORT = 9003
_LONGEST_NAME = 1024
_MOST_METRICS_BYTES = 1 << 22
_USAGE = ("master_allocated_bytes", "master_total_capacity_bytes")


class MasterMetrics:
    """The master's HTTP port."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def names(self, prefix: str, deadline: float) -> Iterator[str]:
        """Names of objects that begin like this. The master sends all that it has."""
        for line in self._lines("/get_all_keys", deadline):
            if line.startswith(prefix):
                yield line

    def usage(self, deadline: float) -> BackendUsage:
        """How full the cluster is."""
        found = dict.fromkeys(_USAGE, 0)
        size = 0
        for line in self._lines("/metrics", deadline):
            size += len(line)
            name, _, value = line.partition(" ")
            if name in found and value.replace(".", "", 1).isdecimal():
                found[name] = int(float(value))
            if size > _MOST_METRICS_BYTES:
                break
        return BackendUsage(*found.values())

    def _lines(self, path: str, deadline: float) -> Iterator[str]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_left(deadline))
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            if reply.status != http.HTTPStatus.OK:
                raise BackendError(f"the master's port {self._port} answered {path} with {reply.status}")
            while line := reply.readline(_LONGEST_NAME):
                _left(deadline)
                yield line.decode("utf-8", "replace").rstrip("\r\n")
        except TimeoutError as error:
            raise DeadlineError(f"the master's port {self._port} does not answer in time") from error
        except (OSError, http.client.HTTPException) as error:
            raise BackendError(
                f"Mooncake's clients cannot list what there is, only its master can, and there is no answer at "
                f"{self._host}:{self._port} ({error}); say where its metrics are with metrics=PORT"
            ) from error
        finally:
            connection.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("no time is left")
    return left
