"""Starting, talking to and ending the engine process, as asyncio sees it. What is said is `client`'s business."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence

from headwater.serve.messages import READ_BYTES, FrameReader, FromEngine, ToEngine, decode_from_engine, encode

LAST_WORDS_S = 0.5
"""A process that closed its socket is dead in a moment, and a dead one's last message may still be on its way."""


class Connection:
    """The server's end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()

    def send(self, message: ToEngine) -> None:
        """Queue one message. Never fails: the death of the other end is noticed by reading."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def drain(self) -> None:
        """Wait while more is queued than the socket takes."""
        try:
            await self._writer.drain()
        except OSError:
            pass  # as in `send`

    async def receive(self) -> list[FromEngine]:
        """The next messages, at least one; empty when the other end is gone."""
        while data := await self._reader.read(READ_BYTES):
            if messages := [decode_from_engine(body) for body in self._frames.feed(data)]:
                return messages
        return []

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._writer.close()


async def spawn(command: Sequence[str]) -> tuple[asyncio.subprocess.Process, Connection]:
    """Start the process with its end of a socket pair; ours is the only copy of the other, so our death closes it."""
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # our stdout may be a program's input
            start_new_session=True,  # a group of its own, so that no rank is left behind
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours)
    return process, Connection(reader, writer)


async def exit_code(process: asyncio.subprocess.Process, timeout_s: float | None = None) -> str:
    """Wait for the process to end, and say how it did."""
    if not await ended(process, timeout_s):
        return "it closed its socket"
    code = process.returncode or 0
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


async def ended(process: asyncio.subprocess.Process, timeout_s: float | None) -> bool:
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        return False
    return True


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill the whole group and reap the process. Idempotent."""
    try:
        # The group outlives its leader as long as any rank does.
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    await process.wait()
