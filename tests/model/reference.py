"""What the scripts must do, in plain Python: the model that the real server is compared with, and the simulation's server.

``ReferenceServer`` takes the place of a ``redis.Redis`` behind the real ``RedisStore``: of ``claim``, ``ack`` and ``release`` only
the scripts are modelled; their words, arguments and replies are those that the heads of the Lua files describe. ``schedule`` is
modelled as a whole, since the store and its script keep its promise together: a compare-and-set of all markers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.core.messages import Message
from pipeline.store.base import NO_MARKER, Scheduled, Transaction
from tests.model.landed import identified_of, messages_of
from tests.model.topics import BUCKET, DEAD, HELD, OUTBOX, SCREEN, Naming, Plan, Topics
from tests.store.builders import BUCKET_MS

MESSAGE_ID_LENGTH = 22
PAGE = 100
FORGET_LIMIT = 1000


@dataclass
class Lease:
    """One claim in flight, without what is acknowledged."""

    until_ms: int
    rows: list[tuple[bytes, int]]


@dataclass(frozen=True)
class Marker:
    """How far a file is stored, and when that was noted last."""

    text: str
    moved_ms: int


class PlainScripts:
    """Calls the reference's verbs by name; see ``Scripts``."""

    def load(self, client: Any) -> None:
        client.execute_command("SCRIPT LOAD")

    def command(self, name: str, keys: Sequence[str | bytes], arguments: Sequence[Any]) -> tuple[Any, ...]:
        return ("EVALSHA", name, keys, *arguments)


@dataclass(frozen=True)
class Place:
    """Where the message of an idempotency key is: in ``topic`` if it is held. As a text it is what the server keeps."""

    message_id: str
    score: int
    topic: str = ""
    is_replacement: bool = False

    def __str__(self) -> str:
        return f"{self.message_id}{self.score}{'r' * self.is_replacement}{':' * bool(self.topic)}{self.topic}"


@dataclass
class ReferenceServer:
    """One namespace. ``clock`` is the server's, epoch ms."""

    clock: Callable[[], int]
    buckets: dict[int, dict[bytes, int]] = field(default_factory=dict)
    claims: dict[str, Lease] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    ids: dict[str, float] = field(default_factory=dict)
    cancelled: dict[str, float] = field(default_factory=dict)
    markers: dict[tuple[str, str], Marker] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    topics: Topics = field(default_factory=Topics)
    rings: list[int] = field(default_factory=list)  # the due_ms of new messages that were before everything else

    def execute_command(self, word: str, name: str, keys: Sequence[Any], *arguments: Any) -> Any:
        """Run a script."""
        if name == "claim":
            return self._claim(keys, *arguments)
        verbs = {"ack": self._ack, "release": self._release, "by_id": self._by_id, "replace": self._replace}
        return verbs[name](*arguments)

    def pipeline(self, transaction: bool) -> "ReferencePipeline":
        """Return what asks several things at once."""
        return ReferencePipeline(self)

    def hget(self, key: str, idempotency_key: str) -> bytes | None:
        """Read a place, the only field that the store reads itself."""
        place = self.places.get(idempotency_key)
        return str(place).encode() if place else None

    def zrange(self, key: str, first: str, last_ms: int, byscore: bool, offset: int, num: int) -> list[bytes]:
        """Find expired claims, the only range that the store reads itself."""
        expired = sorted((lease.until_ms, token.encode()) for token, lease in self.claims.items())
        return [token for until_ms, token in expired if until_ms <= last_ms][offset : offset + num]

    def time(self) -> tuple[int, int]:
        """Read the server's clock, as ``TIME`` does."""
        return self.clock() // 1000, self.clock() % 1000 * 1000

    def schedule(self, source_id: str, transaction: Transaction) -> Scheduled | None:
        """Store a transaction if all its markers are where it says; otherwise do nothing and return None."""
        if any(self.marker(source_id, move.part_id) != move.before for move in transaction.moves):
            return None
        new = messages_of(transaction)
        known = []
        for number, (due_ms, stored, key) in enumerate(identified_of(transaction)):
            if key in self.places or self.how_it_ended(key, self.clock()):
                known.append(number)
            else:
                self.places[key] = Place(_message_id(stored), due_ms)
                new.append((due_ms - due_ms % BUCKET_MS, due_ms, stored))
        for bucket, due_ms, stored in new:
            self.buckets.setdefault(bucket, {})[stored] = due_ms
        for move in transaction.moves:
            self.markers[source_id, move.part_id] = Marker(move.after, self.clock())
        self.counters += Counter(stored=len(new), duplicates=len(known), rejected=transaction.rejected)
        oldest = self.buckets[min(self.buckets)] if self.buckets else {}
        first = min(((due_ms, m) for m, due_ms in oldest.items()), default=None)
        self.rings += [due_ms for _, due_ms, stored in new if (due_ms, stored) == first]
        return Scheduled(len(new), tuple(known))

    def marker(self, source_id: str, part_id: str) -> str:
        """Return how far a file is stored."""
        marker = self.markers.get((source_id, part_id))
        return marker.text if marker else NO_MARKER

    def take_rings(self) -> list[int]:
        """Return what was rung since the last call."""
        heard, self.rings = self.rings, []
        return heard

    def _claim(
        self,
        keys: Sequence[Any],
        bucket: int,
        token: str,
        limit: int,
        bytes_max: int,
        lease_ms: int,
        memory_ms: int,
        now: int | str,
        shards: int,
        look_ahead: int,
    ) -> list[Any]:
        now_ms = self._now(now)
        lease = self.claims.get(token)
        if lease is not None:
            return self._reply(b"OK", now_ms, lease.until_ms, lease.rows)
        oldest = min(self.buckets, default=None)
        if oldest is not None and oldest != bucket:
            return self._reply(b"BUCKET", now_ms, oldest)
        naming = Naming(keys, shards, look_ahead)
        waiting = sorted((due_ms, stored) for stored, due_ms in self.buckets.get(bucket, {}).items())
        due = [row for row in waiting if row[0] <= now_ms]
        is_misfiled = bool(waiting) and not due and waiting[0][0] >= bucket + BUCKET_MS
        is_for_bucket = limit == 1 and due and due[0][0] <= min(self.topics.held_topics.values(), default=now_ms)
        half = 0 if is_misfiled or is_for_bucket else (limit + 1) // 2
        plan = self.topics.take_turns(naming, now_ms, half)
        taken = len(plan.all_steps())
        self.topics.plan(plan, _page(due, limit - taken, bytes_max), naming, now_ms)
        if plan.is_cut or (naming.look_ahead and waiting and not self.topics.is_plain()):
            self.topics.look_ahead(plan, _page(due[len(plan.steps) :], limit, bytes_max), naming, now_ms)
        if not plan.all_steps():
            if plan.is_cut:
                return self._reply(b"TARGET", now_ms, "", wanted=naming.keys(plan.wanted))
            return self._wait(bucket, plan, naming, now_ms)
        rows = self._carry_out(plan, bucket, naming, now_ms, memory_ms)
        if not rows:
            return self._reply(b"MOVED", now_ms, "", moved=plan.moved(), wanted=naming.keys(plan.wanted))
        lease = self.claims[token] = Lease(now_ms + lease_ms, rows)
        return self._reply(b"OK", now_ms, lease.until_ms, lease.rows, plan.moved(), naming.keys(plan.wanted))

    def _wait(self, bucket: int, plan: Plan, naming: Naming, now_ms: int) -> list[Any]:
        """Nothing may go: what is not of this bucket goes to its own."""
        waiting = sorted((due_ms, stored) for stored, due_ms in self.buckets.get(bucket, {}).items())
        if not waiting or waiting[0][0] < bucket + BUCKET_MS:
            self.topics.note_turns(plan, naming, now_ms)
            firsts = [*(due_ms for due_ms, _ in waiting[:1]), *self.topics.held_topics.values()]
            return (
                self._reply(b"WAIT", now_ms, max(now_ms, min(firsts))) if firsts else self._reply(b"EMPTY", now_ms, "")
            )
        page = [(due_ms - due_ms % BUCKET_MS, due_ms, stored) for due_ms, stored in waiting[:PAGE]]
        wanted = dict.fromkeys((BUCKET, str(start)) for start, _, _ in page)
        if wanted.keys() - naming.targets:
            return self._reply(b"TARGET", now_ms, "", wanted=naming.keys(wanted))
        for start, due_ms, stored in page:
            self.buckets.setdefault(start, {})[stored] = due_ms
            del self.buckets[bucket][stored]
        self.counters["misfiled"] += len(page)
        if not self.buckets[bucket]:
            del self.buckets[bucket]
        return self._reply(b"BUCKET", now_ms, min(self.buckets), wanted=naming.keys(wanted))

    def _carry_out(
        self, plan: Plan, bucket: int, naming: Naming, now_ms: int, memory_ms: int
    ) -> list[tuple[bytes, int]]:
        """Let each message go where it is to go; returns those for the screen."""
        rows, forgets = [], False
        for step in plan.all_steps():
            there = self.topics.held[step.turn_of] if step.turn_of else self.buckets[bucket]
            del there[step.member]
            if step.place == SCREEN:
                rows.append((step.member, step.score))
                self.note_place(step.idempotency_key, step.member, step.score)
            elif step.place == HELD:
                self.topics.held.setdefault(step.topic, {})[step.member] = step.score
                self.note_place(step.idempotency_key, step.member, step.score, step.topic)
            else:
                attempt = self.attempts.pop(_message_id(step.member), 0) + 1
                self.topics.write(step, step.attempt or attempt, now_ms)
                self.counters["dead" if step.place == DEAD else "delivered"] += 1
                if step.idempotency_key and not step.group:
                    forgets = True
                    self._end(step.idempotency_key, _message_id(step.member), now_ms + memory_ms)
            if step.place not in (SCREEN, OUTBOX):
                self.topics.names.add(step.topic)
        if forgets:
            self._forget_ids(now_ms)
        if not self.buckets.get(bucket, True):
            del self.buckets[bucket]
        self.topics.held = {topic: rows for topic, rows in self.topics.held.items() if rows}
        self.topics.note_turns(plan, naming, now_ms)
        return rows

    def note_place(self, idempotency_key: str, stored: bytes, score: int, topic: str = "") -> None:
        """Note where a message went, if its id leads to it."""
        place = self.places.get(idempotency_key)
        if place and place.message_id == _message_id(stored):
            self.places[idempotency_key] = Place(place.message_id, score, topic, place.is_replacement)

    def _end(self, idempotency_key: str, message_id: str, forget_ms: int) -> None:
        """Remember the id of a message that was delivered, unless another message waits with it."""
        place = self.places.get(idempotency_key)
        if place and place.message_id == message_id:
            del self.places[idempotency_key]
        if place.message_id == message_id if place else idempotency_key in self.ids:
            self.ids[idempotency_key] = forget_ms

    def how_it_ended(self, name: str, now_ms: int) -> bytes:
        """Return how a message ended that is remembered, or nothing."""
        if self.ids.get(name, now_ms) > now_ms:
            return b"DELIVERED"
        return b"CANCELLED" if self.cancelled.get(name, now_ms) > now_ms else b""

    def _forget_ids(self, now_ms: int) -> None:
        over = sorted((until, idempotency_key) for idempotency_key, until in self.ids.items() if until <= now_ms)
        for _, idempotency_key in over[:FORGET_LIMIT]:
            del self.ids[idempotency_key]

    def _ack(
        self, token: str, until_ms: int, claimed: int, delivered: int, memory_ms: int, now: int | str, *ids: str
    ) -> list[Any]:
        now_ms = self._now(now)
        lease = self.claims.get(token)
        if lease is None or lease.until_ms != until_ms or until_ms <= now_ms:
            self.counters["late_acks"] += 1
            return [b"LOST", 0]
        count = delivered - (claimed - len(lease.rows))
        if count > 0:
            for acknowledged, _ in lease.rows[:count]:
                self.attempts.pop(_message_id(acknowledged), None)
            for message_id, idempotency_key in zip(ids[::2], ids[1::2], strict=True):
                self._end(idempotency_key, message_id, now_ms + memory_ms)
            if ids:
                self._forget_ids(now_ms)
            self.counters["delivered"] += count
            del lease.rows[:count]
        if delivered == claimed:
            del self.claims[token]
        return [b"OK", max(count, 0)]

    def _release(self, token: str, until_ms: int | str, claimed: int, delivered: int, now: int | str) -> list[Any]:
        by_finder = until_ms == ""
        lease = self.claims.get(token)
        if lease is None or (lease.until_ms > self._now(now) if by_finder else lease.until_ms != until_ms):
            return [b"LOST", 0]
        unacknowledged = delivered - (claimed - len(lease.rows))
        for index, (given_back, due_ms) in enumerate(lease.rows):
            self.buckets.setdefault(due_ms - due_ms % BUCKET_MS, {})[given_back] = due_ms
            if by_finder or index < unacknowledged:
                message_id = _message_id(given_back)
                self.attempts[message_id] = self.attempts.get(message_id, 0) + 1
        del self.claims[token]
        if by_finder:
            self.counters["reclaimed"] += len(lease.rows)
        return [b"OK", len(lease.rows)]

    def _by_id(
        self,
        verb: str,
        name: str,
        place_text: bytes,
        is_handle: int,
        due_ms: int | str,
        memory_ms: int,
        now: int | str,
        in_any_case: int,
        channel: str,
        cold_member: bytes,
    ) -> list[Any]:
        now_ms = self._now(now)
        place = self._place_of_handle(name) if is_handle else self.places.get(name)
        if is_handle and str(place).encode() != place_text:
            return [b"MOVED", str(place).encode(), b""]
        if place is not None:
            assert str(place).encode() == place_text, "nothing moves between the two looks of a reference"
        found = self._find(place) if place else None
        if not place or not found or (is_handle and _has_key(found)):
            is_in_flight = place is not None and not is_handle
            status = b"IN_FLIGHT" if is_in_flight else self.how_it_ended(name, now_ms) or b"UNKNOWN"
            if in_any_case:
                self._cancel(name, now_ms, memory_ms)
            return [status, b"", b""]
        if verb == "get":
            return [b"OK", found, str(place.score).encode()]
        self._remove(place, found)
        if verb == "cancel":
            self._cancel(name, now_ms, memory_ms)
            self.places.pop(name, None)
            self.attempts.pop(place.message_id, None)
            self.counters["cancelled"] += 1
            return [b"OK", found, str(place.score).encode()]
        stored, due_ms = as_if_new(found), int(due_ms)
        self._put(stored, due_ms)
        if not is_handle:
            self.places[name] = Place(place.message_id, due_ms, is_replacement=place.is_replacement)
        return [b"OK", stored, str(due_ms).encode()]

    def _place_of_handle(self, handle: str) -> Place:
        _, message_id, score = handle.split("~")
        topics = [topic for topic, rows in self.topics.held.items() for each in rows if _message_id(each) == message_id]
        for topic in ("", *topics):
            if self._find(place := Place(message_id, int(score), topic)):
                return place
        return Place(message_id, int(score))

    def _replace(
        self, name: str, place_text: bytes, stored: bytes, due_ms: int, lifts: int, now: int | str, channel: str
    ) -> list[Any]:
        now_ms, place = self._now(now), self.places.get(name)
        assert place_text == (str(place).encode() if place else b""), (
            "nothing moves between the two looks of a reference"
        )
        if place is None and self.how_it_ended(name, now_ms) == b"DELIVERED":
            return [b"DELIVERED", b"", b""]
        found = self._find(place) if place else None
        if place and not found:
            return [b"IN_FLIGHT", b"", b""]
        if not lifts and self.cancelled.get(name, now_ms) > now_ms:
            return [b"CANCELLED", b"", b""]
        message_id = _message_id(stored)
        if place and (place.message_id == message_id or (place.is_replacement and place.message_id > message_id)):
            return [b"OK", found, str(place.score).encode()]
        if place and found:
            self._remove(place, found)
            self.attempts.pop(place.message_id, None)
        else:
            self.counters["stored"] += 1
        if lifts:
            self.cancelled.pop(name, None)
        self.places[name] = Place(message_id, due_ms, is_replacement=True)
        self._put(stored, due_ms)
        return [b"OK", stored, str(due_ms).encode()]

    def _waiting(self, place: Place) -> tuple[dict[Any, dict[bytes, int]], Any]:
        """Return where a place is: the sets of its kind, and which of them."""
        if place.topic:
            return self.topics.held, place.topic
        return self.buckets, place.score - place.score % BUCKET_MS

    def _find(self, place: Place) -> bytes | None:
        sets, key = self._waiting(place)
        for stored, score in sets.get(key, {}).items():
            if score == place.score and _message_id(stored) == place.message_id:
                return stored
        return None

    def _remove(self, place: Place, stored: bytes) -> None:
        sets, key = self._waiting(place)
        del sets[key][stored]
        if not sets[key]:
            del sets[key]

    def _put(self, stored: bytes, due_ms: int) -> None:
        """Schedule a member, and ring if it is due before everything else."""
        self.buckets.setdefault(due_ms - due_ms % BUCKET_MS, {})[stored] = due_ms
        oldest = self.buckets[min(self.buckets)]
        if (due_ms, stored) == min((score, each) for each, score in oldest.items()):
            self.rings.append(due_ms)

    def _cancel(self, name: str, now_ms: int, memory_ms: int) -> None:
        self._forget_cancelled(now_ms)
        self.cancelled[name] = max(now_ms + memory_ms, self.cancelled.get(name, 0))

    def _forget_cancelled(self, now_ms: int) -> None:
        over = sorted((until, name) for name, until in self.cancelled.items() if until <= now_ms)
        for _, name in over[:FORGET_LIMIT]:
            del self.cancelled[name]

    def _reply(
        self,
        status: bytes,
        now_ms: int,
        detail: int | str,
        rows: Sequence[tuple[bytes, int]] = (),
        moved: Sequence[Any] = (),
        wanted: Sequence[bytes] = (),
    ) -> list[Any]:
        first_lease = min((lease.until_ms for lease in self.claims.values()), default="")
        attempts = [self.attempts.get(_message_id(taken), 0) for taken, _ in rows]
        flat = [value for row in rows for value in row]
        return [status, now_ms, first_lease, str(detail).encode(), flat, attempts, moved, wanted]

    def _now(self, argument: int | str) -> int:
        return self.clock() if argument == "" else int(argument)


class ReferencePipeline:
    """Several calls, one after the other."""

    def __init__(self, server: ReferenceServer) -> None:
        self._server = server
        self._calls: list[Callable[[], Any]] = []

    def hget(self, key: str, name: str) -> None:
        self._calls.append(lambda: self._server.hget(key, name))

    def execute_command(self, *command: Any) -> None:
        self._calls.append(lambda: self._server.execute_command(*command))

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        return [call() for call in self._calls]


def _page(due: Sequence[tuple[int, bytes]], limit: int, bytes_max: int) -> list[tuple[bytes, int]]:
    """Choose the oldest due messages, a page at a time until there are enough bytes."""
    rows: list[tuple[bytes, int]] = []
    while len(rows) < min(limit, len(due)) and sum(len(taken) for taken, _ in rows) < bytes_max:
        rows += [(waiting, due_ms) for due_ms, waiting in due[len(rows) : min(len(rows) + PAGE, limit)]]
    return rows


def as_if_new(stored: bytes) -> bytes:
    """Return a member that was redriven as one that was not."""
    if stored[MESSAGE_ID_LENGTH:][:1] != b"r":
        return stored
    return Message.from_member(stored, 0).to_member()


def _has_key(stored: bytes) -> bool:
    message = Message.from_member(stored, 0)
    return message.id != message.message_id


def _message_id(stored: bytes) -> str:
    return stored[:MESSAGE_ID_LENGTH].decode()
