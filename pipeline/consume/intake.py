"""How messages come into the hands of an instance: new ones, those of an earlier life, and those of instances that are silent."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pipeline.core.clock import Clock
from pipeline.store.entries import Entry
from pipeline.store.groups import BEGINNING, END, GroupStore

TAKE_OVER_MS = 1_000  # how often it looks for messages of others that are silent
LOOKS_MAX = 20  # pages of pending messages that it looks at then, of each stream
PAGE = 100  # messages it takes over at a time
SWEEP_MS = 3_600_000  # how often it forgets instances that were silent for as long

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """A message in hand, since a time on the monotonic clock; ``begun`` once it was given out.

    Args:
        counted: whether the server has counted this time of handing it out: it counts what is read when it is read, and what is
            taken over when it is begun, since one of these may be what killed the instance before.
    """

    entry: Entry
    since_ms: float
    counted: bool
    begun: bool = False


@dataclass(slots=True)
class Intake:
    """Takes messages in hand; ``in_hand`` has all that are not settled yet, by their keys.

    Each verb may raise ``StoreUnavailable``; then the same may be asked again, and messages whose reply was lost are found.

    Args:
        lease_ms: after which others may take what this instance is silent about.

        block_ms: how long to wait for a message.

        interruptible: makes a call that only waits, and may leave it at once on a signal.
    """

    store: GroupStore
    clock: Clock
    lease_ms: float
    block_ms: int
    wait: Callable[[float], object]
    interruptible: Callable[[Callable[[], None]], None]
    ordered: bool
    in_hand: dict[tuple[str, str], Held] = field(default_factory=dict)
    has_turn: bool = False
    _turn_ms: float = float("-inf")  # when it was told last that it has the turn
    # In hand, and not yet told of: a call may fail after another one found some.
    _found: list[Entry] = field(default_factory=list)
    # Whether messages may be its own that it does not know of, of an earlier life or of a lost reply; and whether that was one to a
    # read: then they are counted, and were never given out.
    _unsure: bool = True
    _lost_read: bool = False
    _cursors: dict[str, str] = field(default_factory=dict)
    _looked_ms: float = float("-inf")
    _swept_ms: float = float("-inf")

    def look(self, limit: int) -> list[Entry]:
        """Wait a while for messages and take some in hand."""
        if self.ordered and not self.keep_turn():
            self.wait(self.block_ms)
            return []
        self._forget_unsettled()
        for step in (self.gather_own, self._take_over, lambda: self._read(limit)):
            if not self._found:
                step()
        found, self._found = self._found, []
        return found

    def _forget_unsettled(self) -> None:
        """Let what was given out and not settled within its lease come again, if only to this instance."""
        over_ms = self.clock.monotonic_ms() - self.lease_ms
        for key in [key for key, held in self.in_hand.items() if held.begun and held.since_ms < over_ms]:
            del self.in_hand[key]

    def gather_own(self) -> None:
        """Find what was handed out to this instance without its knowledge."""
        if self._unsure:
            for stream in self.store.streams:
                self._hold_taken(self._pages(stream, None), counted=self._lost_read)
            self._unsure = self._lost_read = False

    def keep_turn(self) -> bool:
        """Say whether this instance of an ordered group has the turn, for a lease from now on.

        When it has it anew, or others may have had it meanwhile, it first takes what they have left.
        """
        asked_ms = self.clock.monotonic_ms()
        had_turn = self.has_turn and asked_ms - self._turn_ms < self.lease_ms
        has_turn = self.store.take_turn(round(self.lease_ms))
        if has_turn and not had_turn:
            for stream in self.store.streams:
                for _ in self._pages(stream, 0):
                    pass  # they are this instance's now, and gathered as such
            self._unsure, self._lost_read = True, False
        elif self.has_turn and not has_turn:
            log.warning("lost the turn: it was silent for longer than a lease")
            self.in_hand.clear()
            self._found.clear()
        self.has_turn, self._turn_ms = has_turn, asked_ms  # only now: a call that failed before this is made again
        return has_turn

    def give_back(self, held: Iterable[Held]) -> None:
        """Let others have messages at once; those that were not begun count as not handed out."""
        each = list(held)
        self.store.settle("release", [h.entry for h in each if h.counted and not h.begun])
        self.store.settle("drop", [h.entry for h in each if h.begun or not h.counted])

    def _read(self, limit: int) -> None:
        self._unsure = self._lost_read = True  # until there is a reply
        asked_ms = self.clock.monotonic_ms()
        found: list[Entry] = []

        def read() -> None:
            found.extend(self.store.read(limit, self.block_ms))
            self._unsure = self._lost_read = False

        self.interruptible(read)
        for entry in found:
            self.in_hand[entry.key] = Held(entry, asked_ms, counted=True)
        self._found += found
        if self.ordered and not found:
            self.interruptible(lambda: self.store.wait(self.block_ms))

    def _take_over(self) -> None:
        """Find messages of instances that were silent for a lease."""
        now_ms = self.clock.monotonic_ms()
        if now_ms - self._looked_ms < TAKE_OVER_MS:
            return
        self._looked_ms = now_ms
        if now_ms - self._swept_ms >= SWEEP_MS:
            self._swept_ms = now_ms
            self.store.sweep(SWEEP_MS)
        self._unsure = True  # until there are replies
        for stream in self.store.streams:
            for _ in range(LOOKS_MAX):
                page = self.store.gather(stream, self._cursors.get(stream, BEGINNING), PAGE, round(self.lease_ms))
                self._cursors[stream] = page.cursor
                self._hold_taken(page.entries, counted=False)
                if self._found or page.cursor == END:
                    break
        self._unsure = False
        if self._found:
            log.warning("took over %d messages that were not acknowledged in time", len(self._found))

    def _pages(self, stream: str, min_idle_ms: int | None) -> Iterator[Entry]:
        cursor = BEGINNING
        while True:
            page = self.store.gather(stream, cursor, PAGE, min_idle_ms)
            yield from page.entries
            cursor = page.cursor
            if cursor == END:
                return

    def _hold_taken(self, entries: Iterable[Entry], counted: bool) -> None:
        """Take in hand what was pending, but for what is there already."""
        now_ms = self.clock.monotonic_ms()
        for entry in entries:
            if entry.key not in self.in_hand:
                self.in_hand[entry.key] = Held(entry, now_ms, counted)
                self._found.append(entry)
