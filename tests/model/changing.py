"""The part of the machine that cancels and replaces as rows of files do: in any order, late, and again."""

from collections.abc import Callable
from typing import TypeVar

import hypothesis.strategies as st
from hypothesis.stateful import Bundle, precondition, rule

from pipeline.core.messages import DEFAULT_TOPIC, Cancellation, Message, Replacement
from pipeline.store.by_id import MessagesById
from tests.model.reference import MESSAGE_ID_LENGTH
from tests.model.snapshot import Snapshot
from tests.model.storing import StoringMachine
from tests.model.times import DUES

CANCELLED = "cancelled"  # in place of a lease token
NAMES = st.sampled_from(["a", "b"])

T = TypeVar("T")


class ChangingMachine(StoringMachine):
    """What is cancelled or replaced has ended, and what replaces it is accepted."""

    replacements: Bundle[Message] = Bundle("replacements")

    @rule(target=replacements, name=NAMES, due=st.sampled_from(DUES), number=st.integers(0, 3))
    def write_a_replacement(self, name: str, due: tuple[str, int], number: int) -> Message:
        """One that is stored later, or never."""
        self.landed += 1
        start_ms = {"now": self.now_ms, "border": self.border_ms(), "epoch": 0}[due[0]]
        topic = self.topics[number % len(self.topics)] if self.topics else DEFAULT_TOPIC
        token = f"{self.landed:014d}"
        return Message(max(start_ms + due[1], 0), f"replacement {token}", topic, name, {}, f"{token}{1:08x}")

    @rule(first=replacements, second=replacements, names=st.lists(NAMES, max_size=2))
    def rows_cancel_and_replace(self, first: Message, second: Message, names: list[str]) -> None:
        replacements = [Replacement(message) for message in (first, second) if not self.is_over(message, False)]
        self.change(lambda messages: messages.apply([*replacements, *map(Cancellation, names)]))

    @rule(message=replacements, lifts_cancellation=st.booleans())
    def replace(self, message: Message, lifts_cancellation: bool) -> None:
        if not self.is_over(message, lifts_cancellation):
            self.change(lambda messages: messages.replace(message, lifts_cancellation))

    @rule(name=NAMES)
    def cancel_in_any_case(self, name: str) -> None:
        self.change(lambda messages: messages.cancel(name, in_any_case=True))

    @precondition(lambda self: self.seen.places)
    @rule(number=st.integers(0, 3), due=st.sampled_from(DUES))
    def replace_what_is_there(self, number: int, due: tuple[str, int]) -> None:
        """Mostly what was tried before."""
        tried = [name for name, place in self.seen.places.items() if place[:MESSAGE_ID_LENGTH] in self.seen.attempts]
        names = [*sorted(tried), *sorted(self.seen.places)]
        self.replace(self.write_a_replacement(names[number % len(names)], due, number), lifts_cancellation=True)

    def is_over(self, message: Message, lifts_cancellation: bool) -> bool:
        """Whether it would be stored a second time, when all that is known of the first time is forgotten."""
        if message.to_member() not in self.accepted:
            return False
        place = self.reference.places.get(message.id)
        if place is not None:
            return not place.is_replacement or place.message_id < message.message_id
        ended = self.reference.how_it_ended(message.id, self.now_ms)
        return not ended or (lifts_cancellation and ended == b"CANCELLED")

    def change(self, call: Callable[[MessagesById], T]) -> None:
        self.loops[0].same_by_id(call)
        assert self.hear() == self.reference.take_rings()
        before, self.seen = self.seen, self.look()
        there, here = that_wait(before), that_wait(self.seen)
        gone = [self.stored_as(message_id) for message_id in there.keys() - here.keys()]
        for stored in gone:
            self.acknowledged[stored] = (CANCELLED, self.now_ms)
            self.cancelled.add(stored)
        keys = {key for key, stored in self.ids.items() if stored in gone}
        for message_id in here.keys() - there.keys():
            stored, due_ms = here[message_id]
            assert stored not in self.accepted, "stored twice"
            key = Message.from_member(stored, due_ms).id
            self.accepted[stored] = due_ms
            self.swapped += key in keys
            self.ids[key] = stored

    def stored_as(self, message_id: bytes) -> bytes:
        """Return a message as it was stored; a rate limit may have given it another form."""
        return next(stored for stored in self.accepted if stored.startswith(message_id))


def that_wait(seen: Snapshot) -> dict[bytes, tuple[bytes, int]]:
    """Return the messages in the buckets and those that are held, by their ids."""
    held = [row for rows in seen.held.values() for row in rows.items()]
    return {stored[:MESSAGE_ID_LENGTH]: (stored, due_ms) for stored, due_ms in [*seen.waiting(), *held]}
