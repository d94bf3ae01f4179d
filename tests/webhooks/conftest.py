"""A namespace, a loop that delivers into streams, and a target."""

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.config import DrainSettings, RedisSettings, Settings
from pipeline.consume import handling
from pipeline.core.buckets import bucket_start_ms
from pipeline.core.clock import SystemClock
from pipeline.core.messages import Message
from pipeline.store.connection import connect
from pipeline.store.entries import BEGINNING
from pipeline.store.keys import Keys, keys_of
from pipeline.store.namespace import change_topic_settings
from pipeline.store.redis_store import RedisStore
from pipeline.webhooks.service import GROUP, Webhooks
from tests.servers import RealServer
from tests.webhooks.receiver import PATIENCE_SEC, Receiver, receiving

PAUSE_MS = 100


class World:
    """A namespace whose messages are delivered, by a thread that stands in for a drain loop."""

    def __init__(self, server: RealServer) -> None:
        self.settings = Settings(redis=RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}"))
        self.shards: list[Keys] = keys_of(self.settings.redis)
        self.client, self.user = server.client(), connect(self.settings.redis)
        self.running: list[Webhooks] = []
        self._numbers = itertools.count(1)
        self._over = threading.Event()
        self._loop = threading.Thread(target=self._deliver)
        self._loop.start()

    def set(self, topic: str, **changes: Any) -> None:
        change_topic_settings(self.user, self.settings.redis, topic, changes)

    def send(self, topic: str, *texts: str, **fields: Any) -> int:
        """Schedule messages that are due now, all at once; returns when they are due."""
        due_ms, [keys] = SystemClock().wall_ms(), self.shards
        members = [
            Message(due_ms, text, topic, **fields).to_member(f"Psent000000000{next(self._numbers):08x}")
            for text in texts
        ]
        start_ms = bucket_start_ms(due_ms)
        with self.client.pipeline() as pipeline:
            pipeline.zadd(keys.bucket(start_ms), dict.fromkeys(members, due_ms))
            pipeline.zadd(keys.buckets(), {str(start_ms): start_ms})
            pipeline.execute()
        return due_ms

    def post(self, *only: str, secrets: Any = None, start: str = BEGINNING) -> Webhooks:
        """Begin to post; the test looks again by itself."""
        clock = SystemClock()
        webhooks = Webhooks(self.user, self.settings, self.shards, secrets or {}, clock, start, set(only))
        self.running.append(webhooks)
        webhooks.look()
        return webhooks

    def dead(self, topic: str) -> list[dict[str, str]]:
        letters = self.client.xrange(self.shards[0].dead(topic))
        return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in letters]

    def is_settled(self, topic: str) -> bool:
        """Whether the group has handled all that came, and nothing waits to come again."""
        [keys] = self.shards
        for stream in (keys.stream(topic), keys.retry(topic, GROUP)):
            [group] = [each for each in self.client.xinfo_groups(stream) if each["name"] == GROUP.encode()]
            if group["pending"] or group["lag"]:
                return False
        return not self.client.zcard(keys.buckets())

    def wait_for(self, seen: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_SEC
        while not seen():
            assert time.monotonic() < end, f"no {what}"
            self._over.wait(0.005)

    def close(self) -> None:
        for webhooks in self.running:
            webhooks.stop()
        self._over.set()
        self._loop.join()
        self.user.close()
        self.client.close()

    def _deliver(self) -> None:
        with connect(self.settings.redis) as client:
            store = RedisStore(client, self.shards[0], DrainSettings())
            while not self._over.wait(0.005):
                while store.claim(uuid.uuid4().hex).moved:
                    pass


@pytest.fixture
def world(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(handling, "PAUSE_MS_FIRST", PAUSE_MS)
    monkeypatch.setattr(handling, "PAUSE_MS_MAX", PAUSE_MS)
    made = World(server)
    yield made
    made.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(Receiver()) as made:
        yield made
