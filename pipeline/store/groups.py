"""Consumer groups on the streams of a topic: every call to the server that a consumer makes.

A group reads two streams of each shard: that of the topic, which all groups share, and that of its own retries. What is delivered
is pending until it is settled. A call about it names the consumer and how often it was delivered, and the scripts refuse it when
that is not so any more: a consumer that was silent for too long can't settle what is another's by now.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.errors import ConfigError, StoreProtocolError, StoreUnavailable
from pipeline.core.text import command_text
from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.entries import NO_ENTRY, Entry, EntryId, by_stream, entry_id_of, in_order
from pipeline.store.group_reads import GroupReads
from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts, SentAhead, run_commands, run_script
from pipeline.store.shards import first_that_answers, those_that_answer
from pipeline.store.topology import client_of

NEW, END = "$", "0-0"
ORDERED, SHARED = "ordered", "shared"  # what a group can be
PAGE = 100  # pending messages that it takes at a time


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
        self.repeated = 0  # 1 if the last call said again what may have been done already
        self._client = client
        self._shards = shards
        self._scripts = scripts or Scripts()
        self._ahead, self._sent = SentAhead(client, self._scripts), list[Entry]()
        self._keys_of = {stream: keys for keys in shards for stream in (keys.retry(topic, group), keys.stream(topic))}
        self.streams = list(self._keys_of)
        of_shards = {keys.tag: [keys.retry(topic, group), keys.stream(topic)] for keys in shards}
        self._reads = GroupReads(client, group, consumer, of_shards)

    def register(self, start: str, ordered: bool | None = None, passes_over: bool = False) -> bool:
        """Make the group known, so that it gets what comes from now on, connected or not; False if it was.

        Args:
            start: the entry after which a new group begins: ``BEGINNING``, ``NEW`` or an entry's id.

            ordered: whether one consumer of the group is active at a time; None means as the group is, and not if it is new.

            passes_over: the shards that are away. Who joins there later says ``place_from_now``, as it was before this.
        Raises:
            ConfigError: the group is of the other kind.
        """
        wanted = "" if ordered is None else ORDERED if ordered else SHARED

        def register(keys: Keys) -> bool:
            names = [
                keys.stream(self.topic),
                keys.retry(self.topic, self.group),
                keys.topics(),
                keys.groups(self.topic),
            ]
            kind, is_new = self._run("register", names, [self.topic, self.group, start, wanted])
            if wanted and kind.decode() != wanted:
                raise ConfigError(
                    f"The group {self.group} of the topic {self.topic} is {kind.decode()}, not {wanted}: leave that out to join it "
                    f"as it is, or drop it first ({command_text('topics', f'drop-group {self.topic} {self.group}')})."
                )
            self.ordered = kind == ORDERED.encode()
            return bool(is_new == 1)

        return any(those_that_answer(self._shards, register) if passes_over else [*map(register, self._shards)])

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
        with self._errors_of_groups():
            return self._entries(self._reads.read(limit, block_ms))

    def wait(self, block_ms: int) -> None:
        """Wait until something is new for the group; for an ordered one, whose reads can't wait."""
        with self._errors_of_groups():
            self._reads.wait(block_ms)

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

    def send_ack(self, entry: Entry) -> None:
        """Acknowledge a message without waiting for the answer, which the next ``settle`` of all that was sent so has."""
        self._ahead.send(*self._settling("ack", entry.stream, [entry]))
        self._sent.append(entry)

    def settle(self, verb: str, entries: Sequence[Entry]) -> list[bool]:
        """Settle messages by a verb of ``settle.lua``; False for each that is not this consumer's (any more)."""
        if verb != "extend":  # which another thread may say meanwhile
            self.repeated = 0
        if verb == "ack" and self._sent and list(entries) == self._sent:
            self._sent = []
            try:
                with self._errors_of_groups():
                    return [bool(is_done) for [is_done] in self._ahead.replies()]
            except StoreUnavailable:
                self.repeated = 1
        elif verb in ("release", "undo"):  # lest others get what is acknowledged in this moment
            with suppress(StoreUnavailable):
                self._ahead.gather()
        of_stream = by_stream(entries)
        with self._errors_of_groups():
            answers = [self._run(*self._settling(verb, stream, some)) for stream, some in of_stream.items()]
        return in_order(entries, of_stream, answers)

    def ack_and_read(self, entries: Sequence[Entry], limit: int) -> tuple[list[bool], list[Entry]]:
        """Acknowledge messages and, in the same round trip, take up to ``limit`` new ones of each stream; not of an ordered group.

        Raises:
            StoreUnavailable: any part of it may be done.
        """
        if self._reads.is_apart:
            return self.settle("ack", entries), self.read(limit, 0)
        of_stream = by_stream(entries)
        commands = [self._scripts.command(*self._settling("ack", *each)) for each in of_stream.items()]
        read = ("XREADGROUP", "GROUP", self.group, self.consumer, "COUNT", limit, "STREAMS", *self.streams)
        with self._errors_of_groups():
            *answers, found = run_commands(
                self._client, self._scripts, [*commands, (*read, *(">" for _ in self.streams))]
            )
        return in_order(entries, of_stream, answers), self._entries(found)

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
        self._reads.close()
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
        """Return the clock of the first server that answers, epoch ms."""
        return first_that_answers(self._shards, lambda keys: server_ms(client_of(self._client, keys)))

    def _settling(self, verb: str, stream: str, entries: Sequence[Entry]) -> tuple[str, list[str], list[Any]]:
        names = [*self._keys_of_group(stream), self._keys_of[stream].counters()]
        settled = [value for entry in entries for value in (entry.entry_id, entry.delivery_count)]
        return "settle", names, [verb, self.group, self.consumer, *settled]

    def _entries(self, found: Any) -> list[Entry]:
        """Return what a read gave, of each stream."""
        return [
            self._entry(stream.decode(), entry_id.decode(), 1, fields)
            for stream, rows in found or ()
            for entry_id, fields in rows
        ]

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
        self.repeated = 0
        keys = self._keys_of[entry.stream]
        start = bucket_start_ms(due_ms)
        names = [keys.counters(), keys.topics(), keys.buckets(), keys.bucket(start)]
        names += [keys.dead(entry.topic), keys.dead_topics()]
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
