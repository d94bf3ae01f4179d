"""An empty private server for each measurement, with the settings that users get, and what it tells about itself."""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import redis

from pipeline.core.clock import SystemClock
from pipeline.runtime.server import private_server

SETTINGS = (
    "appendonly",
    "appendfsync",
    "save",
    "maxmemory-policy",
    "aof-use-rdb-preamble",
    "auto-aof-rewrite-min-size",
    "io-threads",
)
REWRITE_SEC_MAX = 600
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. ``client`` is the bench's own connection, for questions between measurements."""

    url: str
    client: Any

    @property
    def socket(self) -> str:
        """The path of its unix socket."""
        return unquote(self.url.removeprefix("unix://"))

    def info(self, section: str) -> dict[str, Any]:
        """Return a section of INFO."""
        reply: dict[str, Any] = self.client.info(section)
        return reply

    def messages(self) -> int:
        """Count the members of all buckets, ours and those of other ways to store."""
        return sum(self.client.zcard(key) for key in self.client.scan_iter(match="*bucket:*", count=1_000))

    def data_bytes(self) -> int:
        """Return the memory in use, without what connections hold for the moment."""
        memory = self.info("memory")
        return int(memory["used_memory"] - memory["mem_clients_normal"] - memory["mem_aof_buffer"])

    def wait_for_rewrite(self) -> None:
        """Wait while it rewrites its append-only file, or is about to."""
        clock = SystemClock()
        deadline_ms = clock.monotonic_ms() + REWRITE_SEC_MAX * 1000
        while clock.monotonic_ms() < deadline_ms:
            state = self.info("persistence")
            if not state["aof_rewrite_in_progress"] and not state["aof_rewrite_scheduled"]:
                return
            self.client.blpop(["nothing"], timeout=0.2)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the server's own process so far."""
        cpu = self.info("cpu")
        return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])

    def facts(self) -> dict[str, Any]:
        """Return the version and the settings that matter for speed and durability."""
        about, config = self.info("server"), self.client.config_get(*SETTINGS)
        name = about.get("server_name", "redis")
        return {"server": f"{name} {about.get('valkey_version') or about['redis_version']}", "settings": config}


@contextmanager
def empty_server(work: Path) -> Iterator[Server]:
    """Run a private server of its own, on an empty folder below ``work``, while the block lasts."""
    state = work / f"server-{next(_numbers)}"
    with private_server(state) as url:
        server = Server(url, redis.Redis.from_url(url, decode_responses=True, socket_timeout=120))
        try:
            yield server
        finally:
            server.client.close()
    folder = Path(server.socket).parent
    if folder != state / "server":  # the path was too long for a socket
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(state)
