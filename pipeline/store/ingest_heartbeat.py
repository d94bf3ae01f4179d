"""That an ingest job runs, and what it tells beside its batches: failovers, and files that wait for shards."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pipeline.core.errors import StoreError
from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.heartbeats import (
    FAILOVER,
    FRESH_MS,
    IDLE_BEAT_MS,
    INGEST_KEEP_SEC,
    READ_MAX,
    read_records,
    record_of,
    write_record,
)
from pipeline.store.keys import Keys
from pipeline.store.replication import Failover

_HAS_ENDED: Final = "has_ended"
_WAITING: Final = "waiting"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Files that an ingest job has read and that wait for shards which are away; the oldest was landed at ``oldest_ms``, epoch ms.

    ``shards`` are those that are known to lack something; none, if a start has yet to find out.
    """

    files: int
    shards: Sequence[int]
    oldest_ms: int


class IngestHeartbeat:
    """Says that the ingest job of a source runs; what is known of its batches stays. A task for ``core.background``."""

    def __init__(self, client: Any, keys: Keys, source_id: str) -> None:
        self._client = client
        self._keys = keys
        self._source_id = source_id
        self._failover: Failover | None = None
        self._waiting: Waiting | None = None

    def tell(self, failover: Failover) -> None:
        """Publish that a failover undid something."""
        self._failover = failover
        self.publish()

    def tell_waiting(self, waiting: Waiting | None) -> None:
        """Publish which files wait for shards that are away."""
        self._waiting = waiting
        self.publish()

    def step(self) -> float:
        """Publish; see ``background.Task``."""
        self.publish()
        return IDLE_BEAT_MS

    def publish(self, has_ended: bool = False) -> None:
        """Publish now, if the server answers; ``has_ended`` says that it is the last time."""
        key, index_key = self._keys.ingest(self._source_id), self._keys.ingests()
        waiting = asdict(self._waiting) if self._waiting else None
        values = {_HAS_ENDED: has_ended, FAILOVER: record_of(self._failover), _WAITING: waiting}
        try:
            at_ms = server_ms(self._client)
            write_record(self._client, key, index_key, self._source_id, at_ms, INGEST_KEEP_SEC, values)
        except StoreError as exc:
            log.debug("the heartbeat is published later: %s", exc)  # the writer logs what is wrong


def count_running_ingests(client: Any, keys: Keys, now_ms: int) -> int:
    """Return how many ingest jobs have not ended and have a fresh heartbeat.

    Raises:
        StoreError: no answer, or an error.
    """
    with translated_errors():
        sources = client.zrange(keys.ingests(), now_ms - FRESH_MS, "+inf", byscore=True, offset=0, num=READ_MAX)
        pipeline = client.pipeline(transaction=False)
        for source in sources:
            pipeline.hget(keys.ingest(source.decode()), _HAS_ENDED)
        return sum(has_ended == b"false" for has_ended in pipeline.execute())


def read_failovers(client: Any, keys: Keys) -> list[Failover]:
    """Return the last failover that undid something which each ingest job has noticed.

    Raises:
        StoreError: no answer, or an error.
    """
    found = (values[FAILOVER] for values in read_records(client, keys.ingests(), keys.ingest, [FAILOVER]))
    return [Failover(**each) for each in found if each]


def read_waiting(client: Any, keys: Keys) -> list[Waiting]:
    """Return which files of each ingest job wait for shards that are away.

    Raises:
        StoreError: no answer, or an error.
    """
    found = (values[_WAITING] for values in read_records(client, keys.ingests(), keys.ingest, [_WAITING]))
    return [Waiting(**each) for each in found if each]
