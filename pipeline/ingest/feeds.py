"""What brings files to where Spark reads them: the gatekeeper, the socket receiver, or nothing at all."""

import hashlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.config import IngestSettings
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import ConfigError, SourceError
from pipeline.landing.gatekeeper import Gatekeeper
from pipeline.landing.receiver import LineReceiver
from pipeline.landing.reports import LandingReport
from pipeline.landing.watcher import Watcher

log = logging.getLogger(__name__)

LANDING_NAME = ".landing"  # in the input folder itself: one file system, so that landing is one atomic rename
LOOK_MS = 200  # the longest wait between two looks at an input

# --once always ends. How long it waits for what may still come, and when it gives up:
ONCE_GRACE_MS = 5_000  # for files that are still being written, more than an ordinary drop takes, and for trouble
ONCE_CONNECT_MS = 5_000  # for a line server to be reached at all
ONCE_SILENT_MS = 1_000  # a line server that is silent for so long has nothing more
ONCE_SOCKET_MS = 60_000  # the longest run of a line server that is never silent


class Feed(Protocol):
    """Drives one input; ``close`` leaves nothing half done behind that the next start can't finish."""

    source_id: str
    reads: str
    location: str

    def step(self, should_stop: Callable[[], bool]) -> None:
        """Bring in what is there; returns soon. Trouble with the input or the disk is said once and tried again."""
        ...

    def wait(self) -> None:
        """Return when there may be more, at the latest after ``LOOK_MS``.

        It changes nothing, so any exception may leave it at any point.
        """
        ...

    def start_finishing(self) -> None:
        """Bring in, from now on, only what is there or comes very soon, for --once."""
        ...

    def is_taken_in(self) -> bool:
        """Tell, after ``start_finishing``, whether all is brought in; says what is left. It is True in bounded time.

        Raises:
            SourceError: trouble lasts, or nothing could be reached.
        """
        ...

    def close(self) -> None:
        """Let go of the input."""
        ...


class _Trouble:
    """What keeps a feed from its work: said once, and raised only where a run has to end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_ms = 0.0
        self.error: SourceError | None = None

    def note(self, error: SourceError) -> None:
        if self.error is None:
            self._since_ms = self._clock.monotonic_ms()
        if str(error) != str(self.error):
            log.warning("%s", error)
        self.error = error

    def clear(self) -> None:
        self.error = None

    def raise_if_lasting(self) -> None:
        """Raise trouble that has not passed for ``ONCE_GRACE_MS``."""
        if self.error is not None and self._clock.monotonic_ms() - self._since_ms >= ONCE_GRACE_MS:
            raise self.error


class FilesFeed:
    """A local folder that users drop files into."""

    def __init__(self, settings: IngestSettings, clock: Clock | None = None) -> None:
        folder = Path(settings.input)
        rejects = Path(settings.rejects)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(
                f"The input folder {folder} can't be made ({exc.strerror}); name another with --input."
            ) from exc
        self.reads = str(folder)
        self._clock = clock or SystemClock()
        self._watcher = Watcher(folder)
        self._gatekeeper = Gatekeeper(
            folder,
            folder / LANDING_NAME,
            rejects / "quarantine",
            rejects,
            segment_bytes=settings.segment_bytes,
            settle_ms=settings.settle_ms,
            clock=self._clock,
            hints=self._watcher,
        )
        self.source_id = self._gatekeeper.source_id
        self.location = str(self._gatekeeper.landing_path)
        self._report = LandingReport()
        # A file that has to be still for settle_ms must get the time for that.
        self._grace_ms = ONCE_GRACE_MS + settings.settle_ms
        self._grace_ends_ms = math.inf
        self._trouble = _Trouble(self._clock)

    def step(self, should_stop: Callable[[], bool]) -> None:
        self._watcher.catch_up()
        try:
            self._report = report = self._gatekeeper.step(should_stop, take_new=not self._grace_is_over())
        except SourceError as exc:
            self._trouble.note(exc)
            return
        self._trouble.clear()
        for quarantined in report.quarantined:
            log.warning("quarantined %s: %s It is now %s.", quarantined.file, quarantined.detail, quarantined.path)
        for ignored in report.ignored:
            log.warning("left %s where it is: %s", ignored.file, ignored.detail)

    def wait(self) -> None:
        longest_s = LOOK_MS / 1000
        self._watcher.wait(longest_s if self._trouble.error else self._report.wait_s(longest_s))

    def start_finishing(self) -> None:
        self._grace_ends_ms = self._clock.monotonic_ms() + self._grace_ms

    def is_taken_in(self) -> bool:
        self._trouble.raise_if_lasting()
        if self._trouble.error is not None or self._report.busy:
            return False
        if self._report.waiting and not self._grace_is_over():
            return False
        if self._report.waiting:
            log.info("files still being written, left for the next run: %d", self._report.waiting)
        return True

    def _grace_is_over(self) -> bool:
        return self._clock.monotonic_ms() >= self._grace_ends_ms

    def close(self) -> None:
        self._gatekeeper.close()
        self._watcher.close()


class SocketFeed:
    """A server that sends lines, as ``nc -lk 9999`` does."""

    def __init__(self, settings: IngestSettings, state: Path, clock: Clock | None = None) -> None:
        self.reads = f"{settings.host}:{settings.port}"
        landing = state / "socket" / f"{settings.host}_{settings.port}"
        self._clock = clock or SystemClock()
        self._receiver = LineReceiver(
            settings.host, settings.port, landing, roll_ms=settings.socket_roll_ms, clock=self._clock
        )
        self.source_id = self._receiver.source_id
        self.location = str(landing)
        self._finishing_since_ms = math.inf
        self._trouble = _Trouble(self._clock)

    def step(self, should_stop: Callable[[], bool]) -> None:
        try:
            self._receiver.step(0)
        except SourceError as exc:
            self._trouble.note(exc)
        else:
            self._trouble.clear()

    def wait(self) -> None:
        self._receiver.wait(LOOK_MS / 1000)

    def start_finishing(self) -> None:
        self._finishing_since_ms = self._clock.monotonic_ms()

    def is_taken_in(self) -> bool:
        for_ms = self._clock.monotonic_ms() - self._finishing_since_ms
        self._trouble.raise_if_lasting()
        if self._trouble.error is None:
            if not self._receiver.has_connected and for_ms >= ONCE_CONNECT_MS:
                raise SourceError(
                    f"the line server {self.reads} can't be reached: start it, or name another with --host and --port."
                )
            if self._receiver.has_ended or (
                self._receiver.has_connected and self._receiver.quiet_for_ms >= ONCE_SILENT_MS
            ):
                return True
        if for_ms < ONCE_SOCKET_MS:
            return False
        if self._trouble.error is not None:
            raise self._trouble.error
        log.info("%s still sends after %d s; what comes now is left.", self.reads, ONCE_SOCKET_MS // 1000)
        return True

    def close(self) -> None:
        self._receiver.close()


class DirectFeed:
    """A directory of HDFS or an object store: Spark reads it itself."""

    def __init__(self, settings: IngestSettings, pause: Callable[[float], object]) -> None:
        self.reads = self.location = settings.input
        self.source_id = hashlib.sha256(settings.input.encode()).hexdigest()[:16]
        self._pause = pause

    def step(self, should_stop: Callable[[], bool]) -> None:
        pass

    def wait(self) -> None:
        self._pause(LOOK_MS / 1000)

    def start_finishing(self) -> None:
        pass

    def is_taken_in(self) -> bool:
        return True

    def close(self) -> None:
        pass
