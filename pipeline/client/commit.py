"""Storing messages of a program: what several callers want at once goes to the server in one transaction.

A program is a source like a file of the ingest job: it has a progress marker, which each transaction moves by one. A transaction
whose reply was lost is sent again and goes through only if the marker is where it was, so no retry stores a message twice.
"""

import logging
import os
import random
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

from pipeline.core.clock import Clock
from pipeline.core.errors import ColdUnavailable, StoreError, StoreUnavailable
from pipeline.core.ids import TOKEN_HALF_BITS, encode_token, message_id
from pipeline.core.messages import Message
from pipeline.store.base import NO_MARKER, Found, MarkerMove, MessageRows, Transaction
from pipeline.store.redis_store import RedisStore
from pipeline.store.retry import retry_until_available
from pipeline.store.shards import shard_of

SOURCE_ID: Final = "client"  # of all programs; each has a part of its own
MESSAGES_MAX: Final = 5_000  # in a transaction
BYTES_MAX: Final = 4 * 1024 * 1024  # of message bodies, after which a transaction is full

log = logging.getLogger(__name__)

T = TypeVar("T")


class Stored(NamedTuple):
    """A request with its message id; ``is_duplicate`` if its idempotency key was known, so that nothing was stored."""

    request: Message
    message_id: str
    is_duplicate: bool

    @property
    def message(self) -> Message:
        """The message that it asked for."""
        return replace(self.request, id=self.request.id or self.message_id, message_id=self.message_id)


class Committer:
    """Stores messages of one process, for one thread at a time.

    Args:
        shards: the store of each.

        find: looks for a message by its idempotency key.

        patience_ms: how long a call may wait for a server that does not answer.

        marker_keep_ms: after which a marker of a program that was killed is dropped.

        wait_for_disk: a message counts as stored when the server has it on disk.
    """

    def __init__(
        self,
        shards: Sequence[RedisStore],
        find: Callable[[str], Found],
        clock: Clock,
        patience_ms: float,
        marker_keep_ms: int,
        wait_for_disk: bool = False,
    ) -> None:
        self._shards = shards
        self._find = find
        self._clock = clock
        self._patience_ms = patience_ms
        self._marker_keep_ms = marker_keep_ms
        self._wait_for_disk = wait_for_disk
        self._last_token = (0, 0)
        # The part id, and how many transactions it has; none while a marker may be elsewhere, as after a call that was cut off.
        self._markers: list[tuple[str, int] | None] = [None] * len(shards)
        self._end_ms = 0.0

    def commit(self, requests: Sequence[Message]) -> list[Stored | StoreError]:
        """Store requests, those of each shard in one transaction.

        Returns:
            What became of each. Of those with an error it is not known whether they are stored.
        """
        token = self._new_token()
        names = [f"{token}{number:08x}" for number in range(len(requests))]  # as ids.message_id, which checks it, too
        self._end_ms = self._clock.monotonic_ms() + self._patience_ms
        if len(self._shards) == 1:
            return self._try(0, requests, names)
        by_shard: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            by_shard.setdefault(shard_of(request.id or token, len(self._shards)), []).append(number)
        results: list[Stored | StoreError] = [StoreUnavailable("Nothing was tried.")] * len(requests)
        for shard, numbers in by_shard.items():
            tried = self._try(shard, [requests[number] for number in numbers], [names[number] for number in numbers])
            for number, result in zip(numbers, tried, strict=True):
                results[number] = result
        return results

    def _try(self, shard: int, requests: Sequence[Message], names: Sequence[str]) -> list[Stored | StoreError]:
        try:
            duplicates = self._store(shard, requests, names)
        except StoreError as exc:
            return [exc] * len(requests)
        return [Stored(request, names[place], place in duplicates) for place, request in enumerate(requests)]

    def name(self, request: Message) -> Message:
        """Return a request with a message id of its own."""
        return replace(request, message_id=message_id(self._new_token(), 0))

    def close(self) -> None:
        """Drop the markers; what is stored stays so."""
        for store, marker in zip(self._shards, self._markers, strict=True):
            try:
                if marker:
                    store.forget_markers(SOURCE_ID, [marker[0]])
            except StoreError as exc:
                log.debug("a marker stays for a while: %s", exc)
        self._markers = [None] * len(self._shards)

    def _store(self, shard: int, requests: Sequence[Message], names: Sequence[str]) -> set[int]:
        """Store messages in a shard; returns the places of those whose idempotency key was known."""
        store = self._shards[shard]
        while True:
            part_id, count = self._markers[shard] or (self._new_part_id(store), 0)
            self._markers[shard] = None
            move = MarkerMove(part_id, str(count) if count else NO_MARKER, str(count + 1))
            transaction, identified = transaction_of(requests, names, move)
            done = self._retrying(partial(store.schedule, SOURCE_ID, transaction))
            if self._wait_for_disk:
                self._retrying(partial(store.wait_for_copies, True))
            if done is None or self._wait_for_disk:  # a server that started anew may have lost it before it was on disk
                [marker] = self._retrying(partial(store.markers, SOURCE_ID, [part_id]))
                if marker != str(count + 1):
                    continue  # it is gone with the server's last writes, or was too old: all is stored again under another one
            self._markers[shard] = (part_id, count + 1)
            if done is None:  # a try whose reply was lost has stored it
                return {place for place in identified if not self._waits(requests[place].id, names[place])}
            return {identified[number] for number in done.duplicates}

    def _waits(self, key: str, message_id: str) -> bool:
        try:
            found = self._retrying(partial(self._find, key))
        except ColdUnavailable:
            return False  # what a program stores waits in no cold file: the key was another message's before
        return found.message is not None and found.message.message_id == message_id

    def _new_part_id(self, store: RedisStore) -> str:
        """Return a part id, and drop the markers of programs that did not end as they should."""
        before_ms = self._clock.wall_ms() - self._marker_keep_ms
        marked = self._retrying(lambda: list(store.marked_parts(SOURCE_ID)))
        old = [part_id for part_id, moved_ms in marked if moved_ms < before_ms]
        self._retrying(partial(store.forget_markers, SOURCE_ID, old))
        return self._new_token()

    def _new_token(self) -> str:
        """Return a token that is later than all before, so that messages of one due time keep the order of their calls."""
        epoch_ms, bits = self._clock.wall_ms(), secrets.randbits(TOKEN_HALF_BITS - 1)
        last_ms, last_bits = self._last_token
        if epoch_ms <= last_ms:
            epoch_ms, bits = last_ms, last_bits + 1 + (bits >> TOKEN_HALF_BITS // 2)
        self._last_token = (epoch_ms, bits)
        return encode_token(epoch_ms, bits)

    def _retrying(self, call: Callable[[], T]) -> T:
        return retry_until_available(
            call,
            lambda ms: threading.Event().wait(ms / 1000),
            self._clock,
            random.random,
            lambda: self._clock.monotonic_ms() >= self._end_ms,
            waits_long=False,  # whoever schedules hears of it at once
        )


def transaction_of(
    messages: Sequence[Message], names: Iterable[str], move: MarkerMove
) -> tuple[Transaction, list[int]]:
    """Return the transaction that stores messages and moves a marker, and the places of those that have an idempotency key.

    Args:
        names: their message ids.
    """
    plain: list[tuple[int, bytes]] = []
    identified = MessageRows([], [], [])
    places = []
    for place, (message, name) in enumerate(zip(messages, names, strict=True)):
        due_ms, member = message.due_ms, message.to_member(name)
        if message.id in ("", name):
            plain.append((due_ms, member))
        else:
            identified.due_ms.append(due_ms)
            identified.members.append(member)
            identified.idempotency_keys.append(message.id)
            places.append(place)
    plain.sort()
    rows = MessageRows([due_ms for due_ms, _ in plain], [member for _, member in plain])
    return Transaction([move], rows, identified, 0), places


@dataclass(slots=True)
class _Waiting:
    """What one call wants to have stored, until it is."""

    messages: Sequence[Message]
    results: list[Stored | StoreError] | None = None

    @property
    def size(self) -> int:
        """The characters of their bodies."""
        return sum(len(message.body) for message in self.messages)


class GroupCommit:
    """Stores messages for any number of threads, also of a process that forked: those that wait at once share a transaction."""

    def __init__(self, new_committer: Callable[[], Committer]) -> None:
        self._new_committer = new_committer
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._queue: deque[_Waiting] = deque()
        self._committer = self._new_committer()

    def store(self, messages: Sequence[Message]) -> list[Stored | StoreError]:
        """Store checked messages; returns what became of each."""
        self._begin_in_child()
        waiting = _Waiting(messages)
        self._queue.append(waiting)
        # Whoever gets the lock stores for all that wait.
        with self._lock:
            while waiting.results is None:
                self._commit()
        return waiting.results

    def name(self, request: Message) -> Message:
        """Return a request with a message id, which is greater than those of all before."""
        self._begin_in_child()
        with self._lock:
            return self._committer.name(request)

    def close(self) -> None:
        """Drop what is only needed to store more; what waits is stored first."""
        self._begin_in_child()
        with self._lock:
            self._committer.close()

    def _begin_in_child(self) -> None:
        """Begin anew in a process that forked: the marker is its parent's, and a thread of the parent may hold the lock."""
        if self._process != os.getpid():
            self._begin()

    def _commit(self) -> None:
        taken = [self._queue.popleft()]
        count, size = len(taken[0].messages), taken[0].size
        while self._queue and count + len(self._queue[0].messages) <= MESSAGES_MAX and size < BYTES_MAX:
            taken.append(self._queue.popleft())
            count += len(taken[-1].messages)
            size += taken[-1].size
        results: list[Stored | StoreError] = [StoreUnavailable("The call that stored this, too, was cut off.")] * count
        try:
            results = self._committer.commit([message for waiting in taken for message in waiting.messages])
        finally:  # nobody may wait for ever
            for waiting in taken:
                waiting.results, results = results[: len(waiting.messages)], results[len(waiting.messages) :]
