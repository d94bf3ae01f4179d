"""Moves what is in an outbox to Kafka, from a drain loop, one loop an outbox at a time.

Nothing is remembered about a failure: whatever goes wrong, the sender is closed and a new one begins as after a crash. It fences
the one before, and reads from Kafka how far that one had come. So there is one way to go on, and it is taken often enough to work.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Final, Protocol

from pipeline.core.backoff import backoff_ms
from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.core.text import command_text, count_text
from pipeline.kafka.sender import Refusal, Sender
from pipeline.store.entries import entry_id_of
from pipeline.store.outbox import Outbox, OutboxEntry
from pipeline.store.retry import COMPLAIN_MS

BLOCK_MS: Final = 500  # how long a stop waits for a loop that has nothing to do
STOP_SEC: Final = 15.0  # how long for one that is in a transaction

log = logging.getLogger(__name__)


class Counts(Protocol):
    """Counts what forwarders do, in several threads."""

    stuck_partitions: list[str]
    """Where a transaction hangs, ``topic/partition``."""

    def count_forwarded(self, arrived_ms: Sequence[int], at_ms: int) -> None:
        """Count messages that are in Kafka since ``at_ms``, by when they came into the outbox."""
        ...

    def count_refused(self) -> None:
        """Count a dead letter."""
        ...

    def count_error(self, error: Exception) -> None:
        """Count what failed and is tried again."""
        ...


class Forwarder:
    """Forwards one outbox, by a thread of its own between ``start`` and ``stop``.

    Args:
        open_sender: makes a sender, which knows how far the one before it came; may raise what a sender raises.

        batch_messages: that are sent at a time.

        standby_ms: how often it looks whether the outbox is free.

        counts: told what happens.

        block_ms: how long one wait for a message takes; less than the client waits for a reply.
    """

    def __init__(
        self,
        outbox: Outbox,
        open_sender: Callable[[], Sender],
        batch_messages: int,
        standby_ms: float,
        clock: Clock,
        random: Callable[[], float],
        counts: Counts,
        block_ms: int = BLOCK_MS,
    ) -> None:
        self._outbox = outbox
        self._open_sender = open_sender
        self._batch_messages = batch_messages
        self._standby_ms = standby_ms
        self._clock = clock
        self._random = random
        self._counts = counts
        self._block_ms = block_ms
        self._sender: Sender | None = None
        self._is_leading = False
        self._ahead: Sequence[OutboxEntry] | None = []
        self._stop = Event()
        self._thread = Thread(target=self.run, name="forwarder", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def request_stop(self) -> None:
        """Let it end when the batch under way is written."""
        self._stop.set()

    def stop(self) -> None:
        """Wait until it has ended, so that another loop can go on at once; not for a Kafka that does not answer."""
        self.request_stop()
        self._thread.join(STOP_SEC if self._sender else BLOCK_MS / 1000)

    def run(self) -> None:
        """Forward until ``stop``. Whatever fails is tried again."""
        failures, told_ms = 0, 0.0
        while not self._stop.is_set():
            try:
                wait_ms = self.step()
            except Exception as exc:  # also what nobody expected: without this thread all messages would wait
                self._leave()
                self._counts.count_error(exc)
                failures += 1
                if failures == 1 or self._clock.monotonic_ms() - told_ms >= COMPLAIN_MS:
                    log.warning("messages for Kafka wait: %s", str(exc) or type(exc).__name__)
                    told_ms = self._clock.monotonic_ms()
                wait_ms = backoff_ms(failures, self._random)
            else:
                if failures and self._sender:
                    log.warning("messages for Kafka go on")
                    failures = 0
            self._stop.wait(wait_ms / 1000)
        self._leave()

    def step(self) -> float:
        """Forward one batch, or wait for one; returns after how many milliseconds to call it again.

        Raises:
            KafkaAway, TopicGone, PipelineError: ``close``, and try again.
        """
        if self._sender is None and not self._outbox.exists():
            self._outbox.wait("", self._block_ms)
            return 0.0
        if self._sender is None and not self._take_over():
            return self._standby_ms
        assert self._sender
        entries, self._ahead = self._ahead or self._read(""), []
        if entries is None:
            log.info("another loop writes to Kafka now")
            self.close()
            return self._standby_ms
        if entries:
            self._forward(self._sender, entries)
        elif not self._stop.is_set():
            self._outbox.wait(self._sender.position, self._block_ms)
        return 0.0

    def keep(self) -> None:
        """Renew the lease while this loop writes; for another thread, as a batch may take longer than a lease.

        Raises:
            StoreError: no answer, or an error.
        """
        if self._is_leading:
            self._outbox.keep()

    def is_done(self) -> bool:
        """Return whether nothing is in the outbox; may raise ``StoreError``."""
        return self._outbox.length() == 0

    def close(self) -> None:
        """Forget the sender. What it had under way is settled by the next one, of whichever loop."""
        self._is_leading, self._ahead = False, []
        if self._sender:
            self._sender.close()
            self._sender = None

    def _leave(self) -> None:
        self.close()
        try:
            self._outbox.leave()
        except PipelineError as exc:
            log.debug("some loop goes on when the lease is over: %s", exc)

    def _take_over(self) -> bool:
        """Become the one who writes; False if somebody else does."""
        if not self._outbox.acquire():
            return False
        self._is_leading = True
        self._sender = self._open_sender()
        return True

    def _forward(self, sender: Sender, entries: Sequence[OutboxEntry]) -> None:
        """Write entries, and make dead letters of those that Kafka refuses."""
        refused = sender.refusals(entries)
        self._refuse(entries, refused)

        def read_ahead() -> None:
            try:
                self._ahead = self._read(entries[-1].entry_id)
            except PipelineError as exc:  # what is under way is to be ended first
                log.debug("read again later: %s", exc)

        self._write(sender, [entry for entry in entries if entry.entry_id not in refused], read_ahead)

    def _read(self, after: str) -> Sequence[OutboxEntry] | None:
        assert self._sender
        return self._outbox.read(self._sender.position, after, self._batch_messages)

    def _write(
        self, sender: Sender, entries: Sequence[OutboxEntry], meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        while entries:
            refused = sender.send(entries, meanwhile)
            is_lost = bool(refused) and sender.is_atomic
            written = [] if is_lost else [entry for entry in entries if entry.entry_id not in refused]
            came_ms = [entry_id_of(entry.entry_id)[0] for entry in written]
            self._counts.count_forwarded(came_ms, self._clock.wall_ms())
            left = entries if is_lost else [entry for entry in entries if entry.entry_id in refused]
            if len(refused) > 1 and len(left) > 1:
                # A request with many records may be too large where each of them is not.
                middle = len(left) // 2
                self._write(sender, left[:middle])
                self._write(sender, left[middle:])
                return
            self._refuse(left, refused)
            entries = [entry for entry in left if entry.entry_id not in refused]

    def _refuse(self, entries: Sequence[OutboxEntry], refused: dict[str, Refusal]) -> None:
        for entry in entries:
            refusal = refused.get(entry.entry_id)
            if refusal and self._outbox.refuse(entry, refusal.reason, refusal.detail):
                self._counts.count_refused()
        if refused:
            first = next(iter(refused.values()))
            log.warning(
                "Kafka refused %s, which %s lists as dead letters; the first for %s (%s)",
                *(
                    count_text(len(refused), "message"),
                    command_text("dead_letters", "list"),
                    first.reason,
                    first.detail,
                ),
            )
