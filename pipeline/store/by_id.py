"""Messages by their ids: get, cancel, reschedule or replace what waits, by its idempotency key or by its handle.

A message without an idempotency key has a handle, which says where it is scheduled: it costs no memory, and leads to the message
as long as nothing has moved it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.ids import MESSAGE_ID_LENGTH, TOKEN_LENGTH
from pipeline.core.messages import Cancellation, Change, Message
from pipeline.store.base import Changed, Found, State
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys
from pipeline.store.scripts import Call, Scripts, run_script, run_scripts
from pipeline.store.shards import shard_of

MOVES_MAX = 10  # places that a message can be followed to within one call; each move of it takes seconds
CHANGES_MAX = 100  # a round trip, whose replies may have a message each
CHANGES_BYTES = 4 * 1024 * 1024  # of their messages, a round trip, give or take one

_HANDLE: Final = re.compile(rf"~(.{{{MESSAGE_ID_LENGTH}}})~(\d+)", re.ASCII)  # "~" is in no idempotency key
_PLACE: Final = re.compile(rf".{{{MESSAGE_ID_LENGTH}}}(\d+)r?(?::(.+))?", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a script for one message. ``arguments`` come from the place where it is, which may change between two tries.

    ``due_ms`` is that of the bucket into which the message goes, None if it goes nowhere.
    """

    script: str
    name: str
    due_ms: int | None
    arguments: Callable[[bytes], list[Any]]


def handle_of(message: Message) -> str:
    """Return what names a message from now on: its idempotency key, else its handle."""
    return message.id if message.id != message.message_id else handle(message.message_id, message.due_ms)


def handle(message_id: str, due_ms: int) -> str:
    """Return what names a message without an idempotency key while it is scheduled at ``due_ms``."""
    return f"~{message_id}~{due_ms}"


class MessagesById:
    """The messages of a namespace that wait, by idempotency key or handle. A verb that is cut off may be called again.

    Args:
        shards: the keys of each shard.

        id_retention_ms: how long it is known that a message was cancelled.

        now_ms: tests give a clock; None means the server's.
    """

    def __init__(
        self,
        client: Any,
        shards: Sequence[Keys],
        id_retention_ms: int,
        scripts: Scripts | None = None,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        self._client = client
        self._shards = shards
        self._id_retention_ms = id_retention_ms
        self._scripts = scripts or Scripts()
        self._now_ms = now_ms

    def get(self, name: str) -> Found:
        """Look for a message.

        Raises:
            StoreError: no answer, or an error.
        """
        return self._follow(self._by_id("get", name))

    def get_many(self, names: Sequence[str]) -> list[Found]:
        """Look for messages, hundreds in a round trip; raises as ``get``."""
        return self._many("get", names)

    def cancel_many(self, names: Sequence[str]) -> list[Found]:
        """Do with messages what ``cancel`` does, hundreds in a round trip, each for itself; raises as ``cancel``."""
        return [_as(State.CANCELLED, found) for found in self._many("cancel", names)]

    def _many(self, verb: str, names: Sequence[str]) -> list[Found]:
        pages = (names[first : first + CHANGES_MAX] for first in range(0, len(names), CHANGES_MAX))
        return [found for page in pages for found in self._follow_all([self._by_id(verb, name) for name in page])]

    def cancel(self, name: str, in_any_case: bool = False) -> Found:
        """Take a message out of the schedule: it is never delivered, also not when its file is read again.

        Args:
            in_any_case: remember the idempotency key also if nothing waits, so that no message that comes later with it is stored.

        Returns:
            ``CANCELLED``, with the message if it was this call that did it; any other state says why it was not possible. In
            any case, ``UNKNOWN``: it was this call that cancelled a key that was not known.
        Raises:
            StoreError: no answer, or an error; it may be cancelled.
        """
        return _as(State.CANCELLED, self._follow(self._by_id("cancel", name, in_any_case=in_any_case)))

    def reschedule(self, name: str, due_ms: int) -> Found:
        """Give a message that waits another due time, epoch ms UTC; it keeps its place among those of the same time.

        Returns:
            ``SCHEDULED``, with the message as it is now; any other state says why it was not possible.
        Raises:
            StoreError: no answer, or an error; it may be rescheduled.
        """
        return _as(State.SCHEDULED, self._follow(self._by_id("reschedule", name, due_ms)))

    def replace(self, message: Message, lifts_cancellation: bool = False) -> Found:
        """Store a message in place of the one that waits with its idempotency key, or as the first one with it.

        Of several replacements the one with the greatest message id stays.

        Args:
            message: with an idempotency key and a message id.

            lifts_cancellation: store it also if its key was cancelled, which is then forgotten.

        Returns:
            ``SCHEDULED`` or ``HELD``, with the message that waits now: this one, or a replacement with a greater message id. Any
            other state says why it was not possible.
        Raises:
            ValueError: there is no key, or no message id.
            StoreError: no answer, or an error; it may be replaced.
        """
        return self._follow(self._replace(message, lifts_cancellation))

    def apply(self, changes: Sequence[Change]) -> Changed:
        """Make many changes in few round trips: cancel in any case, and replace. Neither their order nor a repetition matters.

        Raises:
            ValueError: a replacement has no key, or no message id.
            StoreError: no answer, or an error; some may be made. Call again with the same arguments.
        """
        of_key: dict[str, list[Change]] = {}
        for change in changes:
            of_key.setdefault(change.key, []).append(change)
        total: Counter[str] = Counter()
        for page in _pages(max(same, key=_rank) for same in of_key.values()):
            calls = [
                self._by_id("cancel", change.key, in_any_case=True)
                if isinstance(change, Cancellation)
                else self._replace(change.message, False)
                for change in page
            ]
            for change, found in zip(page, self._follow_all(calls), strict=True):
                outcome = _outcome(change, found)
                total[outcome] += 1
                total["late" if outcome == "late" else "duplicates"] += len(of_key[change.key]) - 1
        return Changed(**total)

    def _by_id(self, verb: str, name: str, due_ms: int | None = None, in_any_case: bool = False) -> _Call:
        is_handle, now_ms = int(_HANDLE.fullmatch(name) is not None), self._now()
        there, retention_ms = "" if due_ms is None else due_ms, self._id_retention_ms
        return _Call(
            "by_id",
            name,
            due_ms,
            lambda place: [verb, name, place, is_handle, there, retention_ms, now_ms, int(in_any_case)],
        )

    def _replace(self, message: Message, lifts_cancellation: bool) -> _Call:
        if message.id in ("", message.message_id):
            raise ValueError("A replacement takes an idempotency key.")
        member, now_ms = message.to_member(), self._now()
        return _Call(
            "replace",
            message.id,
            message.due_ms,
            lambda place: [message.id, place, member, message.due_ms, int(lifts_cancellation), now_ms],
        )

    def _now(self) -> int | str:
        return self._now_ms() if self._now_ms else ""

    def _follow(self, call: _Call) -> Found:
        """Call a script where the message is."""
        shard = self._shard_of(call.name)
        place = _place_of_handle(call.name)
        if not place:
            keys = self._shards[shard]
            with translated_errors():
                place = self._client.hget(keys.places(), call.name) or b""
            return self._follow_in(keys, call, place)
        # A message of a large file's later part is in another shard than the handle's token says.
        for keys in [*self._shards[shard:], *self._shards[:shard]]:
            found = self._follow_in(keys, call, place)
            if found.state is not State.UNKNOWN:
                break
        return found

    def _follow_in(self, keys: Keys, call: _Call, place: bytes) -> Found:
        for _ in range(MOVES_MAX):
            reply = run_script(self._client, self._scripts, *_script_call(keys, call, place))
            if reply[0] != b"MOVED":
                return _read_reply(reply, place)
            place = reply[1]
        return Found(State.IN_FLIGHT)

    def _shard_of(self, name: str) -> int:
        found = _HANDLE.fullmatch(name)
        return shard_of(found[1][:TOKEN_LENGTH] if found else name, len(self._shards))

    def _follow_all(self, calls: Sequence[_Call]) -> list[Found]:
        """Call a script for each of some messages, all in one round trip; what has moved meanwhile is asked for again."""
        shards = [self._shards[self._shard_of(call.name)] for call in calls]
        places = {index: place for index, call in enumerate(calls) if (place := _place_of_handle(call.name))}
        with translated_errors():
            pipeline = self._client.pipeline(transaction=False)
            keyed = [index for index in range(len(calls)) if index not in places]
            for index in keyed:
                pipeline.hget(shards[index].places(), calls[index].name)
            places |= {index: place or b"" for index, place in zip(keyed, pipeline.execute(), strict=True)}
        found: dict[int, Found] = {}
        while left := [index for index in range(len(calls)) if index not in found]:
            asked = [_script_call(shards[index], calls[index], places[index]) for index in left]
            for index, reply in zip(left, run_scripts(self._client, self._scripts, asked), strict=True):
                if reply[0] == b"MOVED":
                    places[index] = reply[1]
                else:
                    found[index] = _read_reply(reply, places[index])
        for index in {*range(len(calls))} - {*keyed} if len(self._shards) > 1 else ():
            if found[index].state is State.UNKNOWN:  # a handle's message may be in another shard
                found[index] = self._follow(calls[index])
        return [found[index] for index in range(len(calls))]


def _place_of_handle(name: str) -> bytes:
    """Return where a handle leads to; nothing for an idempotency key."""
    found = _HANDLE.fullmatch(name)
    return f"{found[1]}{int(found[2])}".encode() if found else b""


def _as(state: State, found: Found) -> Found:
    """Return what a verb found and changed, in its new state."""
    return Found(state, found.message) if found.message else found


def _rank(change: Change) -> tuple[bool, str]:
    """Return what is greater for the change that wins among those of one key."""
    return (True, "") if isinstance(change, Cancellation) else (False, change.message.message_id)


def _outcome(change: Change, found: Found) -> str:
    """Return what a change counts as, by the name in ``Changed``."""
    if found.state in (State.IN_FLIGHT, State.DELIVERED):
        return "late"
    if isinstance(change, Cancellation):
        return "cancelled" if found.message or found.state is State.UNKNOWN else "duplicates"
    is_there = found.message is not None and found.message.message_id == change.message.message_id
    return "replaced" if is_there else "duplicates"


def _pages(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Cut changes into as many as go in one round trip."""
    page: list[Change] = []
    size = 0
    for change in changes:
        page.append(change)
        size += 0 if isinstance(change, Cancellation) else len(change.message.body)
        if len(page) == CHANGES_MAX or size >= CHANGES_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


def _key_of(keys: Keys, place: bytes) -> str:
    """Return the key that a place is in; of no place any bucket."""
    read = _PLACE.fullmatch(place.decode("utf-8", "replace"))
    if read and read[2]:
        return keys.held(read[2])
    return keys.bucket(bucket_start_ms(int(read[1])) if read else 0)


def _script_call(keys: Keys, call: _Call, place: bytes) -> Call:
    here = _key_of(keys, place)
    there = here if call.due_ms is None else keys.bucket(bucket_start_ms(call.due_ms))
    names = [keys.places(), keys.ids(), keys.cancelled(), keys.buckets(), here, there, keys.attempts(), keys.counters()]
    return call.script, names, [*call.arguments(place), keys.wake()]


def _read_reply(reply: Sequence[bytes], place: bytes) -> Found:
    """Say what a script answered about the message of a place."""
    status, member, score = reply
    if status != b"OK":
        return Found(State(status.decode().lower()))
    is_held = b":" in place and member.startswith(place[:MESSAGE_ID_LENGTH])
    return Found(State.HELD if is_held else State.SCHEDULED, Message.read_member(member, int(float(score))))
