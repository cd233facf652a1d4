"""`headwater pool receive`: lets other hosts push KV into a pool of this one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from headwater.cli.output import plural, print_json
from headwater.cli.usage import reading_options
from headwater.errors import InvalidArgumentError, StoreError
from headwater.logs import note
from headwater.peers.address import parse_address
from headwater.peers.hello import read_secret
from headwater.peers.options import server_tls
from headwater.peers.receiver import Receiver, ReceiverSettings
from headwater.pool.pool import open_pool
from headwater.stores.embedded import store_directory
from headwater.stores.url import DEFAULT_URL, format_size, parse_urls

_LOOK_S = 0.5
"""So often it is looked whether the pool is still there."""


def receive(
    url: str | None,
    listen: str,
    secret_file: str | None,
    spaces: Sequence[str],
    share: float,
    tls: tuple[str | None, str | None, str | None],
    as_json: bool,
    carrier: str = "tcp",
) -> None:
    """Serve until SIGTERM or Ctrl-C; then everything that peers have not finished is aborted."""
    with reading_options():
        scopes, address = tuple(_scope(text) for text in spaces), parse_address(listen)
        if tls[0] is None and any(tls):
            raise InvalidArgumentError("--tls-key and --tls-ca need --tls-cert")
    settings = ReceiverSettings(
        secret=None if secret_file is None else read_secret(secret_file),
        scopes=scopes,
        share=share,
        tls=server_tls(*tls),
        carrier=carrier,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    url = DEFAULT_URL if url is None else url
    scheme = parse_urls(url)[0].scheme
    if scheme == "memory":
        raise InvalidArgumentError(
            "memory:// is private to one process; a receiver needs a pool that other processes can open, e.g. shm:///headwater"
        )
    with open_pool(url) as pool:
        home = _home(url)
        receiver = Receiver(pool, address, settings)
        receiver.start()
        if as_json:
            print_json({"listening": str(receiver.address), "share_bytes": receiver.landing.share_bytes})
        else:
            share_text = format_size(receiver.landing.share_bytes)
            note(f"listening on {receiver.address}; peers may have {share_text} pending")
            if scheme != "shm":
                note(f"peers can only read a {scheme}:// pool; pushes need shm://")
        try:
            while not stop.wait(_LOOK_S):
                if _home(url) != home:
                    raise StoreError(f"{url} was removed while its receiver ran; restart the receiver")
        finally:
            receiver.close()
            stats = receiver.stats()
            if as_json:
                print_json(stats)
            else:
                stored = plural(int(stats.get("chunks_stored", 0)), "chunk")
                note(f"{stored} received, {format_size(int(stats.get('bytes', 0)))}")


def _home(url: str) -> tuple[int, int] | None:
    """Which pool is to be found there now; None where there is none. A receiver that went on with one that was removed
    would fill memory that no engine looks at."""
    first = parse_urls(url)[0]
    if first.scheme not in ("shm", "file"):
        return None
    try:
        found = os.stat(os.path.join(store_directory(first), "members"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _scope(text: str) -> bytes:
    try:
        scope = bytes.fromhex(text)
    except ValueError:
        scope = b""
    if len(scope) != 32:
        raise InvalidArgumentError(f"--space is {text[:80]!r}; expected 64 hexadecimal digits")
    return scope
