"""The half of the machine that stores: landing files, writers, and what they hear of each other."""

from collections.abc import Callable
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, precondition, rule

from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import Scripts
from tests.model.landed import LandedFile, Line, together
from tests.model.pair import DRAIN, Pair
from tests.model.reference import ReferenceServer
from tests.model.snapshot import Snapshot, read_server
from tests.model.times import AROUND_MS, DELAYS_MS, DUES, ID_MEMORY_MS, START_MS
from tests.model.writer import SlowClient
from tests.store.builders import BUCKET_MS

LOOPS = 3
WRITERS = 2
SOURCE = "s"
LINES_MAX = 6
PLACES = st.integers(0, LINES_MAX)
Part = tuple[LandedFile, int, int]  # of which a transaction stores the lines between two places


class StoringMachine(RuleBasedStateMachine):
    """Files are landed and stored in any cut, by two writers that get in each other's way.

    The class attributes are what a test chooses: the server, which is this machine's alone, and a planted fault.
    """

    clients: ClassVar[list[Any]]  # one for each writer; the first is also the loops'
    scripts: ClassVar[Scripts]
    store_type: ClassVar[type[RedisStore]] = RedisStore
    clock_error_ms: ClassVar[int] = 0
    topics: ClassVar[tuple[str, ...]] = ()  # of the messages that are stored

    files: Bundle[LandedFile] = Bundle("files")

    @initialize()
    def begin(self) -> None:
        for client in self.clients:
            client.connection_pool.disconnect()  # what one run left watched is no business of the next
        self.client = self.clients[0]
        self.client.flushall()
        self.now_ms = self.latest_ms = START_MS
        self.keys = Keys("model")
        self.reference = ReferenceServer(self.now)
        self.loops = [Pair(self) for _ in range(LOOPS)]
        self.landed = 0
        self.accepted: dict[bytes, int] = {}  # member -> due_ms, of everything that was stored
        self.misfiled: set[bytes] = set()  # what was accepted in a wrong bucket
        self.cancelled: set[bytes] = set()  # what was cancelled or replaced
        self.swapped = 0  # how many took the place of another
        self.ids: dict[str, bytes] = {}  # the idempotency key -> the latest message that was stored under it
        self.acknowledged: dict[bytes, tuple[str, int]] = {}  # member -> lease token, and when
        self.seen = self.look()
        self.bell = self.client.pubsub()
        self.bell.subscribe(self.keys.wake())
        self.hear()

    def now(self) -> int:
        return self.now_ms

    def server_ms(self) -> int:
        return self.now_ms + self.clock_error_ms

    def look(self) -> Snapshot:
        return read_server(self.client, self.keys)

    def border_ms(self) -> int:
        return self.now_ms - self.now_ms % BUCKET_MS + BUCKET_MS

    # Storing

    @rule(
        target=files,
        lines=st.lists(
            st.tuples(
                st.sampled_from(DUES) | st.none(),
                st.sampled_from(["", "", "a", "b"]),
            ),
            min_size=1,
            max_size=LINES_MAX,
        ),
    )
    def land(self, lines: list[tuple[Any, str]]) -> LandedFile:
        self.landed += 1
        start_ms = {"now": self.now_ms, "border": self.border_ms(), "epoch": 0}
        dues = [None if due is None else start_ms[due[0]] + due[1] for due, _ in lines]
        return LandedFile(
            f"{self.landed:014d}",
            tuple(
                Line(number, due_ms, idempotency_key)
                for number, (due_ms, (_, idempotency_key)) in enumerate(zip(dues, lines, strict=True), start=1)
            ),
            self.topics,
        )

    @rule(file=files, writer=st.integers(0, WRITERS - 1))
    def store_whole(self, file: LandedFile, writer: int) -> None:
        self.store(writer, [(file, 0, len(file.lines))])

    @rule(
        target=files,
        delays_ms=st.lists(st.sampled_from(DELAYS_MS), min_size=1, max_size=2),
        last=st.integers(1, DRAIN.claim_limit + 2),
    )
    def land_and_store_in_part(self, delays_ms: list[int], last: int) -> Any:
        """More than a claim takes, so that something waits behind it in the same bucket; or of two files at once."""
        files = [self.land([(("now", delay_ms), "")] * (DRAIN.claim_limit + 2)) for delay_ms in delays_ms]
        self.store(0, [(file, 0, last if file == files[0] else 1) for file in files])
        return multiple(*files)

    @precondition(lambda self: self.seen.ids or self.seen.cancelled)
    @rule(target=files, ms=st.sampled_from(AROUND_MS))
    def store_a_key_again_when_it_is_forgotten(self, ms: int) -> Any:
        """Whether or not something has cleaned up by then."""
        known = {
            name: int(until) for name, until in {**self.seen.ids, **self.seen.cancelled}.items() if "~" not in name
        }
        if not known:
            return multiple()
        name = min(known)
        self.now_ms = known[name] + ms
        file = self.land([(("now", 500), name)])
        self.store_whole(file, 0)
        return file

    @rule(file=files, first=PLACES, last=PLACES, writer=st.integers(0, WRITERS - 1))
    def store_from_anywhere(self, file: LandedFile, first: int, last: int, writer: int) -> None:
        """Mostly not from where the marker is: a transaction comes twice, late or too early."""
        self.store(writer, [(file, first, min(last, len(file.lines)))])

    @rule(file=files, other=files, last=PLACES, lost=st.booleans(), writer=st.integers(0, WRITERS - 1))
    def store_two_together(self, file: LandedFile, other: LandedFile, last: int, lost: bool, writer: int) -> None:
        """Store the next parts of both in one transaction, or lose the place in the second one before."""
        if file != other:
            next_of_other = (other, 0, len(other.lines)) if lost else self.next_part(other, LINES_MAX)
            self.store(writer, [self.next_part(file, last), next_of_other])

    @rule(file=files, second=files, other=files, last=PLACES)
    def store_while_another_writer_does(
        self, file: LandedFile, second: LandedFile, other: LandedFile, last: int
    ) -> None:
        """The other one stores one of the same files, or another one, when the first has looked at its markers."""
        mine = [self.next_part(each, last) for each in dict.fromkeys([file, second])]
        theirs = self.next_part(other, LINES_MAX)
        self.store(0, mine, lambda: self.store(1, [theirs]))

    @rule(file=files, other=files, last=PLACES)
    def store_behind_another_writer(self, file: LandedFile, other: LandedFile, last: int) -> None:
        """The second one is refused; how the first goes on is no business of the second's next transaction."""
        both = self.next_part(file, last)
        self.store(1, [both])
        self.store(0, [both])
        self.store(1, [self.next_part(file, LINES_MAX)])
        self.store(0, [self.next_part(other, last)])

    def next_part(self, file: LandedFile, last: int) -> Part:
        """Return what comes after the marker, up to ``last`` or, if that is behind it, to the end."""
        first = file.place_of(self.loops[0].real.markers(SOURCE, [file.token])[0])
        return file, first, last if first < last < len(file.lines) else len(file.lines)

    def store(self, writer: int, parts: list[Part], meanwhile: Callable[[], None] | None = None) -> None:
        """Store parts of files in one transaction; what happens ``meanwhile`` is over when the reference does the same."""
        parts = [(file, first, last) for file, first, last in parts if first < last]
        if not parts:
            return
        transaction = together(*(file.transaction(first, last) for file, first, last in parts))
        client = SlowClient(self.clients[writer], meanwhile) if meanwhile else self.clients[writer]
        store = self.store_type(client, self.keys, DRAIN, self.scripts, self.server_ms)
        result = store.schedule(SOURCE, transaction)
        assert result == self.reference.schedule(SOURCE, transaction)
        assert self.hear() == self.reference.take_rings()
        self.take_note_of([file for file, _, _ in parts])

    def hear(self) -> list[int]:
        """What the bell rang since the last call: the server answers the ping after everything that it had said before."""
        self.bell.ping()
        heard = []
        while True:
            said = self.bell.get_message(timeout=60)
            assert said is not None, "the server does not answer the ping"
            if said["type"] == "pong":
                return heard
            if said["type"] == "message":
                heard.append(int(said["data"]))

    def take_note_of(self, files: list[LandedFile]) -> None:
        """Take what is new on the server for accepted, if no promise is broken by that."""
        before, self.seen = self.seen, self.look()
        new = {m: due_ms for m, due_ms in self.seen.waiting() if m not in before.everything()}
        assert not new.keys() & self.accepted.keys(), "stored twice"
        for landed, line in ((file, line) for file in files for line in file.lines):
            stored = landed.member_of(line.number, line.idempotency_key)
            if line.idempotency_key and stored in new:
                other = self.ids.get(line.idempotency_key)
                assert other is None or (
                    other in self.acknowledged and self.acknowledged[other][1] + ID_MEMORY_MS <= self.now_ms
                ), "an id that is known was stored again"
                self.ids[line.idempotency_key] = stored
        self.accepted |= new
