"""The landing folder: one owner at a time, a name that keeps its identity, and durable renames."""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from pathlib import Path

from pipeline.core.errors import ConfigError, SourceError
from pipeline.landing.names import TokenMaker, WorkName, parse_landing_name, parse_token, parse_work_name
from pipeline.landing.reports import Landed

log = logging.getLogger(__name__)

LOCK_NAME = ".lock"
SOURCE_ID_NAME = ".source-id"
SCRATCH_PREFIX = ".tmp-"  # of small files that are about to be renamed into place
_FULL = {errno.ENOSPC, errno.EDQUOT}


class LandingFolder:
    """An open landing folder. While it is open no other process can open it.

    Raises:
        ConfigError: the folder can't be made or written, or another ingest job has it.
    """

    def __init__(self, path: str | os.PathLike[str], *, reads: str):
        """Open ``path``, making it if need be; ``reads`` names what the job takes in, to tell a second job."""
        self.path = Path(path).absolute()
        self._prefix = os.path.join(self.path, "")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path / LOCK_NAME, reads)
        except OSError as exc:
            raise ConfigError(
                f"the landing folder {self.path} can't be used ({exc.strerror}): let this user make and write it, "
                "or configure another one."
            ) from exc
        try:
            self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self.source_id = _source_id(self.path / SOURCE_ID_NAME)
                self.tokens = TokenMaker(self._last_epoch_ms())
            except BaseException:
                os.close(self._directory)
                raise
        except OSError as exc:
            os.close(self._lock)
            raise ConfigError(f"the landing folder {self.path} can't be written ({exc.strerror}): make room or let "
                              "this user write it.") from exc  # fmt: skip
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Give the folder back. Closing twice is fine."""
        if self._lock >= 0:
            os.close(self._directory)
            os.close(self._lock)
            self._lock = self._directory = -1

    def join(self, name: str) -> str:
        """Return the path of ``name`` in the folder."""
        return self._prefix + name

    def sync(self) -> None:
        """Make the renames done so far survive a power cut."""
        os.fsync(self._directory)

    def names(self) -> list[str]:
        """List the folder, unsorted."""
        return os.listdir(self._directory)

    def unread(self) -> int:
        """Count the published files that are still here: what Spark has read is taken away by the ingest job."""
        return sum(not name.startswith(".") for name in self.names())

    def publish(self, work: WorkName, size_bytes: int) -> Landed:
        """Give plain claimed work its landing name. From then on Spark may read it and the ingest job take it away."""
        name = work.landing_name(0, 2 if work.kind == "csv" else 1)
        os.rename(self.join(str(work)), self.join(name))
        return Landed(work.original_name, name, size_bytes)

    def _last_epoch_ms(self) -> int:
        """Return the time part of the newest token here, so that new files sort after it whatever the clock says."""
        latest = 0
        for name in self.names():
            landed, work = parse_landing_name(name), parse_work_name(name)
            token = parse_token(landed.token) if landed else work.token if work else None
            latest = max(latest, token.epoch_ms if token else 0)
        return latest


def write_whole(path: str, data: bytes) -> None:
    """Write a small file so that it is there completely or not at all, also after a power cut."""
    folder, name = os.path.split(path)
    scratch = os.path.join(folder, f"{SCRATCH_PREFIX}{name.lstrip('.')}")
    try:
        with open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def is_full(exc: OSError) -> bool:
    """Tell whether the disk, or the user's share of it, is full."""
    return exc.errno in _FULL


def source_error(exc: OSError, doing: str, where: str | os.PathLike[str]) -> SourceError:
    """Say in one sentence what stands in the way and that nothing is lost."""
    if is_full(exc):
        return SourceError(f"the disk of {where} is full: make room; {doing} goes on from where it stopped.")
    return SourceError(
        f"{doing} failed in {where} ({exc.strerror or exc}): put that right; it goes on from where it stopped."
    )


def _lock(path: Path, reads: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        owner = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"another ingest job (pid {owner}) reads {reads}: stop it, or give this one an input of its own."
        ) from exc
    except OSError as exc:
        # Some network file systems have no locks at all; refusing to work there would help nobody.
        log.warning(
            "The file system of %s has no locks (%s): make sure that only one ingest job reads %s.", path, exc, reads
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    return descriptor


def _source_id(path: Path) -> str:
    """Read the random 16 hex digits that tell this folder from every other, made on first use."""
    try:
        text = path.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        text = secrets.token_hex(8)
        write_whole(str(path), text.encode())
    if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
        raise ConfigError(
            f"{path} is damaged: restore it, or delete it once every file in its folder has been ingested."
        )
    return text
