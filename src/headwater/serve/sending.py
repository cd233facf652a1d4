"""Answers of ASGI applications that are made while they are sent: no longer than somebody waits for them and reads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message, Receive, Send

SEND_TIMEOUT_S = 30.0
SEND_BYTES = 1 << 16
"""A client that does not read this much in that time is given up."""


class ClientStalledError(Exception):
    """The client does not read its answer."""


def impatient(send: Send) -> Send:
    """`send`, cutting bodies in pieces of SEND_BYTES. Raises ClientStalledError if one takes longer than
    SEND_TIMEOUT_S: the server waits there until the client has read what came before."""

    async def one(message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)
        except TimeoutError:
            raise ClientStalledError(
                f"the client read nothing for {SEND_TIMEOUT_S:g} s; its request is aborted"
            ) from None

    async def in_pieces(message: Message) -> None:
        body = memoryview(message.get("body", b""))
        start = 0
        while len(body) - start > SEND_BYTES:
            piece = bytes(body[start : start + SEND_BYTES])
            await one({"type": message["type"], "body": piece, "more_body": True})
            start += SEND_BYTES
        await one({**message, "body": bytes(body[start:])} if start else message)

    return in_pieces


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, but cancel it (and wait until it has cleaned up) when the client leaves. Raises what it raises."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = working.done()
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if is_done:
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
