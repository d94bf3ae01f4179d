"""What Redis knows of messages that wait in cold files: how many are due in each hour, and who brings them back."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, NamedTuple, Protocol

from pipeline.core.clock import Clock
from pipeline.core.errors import ColdUnavailable, StoreError
from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.heartbeats import LOOP_KEEP_SEC, read_records, write_record
from pipeline.store.keys import Keys
from pipeline.store.topology import client_of

BEAT_MS: Final = 10_000  # between two heartbeats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HydratorProgress:
    """A heartbeat of a process that brings cold messages back. Times are epoch ms UTC, ``seen_ms`` on the server's clock.

    ``messages`` came into Redis since it started, and ``files`` were done with. What is due before ``until_ms`` is in Redis, if
    ``is_done``; ``problem`` is what keeps it from that, "" if nothing does. ``lead_ms`` is its setting.
    """

    hydrator_id: str
    started_ms: int
    seen_ms: int = 0
    has_ended: bool = False
    messages: int
    files: int
    until_ms: int
    lead_ms: int
    is_done: bool
    problem: str


class HydratorHeartbeat:
    """Publishes what such a process does. A task for ``core.background``.

    Args:
        progress: returns it, given the id of the process and since when it runs.
    """

    def __init__(
        self, client: Any, keys: Keys, hydrator_id: str, clock: Clock, progress: Callable[[str, int], HydratorProgress]
    ) -> None:
        self._client = client
        self._keys = keys
        self._id = hydrator_id
        self._started_ms = clock.wall_ms()
        self._progress = progress

    def step(self) -> float:
        """Publish; see ``background.Task``."""
        self.publish()
        return BEAT_MS

    def publish(self, has_ended: bool = False) -> None:
        """Publish now, if the server answers; ``has_ended`` says that it is the last time."""
        try:
            at_ms = server_ms(self._client)
            progress = replace(self._progress(self._id, self._started_ms), seen_ms=at_ms, has_ended=has_ended)
            write_record(
                self._client,
                self._keys.hydration(self._id),
                self._keys.hydrations(),
                self._id,
                at_ms,
                LOOP_KEEP_SEC,
                asdict(progress),
            )
        except StoreError as exc:
            log.debug("the heartbeat is published later: %s", exc)


def read_hydrators(client: Any, keys: Keys) -> list[HydratorProgress]:
    """Return what is known of each such process of the last hour, the latest first.

    Raises:
        StoreError: no answer, or an error.
    """
    names = [each.name for each in fields(HydratorProgress)]
    return [HydratorProgress(**values) for values in read_records(client, keys.hydrations(), keys.hydration, names)]


def has_cold(client: Any, shards: Sequence[Keys]) -> bool:
    """Return whether messages wait in cold files.

    Raises:
        StoreError: no answer, or an error.
    """
    with translated_errors():
        return any(client_of(client, keys).exists(keys.cold()) for keys in shards)


def read_cold_hours(client: Any, shards: Sequence[Keys]) -> Counter[int]:
    """Return how many messages that are due in each hour since the epoch wait in cold files.

    Raises:
        StoreError: no answer, or an error.
    """
    hours = Counter[int]()
    with translated_errors():
        for keys in shards:
            hours.update(
                {int(hour): int(count) for hour, count in client_of(client, keys).hgetall(keys.cold()).items()}
            )
    return hours


class ColdMember(NamedTuple):
    """A message that waits in a cold file: its member, and when it is due, epoch ms UTC."""

    member: bytes
    due_ms: int


class ColdReader(Protocol):
    """Reads a message from the cold files of a shard."""

    def __call__(self, message_id: str, shard: int) -> ColdMember | None:
        """Return it, None if it is in none: then it is on its way into Redis, or was there.

        Raises:
            ColdUnavailable: the files can't be read.
        """
        ...


def read_no_cold(message_id: str, shard: int) -> ColdMember | None:
    """Refuse to read cold files, in a program that does not know where they are.

    Raises:
        ColdUnavailable: always.
    """
    raise ColdUnavailable(f"The message {message_id} waits in a cold file: set cold.folder, so that it can be read.")


class HydratorLease:
    """The lease of the process that brings back the cold messages of a shard.

    It saves double work and nothing else: what is brought back is decided by progress markers.
    """

    def __init__(self, client: Any, keys: Keys, name: str, lease_sec: int) -> None:
        self._client = client_of(client, keys)
        self._key = keys.hydrator()
        self._name = name
        self._lease_sec = lease_sec

    def hold(self) -> bool:
        """Take the lease, or keep it; False if another process has it.

        Raises:
            StoreError: no answer, or an error.
        """
        with translated_errors():
            if self._client.set(self._key, self._name, nx=True, ex=self._lease_sec):
                return True
            return self._is_ours() and bool(self._client.expire(self._key, self._lease_sec))

    def leave(self) -> None:
        """Let others have it.

        Raises:
            StoreError: no answer, or an error: it ends by itself.
        """
        with translated_errors():
            if self._is_ours():
                self._client.unlink(self._key)

    def _is_ours(self) -> bool:
        return bool(self._client.get(self._key) == self._name.encode())
