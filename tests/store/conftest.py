"""One store suite, two servers: fakeredis for speed, the real one for truth."""

import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import fakeredis
import pytest
import redis

from pipeline.config import DrainSettings, RedisSettings
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import Scripts
from pipeline.store.stats import Stats, read_stats
from tests.servers import RealServer

START_MS = 1_700_000_000_000


@dataclass
class Bench:
    """A store, its server seen from outside, and the clock of its scripts.

    ``user`` is what the code under test has, ``client`` may do everything.
    """

    client: "redis.Redis"
    user: "redis.Redis"
    keys: Keys
    scripts: Scripts
    now_ms: int = START_MS
    drain: DrainSettings = field(default_factory=lambda: DrainSettings(lease_sec=30, claim_limit=500))

    def store(self, **drain: float) -> RedisStore:
        """A new store, as another process would have it."""
        settings = DrainSettings(**{"lease_sec": 30, "claim_limit": 500, **drain})  # type: ignore[arg-type]
        return RedisStore(self.user, self.keys, settings, self.scripts, lambda: self.now_ms)

    def stats(self) -> Stats:
        """Count what there is."""
        return read_stats(self.user, [self.keys], self.now_ms)

    def names(self) -> set[str]:
        """The keys that exist, without their hash tag."""
        tag = f"{{{self.keys.namespace}:0}}:"
        return {key.decode().removeprefix(tag) for key in self.client.scan_iter(f"{tag}*")}


def ends(wait: Callable[[], None]) -> bool:
    """Whether a wait of a minute ends long before."""
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(60)
    return not waiting.is_alive()


@pytest.fixture(params=["fake", "real"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    keys = Keys(f"test-{uuid.uuid4().hex}")
    if request.param == "fake":
        client = fakeredis.FakeRedis()
        yield Bench(client, client, keys, Scripts(flags=False))
        return
    server: RealServer = request.getfixturevalue("server")
    client, user = server.client(), connect(RedisSettings(url=server.url))
    yield Bench(client, user, keys, Scripts())
    user.close()
    client.close()
