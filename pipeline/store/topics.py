"""What can be done about a topic as a whole: pause, resume, look at it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import TopicSettings
from pipeline.store.connection import members_of, server_ms, translated_errors
from pipeline.store.groups import ORDERED
from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts, run_script, run_scripts
from pipeline.store.shards import those_that_answer

# What one script does at most: the server answers nobody else meanwhile.
TRIM_LIMIT = 100  # entries that are dropped
GROUPS_A_TURN = 100  # of which the streams of retries are trimmed at once
COMMANDS_AHEAD = 500  # in a round trip


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic in all shards; numbers are of messages, ``paused_ms`` is since when it is paused, epoch ms UTC, or None."""

    name: str
    in_stream: int
    held: int
    dead: int
    paused_ms: int | None


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A consumer of a group: how many messages are ``pending`` for it, and for how long it has been silent."""

    name: str
    pending: int
    idle_ms: int


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """How far a group is: ``lag`` messages that it has not read, ``pending`` that are delivered and not acknowledged.

    ``oldest_pending_ms`` is when the oldest of these came into its stream, epoch ms UTC, None if there is none. ``lag`` is None
    where the server does not know: of a group that began, or was set back, in the middle, until it has read to the end.
    """

    name: str
    lag: int | None
    pending: int
    oldest_pending_ms: int | None
    ordered: bool
    consumers: Sequence[ConsumerInfo]


class Topics:
    """The topics of a namespace.

    Args:
        client: a ``redis.Redis``.

        shards: the keys of each shard.
    """

    def __init__(self, client: Any, shards: Sequence[Keys], scripts: Scripts | None = None) -> None:
        self._client = client
        self._shards = shards
        self._scripts = scripts or Scripts()
        self._next_group: dict[str, int] = {}  # by stream: where the next turn begins

    def pause(self, topic: str, now_ms: int) -> None:
        """Let no message of a topic leave the schedule from now on; those that come due are held. Saying it twice does nothing.

        Raises:
            StoreError: no answer, or an error: it may be paused in some shards; say it again.
        """
        for keys in self._shards:
            with translated_errors():
                self._client.hsetnx(keys.pauses(), topic, now_ms)

    def resume(self, topic: str) -> int:
        """End a pause; returns how many messages are held. Drain loops deliver them in order, before what comes due from now on.

        Raises:
            StoreError: no answer, or an error: it may be paused in some shards; say it again.
        """
        return sum(self._let_go(keys, topic, ends_pause=True) for keys in self._shards)

    def look_again(self, keys: Keys, topic: str) -> None:
        """Have drain loops look at what is held of a topic in one shard, unless it is paused, whatever they know of it.

        Raises:
            StoreError: no answer, or an error.
        """
        self._let_go(keys, topic, ends_pause=False)

    def _let_go(self, keys: Keys, topic: str, ends_pause: bool) -> int:
        names = [keys.pauses(), keys.held(topic), keys.held_topics()]
        return int(run_script(self._client, self._scripts, "resume", names, [topic, int(ends_pause), keys.wake()]))

    def names(self) -> list[str]:
        """Return the topics that have a stream, dead letters, held messages or a rate limit, or are paused, in order.

        Raises:
            StoreError: no answer, or an error.
        """
        with translated_errors():
            return sorted(set[str]().union(*map(self._names_in, self._shards)))

    def names_that_answer(self) -> tuple[set[str], bool]:
        """Return the same of the shards that are not away, and whether those are all.

        Raises:
            StoreError: no shard answers, or an error.
        """
        found = those_that_answer(self._shards, self._names_in)
        return set[str]().union(*found), len(found) == len(self._shards)

    def _names_in(self, keys: Keys) -> set[str]:
        others = {*self._client.hkeys(keys.pauses()), *self._client.hkeys(keys.rate_limits())}
        return members_of(self._client, keys.topics()) | {_text(name) for name in others}

    def look(self, topic: str) -> TopicInfo:
        """Count what there is of a topic. Not atomic.

        Raises:
            StoreError: no answer, or an error.
        """
        return self.look_many([topic])[0]

    def look_many(self, topics: Sequence[str]) -> list[TopicInfo]:
        """Count what there is of each of some topics, in a round trip a shard. Not atomic.

        Raises:
            StoreError: no answer, or an error.
        """
        found: list[Any] = []
        with translated_errors():
            for keys in self._shards:
                pipeline = self._client.pipeline(transaction=False)
                for topic in topics:
                    pipeline.xlen(keys.stream(topic))
                    pipeline.zcard(keys.held(topic))
                    pipeline.xlen(keys.dead(topic))
                    pipeline.hget(keys.pauses(), topic)
                found.append(pipeline.execute())
        infos = []
        for first, topic in enumerate(topics):
            rows = [values[4 * first : 4 * first + 4] for values in found]
            in_stream, held, dead = (sum(row[column] for row in rows) for column in range(3))
            paused_ms = min((int(row[3]) for row in rows if row[3] is not None), default=None)
            infos.append(TopicInfo(topic, in_stream, held, dead, paused_ms))
        return infos

    def now_ms(self) -> int:
        """Return the server's clock, epoch ms.

        Raises:
            StoreError: no answer, or an error.
        """
        return server_ms(self._client)

    def groups(self, topic: str) -> list[GroupInfo]:
        """Say how far each group of a topic is, all shards together. Not atomic.

        Raises:
            StoreError: no answer, or an error.
        """
        found: dict[str, GroupInfo] = {}
        for keys in self._shards:
            with translated_errors():
                kinds = self._client.hgetall(keys.groups(topic))
                for row, first, consumers in self._rows_of_groups(keys, topic):
                    name = _text(row["name"])
                    is_ordered = kinds.get(row["name"]) == ORDERED.encode()
                    info = found.get(name) or GroupInfo(name, 0, 0, None, is_ordered, ())
                    found[name] = _add(info, row, first, consumers)
        return [found[name] for name in sorted(found)]

    def drop_group(self, topic: str, group: str) -> bool:
        """Forget a group with all that it has not handled; False if there was none. What is scheduled for it becomes a dead letter.

        Raises:
            StoreError: no answer, or an error: call it again.
        """
        dropped = False
        for keys in self._shards:
            names = [keys.stream(topic), keys.retry(topic, group), keys.active(topic, group), keys.groups(topic)]
            dropped = run_script(self._client, self._scripts, "drop_group", names, [group]) == 1 or dropped
        return dropped

    def trim(self, keys: Keys, topic: str, settings: TopicSettings, now_ms: int) -> int:
        """Drop what the retention of a topic lets go, in one shard, some at a time; returns how many entries of all its streams.

        A topic of which nothing is left is forgotten.


        Raises:
            StoreError: no answer, or an error.
        """
        oldest_ms = now_ms - settings.retain_sec * 1000 if settings.retain_sec else 0
        limits = [settings.retain_messages, max(0, oldest_ms), int(settings.trim_unread), TRIM_LIMIT]
        stream = keys.stream(topic)
        streams = [stream, *(keys.retry(topic, group) for group in self._groups_of_turn(stream))]
        calls = [("trim", [each], limits) for each in streams]
        dropped = sum(map(int, run_scripts(self._client, self._scripts, calls)))
        if dropped == 0:
            self._forget_if_empty(keys, topic)
        return dropped

    def _forget_if_empty(self, keys: Keys, topic: str) -> None:
        streams = keys.stream(topic), keys.dead(topic)
        names = [keys.topics(), *streams, keys.held(topic), keys.rate_limits(), keys.groups(topic)]
        names.append(keys.dead_topics())
        run_script(self._client, self._scripts, "forget_topic", names, [topic, ""])

    def _groups_of_turn(self, stream: str) -> list[str]:
        """Return the groups of a stream, or some of many: the next ones at the next call."""
        with translated_errors():
            names = [_text(row["name"]) for row in self._groups_in([stream])[0]]
        first = self._next_group.get(stream, 0) if len(names) > GROUPS_A_TURN else 0
        turn = names[first : first + GROUPS_A_TURN]
        self._next_group[stream] = first + len(turn) if first + len(turn) < len(names) else 0
        return turn

    def _groups_in(self, streams: Sequence[str]) -> list[list[Any]]:
        """Return the groups of each stream; none of one that is not there."""
        there = self._ask([("EXISTS", stream) for stream in streams])
        answers = iter(
            self._ask([("XINFO GROUPS", stream) for stream, exists in zip(streams, there, strict=True) if exists])
        )
        return [next(answers) if exists else [] for exists in there]

    def _rows_of_groups(self, keys: Keys, topic: str) -> Iterator[tuple[Any, bytes | None, Sequence[Any]]]:
        """Walk the groups of a topic, each in its stream and in that of its retries.

        Yields:
            What Redis says of it there, the first entry that is pending, and its consumers.
        """
        stream = keys.stream(topic)
        [rows] = self._groups_in([stream])
        retries = [keys.retry(topic, _text(row["name"])) for row in rows]
        places = [(stream, row) for row in rows]
        for retry, row, again in zip(retries, rows, self._groups_in(retries), strict=True):
            places += [(retry, each) for each in again if each["name"] == row["name"]]
        pendings = iter(self._ask([("XPENDING", key, row["name"]) for key, row in places if row["pending"]]))
        consumers = iter(self._ask([("XINFO CONSUMERS", key, row["name"]) for key, row in places if row["consumers"]]))
        for _, row in places:
            first = next(pendings)["min"] if row["pending"] else None
            yield row, first, next(consumers) if row["consumers"] else ()

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Give commands, many in a round trip."""
        answers: list[Any] = []
        for start in range(0, len(commands), COMMANDS_AHEAD):
            pipeline = self._client.pipeline(transaction=False)
            for command in commands[start : start + COMMANDS_AHEAD]:
                pipeline.execute_command(*command)
            answers += pipeline.execute()
        return answers


def _add(info: GroupInfo, row: Any, first: bytes | None, consumers: Sequence[Any]) -> GroupInfo:
    """Add what is known of a group in one stream to what is known of it in others."""
    times = [info.oldest_pending_ms, int(first.partition(b"-")[0]) if first else None]
    found = {each.name: each for each in info.consumers}
    for each in consumers:
        name = _text(each["name"])
        before = found.get(name, ConsumerInfo(name, 0, each["idle"]))
        found[name] = ConsumerInfo(name, before.pending + each["pending"], min(before.idle_ms, each["idle"]))
    return GroupInfo(
        info.name,
        None if info.lag is None or row["lag"] is None else info.lag + row["lag"],
        info.pending + row["pending"],
        min((ms for ms in times if ms is not None), default=None),
        info.ordered,
        [found[name] for name in sorted(found)],
    )


def _text(name: bytes) -> str:
    """Return a name that any client may have made up."""
    return name.decode("utf-8", "replace")
