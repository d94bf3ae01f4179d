"""Batches with an idempotency key: stored once, however often the same batch comes.

The key names a marker in each shard. It moves in the transaction that stores the batch there, from nothing to the token of the
batch's message ids, the digest of its body and a nonce of the call. So a repetition finds out that it is one, that it is the same
body, and which ids and due times its messages have; and a call whose reply was lost, that it was itself.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from pipeline.client.commit import transaction_of
from pipeline.client.patience import Patience
from pipeline.core.clock import Clock
from pipeline.core.ids import TOKEN_HALF_BITS, encode_token, message_id, token_epoch_ms
from pipeline.core.messages import Change, Message, Replacement
from pipeline.store.base import NO_MARKER, Changed, MarkerMove
from pipeline.store.by_id import MessagesById
from pipeline.store.redis_store import RedisStore
from pipeline.store.shards import shard_of
from pipeline.web.lines import Judged
from pipeline.web.problems import Problem

SOURCE_ID: Final = "batch"
PART_ID_LENGTH: Final = 32  # hexadecimal digits of the digest of a key
NONCE_BYTES: Final = 8
SWEEPS: Final = 6  # in the time that a marker is kept


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch: its messages with their ids, which of them are new, and what its changes did."""

    judged: Judged
    messages: Sequence[Message]
    is_new: Sequence[bool]
    changed: Changed


class _StartOver(Exception):
    """A marker is not where it was: look at all of them again."""


class KeyedBatches:
    """Stores batches, from several threads at once.

    Args:
        shards: the store of each.

        keep_sec: how long a repetition is known.

        wait_for_disk: a batch counts as stored when the server has it on disk.
    """

    def __init__(
        self,
        shards: Sequence[RedisStore],
        by_id: MessagesById,
        patience: Patience,
        clock: Clock,
        keep_sec: int,
        wait_for_disk: bool,
    ) -> None:
        self._shards = shards
        self._by_id = by_id
        self._patience = patience
        self._clock = clock
        self._keep_ms = keep_sec * 1000
        self._wait_for_disk = wait_for_disk
        self._lock = threading.Lock()
        self._swept_ms: float | None = None

    def store(self, key: str, body: bytes, judge: Callable[[int], Judged]) -> Outcome:
        """Store a batch, unless it is stored.

        Args:
            judge: judges the lines by their arrival, epoch ms.

        Returns:
            What became of it.
        Raises:
            Problem: ``key_reused``.
            StoreError: no answer, or an error; it may be stored.
        """
        self._sweep()
        part_id = hashlib.sha256(key.encode()).hexdigest()[:PART_ID_LENGTH]
        digest, nonce = hashlib.sha256(body).hexdigest(), secrets.token_hex(NONCE_BYTES)
        home = self._shards[shard_of(part_id, len(self._shards))]
        while True:
            [marker] = self._patience(partial(home.markers, SOURCE_ID, [part_id]))
            token, _, rest = marker.partition(":")
            if marker and not rest.startswith(digest):
                raise Problem("key_reused", "Send each batch with a key of its own.")
            token = token or encode_token(self._clock.wall_ms(), secrets.randbits(TOKEN_HALF_BITS))
            try:
                return self._store(part_id, f"{token}:{digest}:", nonce, judge(token_epoch_ms(token)))
            except _StartOver:
                continue

    def _store(self, part_id: str, known: str, nonce: str, judged: Judged) -> Outcome:
        """Store what is judged, the share of the key's own shard first: its marker decides on the token."""
        token = known.partition(":")[0]
        messages = []
        by_shard: dict[int, list[int]] = {shard_of(part_id, len(self._shards)): []}
        for number, (place, request) in enumerate(zip(judged.places, judged.messages, strict=True)):
            name = message_id(token, place + 1)
            key = request.id or name
            messages.append(Message(request.due_ms, request.body, request.topic, key, request.headers, name))
            by_shard.setdefault(shard_of(request.id or part_id, len(self._shards)), []).append(number)
        is_new = [False] * len(messages)
        for count, (shard, numbers) in enumerate(by_shard.items()):
            share = [messages[number] for number in numbers]
            duplicates = self._store_share(self._shards[shard], part_id, known, nonce, share, is_home=count == 0)
            for place, number in enumerate(numbers):
                is_new[number] = place not in duplicates
        changes = [
            _named(change, message_id(token, place + 1))
            for place, change in zip(judged.change_places, judged.changes, strict=True)
        ]
        changed = self._patience(partial(self._by_id.apply, changes)) if changes else Changed()
        return Outcome(judged, messages, is_new, changed)

    def _store_share(
        self, store: RedisStore, part_id: str, known: str, nonce: str, messages: Sequence[Message], is_home: bool
    ) -> Collection[int]:
        """Store what belongs to a shard; returns the places of messages that were there.

        Args:
            known: how the marker begins where this batch is stored; with the nonce it is from this call.

            is_home: whether this shard decides on the token.
        """
        names = [message.message_id for message in messages]
        transaction, identified = transaction_of(messages, names, MarkerMove(part_id, NO_MARKER, known + nonce))
        done = self._patience(partial(store.schedule, SOURCE_ID, transaction))
        if self._wait_for_disk:
            self._patience(partial(store.wait_for_copies, True))
        if done is None or self._wait_for_disk:  # a server that started anew may have lost it before it was on disk
            [marker] = self._patience(partial(store.markers, SOURCE_ID, [part_id]))
            if marker == NO_MARKER or (is_home and not marker.startswith(known)):
                raise _StartOver
            if marker != known + nonce:  # another call has stored it
                return range(len(messages))
        if done is None:  # a try whose reply was lost has stored it
            return {place for place in identified if not self._waits(messages[place])}
        return {identified[number] for number in done.duplicates}

    def _waits(self, message: Message) -> bool:
        found = self._patience(partial(self._by_id.get, message.id))
        return found.message is not None and found.message.message_id == message.message_id

    def _sweep(self) -> None:
        """Drop the markers of batches that came long ago, now and then."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._swept_ms is not None and now_ms - self._swept_ms < self._keep_ms / SWEEPS:
                return
            self._swept_ms = now_ms
        before_ms = self._clock.wall_ms() - self._keep_ms
        for store in self._shards:
            marked = self._patience(lambda at=store: list(at.marked_parts(SOURCE_ID)))  # type: ignore[misc]
            old = [part_id for part_id, moved_ms in marked if moved_ms < before_ms]
            self._patience(partial(store.forget_markers, SOURCE_ID, old))


def _named(change: Change, name: str) -> Change:
    """Give a replacement its message id: by it the latest one is known, so that a repetition undoes no other."""
    return Replacement(replace(change.message, message_id=name)) if isinstance(change, Replacement) else change
