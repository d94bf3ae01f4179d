"""Consumer groups on the streams of a topic: every call to the server that a consumer makes.

A group reads two streams of each shard: that of the topic, which all groups share, and that of the messages that come again for it
alone. What is handed out is pending until it is settled. A call about it names the consumer and how often it was handed out, and
the scripts refuse it when that is not so any more: a consumer that was silent for too long can't settle what is another's by now.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.errors import ConfigError, StoreProtocolError
from pipeline.core.messages import encode_again
from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.entries import Entry, member_id, read_entry
from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts, run_script

BEGINNING, NEW, END = "0-0", "$", "0-0"


@dataclass(frozen=True, slots=True)
class Gathered:
    """Some pending messages, and where to go on: ``END`` if there are no more."""

    cursor: str
    entries: Sequence[Entry]


class GroupStore:
    """One consumer of one group. Each verb may raise ``StoreUnavailable``: then the same call may be made again.

    Args:
        client: a ``redis.Redis`` whose own retries are off.

        shards: the keys of each shard.

        consumer: unique among all instances that ever run.

        ordered: whether one consumer at a time has the turn; the verbs do nothing for the others.
    """

    def __init__(
        self,
        client: Any,
        shards: Sequence[Keys],
        topic: str,
        group: str,
        consumer: str,
        ordered: bool = False,
        scripts: Scripts | None = None,
    ) -> None:
        self.topic, self.group, self.consumer = topic, group, consumer
        self._client = client
        self._shards = shards
        self._ordered = ordered
        self._scripts = scripts or Scripts()
        self._shard_of = {
            stream: number
            for number, keys in enumerate(shards)
            for stream in (keys.again(topic, group), keys.stream(topic))
        }
        self.streams = list(self._shard_of)

    def register(self, start: str) -> bool:
        """Make the group known, so that it gets what comes from now on, connected or not; False if it was.

        Args:
            start: the entry after which a new group begins: ``BEGINNING``, ``NEW`` or an entry's id.
        """
        is_new = False
        for stream in self.streams:
            # What comes again for a group, nobody else has read: a new one gets all of it.
            begin = start if stream == self._shards[self._shard_of[stream]].stream(self.topic) else BEGINNING
            with translated_errors():
                try:
                    self._client.xgroup_create(stream, self.group, begin, mkstream=True)
                    is_new = True
                except redis.exceptions.ResponseError as exc:
                    if not str(exc).startswith("BUSYGROUP"):
                        raise
            with translated_errors():
                self._client.sadd(self._shards[self._shard_of[stream]].topics(), self.topic)
        return is_new

    def replay(self, start: str) -> None:
        """Set the group back, or forward: it gets again what is retained after ``start``."""
        for keys in self._shards:
            with translated_errors():
                self._client.xgroup_setid(keys.stream(self.topic), self.group, start)

    def read(self, limit: int, block_ms: int) -> list[Entry]:
        """Wait for new messages, at most ``block_ms``, and take up to ``limit`` of each stream.

        Raises:
            StoreUnavailable: messages may have been handed out; ``gather`` finds them.
        """
        if self._ordered:
            return self._read_in_turn(limit)
        with self._errors_of_groups():
            found = self._client.xreadgroup(
                self.group, self.consumer, dict.fromkeys(self.streams, ">"), count=limit, block=block_ms
            )
        return [
            self._entry(stream.decode(), entry_id.decode(), 1, fields)
            for stream, rows in found or ()
            for entry_id, fields in rows
        ]

    def wait(self, block_ms: int) -> None:
        """Wait until something is new for the group; for an ordered one, whose reads can't wait."""
        after: dict[str, str] = {}
        with self._errors_of_groups():
            for stream in self.streams:
                for group in self._client.xinfo_groups(stream):
                    if group["name"] == self.group.encode():
                        after[stream] = group["last-delivered-id"].decode()
            if after:  # a group that is gone is told by the next read
                self._client.xread(after, count=1, block=block_ms)

    def gather(self, stream: str, cursor: str, limit: int, min_idle_ms: int | None = None) -> Gathered:
        """Give this consumer some pending messages: its own, or, with ``min_idle_ms``, those that were silent for so long."""
        with self._errors_of_groups():
            next_cursor, rows = self._run(
                "gather",
                [stream, self._active(stream)],
                [*self._who(), "" if min_idle_ms is None else min_idle_ms, cursor, limit],
            )
        entries = [
            self._entry(stream, entry_id.decode(), int(count), dict(zip(fields[::2], fields[1::2], strict=True)))
            for entry_id, count, fields in rows
        ]
        return Gathered(next_cursor.decode(), entries)

    def settle(self, verb: str, entries: Sequence[Entry]) -> list[bool]:
        """Say one of the verbs of ``settle.lua`` about messages; False for each that is not this consumer's (any more)."""
        done: dict[tuple[str, str], bool] = {}
        for stream in {entry.stream: None for entry in entries}:
            of_stream = [entry for entry in entries if entry.stream == stream]
            words = [word for entry in of_stream for word in (entry.entry_id, entry.handed_out)]
            keys = self._shards[self._shard_of[stream]]
            with self._errors_of_groups():
                answers = self._run(
                    "settle", [stream, self._active(stream), keys.counters()], [verb, *self._who(), *words]
                )
            done.update(zip((entry.key for entry in of_stream), map(bool, answers), strict=True))
        return [done[entry.key] for entry in entries]

    def schedule_again(self, entry: Entry, due_ms: int, attempt: int) -> bool:
        """Let this group have a message once more at ``due_ms``; False if it is not this consumer's (any more)."""
        member = encode_again(
            message_id=member_id(entry.entry_id),
            message=entry.message,
            topic=entry.topic,
            id=entry.id,
            headers=entry.headers,
            due_ms=entry.due_ms,
            group=self.group,
            attempt=attempt,
        )
        return self._again(entry, due_ms, member, [])

    def bury(self, entry: Entry, reason: str, detail: str, now_ms: int) -> bool:
        """Make a message a dead letter; False if it is not this consumer's (any more)."""
        fields = {
            "id": entry.id,
            "message": entry.message,
            "topic": entry.topic,
            "due_ms": entry.due_ms,
            "attempt": entry.attempt,
            **({"headers": json.dumps(dict(entry.headers), ensure_ascii=False)} if entry.headers else {}),
            "reason": reason,
            "detail": detail.encode("utf-8", "backslashreplace"),  # an exception may say anything
            "group": self.group,
            "died_ms": now_ms,
        }
        return self._again(entry, now_ms, b"", [word for pair in fields.items() for word in pair])

    def take_turn(self, lease_ms: int) -> bool:
        """Take or keep the turn of an ordered group, in all shards; with 0 leave it."""
        is_leaving = lease_ms == 0
        for keys in self._shards:
            has_turn = self._run("turn", [self._active_of(keys)], [self.consumer, lease_ms]) == 1
            if not has_turn and not is_leaving:
                return False  # the first shard decides: two that each have some would wait for each other for ever
        return not is_leaving

    def leave(self) -> None:
        """Forget this consumer where it has nothing pending."""
        for stream in self.streams:
            self._forget(stream, self.consumer)

    def sweep(self, min_idle_ms: int) -> None:
        """Forget consumers that were silent for so long and have nothing pending: instances that did not end as they should."""
        for stream in self.streams:
            with self._errors_of_groups():
                consumers = self._client.xinfo_consumers(stream, self.group)
            for name in (c["name"].decode() for c in consumers if c["pending"] == 0 and c["idle"] > min_idle_ms):
                self._forget(stream, name)

    def now_ms(self) -> int:
        """Return the server's clock, epoch ms."""
        return server_ms(self._client)

    def _read_in_turn(self, limit: int) -> list[Entry]:
        entries = []
        for stream in self.streams:
            with self._errors_of_groups():
                rows = self._run("read", [stream, self._active(stream)], [self.group, self.consumer, limit])
            entries += [
                self._entry(stream, entry_id.decode(), 1, dict(zip(fields[::2], fields[1::2], strict=True)))
                for entry_id, fields in rows
            ]
        return entries

    def _forget(self, stream: str, consumer: str) -> None:
        with self._errors_of_groups():
            self._run("leave", [stream], [self.group, consumer])

    def _again(self, entry: Entry, due_ms: int, member: bytes, fields: Sequence[Any]) -> bool:
        keys = self._shards[self._shard_of[entry.stream]]
        start = bucket_start_ms(due_ms)
        with self._errors_of_groups():
            status = self._run(
                "again",
                [
                    *(entry.stream, self._active(entry.stream), keys.counters(), keys.topics()),
                    *(keys.buckets(), keys.bucket(start), keys.dead(entry.topic)),
                ],
                [
                    *(*self._who(), entry.entry_id, entry.handed_out, entry.topic),
                    *(due_ms, start, member, keys.wake(), *fields),
                ],
            )
        return bool(status == b"OK")

    def _entry(self, stream: str, entry_id: str, handed_out: int, fields: Mapping[bytes, bytes]) -> Entry:
        return read_entry(self._shard_of[stream], stream, self.topic, entry_id, handed_out, fields)

    def _who(self) -> list[Any]:
        return [self.group, self.consumer, int(self._ordered)]

    def _active(self, stream: str) -> str:
        return self._active_of(self._shards[self._shard_of[stream]])

    def _active_of(self, keys: Keys) -> str:
        return keys.active(self.topic, self.group)

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
