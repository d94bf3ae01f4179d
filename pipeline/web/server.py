"""Running the API: its address, its event loop, and its end."""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import uvicorn

from pipeline.client import AsyncDuetime, Duetime
from pipeline.config import ApiSettings, Settings
from pipeline.core.clock import Clock
from pipeline.core.errors import ConfigError
from pipeline.store.keys import keys_of
from pipeline.web.access import Access, read_tokens
from pipeline.web.api import Api
from pipeline.web.app import App
from pipeline.web.protocol import BoundedProtocol

BACKLOG: Final = 1_024  # connections that the system holds until they are accepted
SWEEP_SEC: Final = 1.0
STOP_SEC: Final = 5  # beside the patience of a request, until connections are cut
# Python lets a thread go on for 5 ms while another one waits; the event loop would wait so long for the thread of a batch.
SWITCH_SEC: Final = 0.0005

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Ends when a stop is requested; signals are left to whoever requests it."""

    def __init__(
        self, config: uvicorn.Config, app: App, stopping: Callable[[], bool], on_ready: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._app = app
        self._stopping = stopping
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Say whether it is time to end; what would never end by itself is ended then."""
        is_over = await super().on_tick(counter) or self._stopping()
        if is_over:
            self._app.site.hub.close()
        return is_over


async def serve(
    settings: Settings,
    client: Any,
    clock: Clock,
    listener: socket.socket,
    stopping: Callable[[], bool],
    on_ready: Callable[[], object],
) -> None:
    """Answer requests until a stop is requested; then what is under way is answered first.

    Args:
        settings: with the server in ``redis``.

        client: a ``redis.Redis`` for what is not a single message.

        listener: a socket that is bound, see ``listen``.

        on_ready: is called when requests are answered.
    """
    limits = settings.api
    access = Access(limits, read_tokens(limits.tokens), lambda: clock.monotonic_ms() / 1000)
    open_duetime = partial(Duetime.over, client, settings, limits.patience_sec, limits.wait_for_disk)
    async with AsyncDuetime.over(open_duetime) as duetime:
        api = Api(settings, duetime, client, keys_of(settings.redis), clock)
        app = App(api, access)
        server = Server(
            uvicorn.Config(
                app,
                http=partial(BoundedProtocol, limits),  # type: ignore[arg-type]
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=limits.keep_alive_sec,
                timeout_graceful_shutdown=round(limits.patience_sec) + STOP_SEC,
            ),
            app,
            stopping,
            on_ready,
        )
        api.server = server.server_state
        sweeper = asyncio.create_task(_sweep(server))
        switch_sec = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SEC)
        try:
            await server.serve(sockets=[listener])
        finally:
            sys.setswitchinterval(switch_sec)
            sweeper.cancel()
            api.close()


async def _sweep(server: Server) -> None:
    while True:
        await asyncio.sleep(SWEEP_SEC)
        for connection in [*server.server_state.connections]:
            if isinstance(connection, BoundedProtocol):
                connection.sweep()


@contextlib.contextmanager
def listen(settings: ApiSettings) -> Iterator[tuple[socket.socket, str]]:
    """Bind the address of the API; gives the socket, and how the address is written.

    Raises:
        ConfigError: the address can't be had.
    """
    where = settings.unix or f"{settings.host} port {settings.port}"
    try:
        listener = _listen_on_path(settings.unix) if settings.unix else _listen_on_port(settings.host, settings.port)
    except OSError as exc:
        raise ConfigError(f"The API can't listen on {where} ({exc.strerror or exc}); choose another address.") from exc
    with listener:
        if settings.unix:
            yield listener, f"unix:{settings.unix}"
            with contextlib.suppress(OSError):
                os.unlink(settings.unix)
        else:
            host, port = listener.getsockname()[:2]
            yield listener, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen_on_path(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
            os.unlink(path)  # of a process that was killed
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _listen_on_port(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)  # asyncio sends without delay only if the protocol is named
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
