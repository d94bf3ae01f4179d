"""What the jobs publish about themselves, for ``jobs/status.py``: nothing of the work depends on it.

Each job has a hash of its own, which expires, and an index lists them by the time of their last heartbeat. That time is the
server's: whether a job counts as running must not depend on the clock of its machine.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from pipeline.core.errors import StoreError
from pipeline.core.lateness import BOUNDS_MS, Lateness, add_up
from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.keys import Keys
from pipeline.store.replication import Failover

LOOP_KEEP_SEC: Final = 3_600  # after the last heartbeat of a drain loop
IDLE_BEAT_MS: Final = 30_000  # between two heartbeats of a job that has nothing new to report
FRESH_MS: Final = 3 * IDLE_BEAT_MS  # a job whose last heartbeat is older does not count as running
INGEST_KEEP_SEC: Final = 7 * 86_400  # after that of an ingest job; it bounds how many sources are kept
_HAS_ENDED: Final = "has_ended"
_FAILOVER: Final = "failover"
_LATER_FIELDS: Final = {
    b"failover": b"null",
    b"stored_again": b"0",
}  # what a release of this version may lack, as if it had it
READ_MAX: Final = 1_000  # jobs that are read at a time, those with the latest heartbeats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestProgress:
    """What one ingest job has done since it started, and its last batch; times are epoch ms UTC on the job's clock.

    ``reads`` is the input as text. ``files`` counts what Spark read: landing files, so the segments of a large one.
    ``last_oldest_waiting_ms`` is how long the oldest file that was not stored after the last batch had waited, 0 if there was
    none, None if it can't be known. ``last_lag`` is how many offsets of Kafka the last batch left, None for another source.
    ``last_phases_ms`` has Spark's own names.
    """

    source_id: str
    reads: str
    started_ms: int
    batches: int
    files: int
    lines: int
    stored: int
    duplicates: int
    rejected: int
    blank: int
    cancelled: int = 0
    replaced: int = 0
    late: int = 0
    stored_again: int = 0
    last_batch_ms: int
    last_lines: int
    last_lines_per_sec: int
    last_took_ms: int
    last_oldest_waiting_ms: int | None
    last_lag: int | None = None
    last_phases_ms: dict[str, int]


@dataclass(slots=True)
class TopicStats:
    """How many messages of a topic a loop delivered, and how late."""

    delivered: int = 0
    lateness: Lateness = field(default_factory=Lateness)


def _counter(meaning: str) -> Any:
    return field(default=0, metadata={"meaning": meaning})


@dataclass(slots=True, kw_only=True)
class LoopStats:
    """What a drain loop did since it started, in messages; ``errors`` are failed calls by the name of their cause.

    ``outbox`` is how long messages were in the outbox, from when they came due to when they were in Kafka; ``stuck_partitions``
    are those of Kafka, ``topic/partition``, where a transaction hangs.
    """

    delivered: int = _counter("Messages delivered and acknowledged, or moved into a stream or an outbox.")
    claimed: int = _counter("Messages taken from Redis.")
    late_acks: int = _counter(
        "Messages delivered whose lease was over before they were acknowledged: they are redelivered."
    )
    redelivered: int = _counter("Messages delivered that may have been delivered before: possible duplicates.")
    reclaimed: int = _counter("Messages given back from claims whose lease was over.")
    late_on_arrival: int = _counter("Messages delivered that were due before they came in.")
    forwarded: int = _counter("Messages written from an outbox to Kafka.")
    refused: int = _counter("Messages that Kafka refused: they are dead letters.")
    outbox: Lateness = field(default_factory=Lateness)
    stuck_partitions: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    topics: dict[str, TopicStats] = field(default_factory=dict)


LOOP_COUNTERS: Final[Mapping[str, str]] = {
    each.name: each.metadata["meaning"] for each in fields(LoopStats) if "meaning" in each.metadata
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopProgress:
    """A heartbeat of a drain loop. A loop that ended by itself ``has_ended``.

    Times are epoch ms UTC: ``started_ms`` on the loop's clock, ``seen_ms`` on the server's, of which ``write_loop`` takes it.
    ``failover`` is the last one that undid something.
    """

    loop_id: str
    started_ms: int
    seen_ms: int = 0
    has_ended: bool
    failover: Failover | None = None
    stats: LoopStats


def write_ingest(client: Any, keys: Keys, progress: IngestProgress) -> None:
    """Replace what is known of an ingest job.

    Raises:
        StoreError: no answer, or an error.
    """
    key, index_key = keys.ingest(progress.source_id), keys.ingests()
    write_heartbeat(client, key, index_key, progress.source_id, server_ms(client), INGEST_KEEP_SEC, asdict(progress))


class IngestHeartbeat:
    """Says that the ingest job of a source runs; what is known of its batches stays. A task for ``core.background``."""

    def __init__(self, client: Any, keys: Keys, source_id: str) -> None:
        self._client = client
        self._keys = keys
        self._source_id = source_id
        self._failover: Failover | None = None

    def tell(self, failover: Failover) -> None:
        """Publish that a failover undid something."""
        self._failover = failover
        self.publish()

    def step(self) -> float:
        """Publish; see ``background.Task``."""
        self.publish()
        return IDLE_BEAT_MS

    def publish(self, has_ended: bool = False) -> None:
        """Publish now, if the server answers; ``has_ended`` says that it is the last time."""
        key, index_key = self._keys.ingest(self._source_id), self._keys.ingests()
        values = {_HAS_ENDED: has_ended, _FAILOVER: _record_of(self._failover)}
        try:
            at_ms = server_ms(self._client)
            write_heartbeat(self._client, key, index_key, self._source_id, at_ms, INGEST_KEEP_SEC, values)
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


def write_loop(client: Any, keys: Keys, progress: LoopProgress) -> None:
    """Replace what is known of a drain loop.

    Raises:
        StoreError: no answer, or an error.
    """
    # As asdict gives it, which takes 8 ms for 100 topics: longer than a message should have to wait for this thread.
    stats = progress.stats
    values = {each.name: getattr(progress, each.name) for each in fields(LoopProgress) if each.name != "stats"}
    values |= {name: getattr(stats, name) for name in (*LOOP_COUNTERS, "errors", "stuck_partitions")}
    values["outbox"] = _lateness_values(stats.outbox)
    values["topics"] = {
        topic: {"delivered": each.delivered, "lateness": _lateness_values(each.lateness)}
        for topic, each in stats.topics.items()
    }
    values[_FAILOVER] = _record_of(progress.failover)
    values["seen_ms"] = at_ms = server_ms(client)
    write_heartbeat(client, keys.drain(progress.loop_id), keys.drains(), progress.loop_id, at_ms, LOOP_KEEP_SEC, values)


def _record_of(failover: Failover | None) -> dict[str, int | None] | None:
    return asdict(failover) if failover else None


def _lateness_values(lateness: Lateness) -> dict[str, Any]:
    return {"counts": lateness.counts, "sum_ms": lateness.sum_ms, "max_ms": lateness.max_ms}


def read_ingests(client: Any, keys: Keys) -> list[IngestProgress]:
    """Return what is known of each source, the latest first.

    Raises:
        StoreError: no answer, or an error.
    """
    names = [each.name for each in fields(IngestProgress)]
    return [IngestProgress(**values) for values in read_heartbeats(client, keys.ingests(), keys.ingest, names)]


def read_failovers(client: Any, keys: Keys) -> list[Failover]:
    """Return the last failover that undid something which each ingest job has noticed.

    Raises:
        StoreError: no answer, or an error.
    """
    found = (values[_FAILOVER] for values in read_heartbeats(client, keys.ingests(), keys.ingest, [_FAILOVER]))
    return [Failover(**each) for each in found if each]


def read_loops(client: Any, keys: Keys) -> list[LoopProgress]:
    """Return what is known of each drain loop of the last hour, the latest first.

    Raises:
        StoreError: no answer, or an error.
    """
    own = [each.name for each in fields(LoopProgress) if each.name != "stats"]
    counted = [each.name for each in fields(LoopStats)]
    found = []
    for values in read_heartbeats(client, keys.drains(), keys.drain, own + counted):
        topics = {
            name: TopicStats(each["delivered"], Lateness(**each["lateness"])) for name, each in values["topics"].items()
        }
        values |= {"topics": topics, "outbox": Lateness(**values["outbox"])}
        histograms = [values["outbox"], *(each.lateness for each in topics.values())]
        if all(len(each.counts) == len(BOUNDS_MS) + 1 for each in histograms):  # else of another version
            stats = LoopStats(**{name: values[name] for name in counted})
            values[_FAILOVER] = Failover(**values[_FAILOVER]) if values[_FAILOVER] else None
            found.append(LoopProgress(**{name: values[name] for name in own}, stats=stats))
    return found


def add_up_loops(each: Iterable[LoopStats]) -> LoopStats:
    """Return what loops did together."""
    parts = list(each)
    errors = Counter[str]()
    for part in parts:
        errors.update(part.errors)
    return LoopStats(
        **{name: sum(getattr(part, name) for part in parts) for name in LOOP_COUNTERS},
        outbox=add_up(part.outbox for part in parts),
        stuck_partitions=sorted({name for part in parts for name in part.stuck_partitions}),
        errors=dict(errors),
        topics={
            name: add_up_topics(part.topics[name] for part in parts if name in part.topics)
            for name in {name for part in parts for name in part.topics}
        },
    )


def add_up_topics(each: Iterable[TopicStats]) -> TopicStats:
    """Return what was delivered of several topics, or by several loops of one."""
    parts = list(each)
    return TopicStats(sum(part.delivered for part in parts), add_up(part.lateness for part in parts))


def write_heartbeat(
    client: Any, key: str, index_key: str, name: str, at_ms: int, keep_sec: int, values: Mapping[str, Any]
) -> None:
    """Replace the hash of ``name``, and forget those that were silent for ``keep_sec``; each value is written as JSON.

    Args:
        at_ms: the server's clock, as what others wrote is judged by it.
    """
    texts = {field: json.dumps(value, ensure_ascii=False) for field, value in values.items()}
    with translated_errors():
        pipeline = client.pipeline(transaction=True)
        pipeline.hset(key, mapping=texts)
        pipeline.expire(key, keep_sec)
        pipeline.zadd(index_key, {name: at_ms})
        pipeline.zremrangebyscore(index_key, "-inf", at_ms - keep_sec * 1000)
        pipeline.execute()


def read_heartbeats(client: Any, index_key: str, key_of: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the hashes that have all fields; one that is gone has expired, one that lacks a field is of another version."""
    with translated_errors():
        pipeline = client.pipeline(transaction=False)
        for member in client.zrange(index_key, 0, READ_MAX - 1, desc=True):
            pipeline.hgetall(key_of(member.decode()))
        found = pipeline.execute()
    hashes = ({**_LATER_FIELDS, **values} for values in found if values)
    return [
        {name: json.loads(values[name.encode()]) for name in names}
        for values in hashes
        if all(name.encode() in values for name in names)
    ]
