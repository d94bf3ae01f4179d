"""A call of ``by_id.lua`` or ``replace.lua`` for one message: its keys and arguments, and what the answer says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.cold import HOUR_MS, read_cold_place
from pipeline.core.errors import VersionDiffers
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.core.messages import Message
from pipeline.store.base import Found, State
from pipeline.store.cold import ColdMember
from pipeline.store.keys import Keys
from pipeline.store.places import bucket_or_held, version, version_of
from pipeline.store.scripts import Call


@dataclass(frozen=True, slots=True)
class CallById:
    """A call of a script for one message. ``arguments`` come from the place where it is, which may change between two tries.

    ``due_ms`` is that of the bucket into which the message goes, None if it goes nowhere; ``after`` the state of the message then,
    None if its place tells it. ``accepts`` says of each place whether the message may be there; None means anywhere.
    """

    script: str
    name: str
    due_ms: int | None
    arguments: Callable[[bytes], list[Any]]
    after: State | None = None
    accepts: Callable[[bytes], bool] | None = None


def version_differs(call: CallById) -> VersionDiffers:
    """Return the error for a message that is there, and that the call does not accept."""
    return VersionDiffers(f"The message {call.name} is another version than expected: look at it again.")


def script_call(keys: Keys, call: CallById, place: bytes, cold_member: bytes = b"") -> Call:
    """Return the call of its script for a place where the message may be."""
    is_by_id = call.script == "by_id"
    more_names = [keys.held_topics(), keys.pauses()] if is_by_id else []
    more = [cold_member] if is_by_id else []
    here = bucket_or_held(keys, place)
    there = here if call.due_ms is None else keys.bucket(bucket_start_ms(call.due_ms))
    names = [keys.places(), keys.ids(), keys.cancelled(), keys.buckets(), here, there, keys.attempts(), keys.counters()]
    return call.script, [*names, keys.cold(), *more_names], [*call.arguments(place), keys.wake(), *more]


def read_reply(call: CallById, reply: Sequence[bytes], place: bytes, cold: ColdMember | None = None) -> Found:
    """Say what a script answered about the message of a place."""
    status, member, score = reply[0], reply[1], reply[2]
    if not member and status in (b"OK", b"COLD") and (where := read_cold_place(place)):
        if cold:
            message = Message.read_member(cold.member, cold.due_ms)
        else:  # cancelled without a look into its file
            message = Message(where[1] * HOUR_MS, "", id=call.name, message_id=where[0])
        is_cold = status == b"COLD"
        return Found(State.SCHEDULED if is_cold else State.CANCELLED, message, version_of(place) if is_cold else "")
    if status not in (b"OK", b"STORED"):
        return Found(State(status.decode().lower()))
    is_held = b":" in place and member.startswith(place[:MESSAGE_ID_LENGTH])
    state = call.after or (State.HELD if is_held else State.SCHEDULED)
    score_ms = int(float(score))
    message = Message.read_member(member, score_ms)
    named = "" if state is State.CANCELLED else version(message.message_id, score_ms, state is State.HELD)
    return Found(state, message, named, status == b"STORED")
