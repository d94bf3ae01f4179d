"""Every key, one function each: the only file with key text, but for the targets of ``claim.lua``.

All keys of a shard carry one hash tag: a Redis Cluster has them in one slot, for one script. See ``docs/wire-format.md``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count

from redis.crc import key_slot

from pipeline.config import RedisSettings

SLOTS = 16_384  # of a Redis Cluster


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one shard of a namespace. ``suffix`` gives it the slot that it has to have, see ``keys_of``."""

    namespace: str
    shard: int = 0
    suffix: str = ""

    @property
    def tag(self) -> str:
        """What is between the braces of its keys."""
        return f"{self.namespace}:{self.shard}{self.suffix}"

    @property
    def slot(self) -> int:
        """Return the slot of a Redis Cluster that all its keys have."""
        return key_slot(self.tag.encode())

    def _key(self, name: str) -> str:
        return f"{{{self.namespace}:{self.shard}{self.suffix}}}:{name}"

    def bucket(self, bucket_start_ms: int) -> str:
        """ZSET: member -> due_ms, of the ten minutes that begin at ``bucket_start_ms``."""
        return self._key(f"bucket:{bucket_start_ms}")

    def buckets(self) -> str:
        """ZSET: bucket_start_ms -> the same number, of every bucket that is not empty."""
        return self._key("buckets")

    def claims(self) -> str:
        """ZSET: lease token -> lease_until_ms, of every claim in flight."""
        return self._key("claims")

    def claim(self, lease_token: str) -> str:
        """LIST: member, due_ms, member, due_ms, … of one claim, in the order of delivery, without what is acknowledged."""
        return self._key(f"claim:{lease_token}")

    def attempts(self) -> str:
        """HASH: message_id -> how often it was claimed and may have been delivered, and not acknowledged; none for 0."""
        return self._key("attempts")

    def places(self) -> str:
        """HASH: idempotency key -> message id, score, ``r`` of a replacement, ``:<topic>`` if held, or a ``cold_place``."""
        return self._key("places")

    def ids(self) -> str:
        """ZSET: idempotency key -> epoch ms at which it is forgotten, of messages that were delivered."""
        return self._key("ids")

    def cancelled(self) -> str:
        """ZSET: idempotency key or handle -> epoch ms at which it is forgotten, of what was cancelled."""
        return self._key("cancelled")

    def aside(self, key: str) -> str:
        """Where ``key`` is within a transaction that must not happen; see ``check_ids.lua``."""
        return f"{key}:aside"

    def cold(self) -> str:
        """HASH: hour since the epoch -> how many messages that are due in it wait in cold files."""
        return self._key("cold")

    def hydrator(self) -> str:
        """STRING: the process that brings cold messages of this shard into Redis; it expires with its lease."""
        return self._key("hydrator")

    def hydration(self, hydrator_id: str) -> str:
        """HASH: what such a process has done since it started; it expires."""
        return self._key(f"hydration:{hydrator_id}")

    def hydrations(self) -> str:
        """ZSET: hydrator id -> epoch ms of its last heartbeat, on the server's clock, of every one that has such a hash."""
        return self._key("hydrations")

    def marker(self, source_id: str, part_id: str) -> str:
        """STRING: how far a part of a landing file is stored; a key of its own, so that writers of others don't touch it."""
        return self._key(f"marker:{source_id}:{part_id}")

    def markers(self, source_id: str) -> str:
        """ZSET: part id -> epoch ms at which its marker moved last."""
        return self._key(f"markers:{source_id}")

    def campaign(self, name: str) -> str:
        """STRING: a JSON object of a table whose rows are scheduled once; it expires; in shard 0 only."""
        return self._key(f"campaign:{name}")

    def stages(self) -> str:
        """ZSET: folder -> since when rows are staged there that no campaign has yet, on the server's clock; in shard 0 only."""
        return self._key("stages")

    def ingest(self, source_id: str) -> str:
        """HASH: what the ingest job of a source has done since it started, and its last batch; it expires."""
        return self._key(f"ingest:{source_id}")

    def ingests(self) -> str:
        """ZSET: source id -> epoch ms of its last heartbeat, on the server's clock, of every source that has such a hash."""
        return self._key("ingests")

    def drain(self, loop_id: str) -> str:
        """HASH: what a drain loop has done since it started; it expires."""
        return self._key(f"drain:{loop_id}")

    def drains(self) -> str:
        """ZSET: loop id -> epoch ms of its last heartbeat, on the server's clock, of every loop that has such a hash."""
        return self._key("drains")

    def session(self, digest: str) -> str:
        """STRING: which token a browser has signed in with, by the SHA-256 of its cookie; it expires; in shard 0 only."""
        return self._key(f"session:{digest}")

    def topics(self) -> str:
        """SET: topics that have a stream, dead letters or held messages."""
        return self._key("topics")

    def stream(self, topic: str) -> str:
        """STREAM: the messages of a topic that were due, for all its groups."""
        return self._key(f"stream:{topic}")

    def outbox(self) -> str:
        """STREAM: the messages of all topics whose sink is Kafka that were due, as far as they are not known to be there."""
        return self._key("outbox:kafka")

    def forwarder(self) -> str:
        """STRING: the loop that writes the outbox to Kafka; it expires with its lease."""
        return self._key("forwarder")

    def retry(self, topic: str, group: str) -> str:
        """STREAM: messages of a topic that one group gets again."""
        return self._key(f"retry:{topic}:{group}")

    def active(self, topic: str, group: str) -> str:
        """STRING: the active consumer of an ordered group; it expires with its lease."""
        return self._key(f"active:{topic}:{group}")

    def groups(self, topic: str) -> str:
        """HASH: group -> ordered or shared, of the groups that a consumer has registered."""
        return self._key(f"groups:{topic}")

    def dead(self, topic: str) -> str:
        """STREAM: messages of a topic that were given up, each with the reason."""
        return self._key(f"dead:{topic}")

    def dead_topics(self) -> str:
        """SET: topics that have dead letters."""
        return self._key("dead_topics")

    def held(self, topic: str) -> str:
        """ZSET: member -> due_ms, of messages that are due and wait for the end of a pause or for the rate limit of their topic."""
        return self._key(f"held:{topic}")

    def held_topics(self) -> str:
        """ZSET: topic -> epoch ms at which the next message that is held of it may go, of topics that are not paused."""
        return self._key("held_topics")

    def pauses(self) -> str:
        """HASH: topic -> epoch ms since when it is paused."""
        return self._key("pauses")

    def topic_settings(self) -> str:
        """HASH: topic, or ``*`` for all topics -> settings as a JSON object; the same in each shard."""
        return self._key("topic_settings")

    def rate_limits(self) -> str:
        """HASH: topic -> epoch ms at which its next message may go, of topics with a max_rate."""
        return self._key("rate_limits")

    def counters(self) -> str:
        """HASH: stored duplicates rejected delivered reclaimed late_acks dead misfiled cancelled -> how many ever."""
        return self._key("counters")

    def meta(self) -> str:
        """HASH: format_version, shards, hash_tags: what every job compares with its own, and outbox_id; a copy in each shard."""
        return self._key("meta")

    def wake(self) -> str:
        """Channel: a time (epoch ms) from which on something may be due, or 0: loops that wait look at once."""
        return self._key("wake")


def keys_of(settings: RedisSettings) -> list[Keys]:
    """Return the keys of each shard; those of the first also hold what a namespace has once.

    Each has another of as many equal ranges of slots (docs/adr/0025-redis-cluster.md); the tag of the first is always the same.
    """
    return [*_keys_of(settings.namespace, settings.shards)]


@cache
def _keys_of(namespace: str, shards: int) -> tuple[Keys, ...]:
    begin = Keys(namespace).slot * shards // SLOTS
    return tuple(
        next(keys for keys in _candidates(namespace, shard) if keys.slot * shards // SLOTS == (begin + shard) % shards)
        for shard in range(shards)
    )


def _candidates(namespace: str, shard: int) -> Iterator[Keys]:
    return (Keys(namespace, shard, f".{number}" if number else "") for number in count())
