"""The life of a server: take the port, start the engine, serve, and stop when asked to or when the engine dies."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from headwater import __version__
from headwater.connector.peering import peer_options
from headwater.engine.config import EngineConfig
from headwater.peers.process import ReceiverChild, ReceiverSpec
from headwater.serve.app import AppConfig, create_app
from headwater.serve.client import WORKER_COMMAND, EngineClient
from headwater.serve.config import ServerConfig
from headwater.serve.connections import Connections
from headwater.serve.generation import Generator, ServerTokenizer
from headwater.serve.http import HttpServer, bound_socket, stop_signals, url_of
from headwater.serve.messages import Ready
from headwater.serve.metrics import ServerMetrics
from headwater.serve.peers import NO_PEERS, Peers
from headwater.serve.tls import load_certificate
from headwater.serve.watching import Watching

STOP_GRACE_S = 1
"""How long a client may take to read the error that ends its request when the server stops."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What is told on the way: progress of loading, and where the server can be reached once it can."""

    on_progress: Callable[[int, int], None] = lambda done, total: None
    on_ready: Callable[[Ready, str, str], None] = lambda ready, model, url: None
    """Facts of the engine, name of the model, URL."""
    on_peer: Callable[[str], None] = lambda address: None
    """Where other servers push KV to, before `on_ready`."""
    on_death: Callable[[str], None] = lambda reason: None


def run_server(
    config: ServerConfig,
    *,
    hooks: Hooks | None = None,
    load_tokenizer: Callable[[EngineConfig], ServerTokenizer] | None = None,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> int:
    """Serve until SIGINT or SIGTERM (returns 0) or until the engine dies (returns 1).

    Raises OSError if the port cannot be had, and what starting the engine raises.
    """
    return asyncio.run(_run(config, load_tokenizer or load_tokenizer_of, hooks or Hooks(), worker_command))


def load_tokenizer_of(config: EngineConfig) -> ServerTokenizer:
    """The tokenizer of the checkpoint. Takes seconds: it imports torch and transformers."""
    from headwater.models.checkpoint import open_checkpoint

    return open_checkpoint(config.model, config.load_format).load_tokenizer()


async def _run(
    config: ServerConfig,
    load_tokenizer: Callable[[EngineConfig], ServerTokenizer],
    hooks: Hooks,
    worker_command: Sequence[str],
) -> int:
    certificate = load_certificate(config.ssl_certfile, config.ssl_keyfile)
    with bound_socket(config.host, config.port) as sock, stop_signals() as stop:
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(_start(config.engine, load_tokenizer, hooks, worker_command))
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return 0
        client, tokenizer = starting.result()
        peers = NO_PEERS
        try:
            peers = await _in_daemon_thread(lambda: _start_receiver(config))
            return await _serve(config, client, tokenizer, hooks, sock, certificate, stopping, peers)
        finally:
            await client.close()
            await _in_daemon_thread(peers.close)
            stopping.cancel()


async def _serve(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: ServerTokenizer,
    hooks: Hooks,
    sock: socket.socket,
    certificate: ssl.SSLContext | None,
    stopping: asyncio.Task[bool],
    peers: Peers,
) -> int:
    model = config.model_name
    facts = {"version": __version__, "model": model}
    metrics = ServerMetrics(lambda: client.stats, facts, lambda: client.silent_s, peers)
    limit = client.ready.max_num_seqs + config.max_waiting
    generator = Generator(client, tokenizer, metrics, max_sequences=limit)
    hides = config.requires_cache_salt
    watching = Watching(config.engine.pool, model, lambda: client.stats, hides_prefixes=hides)
    server = _make_server(config, generator, certificate, peers, watching)
    # What is there now stays: a full collection that looked at all of transformers would take some 200 ms each time.
    gc.collect()
    gc.freeze()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    listening = asyncio.create_task(server.listening.wait())
    dying = asyncio.create_task(client.wait_dead())
    try:
        await asyncio.wait({listening, serving}, return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            if peers.address:
                hooks.on_peer(peers.address)
            scheme = "http" if certificate is None else "https"
            hooks.on_ready(client.ready, model, url_of(scheme, config.host, sock.getsockname()[1]))
        await asyncio.wait({stopping, dying, serving}, return_when=asyncio.FIRST_COMPLETED)
        if client.death is not None:
            hooks.on_death(str(client.death))
        code = 0 if stopping.done() and client.death is None else 1
        # Closing generator and client ends every request with an error event, so that no connection has to be cut.
        server.should_exit = True
        generator.close()
        await client.close()
        await serving
        return code
    finally:
        listening.cancel()
        dying.cancel()
        watching.close()
        generator.close()
        generator.workers.join()
        gc.unfreeze()


async def _start(
    config: EngineConfig,
    load_tokenizer: Callable[[EngineConfig], ServerTokenizer],
    hooks: Hooks,
    worker_command: Sequence[str],
) -> tuple[EngineClient, ServerTokenizer]:
    """Engine and tokenizer side by side; if one fails, the other is stopped and the error raised."""
    tokenizer = asyncio.create_task(_in_daemon_thread(lambda: load_tokenizer(config)))
    engine = asyncio.create_task(EngineClient.start(config, command=worker_command, on_progress=hooks.on_progress))
    try:
        # Whichever fails first is heard first: a model that is not there need not wait for the engine to find out.
        await asyncio.wait({engine, tokenizer}, return_when=asyncio.FIRST_EXCEPTION)
        if tokenizer.done():
            tokenizer.result()
        return await engine, await tokenizer
    except BaseException:
        for task in (engine, tokenizer):
            task.cancel()
        results = await asyncio.gather(engine, tokenizer, return_exceptions=True)
        if isinstance(results[0], EngineClient):
            await results[0].close()
        raise


async def _in_daemon_thread(work: Callable[[], _Result]) -> _Result:
    """What `work` returns or raises. Unlike `asyncio.to_thread`, the process can end before it has: importing takes
    seconds, and who stops a server that is starting should not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        def unless_cancelled() -> None:
            if not done.done():
                set_outcome()

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(unless_cancelled)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            settle(partial(done.set_exception, error))
        else:
            settle(partial(done.set_result, result))

    threading.Thread(target=run, name="headwater-tokenizer", daemon=True).start()
    return await done


def _start_receiver(config: ServerConfig) -> Peers:
    if config.peer_listen is None or config.engine.pool is None:
        return NO_PEERS
    child = ReceiverChild(ReceiverSpec(config.engine.pool, config.peer_listen, peer_options(config.engine)))
    child.start()
    return child


def _make_server(
    config: ServerConfig,
    generator: Generator,
    certificate: ssl.SSLContext | None,
    peers: Peers,
    watching: Watching,
) -> HttpServer:
    app = create_app(
        generator,
        AppConfig(
            served_model_name=config.model_name,
            host=config.host,
            api_key=config.api_key,
            max_body_bytes=config.max_body_bytes,
            max_total_body_bytes=config.max_total_body_bytes,
            engine_timeout_s=config.engine_timeout_s,
            requires_cache_salt=config.requires_cache_salt,
        ),
        peers,
        watching,
    )
    connections = Connections(config.max_connections, config.header_timeout_s)
    return HttpServer(app, connections, certificate, grace_s=STOP_GRACE_S)
