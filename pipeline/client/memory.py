"""A namespace in the memory of a test: the same scripts on fakeredis, and a clock that the test moves."""

from datetime import datetime, timedelta
from math import inf

from pipeline.client.requests import Delay, due_ms_of
from pipeline.client.sync import Duetime
from pipeline.config import ALL_TOPICS, Settings
from pipeline.core.clock import SystemClock
from pipeline.core.due import time_of_ms
from pipeline.core.errors import ConfigError
from pipeline.core.messages import Message
from pipeline.core.text import install_text
from pipeline.store.listing import list_scheduled
from pipeline.store.namespace import change_topic_settings, open_namespace
from pipeline.store.scripts import Scripts
from pipeline.store.shards import open_shards


class MemoryDuetime(Duetime):
    """What ``Duetime`` does, without a server, for the tests of programs.

        duetime = MemoryDuetime()
        sign_up(duetime, "ada")
        [message] = duetime.advance(timedelta(days=7))

    It can't show what comes with a server and other programs: time that passes by itself, lost connections, memory that is full,
    and messages that are redelivered, as leases count real time here. Every topic has a stream.

    Args:
        now: the time at the beginning, with a zone; None means now.

    Raises:
        ConfigError: fakeredis is not installed.
    """

    def __init__(self, now: datetime | None = None) -> None:
        try:
            from fakeredis import FakeRedis
        except ImportError as exc:
            raise ConfigError(
                f"The memory of tests needs fakeredis with Lua ({exc}): {install_text('testing')}."
            ) from exc
        self._time = _Clock(SystemClock().wall_ms() if now is None else due_ms_of(now))
        client, settings, scripts = FakeRedis(), Settings(), Scripts(flags=False)
        open_namespace(client, settings.redis, may_create=True)
        change_topic_settings(client, settings.redis, ALL_TOPICS, {"sink": "stream"}, scripts)
        self._begin(client, settings, self._time, scripts, patience_sec=0, now_ms=self._time.wall_ms)
        self._drain = open_shards(client, settings.redis, None, scripts, self._time.wall_ms)[0]

    @property
    def now(self) -> datetime:
        """The time on the clock of this namespace."""
        return time_of_ms(self._time.wall_ms())

    def advance(self, delay: Delay) -> list[Message]:
        """Move the clock on, by seconds or a ``timedelta``, and deliver what is due by then, into the streams of its topics.

        Returns:
            What was delivered, in order of due time.
        """
        span = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        end_ms = self._time.ms + round(span / timedelta(milliseconds=1))
        due = [found.message for found in list_scheduled(self._client, self._keys, 0, end_ms + 1)]
        # Each message at its time, so that what is forgotten after a while is forgotten then.
        while (reply := self._drain.claim("memory")).moved or (reply.next_due_ms or inf) <= end_ms:
            self._time.ms = max(self._time.ms, reply.next_due_ms or 0)
        self._time.ms = end_ms
        return due


class _Clock(SystemClock):
    def __init__(self, ms: int) -> None:
        self.ms = ms

    def wall_ms(self) -> int:
        return self.ms
