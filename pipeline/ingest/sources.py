"""What brings files to where Spark reads them: the gatekeeper, the socket receiver, or nothing at all."""

import hashlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.config import ROOT, IngestSettings
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import ConfigError, SourceError
from pipeline.core.text import visible
from pipeline.landing.folder import require_input
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


class Source(Protocol):
    """Drives one input. No other job can open the same local input until ``close``."""

    source_id: str
    reads: str
    location: str

    def step(self, should_stop: Callable[[], bool]) -> None:
        """Bring in what is there; returns soon. Trouble with the input or the disk is logged once and tried again."""
        ...

    def wait(self) -> None:
        """Return when there may be more, at the latest after ``LOOK_MS``.

        It changes nothing, so any exception may leave it at any point.
        """
        ...

    def begin_drain(self) -> None:
        """Bring in, from now on, only what is there or comes very soon, for --once."""
        ...

    def is_drained(self) -> bool:
        """Return, after ``begin_drain``, whether all is brought in, which is so in bounded time; logs what is left.

        Raises:
            SourceError: trouble lasts, or nothing could be reached.
        """
        ...

    def finish(self) -> None:
        """Bring in what was received already, and nothing more."""
        ...

    def close(self) -> None:
        """Finish, and unlock the input, once the query over it has ended. The next start goes on with what is half done."""
        ...


class _Trouble:
    """What keeps a source from its work: logged once, and raised only where a run has to end."""

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


class FilesSource:
    """A local folder that users drop files into."""

    def __init__(self, settings: IngestSettings, clock: Clock | None = None) -> None:
        folder = Path(settings.input)
        rejects = Path(settings.rejects)
        _make_default(folder)
        require_input(folder)
        self.reads = str(folder)
        self._clock = clock or SystemClock()
        self._watcher = Watcher(folder)
        try:
            self._gatekeeper = Gatekeeper(
                folder,
                folder / LANDING_NAME,
                rejects / "quarantine",
                rejects,
                segment_bytes=settings.segment_bytes,
                quiet_period_ms=settings.quiet_period_ms,
                clock=self._clock,
                hints=self._watcher,
            )
        except BaseException:
            self._watcher.close()
            raise
        self.source_id = self._gatekeeper.source_id
        self.location = str(self._gatekeeper.landing_path)
        self._report = LandingReport()
        # A file that must not change for quiet_period_ms must get the time for that.
        self._grace_ms = ONCE_GRACE_MS + settings.quiet_period_ms
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
        for refused in report.quarantined:
            log.warning("moved %s to quarantine: %s It is now %s.", visible(refused.file), refused.detail, refused.path)
        for refused in report.ignored:
            log.warning("left %s where it is: %s", visible(refused.file), refused.detail)

    def wait(self) -> None:
        longest_s = LOOK_MS / 1000
        self._watcher.wait(longest_s if self._trouble.error else self._report.wait_s(longest_s))

    def begin_drain(self) -> None:
        self._grace_ends_ms = self._clock.monotonic_ms() + self._grace_ms

    def is_drained(self) -> bool:
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

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._gatekeeper.close()
        self._watcher.close()


def _make_default(folder: Path) -> None:
    """Make the input folder if it is the default one; any other that is missing may be mistyped."""
    if folder != ROOT / IngestSettings().input:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"The input folder {folder} can't be made ({exc.strerror}); name another with --input."
        ) from exc


class SocketSource:
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
        self._draining_since_ms = math.inf
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

    def begin_drain(self) -> None:
        self._draining_since_ms = self._clock.monotonic_ms()

    def is_drained(self) -> bool:
        for_ms = self._clock.monotonic_ms() - self._draining_since_ms
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
        log.info("%s still sends after %d s; what it sends from now on is left.", self.reads, ONCE_SOCKET_MS // 1000)
        return True

    def finish(self) -> None:
        self._receiver.finish()

    def close(self) -> None:
        self._receiver.close()


class DirectSource:
    """A directory of HDFS or an object store: Spark reads it itself."""

    source_id: str
    reads: str
    location: str

    def __init__(self, settings: IngestSettings, pause: Callable[[float], object]) -> None:
        self.reads = self.location = settings.input
        self.source_id = hashlib.sha256(settings.input.encode()).hexdigest()[:16]
        self._pause = pause

    def step(self, should_stop: Callable[[], bool]) -> None:
        pass

    def wait(self) -> None:
        self._pause(LOOK_MS / 1000)

    def begin_drain(self) -> None:
        pass

    def is_drained(self) -> bool:
        return True

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
