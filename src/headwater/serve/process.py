"""Starting, talking to and ending the engine process, as asyncio sees it. What is said is `client`'s business."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence

from headwater.serve.messages import (
    READ_BYTES,
    Abort,
    FrameReader,
    FromEngine,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)

LAST_WORDS_S = 0.5
"""A process that closed its socket is dead in a moment, and a dead one's last message may still be on its way."""


class EngineConnection:
    """The server's end of the socket.

    A Submit waits here until the socket takes it, and is dropped if its Abort comes first: however long the engine does
    not read, only the requests of clients that stay take memory.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()
        self._waiting: dict[str, bytes] = {}
        """Frames of Submits, in order."""
        self.num_waiting_bytes = 0
        """Of Submits that the socket has not taken."""
        self._writing: asyncio.Task[None] | None = None

    def send(self, message: ToEngine) -> None:
        """Queue one message. The other end's death is noticed by reading. Raises EngineError if it is too large."""
        if self._writer.is_closing():
            return
        match message:
            case Submit(request_id):
                self._waiting[request_id] = frame = encode(message)
                self.num_waiting_bytes += len(frame)
                if self._writing is None:
                    self._writing = asyncio.create_task(self._write_waiting())
            case Abort(request_id) if request_id in self._waiting:
                self.num_waiting_bytes -= len(self._waiting.pop(request_id))
            case _:
                self._writer.write(encode(message))

    async def drain(self) -> None:
        """Wait while the socket takes nothing."""
        try:
            await self._writer.drain()
        except OSError:
            pass  # as in `send`

    async def _write_waiting(self) -> None:
        while self._waiting and not self._writer.is_closing():
            await self.drain()
            if self._waiting:
                frame = self._waiting.pop(next(iter(self._waiting)))
                self.num_waiting_bytes -= len(frame)
                self._writer.write(frame)
        self._writing = None

    async def receive(self) -> list[FromEngine]:
        """The next messages, at least one; empty when the other end is gone."""
        while data := await self._reader.read(READ_BYTES):
            if messages := [decode_from_engine(body) for body in self._frames.feed(data)]:
                return messages
        return []

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        self._waiting.clear()
        self.num_waiting_bytes = 0
        self._writer.close()


async def spawn(command: Sequence[str]) -> tuple[asyncio.subprocess.Process, EngineConnection]:
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
    return process, EngineConnection(reader, writer)


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
