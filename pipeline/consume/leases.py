"""Keeping the leases of messages while a handler works on one of them."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.store.entries import Entry
from pipeline.store.groups import GroupStore

KEEP_SHARE = 1 / 3  # of a lease, after which it is renewed
LOOK_SHARE = 1 / 6  # of a lease: how often the thread looks, so that a lease is at most half over when it is renewed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Renewal:
    """The last renewal: which messages were still the consumer's, asked for at a time on the monotonic clock."""

    own: Sequence[bool]
    asked_ms: float


class LeaseRenewer:
    """Renews leases from a thread of its own, which it starts when it is first needed.

    ``begin``, ``end`` and ``close`` are for the thread of the consumer. The store's client gives this thread another connection.

    Args:
        timeout_ms: how long after ``begin`` it goes on at most; 0 means for ever.
    """

    def __init__(self, store: GroupStore, clock: Clock, lease_ms: float, timeout_ms: float) -> None:
        self._store = store
        self._clock = clock
        self._lease_ms = lease_ms
        self._timeout_ms = timeout_ms
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._entries: Sequence[Entry] = ()
        self._began_ms = self._since_ms = 0.0
        self._renewal: Renewal | None = None
        self._closed = False

    def begin(self, entries: Sequence[Entry], since_ms: float) -> None:
        """Renew leases from now on, the oldest of which began at ``since_ms``."""
        with self._lock:
            self._entries, self._renewal = entries, None
            self._began_ms, self._since_ms = self._clock.monotonic_ms(), since_ms
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lease-renewer", daemon=True)
                self._thread.start()

    def end(self) -> Renewal | None:
        """Renew no more; waits for a renewal that is on its way, lest it undoes what is said about a message afterwards."""
        with self._lock:
            self._entries = ()
            return self._renewal

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed, self._entries = True, ()
            self._lock.notify()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._lock:
            while not self._closed:
                self._lock.wait(self._lease_ms * LOOK_SHARE / 1000)
                if self._entries and self._clock.monotonic_ms() - self._since_ms >= self._lease_ms * KEEP_SHARE:
                    self._renew()

    def _renew(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._timeout_ms and now_ms - self._began_ms > self._timeout_ms:
            log.warning("a handler works for longer than handler_timeout_sec, so its message goes to another consumer")
            self._entries = ()
            return
        try:
            is_active = not self._store.ordered or self._store.acquire_active(round(self._lease_ms))
            own = self._store.settle("extend", self._entries) if is_active else [False] * len(self._entries)
        except PipelineError as exc:
            log.warning("leases could not be renewed, which is tried again: %s", exc)
            return
        self._renewal, self._since_ms = Renewal(own, now_ms), now_ms
