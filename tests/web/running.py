"""The API as a test runs it: a real server on a port, in a thread of this process."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from pipeline.config import ApiSettings, IngestSettings, RedisSettings, Settings
from pipeline.core.clock import SystemClock
from pipeline.store.connection import connect
from pipeline.store.namespace import open_namespace
from pipeline.web.server import listen, serve

LINES = {"Content-Type": "application/x-ndjson"}
WAIT_SEC = 30.0


class Api(httpx.Client):
    """A client of a running API, which keeps its connections open."""

    def __init__(self, port: int, **options: Any) -> None:
        super().__init__(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_SEC, **options)
        self.port = port

    def schedule(self, message: str = "tea", delay_sec: float = 3_600, **fields: Any) -> httpx.Response:
        return self.post("/v1/messages", json={"message": message, "delay_sec": delay_sec, **fields})

    def batch(self, lines: list[Any], query: str = "", **headers: str) -> httpx.Response:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        return self.post(f"/v1/batches{query}", content="\n".join(texts) + "\n", headers=LINES | headers)

    def listed(self, **parameters: Any) -> list[dict[str, Any]]:
        """Walk all pages of what is scheduled."""
        found: list[dict[str, Any]] = []
        while True:
            page = self.get("/v1/messages", params=parameters).raise_for_status().json()
            found += page["messages"]
            if "cursor" not in page:
                return found
            parameters["cursor"] = page["cursor"]

    def raw(self) -> socket.socket:
        """Open a connection of bytes."""
        return socket.create_connection(("127.0.0.1", self.port), WAIT_SEC)


def settings_of(url: str, **api: Any) -> Settings:
    return Settings(redis=RedisSettings(url=url), api=ApiSettings(**{"port": 0, **api}))


@contextmanager
def running(settings: Settings, stopping: Callable[[], bool] | None = None) -> Iterator[Api]:
    """Run the API while the block lasts."""
    stop, ready = threading.Event(), threading.Event()
    client = connect(settings.redis)
    with listen(settings.api) as (listener, _):
        port = listener.getsockname()[1]
        open_namespace(client, settings.redis, may_create=True)

        def work() -> None:
            is_over = stopping or stop.is_set
            asyncio.run(serve(settings, client, SystemClock(), listener, is_over, ready.set))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert ready.wait(WAIT_SEC)
            with Api(port) as api:
                yield api
        finally:
            stop.set()
            thread.join(WAIT_SEC)
            client.close()
            assert not thread.is_alive()


def with_marker_keep(settings: Settings, seconds: int) -> Settings:
    return replace(settings, ingest=IngestSettings(marker_keep_sec=seconds))
