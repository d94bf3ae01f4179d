"""Consumers on a real server, with a clock of their own."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pipeline.config import DrainSettings, RedisSettings, TopicSettings
from pipeline.consume.consumer import Consumer
from pipeline.core.buckets import bucket_start_ms
from pipeline.core.messages import Message
from pipeline.store.connection import connect
from pipeline.store.entries import BEGINNING
from pipeline.store.groups import GroupStore
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from tests.clock import ManualClock
from tests.servers import RealServer
from tests.store.builders import set_topic

TOPIC, GROUP = "mail", "billing"
SETTINGS = TopicSettings(sink="stream", lease_sec=100, attempts_max=3, backoff_ms=1, backoff_ms_max=2)


@dataclass
class Stage:
    """A namespace whose topics all go into streams; ``user`` is what the code under test has, ``client`` may do everything."""

    client: Any
    user: Any
    keys: Keys
    settings: TopicSettings = SETTINGS
    clock: ManualClock = field(default_factory=ManualClock)
    _names: int = 0
    _sent: int = 0
    _opened: list[Consumer] = field(default_factory=list)

    def send(self, *texts: str, due_ms: int = 1_000, **fields: Any) -> None:
        """Schedule messages that are due, and let them move into their stream."""
        for text in texts:
            self._sent += 1
            member = Message(due_ms, text, TOPIC, **fields).to_member(f"Psent000000000{self._sent:08x}")
            self.client.zadd(self.keys.bucket(bucket_start_ms(due_ms)), {member: due_ms})
            self.client.zadd(self.keys.buckets(), {str(bucket_start_ms(due_ms)): bucket_start_ms(due_ms)})
        self.move()

    def move(self) -> int:
        """Do what a drain loop does; returns how many messages moved."""
        set_topic(self.client, self.keys, "*", self.settings)
        store = RedisStore(self.user, self.keys, DrainSettings())
        moved = 0
        while found := store.claim(uuid.uuid4().hex).moved:
            moved += sum(len(each.dues_ms) for each in found)
        return moved

    def move_when_due(self, count: int = 1) -> None:
        """Wait until messages that come again have moved."""
        moved = 0
        for _ in range(2_000):
            moved += self.move()
            if moved >= count:
                return
        raise AssertionError(f"only {moved} of {count} came again")

    def open(self, name: str = "", group: str = GROUP, start: str = BEGINNING, **options: Any) -> Consumer:
        """Open a consumer that waits for nothing."""
        self._names += 1
        store = GroupStore(self.user, [self.keys], TOPIC, group, name or f"instance-{self._names}")
        store.register(start, options.pop("ordered", None))
        settings = replace(self.settings, **options.pop("settings", {}))
        wait = self.clock.advance_ms
        self._opened.append(Consumer(store, settings, self.clock, wait, lambda: 0.5, block_ms=1, **options))
        return self._opened[-1]

    def end_threads(self) -> None:
        """End what consumers run that were left as they are, as by a test that fails."""
        for consumer in self._opened:
            consumer._renewer.close()

    def pending(self, group: str = GROUP) -> int:
        streams = (self.keys.stream(TOPIC), self.keys.retry(TOPIC, group))
        return sum(int(self.client.xpending(stream, group)["pending"]) for stream in streams)

    def dead(self) -> list[dict[str, str]]:
        return [
            {name.decode(): value.decode() for name, value in fields.items()}
            for _, fields in self.client.xrange(self.keys.dead(TOPIC))
        ]

    def silence_ms(self, ms: float) -> None:
        """Let it seem, on the server and here, as if nothing was heard of any consumer for so long."""
        for stream in (self.keys.stream(TOPIC), self.keys.retry(TOPIC, GROUP)):
            for row in self.client.xpending_range(stream, GROUP, "-", "+", 1_000):
                self.client.xclaim(
                    *(stream, GROUP, row["consumer"], 0, [row["message_id"]]),
                    idle=int(ms),
                    retrycount=row["times_delivered"],
                    justid=True,
                )
        self.clock.advance_ms(ms)


@pytest.fixture
def stage(server: RealServer) -> Iterator[Stage]:
    keys = Keys(f"test-{uuid.uuid4().hex}")
    client, user = server.client(), connect(RedisSettings(url=server.url))
    stage = Stage(client, user, keys)
    yield stage
    stage.end_threads()
    user.close()
    client.close()
