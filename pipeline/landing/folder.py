"""The landing folder: one owner at a time, an identity that lasts, and durable renames."""

import contextlib
import errno
import logging
import os
import secrets
from pathlib import Path

from pipeline.core.errors import ConfigError, SourceError
from pipeline.core.files import FULL, SCRATCH_PREFIX, create, make_private, try_lock, write_whole
from pipeline.landing.names import (
    DONE_PREFIX,
    SEGMENT_PREFIX,
    TokenMaker,
    WorkName,
    parse_landing_name,
    parse_token,
    parse_work_name,
)

log = logging.getLogger(__name__)

LOCK_NAME = ".lock"
SOURCE_ID_NAME = ".source-id"


class LandingFolder:
    """An open landing folder. While it is open no other process can open it.

    Raises:
        ConfigError: the folder can't be made or written, others may write it, or another ingest job has it.
    """

    def __init__(self, path: str | os.PathLike[str], *, reads: str):
        """Open ``path``, making it if need be; ``reads`` names the input of the job, for the error of a second job."""
        self.path = Path(path).absolute()
        self._prefix = os.path.join(self.path, "")
        try:
            make_private(self.path)
            self._lock = _lock(self.path / LOCK_NAME, reads)
        except OSError as exc:
            raise ConfigError(
                f"The landing folder {self.path} can't be used ({exc.strerror}: {exc.filename}): let this user make and write it, "
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
            raise ConfigError(f"The landing folder {self.path} can't be written ({exc.strerror}): make room or let "
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
        """Count the published files that are still here: the ingest job deletes what Spark has read and stored."""
        return sum(not name.startswith(".") for name in self.names())

    def publish(self, work: WorkName) -> None:
        """Give plain claimed work its landing name. From then on Spark may read it and the ingest job delete it."""
        name = work.landing_name(0, 2 if work.kind == "csv" else 1)
        os.rename(self.join(str(work)), self.join(name))

    def recover_work(self) -> list[WorkName]:
        """Find the work that a former process did not finish, oldest first, and delete what belongs to none."""
        names = self.names()
        works: dict[int, WorkName] = {}
        for name in sorted(names):
            work = parse_work_name(name)
            if work is None:
                continue
            other = works.get(work.token.random_bits)
            if other is not None:
                # The plain copy of a gzipped file is complete; only the removal of the original was missed.
                gzipped, work = (other, work) if other.gzipped else (work, other)
                os.unlink(self.join(str(gzipped)))
            works[work.token.random_bits] = work
        for name in names:
            for prefix in (DONE_PREFIX, SEGMENT_PREFIX, SCRATCH_PREFIX):
                if name.startswith(prefix):
                    token = parse_token(name.removeprefix(prefix))
                    if token is None or token.random_bits not in works:
                        os.unlink(self.join(name))
        return sorted(works.values(), key=lambda work: work.token.epoch_ms)

    def _last_epoch_ms(self) -> int:
        """Return the time part of the newest token here, so that new files sort after it whatever the clock says."""
        latest = 0
        for name in self.names():
            landed, work = parse_landing_name(name), parse_work_name(name)
            token = parse_token(landed.token) if landed else work.token if work else None
            latest = max(latest, token.epoch_ms if token else 0)
        return latest


def require_input(path: Path) -> None:
    """Raise a ``ConfigError`` if there is no such folder."""
    if not path.is_dir():
        raise ConfigError(f"The input folder {path} does not exist; make it, or correct --input.")


def check_rename(input_path: Path, landing_path: Path) -> None:
    """Try the one thing that everything rests on: a rename from the input folder into the landing folder.

    Raises:
        ConfigError: files can't be renamed from one to the other.
    """
    name = f".duetime-probe-{secrets.token_hex(8)}"  # nobody else can take it first
    probe, target = input_path / name, landing_path / name
    try:
        create(probe).close()
        os.rename(probe, target)
        target.unlink()
    except OSError as exc:
        with contextlib.suppress(OSError):
            probe.unlink()
        if exc.errno == errno.EXDEV:
            raise ConfigError(
                f"The landing folder {landing_path} is on another file system than the input folder {input_path}: "
                "configure one beside the input files, since only there a file can be moved at once."
            ) from exc
        raise ConfigError(
            f"Files can't be moved from the input folder {input_path} to {landing_path} ({exc.strerror}): "
            "let the user of the ingest job write both."
        ) from exc


def source_error(exc: OSError, doing: str, where: str | os.PathLike[str]) -> SourceError:
    """Say in one sentence what stands in the way and that nothing is lost."""
    if exc.errno in FULL:
        return SourceError(f"the disk of {where} is full: make room; {doing} goes on from where it stopped.")
    return SourceError(
        f"{doing} failed in {where} ({exc.strerror or exc}): put that right; it goes on from where it stopped."
    )


def _lock(path: Path, reads: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        is_locked = try_lock(descriptor)
    except OSError as exc:
        # Some network file systems have no locks at all; refusing to work there would help nobody.
        log.warning(
            "The file system of %s has no locks (%s): make sure that only one ingest job reads %s.", path, exc, reads
        )
        is_locked = True
    if not is_locked:
        owner = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"another ingest job (pid {owner}) reads {reads}: stop it, or give this one an input of its own."
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    return descriptor


def _source_id(path: Path) -> str:
    """Read the random 16 hex digits that distinguish this folder from every other, made on first use."""
    try:
        text = path.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        text = secrets.token_hex(8)
        write_whole(path, text.encode())
    if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
        raise ConfigError(
            f"{path} is damaged: restore it, or delete it once every file in its folder has been ingested."
        )
    return text
