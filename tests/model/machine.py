"""A Hypothesis machine that drives a real server and the reference side by side, and checks what the pipeline promises."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import Bundle, invariant, multiple, precondition, rule

from pipeline.core.errors import StoreProtocolError
from pipeline.core.messages import Message
from pipeline.store.base import Claim, ClaimReply, Found
from pipeline.store.by_id import MessagesById
from tests.model.changing import CANCELLED, ChangingMachine
from tests.model.landed import LandedFile
from tests.model.pair import DRAIN, Pair
from tests.model.reference import MESSAGE_ID_LENGTH
from tests.model.snapshot import read_reference
from tests.model.storing import LOOPS
from tests.model.times import AROUND_MS, DELAYS_MS, DUES, LEASE_MS, STEPS_MS
from tests.store.builders import BUCKET_MS, keyed

PERMANENT = frozenset(
    {"cancelled", "counters", "ids", "marker", "markers"}
)  # what may be left when every message is delivered


VERBS = st.sampled_from(["get", "cancel", "reschedule"])


class StoreMachine(ChangingMachine):
    """Files are stored, loops claim, acknowledge and give back, and time goes where it likes."""

    permanent: ClassVar[frozenset[str]] = PERMANENT
    sound = False  # whether the last look found everything in order

    claims: Bundle[Claim] = Bundle("claims")

    # Delivering

    @rule(target=claims, number=st.integers(0, LOOPS - 1))
    def claim(self, number: int) -> Any:
        loop = self.loops[number]
        loop.passes += 1
        return self.ask(loop, f"loop{number}:{loop.passes}")

    @rule(target=claims, number=st.integers(0, LOOPS - 1))
    def claim_again_after_a_lost_reply(self, number: int) -> Any:
        loop = self.loops[number]
        self.a_moment_later()
        return self.ask(loop, f"loop{number}:{loop.passes}")

    @rule(target=claims, claim=claims)
    def a_request_to_claim_comes_late(self, claim: Claim) -> Any:
        """It was given up and asked again, and that claim may be over by now."""
        self.a_moment_later()
        return self.ask(Pair(self), claim.lease_token.partition(":")[2])

    def a_moment_later(self) -> None:
        """Come to a millisecond at which no lease has started: a token and a lease name one claim only if they differ."""
        self.now_ms = max(self.now_ms, self.latest_ms) + 1

    def ask(self, loop: Pair, name: str) -> Any:
        reply = loop.same(lambda store: store.claim(name))
        if reply.claim is None:
            self.check_wait(reply)
            return multiple()
        if reply.claim.lease_token not in self.seen.leases:
            self.check_new_claim(reply.claim)
        return reply.claim

    def check_wait(self, reply: ClaimReply) -> None:
        if reply.next_due_ms == self.now_ms:  # it gave up for now
            assert self.misfiled, "it says to ask again at once, and nothing is due"
            return
        now = self.look()
        dues = [*(due_ms for _, due_ms in now.waiting()), *now.held_topics.values()]
        assert reply.next_due_ms == min(dues, default=None)
        assert reply.next_due_ms is None or reply.next_due_ms > self.now_ms

    def check_new_claim(self, claim: Claim) -> None:
        claimed = [(m.due_ms, m.member) for m in claim.messages]
        now = self.look()
        assert 0 < len(claimed) <= DRAIN.claim_limit
        assert max(claimed)[0] <= self.now_ms, "early"
        for topic, rows in self.seen.held.items():
            self.check_order([row for row in claimed if row[1] in rows], now.held.get(topic, {}).items())
        held = {stored for rows in self.seen.held.values() for stored in rows}
        self.check_order([row for row in claimed if row[1] not in held], now.waiting())
        assert claim.lease_until_ms == self.now_ms + LEASE_MS

    def check_order(self, claimed: list[tuple[int, bytes]], left: Iterable[tuple[bytes, int]]) -> None:
        assert claimed == sorted(claimed)
        in_order = [row for row in claimed if row[1] not in self.misfiled]
        oldest = min(((due_ms, stored) for stored, due_ms in left), default=(float("inf"), b""))
        assert max(in_order, default=(0, b"")) < oldest, "something older was left"

    @rule(number=st.integers(0, LOOPS - 1), claim=claims, delivered=st.integers(0, DRAIN.claim_limit))
    def acknowledge(self, number: int, claim: Claim, delivered: int) -> None:
        done = [m.member for m in claim.messages[:delivered]]
        pairs = keyed(replace(claim, messages=claim.messages[:delivered]))
        if self.loops[number].same(lambda store: store.ack(claim, len(done), pairs)):
            for stored in done:
                token, _ = self.acknowledged.setdefault(stored, (claim.lease_token, self.now_ms))
                assert token == claim.lease_token, "acknowledged under two claims"

    @rule(claim=claims)
    def acknowledge_all(self, claim: Claim) -> None:
        self.acknowledge(0, claim, len(claim.messages))

    @rule(claim=claims, ms=st.sampled_from(AROUND_MS))
    def acknowledge_at_the_end_of_the_lease(self, claim: Claim, ms: int) -> None:
        self.now_ms = claim.lease_until_ms + ms
        self.acknowledge_all(claim)

    @rule(target=claims, claim=claims, gives_back=st.booleans())
    def end_a_claim_again_after_a_late_request(self, claim: Claim, gives_back: bool) -> Any:
        """The reply to the acknowledgement was lost, and a request to claim took its time."""
        self.acknowledge_all(claim)
        self.every_promise_holds()
        late = self.a_request_to_claim_comes_late(claim)
        if gives_back:
            self.give_back(0, claim, 0)
        else:
            self.acknowledge_all(claim)
        return late

    @rule(target=claims, number=st.integers(0, LOOPS - 1), delivered=st.integers(1, DRAIN.claim_limit))
    def claim_and_acknowledge(self, number: int, delivered: int) -> Any:
        """The whole claim, or a part of it, and that twice."""
        claim = self.claim(number)
        if isinstance(claim, Claim):
            for _ in range(2):
                self.acknowledge(number, claim, delivered)
        return claim

    @rule(number=st.integers(0, LOOPS - 1), claim=claims, delivered=st.integers(0, DRAIN.claim_limit))
    def give_back(self, number: int, claim: Claim, delivered: int) -> None:
        self.loops[number].same(lambda store: store.release(claim, min(delivered, len(claim.messages))))

    @rule(number=st.integers(0, LOOPS - 1))
    def reclaim(self, number: int) -> None:
        self.loops[number].same(lambda store: store.reclaim())

    # One message at a time

    @rule(name=st.sampled_from(["a", "b"]), verb=VERBS, due=st.sampled_from(DUES))
    def look_for_a_key(self, name: str, verb: str, due: tuple[str, int]) -> None:
        self.look_for(name, verb, due)

    @precondition(lambda self: self.seen.waiting() or self.seen.held)
    @rule(number=st.integers(0, 9), by_handle=st.booleans(), verb=VERBS, due=st.sampled_from(DUES))
    def look_for_what_waits(self, number: int, by_handle: bool, verb: str, due: tuple[str, int]) -> None:
        """Mostly for what something has happened to."""
        held = [row for rows in self.seen.held.values() for row in rows.items()]
        waiting = sorted(self.seen.waiting(), key=lambda row: (not self.was_moved(row[0]), row))
        self.look_for(name_of(*[*held, *waiting][number % len(held + waiting)], by_handle), verb, due)

    def was_moved(self, stored: bytes) -> bool:
        return stored[:MESSAGE_ID_LENGTH].decode() in self.seen.attempts

    @rule(claim=claims, by_handle=st.booleans(), verb=VERBS, due=st.sampled_from(DUES))
    def look_for_what_was_claimed(self, claim: Claim, by_handle: bool, verb: str, due: tuple[str, int]) -> None:
        """It is in flight, waits again, or has ended."""
        for message in claim.messages:
            self.look_for(name_of(message.member, message.due_ms, by_handle), verb, due)

    @rule(claim=claims, due=st.sampled_from(DUES))
    def replace_what_is_given_back(self, claim: Claim, due: tuple[str, int]) -> None:
        self.give_back(0, claim, len(claim.messages))
        self.every_promise_holds()
        if self.seen.places:
            self.replace_what_is_there(0, due)

    def look_for(self, name: str, verb: str, due: tuple[str, int]) -> None:
        due_ms = {"now": self.now_ms, "border": self.border_ms(), "epoch": 0}[due[0]] + due[1]
        calls: dict[str, Callable[[MessagesById], Found]] = {
            "get": lambda messages: messages.get(name),
            "cancel": lambda messages: messages.cancel(name),
            "reschedule": lambda messages: messages.reschedule(name, max(due_ms, 0)),
        }
        found = self.loops[0].same_by_id(calls[verb])
        assert self.hear() == self.reference.take_rings()
        if found.message is None:
            return
        stored = self.stored_as(found.message.message_id.encode())
        if verb == "cancel":
            assert stored not in self.acknowledged
            self.acknowledged[stored] = (CANCELLED, self.now_ms)
            self.cancelled.add(stored)
        elif verb == "reschedule":
            self.accepted[stored] = found.message.due_ms

    # What happens around them

    @rule(delay_ms=st.sampled_from(DELAYS_MS), too_early=st.integers(1, 4), key=st.sampled_from(["", "a", "b"]))
    def a_client_stores_in_a_wrong_bucket(self, delay_ms: int, too_early: int, key: str) -> None:
        """One that is too early; a message that is due then or before is delivered, the others go to their own.

        It may have the idempotency key of another message, which is not noted: then the key leads to that one, or nowhere.
        """
        self.landed += 1
        due_ms = self.now_ms + delay_ms
        start = due_ms - due_ms % BUCKET_MS - too_early * BUCKET_MS
        stored = LandedFile(f"{self.landed:014d}", (), self.topics).member_of(1, key)
        self.client.zadd(self.keys.bucket(start), {stored: due_ms})
        self.client.zadd(self.keys.buckets(), {str(start): start})
        self.reference.buckets.setdefault(start, {})[stored] = due_ms
        self.accepted[stored] = due_ms
        self.misfiled.add(stored)

    @rule(ms=st.sampled_from(STEPS_MS))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule(ms=st.sampled_from(AROUND_MS))
    def time_comes_to_a_border(self, ms: int) -> None:
        self.now_ms = self.border_ms() + ms

    @precondition(lambda self: self.seen.leases)
    @rule(ms=st.sampled_from(AROUND_MS))
    def time_comes_to_the_end_of_a_lease(self, ms: int) -> None:
        self.now_ms = min(self.seen.leases.values()) + ms

    @rule()
    def the_server_forgets_its_scripts(self) -> None:
        self.client.script_flush()

    @precondition(lambda self: self.oldest_bucket_has_something_due())
    @rule()
    def claiming_fails_half_way(self) -> None:
        """A key of another type stands where the claim is to be."""
        token = f"{min(self.seen.buckets)}:spoiled"
        self.fail_on(self.keys.claim(token), lambda: Pair(self).real.claim("spoiled"))

    def oldest_bucket_has_something_due(self) -> bool:
        oldest = self.seen.buckets[min(self.seen.buckets)] if self.seen.buckets else {}
        return any(due_ms <= self.now_ms for due_ms in oldest.values())

    @rule(claim=claims)
    def giving_back_fails_half_way(self, claim: Claim) -> None:
        held = self.seen.leases.get(claim.lease_token) == claim.lease_until_ms
        due_ms = self.seen.claims[claim.lease_token][0][1] if held else 0
        start = due_ms - due_ms % BUCKET_MS
        if held and start not in self.seen.buckets:
            self.fail_on(self.keys.bucket(start), lambda: self.loops[0].real.release(claim, 0))

    def fail_on(self, key: str, call: Callable[[], object]) -> None:
        self.client.set(key, "in the way")
        try:
            call()
            raise AssertionError("it did not notice the key in its way")
        except StoreProtocolError as error:
            assert "WRONGTYPE" in str(error)
        finally:
            self.client.delete(key)

    # What always holds

    @invariant()
    def every_promise_holds(self) -> None:
        self.sound = False
        self.seen = self.look()
        assert self.seen == read_reference(self.reference)
        self.check_that_each_is_in_one_place()
        for start, held in self.seen.buckets.items():
            assert all(start <= due_ms < start + BUCKET_MS or m in self.misfiled for m, due_ms in held.items())
        assert self.seen.index == self.seen.buckets.keys()
        assert self.seen.leases.keys() == self.seen.claims.keys()
        assert self.seen.counters.get("stored", 0) == len(self.accepted) - len(self.misfiled) - self.swapped
        self.latest_ms = max(self.latest_ms, self.now_ms)
        self.sound = True

    def check_that_each_is_in_one_place(self) -> None:
        in_one_place = sorted(self.seen.everything())
        assert in_one_place == sorted(self.accepted.keys() - self.acknowledged.keys()), "lost, doubled or invented"
        assert all(due_ms == self.accepted[m] for m, due_ms in self.seen.waiting())
        assert self.seen.counters.get("delivered", 0) == len(self.acknowledged) - len(self.cancelled)

    def teardown(self) -> None:
        """Deliver everything that is left: then nothing is missing and nothing is left over."""
        self.bell.close()
        if not self.sound:
            return
        for _ in range(1_000):
            self.every_promise_holds()
            if not (self.seen.everything() or self.seen.held or self.seen.held_topics):
                break
            self.deliver_or_wait()
        assert self.acknowledged.keys() == self.accepted.keys()
        assert self.seen.names <= self.permanent

    def deliver_or_wait(self) -> None:
        self.loops[0].passes += 1
        claim = self.ask(self.loops[0], f"loop0:{self.loops[0].passes}")
        if isinstance(claim, Claim):
            self.acknowledge_all(claim)
            return
        self.seen = self.look()
        times = [*self.seen.leases.values(), *(due_ms for _, due_ms in self.seen.waiting())]
        times += [round(at_ms) for at_ms in self.seen.held_topics.values()]
        self.now_ms = max(self.now_ms, min(times, default=0))
        self.reclaim(0)


def name_of(stored: bytes, score: int, by_handle: bool) -> str:
    """Return what leads to a message: its idempotency key or, if it has none or the other is asked for, a handle."""
    message = Message.from_member(stored, score)
    handle = f"~{message.message_id}~{score}"
    return handle if by_handle or message.id == message.message_id else message.id
