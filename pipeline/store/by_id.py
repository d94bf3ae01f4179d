"""Messages by their ids: get, cancel, reschedule or replace what waits, by its idempotency key or by its handle.

A message without an idempotency key has a handle, which says where it is scheduled: it costs no memory, and leads to the message
as long as it waits at that time, also while it is held.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from pipeline.core.cold import read_cold_place
from pipeline.core.errors import ColdUnavailable
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.core.messages import Cancellation, Change, Message
from pipeline.store.base import Changed, Found, State
from pipeline.store.call_by_id import CallById, read_reply, script_call, version_differs
from pipeline.store.changes import CHANGES_MAX, outcome_of, pages_of, rank
from pipeline.store.cold import ColdMember, ColdReader, read_no_cold
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys
from pipeline.store.places import place_of_handle, shard_of_name, version, version_of
from pipeline.store.scripts import Scripts, run_script, run_scripts

_AFTER: Final = {"get": None, "cancel": State.CANCELLED, "reschedule": State.SCHEDULED}
MOVES_MAX = 10  # places that a message can be followed to within one call; each move of it takes seconds


class MessagesById:
    """The messages of a namespace that wait, by idempotency key or handle. A verb that is cut off may be called again.

    ``if_versions`` of a verb are those that the message may have, "*" for any; none means that it does not matter. It raises
    ``VersionDiffers``, and does nothing, if what waits has another one.

    Args:
        shards: the keys of each shard.

        id_retention_ms: how long it is known that a message was cancelled.

        now_ms: tests give a clock; None means the server's.

        read_cold: returns a message that waits in a cold file.
    """

    def __init__(
        self,
        client: Any,
        shards: Sequence[Keys],
        id_retention_ms: int,
        scripts: Scripts | None = None,
        now_ms: Callable[[], int] | None = None,
        read_cold: ColdReader = read_no_cold,
    ) -> None:
        self._client = client
        self._read_cold = read_cold
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
        return self._many("cancel", names)

    def reschedule_many(self, names: Sequence[str], due_ms: int) -> list[Found]:
        """Do with messages what ``reschedule`` does, hundreds in a round trip, each for itself; raises as ``reschedule``."""
        return self._many("reschedule", names, due_ms)

    def _many(self, verb: str, names: Sequence[str], due_ms: int | None = None) -> list[Found]:
        pages = (names[first : first + CHANGES_MAX] for first in range(0, len(names), CHANGES_MAX))
        return [
            found for page in pages for found in self._follow_all([self._by_id(verb, name, due_ms) for name in page])
        ]

    def cancel(self, name: str, in_any_case: bool = False, if_versions: Collection[str] = ()) -> Found:
        """Take a message out of the schedule: it is never delivered, also not when its file is read again.

        Args:
            in_any_case: remember the idempotency key also if nothing waits, so that no message that comes later with it is stored.

        Returns:
            ``CANCELLED``, with the message if it was this call that did it; any other state says why it was not possible. In
            any case, ``UNKNOWN``: it was this call that cancelled a key that was not known.
        Raises:
            StoreError: no answer, or an error; it may be cancelled.
        """
        return self._follow(self._by_id("cancel", name, in_any_case=in_any_case, if_versions=if_versions))

    def reschedule(self, name: str, due_ms: int, if_versions: Collection[str] = ()) -> Found:
        """Give a message that waits another due time, epoch ms UTC; it keeps its place among those of the same time.

        Returns:
            ``SCHEDULED``, with the message as it is now; any other state says why it was not possible.
        Raises:
            StoreError: no answer, or an error; it may be rescheduled.
        """
        return self._follow(self._by_id("reschedule", name, due_ms, if_versions=if_versions))

    def replace(self, message: Message, lifts_cancellation: bool = False, if_versions: Collection[str] = ()) -> Found:
        """Store a message in place of the one that waits with its idempotency key, or as the first one with it.

        Of several replacements the one with the greatest message id stays.

        Args:
            message: with an idempotency key and a message id.

            lifts_cancellation: store it also if its key was cancelled, which is then forgotten.

        Returns:
            ``SCHEDULED`` or ``HELD``, with the message that waits now: this one, or a replacement with a greater message id. Any
            other state says why it was not possible. With ``if_versions``, it is not stored as the first one.
        Raises:
            ValueError: there is no key, or no message id.
            StoreError: no answer, or an error; it may be replaced.
        """
        return self._follow(self._replace(message, lifts_cancellation, if_versions))

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
        for page in pages_of(max(same, key=rank) for same in of_key.values()):
            calls = [
                self._by_id("cancel", change.key, in_any_case=True)
                if isinstance(change, Cancellation)
                else self._replace(change.message, False)
                for change in page
            ]
            for change, found in zip(page, self._follow_all(calls), strict=True):
                outcome = outcome_of(change, found)
                total[outcome] += 1
                total["late" if outcome == "late" else "duplicates"] += len(of_key[change.key]) - 1
        return Changed(**total)

    def _by_id(
        self,
        verb: str,
        name: str,
        due_ms: int | None = None,
        in_any_case: bool = False,
        if_versions: Collection[str] = (),
    ) -> CallById:
        is_handle, now_ms = int(bool(place_of_handle(name))), self._now()
        there, retention_ms = "" if due_ms is None else due_ms, self._id_retention_ms
        # An earlier try, whose reply was lost, may have moved it. Where nothing waits, the script says why.
        moved = {version(each[:MESSAGE_ID_LENGTH], due_ms) for each in if_versions} if due_ms is not None else ()
        accepted = {*if_versions, *moved}
        return CallById(
            "by_id",
            name,
            due_ms,
            lambda place: [verb, name, place, is_handle, there, retention_ms, now_ms, int(in_any_case)],
            _AFTER[verb],
            (lambda place: not place or "*" in accepted or version_of(place) in accepted) if if_versions else None,
        )

    def _replace(self, message: Message, lifts_cancellation: bool, if_versions: Collection[str] = ()) -> CallById:
        if message.id in ("", message.message_id):
            raise ValueError("A replacement takes an idempotency key.")
        member, now_ms = message.to_member(), self._now()

        def accepts(place: bytes) -> bool:
            is_own = place.startswith(message.message_id.encode())  # of an earlier try, whose reply was lost
            return bool(place) and (is_own or "*" in if_versions or version_of(place) in if_versions)

        return CallById(
            "replace",
            message.id,
            message.due_ms,
            lambda place: [message.id, place, member, message.due_ms, int(lifts_cancellation), now_ms],
            accepts=accepts if if_versions else None,
        )

    def _now(self) -> int | str:
        return self._now_ms() if self._now_ms else ""

    def _follow(self, call: CallById) -> Found:
        """Call a script where the message is."""
        shard = shard_of_name(call.name, len(self._shards))
        place = place_of_handle(call.name)
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

    def _follow_in(self, keys: Keys, call: CallById, place: bytes) -> Found:
        for _ in range(MOVES_MAX):
            is_refused = call.accepts is not None and not call.accepts(place)
            if is_refused and not place_of_handle(call.name):
                raise version_differs(call)
            cold = self._find_cold(keys, call, place)
            member = cold.member if cold else b""
            # A handle does not tell whether its message is held, which is another version: look before it is refused.
            asked = self._by_id("get", call.name) if is_refused else call
            reply = run_script(self._client, self._scripts, *script_call(keys, asked, place, member))
            if is_refused and reply[0] == b"OK":
                raise version_differs(call)
            if reply[0] == b"COLD" and not cold:
                raise ColdUnavailable(
                    f"The message {call.name} waits in a cold file that can't be read: see to cold.folder."
                )
            if reply[0] != b"MOVED":
                return read_reply(call, reply, place, cold)
            place = reply[1]
        return Found(State.IN_FLIGHT)

    def _find_cold(self, keys: Keys, call: CallById, place: bytes) -> ColdMember | None:
        """Look for the message of a place in the cold files, if it is one of these and the message is wanted.

        Where it leads is decided by the script, later: the message may be on its way into Redis.
        """
        found = read_cold_place(place) if call.script == "by_id" else None
        if not found:
            return None
        try:
            return self._read_cold(found[0], keys.shard)
        except ColdUnavailable:
            if call.after is State.CANCELLED:
                return None
            raise

    def _follow_all(self, calls: Sequence[CallById]) -> list[Found]:
        """Call a script for each of some messages, all in one round trip; what has moved meanwhile is asked for again."""
        shards = [self._shards[shard_of_name(call.name, len(self._shards))] for call in calls]
        places = {index: place for index, call in enumerate(calls) if (place := place_of_handle(call.name))}
        with translated_errors():
            pipeline = self._client.pipeline(transaction=False)
            keyed = [index for index in range(len(calls)) if index not in places]
            for index in keyed:
                pipeline.hget(shards[index].places(), calls[index].name)
            places |= {index: place or b"" for index, place in zip(keyed, pipeline.execute(), strict=True)}
        found: dict[int, Found] = {}
        for _ in range(MOVES_MAX):
            asked = {i: script_call(shards[i], calls[i], places[i]) for i in range(len(calls)) if i not in found}
            for index, reply in zip(asked, run_scripts(self._client, self._scripts, [*asked.values()]), strict=True):
                if reply[0] == b"MOVED":
                    places[index] = reply[1]
                elif reply[0] == b"COLD":
                    found[index] = self._follow(calls[index])
                else:
                    found[index] = read_reply(calls[index], reply, places[index])
        for index in {*range(len(calls))} - {*keyed} if len(self._shards) > 1 else ():
            if found[index].state is State.UNKNOWN:  # a handle's message may be in another shard
                found[index] = self._follow(calls[index])
        return [found.get(index, Found(State.IN_FLIGHT)) for index in range(len(calls))]
