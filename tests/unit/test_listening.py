"""The list of listening sockets that other tests rely on: it must see every kind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from listening import doors


def test_every_kind_of_socket_is_seen(tmp_path: Path) -> None:
    before = set(doors(os.getpid()))
    with (
        socket.create_server(("127.0.0.1", 0)) as loopback,
        socket.create_server(("0.0.0.0", 0)) as anywhere,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.create_connection(loopback.getsockname()),
    ):
        datagrams.bind(("0.0.0.0", 0))
        named.bind(str(tmp_path / "s"))
        abstract.bind(f"\0hwtest-{os.getpid()}")
        named.listen()
        abstract.listen()
        found = {(d.protocol, d.address, d.port): d.is_local for d in set(doors(os.getpid())) - before}
        assert found == {
            ("tcp", "127.0.0.1", loopback.getsockname()[1]): True,
            ("tcp", "0.0.0.0", anywhere.getsockname()[1]): False,
            ("udp", "0.0.0.0", datagrams.getsockname()[1]): False,
            ("unix", str(tmp_path / "s"), 0): True,
            ("unix", f"@hwtest-{os.getpid()}", 0): False,
        }


def test_ipv6_is_seen_where_there_is_any() -> None:
    if not Path("/proc/net/tcp6").exists():
        return
    with socket.create_server(("::", 0), family=socket.AF_INET6) as server:
        assert ("tcp6", "::", server.getsockname()[1], os.getpid()) in doors(os.getpid())


def test_sockets_of_grandchildren_are_seen() -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import socket, sys;"
        's = socket.create_server(("0.0.0.0", 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()\'])'
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert [(door.address, door.port) for door in doors(process.pid)] == [("0.0.0.0", port)]
        process.communicate()
