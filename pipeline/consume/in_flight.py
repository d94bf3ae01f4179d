"""What is pending for one consumer, as far as it knows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.store.entries import Entry


@dataclass(slots=True)
class Delivery:
    """A message in flight: delivered to this consumer, and not settled.

    Args:
        since_ms: when its lease began, on the monotonic clock.

        is_counted: whether the server has counted this delivery: it counts what is read when it is read, and what is taken over
            when it is started, since one of these may be what killed the consumer before.

        is_started: whether it was yielded, or returned by ``take``.
    """

    entry: Entry
    since_ms: float
    is_counted: bool
    is_started: bool = False


class InFlight(dict[tuple[str, str], Delivery]):
    """All messages in flight, in the order in which they are started, by the keys of their entries."""

    def add(self, entries: Iterable[Entry], since_ms: float, is_counted: bool) -> int:
        """Add messages, but for those that are there; returns how many."""
        before = len(self)
        for entry in entries:
            self.setdefault(entry.key, Delivery(entry, since_ms, is_counted))
        return len(self) - before

    def waiting(self) -> list[Delivery]:
        """Return what is not started yet."""
        return [delivery for delivery in self.values() if not delivery.is_started]

    def has_waiting(self) -> bool:
        """Say whether anything is not started yet."""
        return any(not delivery.is_started for delivery in reversed(self.values()))  # what waits comes last

    def sort_waiting(self) -> None:
        """Bring what waits from several streams into one order."""
        waiting = self.waiting()
        if len({delivery.entry.stream for delivery in waiting}) > 1:
            for delivery in sorted(waiting, key=lambda delivery: delivery.entry.due_ms):
                self[delivery.entry.key] = self.pop(delivery.entry.key)

    def since_ms(self, entries: Iterable[Entry]) -> float:
        """Return when the oldest lease of some messages began; -inf if one of them is not in flight."""
        deliveries = [self.get(entry.key) for entry in entries]
        return min((each.since_ms if each else float("-inf") for each in deliveries), default=float("-inf"))

    def renew(self, entries: Sequence[Entry], own: Sequence[bool], since_ms: float) -> None:
        """Note leases that began anew, and forget messages that are another consumer's by now."""
        for entry, is_own in zip(entries, own, strict=True):
            if not is_own:
                self.pop(entry.key, None)
            elif delivery := self.get(entry.key):
                delivery.since_ms = max(delivery.since_ms, since_ms)

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drop messages, whether they are there or not."""
        for entry in entries:
            self.pop(entry.key, None)

    def forget_unsettled(self, before_ms: float) -> None:
        """Drop what was started, and whose lease began before a time: it is redelivered, if only to this consumer."""
        self.forget([each.entry for each in self.values() if each.is_started and each.since_ms < before_ms])
