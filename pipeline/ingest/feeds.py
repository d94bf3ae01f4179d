"""What brings files to where Spark reads them: the gatekeeper, the socket receiver, or nothing at all."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.config import IngestSettings
from pipeline.core.errors import ConfigError, SourceError
from pipeline.landing.gatekeeper import Gatekeeper
from pipeline.landing.receiver import LineReceiver
from pipeline.landing.watcher import Watcher

log = logging.getLogger(__name__)

LANDING_NAME = ".landing"  # in the input folder itself: one file system, so that landing is one atomic rename
LOOK_MS = 200  # the longest wait between two looks at an input
ONCE_MS = 1_000  # --once takes a socket that was silent for so long as having nothing more


class Feed(Protocol):
    """Drives one input; ``close`` leaves nothing half done behind that the next start can't finish."""

    source_id: str
    reads: str
    location: str

    def step(self, should_stop: Callable[[], bool]) -> None:
        """Bring in what is there; returns soon."""
        ...

    def wait(self) -> None:
        """Return when there may be more, at the latest after ``LOOK_MS``."""
        ...

    def is_taken_in(self) -> bool:
        """Whether everything that was there has been brought in."""
        ...

    def close(self) -> None:
        """Let go of the input."""
        ...


class FilesFeed:
    """A local folder that users drop files into."""

    def __init__(self, settings: IngestSettings) -> None:
        folder = Path(settings.input)
        rejects = Path(settings.rejects)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(
                f"The input folder {folder} can't be made ({exc.strerror}); name another with --input."
            ) from exc
        self.reads = str(folder)
        self._watcher = Watcher(folder)
        self._gatekeeper = Gatekeeper(
            folder,
            folder / LANDING_NAME,
            rejects / "quarantine",
            rejects,
            segment_bytes=settings.segment_bytes,
            settle_ms=settings.settle_ms,
            hints=self._watcher,
        )
        self.source_id = self._gatekeeper.source_id
        self.location = str(self._gatekeeper.landing_path)
        self._wait_sec = 0.0
        self._idle = False
        self._trouble = ""

    def step(self, should_stop: Callable[[], bool]) -> None:
        try:
            report = self._gatekeeper.step(should_stop)
        except SourceError as exc:
            if str(exc) != self._trouble:
                log.warning("%s", exc)
            self._trouble, self._wait_sec, self._idle = str(exc), LOOK_MS / 1000, False
            return
        self._trouble = ""
        for quarantined in report.quarantined:
            log.warning("quarantined %s: %s It is now %s.", quarantined.file, quarantined.detail, quarantined.path)
        for ignored in report.ignored:
            log.warning("left %s where it is: %s", ignored.file, ignored.detail)
        self._wait_sec = report.wait_s(LOOK_MS / 1000)
        self._idle = report.idle

    def wait(self) -> None:
        self._watcher.wait(self._wait_sec)

    def is_taken_in(self) -> bool:
        return self._idle

    def close(self) -> None:
        self._gatekeeper.close()
        self._watcher.close()


class SocketFeed:
    """A server that sends lines, as ``nc -lk 9999`` does."""

    def __init__(self, settings: IngestSettings, state: Path) -> None:
        self.reads = f"{settings.host}:{settings.port}"
        landing = state / "socket" / f"{settings.host}_{settings.port}"
        self._receiver = LineReceiver(settings.host, settings.port, landing, roll_ms=settings.socket_roll_ms)
        self.source_id = self._receiver.source_id
        self.location = str(landing)

    def step(self, should_stop: Callable[[], bool]) -> None:
        self._receiver.step(0)

    def wait(self) -> None:
        self._receiver.step(LOOK_MS / 1000)

    def is_taken_in(self) -> bool:
        return self._receiver.quiet_for_ms >= ONCE_MS

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

    def is_taken_in(self) -> bool:
        return True

    def close(self) -> None:
        pass
