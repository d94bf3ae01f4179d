"""Consumer groups on the streams of a topic: every call to the server that a consumer makes.

A group reads two streams of each shard: that of the topic, which all groups share, and that of its own retries. What is delivered
is pending until it is settled. A call about it names the consumer and how often it was delivered, and the scripts refuse it when
that is not so any more: a consumer that was silent for too long can't settle what is another's by now.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.errors import ConfigError, StoreProtocolError
from pipeline.core.text import command_text
from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.entries import NO_ENTRY, Entry, EntryId, entry_id_of
from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts, run_script
from pipeline.store.stream_wait import StreamWait
from pipeline.store.topology import ClusterClient

BEGINNING, NEW, END = "0-0", "$", "0-0"
ORDERED, SHARED = "ordered", "shared"  # what a group can be


@dataclass(frozen=True, slots=True)
class PendingPage:
    """Some pending messages, and where to go on: ``END`` if there are no more."""

    cursor: str
    entries: Sequence[Entry]


class GroupStore:
    """One consumer of one group. Each verb may raise ``StoreUnavailable``: then the same call may be made again.

    Args:
        client: a ``redis.Redis`` whose own retries are off.

        shards: the keys of each shard.

        consumer: unique among all that ever run.

    After ``register``, ``ordered`` says whether one consumer of the group is active at a time; the verbs do nothing for the others.
    Any thread may call a verb while another one waits for its reply.
    """

    def __init__(
        self, client: Any, shards: Sequence[Keys], topic: str, group: str, consumer: str, scripts: Scripts | None = None
    ) -> None:
        self.topic, self.group, self.consumer = topic, group, consumer
        self.ordered = False
        self._client = client
        self._shards = shards
        self._scripts = scripts or Scripts()
        self._keys_of = {stream: keys for keys in shards for stream in (keys.retry(topic, group), keys.stream(topic))}
        self.streams = list(self._keys_of)
        of_tags = {keys.tag: [stream for stream, its in self._keys_of.items() if its is keys] for keys in shards}
        is_apart = isinstance(client, ClusterClient) and len(shards) > 1
        self._wait = StreamWait(client, of_tags, self._last_delivered) if is_apart else None

    def register(self, start: str, ordered: bool | None = None) -> bool:
        """Make the group known, so that it gets what comes from now on, connected or not; False if it was.

        Args:
            start: the entry after which a new group begins: ``BEGINNING``, ``NEW`` or an entry's id.

            ordered: whether one consumer of the group is active at a time; None means as the group is, and not if it is new.
        Raises:
            ConfigError: the group is of the other kind.
        """
        wanted = "" if ordered is None else ORDERED if ordered else SHARED
        is_new = False
        for keys in self._shards:
            names = [
                keys.stream(self.topic),
                keys.retry(self.topic, self.group),
                keys.topics(),
                keys.groups(self.topic),
            ]
            kind, is_new_here = self._run("register", names, [self.topic, self.group, start, wanted])
            if wanted and kind.decode() != wanted:
                raise ConfigError(
                    f"The group {self.group} of the topic {self.topic} is {kind.decode()}, not {wanted}: leave that out to join it "
                    f"as it is, or drop it first ({command_text('topics', f'drop-group {self.topic} {self.group}')})."
                )
            self.ordered = kind == ORDERED.encode()
            is_new = is_new or is_new_here == 1
        return is_new

    def replay(self, start: str) -> None:
        """Set the group back, or forward: it gets again what is retained after ``start``."""
        for keys in self._shards:
            with translated_errors():
                self._client.xgroup_setid(keys.stream(self.topic), self.group, start)

    def last_ids(self) -> dict[str, EntryId]:
        """Return the last entry of each stream."""
        with translated_errors():
            lasts = [self._client.xrevrange(stream, count=1) for stream in self.streams]
        return {
            stream: entry_id_of(last[0][0].decode()) if last else NO_ENTRY
            for stream, last in zip(self.streams, lasts, strict=True)
        }

    def read(self, limit: int, block_ms: int) -> list[Entry]:
        """Wait for new messages, at most ``block_ms``, and take up to ``limit`` of each stream.

        Raises:
            StoreUnavailable: messages may have been delivered; ``reclaim`` finds them.
        """
        if self.ordered:
            return self._read_active(limit)
        if not self._wait:
            return self._read_group(self.streams, limit, block_ms)
        if not (found := self._read_each(limit)):
            self.wait(block_ms)
            found = self._read_each(limit)
        return found

    def _read_each(self, limit: int) -> list[Entry]:
        """Read of each shard what is there: no command waits for streams of several masters."""
        of_shards: dict[str, list[str]] = {}
        for stream, keys in self._keys_of.items():
            of_shards.setdefault(keys.tag, []).append(stream)
        return [entry for streams in of_shards.values() for entry in self._read_group(streams, limit, None)]

    def _read_group(self, streams: Sequence[str], limit: int, block_ms: int | None) -> list[Entry]:
        with self._errors_of_groups():
            found = self._client.xreadgroup(
                self.group, self.consumer, dict.fromkeys(streams, ">"), count=limit, block=block_ms
            )
        return [
            self._entry(stream.decode(), entry_id.decode(), 1, fields)
            for stream, rows in found or ()
            for entry_id, fields in rows
        ]

    def wait(self, block_ms: int) -> None:
        """Wait until something is new for the group; for an ordered one, whose reads can't wait."""
        with self._errors_of_groups():
            if self._wait:
                self._wait.wait(block_ms)
            elif after := self._last_delivered(self.streams):  # a group that is gone is told by the next read
                self._client.xread(after, count=1, block=block_ms)

    def _last_delivered(self, streams: Sequence[str]) -> dict[str, str]:
        after: dict[str, str] = {}
        for stream in streams:
            for group in self._client.xinfo_groups(stream):
                if group["name"] == self.group.encode():
                    after[stream] = group["last-delivered-id"].decode()
        return after

    def reclaim(self, stream: str, cursor: str, limit: int, min_idle_ms: int | None = None) -> PendingPage:
        """Give this consumer some pending messages: its own, or, with ``min_idle_ms``, those that were silent for so long."""
        with self._errors_of_groups():
            next_cursor, rows = self._run(
                "reclaim",
                self._keys_of_group(stream),
                [self.group, self.consumer, "" if min_idle_ms is None else min_idle_ms, cursor, limit],
            )
        entries = [
            self._entry(stream, entry_id.decode(), int(count), dict(zip(fields[::2], fields[1::2], strict=True)))
            for entry_id, count, fields in rows
        ]
        return PendingPage(next_cursor.decode(), entries)

    def settle(self, verb: str, entries: Sequence[Entry]) -> list[bool]:
        """Settle messages by a verb of ``settle.lua``; False for each that is not this consumer's (any more)."""
        done: dict[tuple[str, str], bool] = {}
        for stream in {entry.stream: None for entry in entries}:
            of_stream = [entry for entry in entries if entry.stream == stream]
            settled = [value for entry in of_stream for value in (entry.entry_id, entry.delivery_count)]
            names = [*self._keys_of_group(stream), self._keys_of[stream].counters()]
            with self._errors_of_groups():
                answers = self._run("settle", names, [verb, self.group, self.consumer, *settled])
            done.update(zip((entry.key for entry in of_stream), map(bool, answers), strict=True))
        return [done[entry.key] for entry in entries]

    def schedule_retry(self, entry: Entry, due_ms: int, attempt: int) -> bool:
        """Schedule a retry for this group at ``due_ms``; False if it is not this consumer's (any more)."""
        member = replace(entry, attempt=attempt).to_member(is_rescheduled=True)
        return self._retry(entry, due_ms, member, [])

    def dead_letter(self, entry: Entry, reason: str, detail: str, now_ms: int) -> bool:
        """Make a message a dead letter; False if it is not this consumer's (any more)."""
        fields = {
            **entry.to_fields(),
            "reason": reason,
            "detail": detail.encode("utf-8", "backslashreplace"),  # an exception may say anything
            "group": self.group,
            "died_ms": now_ms,
        }
        return self._retry(entry, now_ms, b"", [word for pair in fields.items() for word in pair])

    def acquire_active(self, lease_ms: int) -> bool:
        """Become or stay the active consumer of an ordered group, in all shards; with 0 stop being it."""
        is_leaving = lease_ms == 0
        for keys in self._shards:
            is_active = (
                self._run("acquire_active", [keys.active(self.topic, self.group)], [self.consumer, lease_ms]) == 1
            )
            if not is_active and not is_leaving:
                return False  # the first shard decides: two that each have some would wait for each other for ever
        return not is_leaving

    def leave(self) -> None:
        """Forget this consumer where it has nothing pending."""
        if self._wait:
            self._wait.close()
        for stream in self.streams:
            self._forget(stream, self.consumer)

    def sweep(self, min_idle_ms: int) -> None:
        """Forget consumers that were silent for so long and have nothing pending: they did not end as they should."""
        for stream in self.streams:
            with self._errors_of_groups():
                consumers = self._client.xinfo_consumers(stream, self.group)
            for name in (c["name"].decode() for c in consumers if c["pending"] == 0 and c["idle"] > min_idle_ms):
                self._forget(stream, name)

    def now_ms(self) -> int:
        """Return the server's clock, epoch ms."""
        return server_ms(self._client)

    def _read_active(self, limit: int) -> list[Entry]:
        entries = []
        for stream in self.streams:
            with self._errors_of_groups():
                rows = self._run("read_active", self._keys_of_group(stream)[:2], [self.group, self.consumer, limit])
            entries += [
                self._entry(stream, entry_id.decode(), 1, dict(zip(fields[::2], fields[1::2], strict=True)))
                for entry_id, fields in rows
            ]
        return entries

    def _forget(self, stream: str, consumer: str) -> None:
        with self._errors_of_groups():
            self._run("remove_consumer", [stream], [self.group, consumer])

    def _retry(self, entry: Entry, due_ms: int, member: bytes, fields: Sequence[Any]) -> bool:
        keys = self._keys_of[entry.stream]
        start = bucket_start_ms(due_ms)
        names = [keys.counters(), keys.topics(), keys.buckets(), keys.bucket(start), keys.dead(entry.topic)]
        with self._errors_of_groups():
            status = self._run(
                "retry",
                [*self._keys_of_group(entry.stream), *names],
                [
                    *(self.group, self.consumer, entry.entry_id, entry.delivery_count, entry.topic),
                    *(due_ms, start, member, keys.wake(), *fields),
                ],
            )
        return bool(status == b"OK")

    def _entry(self, stream: str, entry_id: str, delivery_count: int, fields: Mapping[bytes, bytes]) -> Entry:
        return Entry.from_fields(
            *(fields, entry_id, delivery_count),
            topic=self.topic,
            group=self.group,
            shard=self._keys_of[stream].shard,
            stream=stream,
            entry_id=entry_id,
            delivery_count=delivery_count,
        )

    def _keys_of_group(self, stream: str) -> list[str]:
        keys = self._keys_of[stream]
        return [stream, keys.active(self.topic, self.group), keys.groups(self.topic)]

    def _run(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return run_script(self._client, self._scripts, name, keys, arguments)

    @contextmanager
    def _errors_of_groups(self) -> Iterator[None]:
        try:
            with translated_errors():
                yield
        except StoreProtocolError as exc:
            if "NOGROUP" in str(exc):
                raise ConfigError(
                    f"The group {self.group} of the topic {self.topic} is not there any more; start again to register it anew."
                ) from exc
            raise
