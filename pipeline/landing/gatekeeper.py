"""Moves what is whole in the input folder into the landing folder: immutable files under unique names, for Spark.

The way of a file: it is judged where it lies; renamed into the landing folder as `.work-...`, which claims it and hides
its old name from every writer; judged once more, in case a writer opened it in between; and then published by a second
rename, or written out by a ``Split`` if it is large, gzipped or a link. Each rename is atomic, and the token in the
work name is the one it is published under, so a crash anywhere neither loses a file nor lands it twice. The landing
folder is synced between the two renames: a power cut can't give a file that Spark has read back to the input folder.

A symlink to a regular file is landed as a copy of what it points to, and the link is removed. The link must belong to
the owner of the file or to our user, so that nobody can make us read another user's file out. A file with several hard
links is copied too: its other names could still be written.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import ConfigError, SourceError
from pipeline.landing.backlog import Backlog, recover_work
from pipeline.landing.folder import LandingFolder, source_error
from pipeline.landing.inspection import Action, Hints, Inspector
from pipeline.landing.lines import LINE_BYTES_MAX
from pipeline.landing.names import WorkName, is_unfinished, kind_of, printable_name, quote_name
from pipeline.landing.quarantine import Quarantine
from pipeline.landing.reports import Ignored, LandingReport
from pipeline.landing.splitter import Split, is_begun

log = logging.getLogger(__name__)

BATCH_FILES = 256  # claimed between two syncs of the landing folder
_NOT_MOVABLE = {errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV}


class Gatekeeper:
    """Lands the files of one input folder, in the order they were written. Not thread-safe: one loop drives it.

    Args:
        segment_bytes: larger files are written out as several landing files of at most about this size.

        settle_ms: how long a file must be still where nothing tells whether it is still being written.

        slice_ms: after about this long one step stops working on large files, so that small ones are not kept waiting.

        hints: the ``Watcher`` of the input folder, which helps where the kernel can't be asked who writes a file.

    Raises:
        ConfigError: a folder is missing, not writable, on another file system, or read by another ingest job.
    """

    def __init__(
        self,
        input_dir: str | os.PathLike[str],
        landing_dir: str | os.PathLike[str],
        quarantine_dir: str | os.PathLike[str],
        rejects_dir: str | os.PathLike[str],
        *,
        segment_bytes: int = 32 << 20,
        settle_ms: float = 1000,
        slice_ms: float = 200,
        line_bytes_max: int = LINE_BYTES_MAX,
        clock: Clock | None = None,
        hints: Hints | None = None,
    ):
        self._input = Path(input_dir).absolute()
        self._input_prefix = os.path.join(self._input, "")
        if not self._input.is_dir():
            raise ConfigError(f"the input folder {self._input} is not there: create it, or name another one.")
        if Path(landing_dir).absolute() == self._input:
            raise ConfigError(
                f"the landing folder can't be the input folder {self._input} itself: configure another one."
            )
        self._clock = clock or SystemClock()
        self._segment_bytes = segment_bytes
        self._slice_ms = slice_ms
        self._line_bytes_max = line_bytes_max
        self._folder = LandingFolder(landing_dir, reads=str(self._input))
        try:
            _check_rename(self._input, self._folder.path)
            self._quarantine = Quarantine(quarantine_dir, rejects_dir)
            own = (self._folder.path, self._quarantine.path, self._quarantine.rejects_path)
            self._inspector = Inspector(self._input, own, settle_ms, hints)
            self._claimed: list[WorkName] = recover_work(self._folder)
        except BaseException:
            self._folder.close()
            raise
        self._backlog = Backlog(self._folder, self._quarantine, self._clock)
        self._known: dict[str, int] = {}  # entries that were left and reported, with their time of change
        self._unripe = 0  # entries that the last scan left, as they may still be written
        self._report = LandingReport()
        self._trouble: SourceError | None = None

    @property
    def source_id(self) -> str:
        """16 hex digits that tell this landing folder from every other, for as long as it exists."""
        return self._folder.source_id

    @property
    def landing_path(self) -> Path:
        return self._folder.path

    def close(self) -> None:
        """Give the folder back. What is half done is finished by the next gatekeeper."""
        self._folder.close()

    def step(self, should_stop: Callable[[], bool] = lambda: False, *, take_new: bool = True) -> LandingReport:
        """Look through the input folder once, land what is whole, and work on large files for about ``slice_ms``.

        Args:
            take_new: False leaves the input folder alone and only goes on with what was taken before.

        Raises:
            SourceError: the disk is full or something failed; all that could be done was done, and nothing is lost. The
                next step goes on, and its report tells what this one did, too.
        """
        self._trouble = None
        found = self._scan() if take_new else []
        for start in range(0, max(1, len(found)), BATCH_FILES):
            if should_stop():
                break
            for name, status in found[start : start + BATCH_FILES]:
                self._take(name, status)
            self._publish_claimed()
        try:
            self._backlog.advance(self._report, self._slice_ms, should_stop)
        except SourceError as trouble:
            self._note_trouble(trouble)
        self._report.waiting = self._unripe + len(self._claimed)
        self._report.busy = bool(self._backlog)
        if self._trouble is not None:
            raise self._trouble
        report, self._report = self._report, LandingReport()
        return report

    def _scan(self) -> list[tuple[str, os.stat_result]]:
        """List the entries to be judged, oldest first, and forget what is known of entries that are gone."""
        found: list[tuple[str, os.stat_result]] = []
        self._unripe = 0
        try:
            with os.scandir(self._input) as entries:
                for entry in entries:
                    if not is_unfinished(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            found.append((entry.name, entry.stat(follow_symlinks=False)))
        except OSError as exc:
            self._note_trouble(source_error(exc, "looking for files", self._input))
            return []
        present = {name for name, _ in found}
        self._known = {name: changed for name, changed in self._known.items() if name in present}
        self._inspector.stillness.forget_all_but(present.union(map(str, self._claimed)))
        found.sort(key=lambda item: (item[1].st_mtime_ns, item[0]))
        return found

    def _take(self, name: str, status: os.stat_result) -> None:
        """Judge one entry and do what follows."""
        if self._known.get(name) == status.st_mtime_ns:
            return
        now_ms = self._clock.monotonic_ms()
        try:
            verdict = self._inspector.judge(name, status, now_ms)
            if verdict.action is Action.WAIT:
                self._unripe += 1
            elif verdict.action is Action.IGNORE:
                # While it changes it is not reported again and again.
                if name not in self._known or self._inspector.stillness.is_still(name, status, now_ms):
                    self._leave(name, status, verdict.reason, verdict.detail)
            elif verdict.action is Action.QUARANTINE:
                token = self._folder.tokens.make(self._clock.wall_ms())
                path = os.path.join(self._input, name)
                self._report.quarantined.append(
                    self._quarantine.put(path, token, quote_name(name), verdict.reason, verdict.detail)
                )
            elif verdict.action is Action.TAKE:
                self._claim(name)
        except FileNotFoundError:
            return  # its owner took it away
        except OSError as exc:
            if exc.errno not in _NOT_MOVABLE:
                self._note_trouble(source_error(exc, f"taking in {printable_name(name)}", self._folder.path))
                return
            detail = (
                f"It can't be moved out of the folder ({exc.strerror}): let the ingest job's user write the folder."
            )
            self._leave(name, status, "not_movable", detail)

    def _leave(self, name: str, status: os.stat_result, reason: str, detail: str) -> None:
        self._known[name] = status.st_mtime_ns
        self._report.ignored.append(Ignored(printable_name(name), reason, detail))

    def _claim(self, name: str) -> None:
        kind, gzipped = kind_of(name) or ("", False)
        work = WorkName(self._folder.tokens.make(self._clock.wall_ms()), kind, gzipped, quote_name(name))
        os.rename(self._input_prefix + name, self._folder.join(str(work)))
        self._inspector.stillness.carry_over(name, str(work))
        self._claimed.append(work)

    def _publish_claimed(self) -> None:
        """Make the claims durable and publish those that still nobody writes."""
        if not self._claimed:
            return
        claimed, self._claimed = self._claimed, []
        try:
            self._folder.sync()
        except OSError as exc:
            self._claimed = claimed
            self._note_trouble(source_error(exc, "landing files", self._folder.path))
            return
        for work in claimed:
            try:
                if not self._publish(work):
                    self._claimed.append(work)
            except FileNotFoundError:
                log.warning("%s was taken out of the landing folder before it was ingested.", work.original_name)
            except OSError as exc:
                self._claimed.append(work)
                self._note_trouble(source_error(exc, f"landing {work.original_name}", self._folder.path))

    def _publish(self, work: WorkName) -> bool:
        """Publish one claimed file, or begin to write it out; False if somebody still writes it."""
        path = self._folder.join(str(work))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except BlockingIOError:
            return False
        except PermissionError:
            self._begin_split(work, path)  # which finds the same and puts it aside
            return True
        except OSError as exc:
            if exc.errno != errno.ELOOP:
                raise
            # A link. A relative one counts from the input folder, where it was dropped.
            self._begin_split(work, os.path.join(self._input, os.readlink(path)))
            return True
        try:
            if not self._inspector.is_whole(str(work), descriptor, self._clock.monotonic_ms()):
                return False
            status = os.fstat(descriptor)
            plain = not work.gzipped and status.st_nlink == 1 and status.st_size <= self._segment_bytes
            # What was begun to be written out, in smaller segments perhaps, has landed in part.
            if not plain or is_begun(self._folder, work) or not self._arrived_by_now(descriptor, status):
                self._begin_split(work, path)
                return True
        finally:
            os.close(descriptor)
        self._report.landed.append(self._folder.publish(work, status.st_size))
        return True

    def _arrived_by_now(self, descriptor: int, status: os.stat_result) -> bool:
        """Set a time in the future to now; False if we may not, as the file is another user's."""
        now_ms = self._clock.wall_ms()
        if status.st_mtime_ns // 1_000_000 > now_ms:
            try:
                os.utime(descriptor, ns=(now_ms * 1_000_000,) * 2)
            except PermissionError:
                return False
        return True

    def _begin_split(self, work: WorkName, source_path: str) -> None:
        split = Split(
            self._folder, work, source_path,
            segment_bytes=self._segment_bytes, line_bytes_max=self._line_bytes_max, clock=self._clock,
        )  # fmt: skip
        self._backlog.add(split)

    def _note_trouble(self, trouble: SourceError) -> None:
        """Keep the first trouble of this step; the rest of the step is done all the same."""
        self._trouble = self._trouble or trouble


def _check_rename(input_path: Path, landing_path: Path) -> None:
    """Try the one thing that everything rests on: a rename from the input folder into the landing folder."""
    probe, target = input_path / ".duetime-probe", landing_path / ".duetime-probe"
    try:
        probe.touch()
        os.rename(probe, target)
        target.unlink()
    except OSError as exc:
        with contextlib.suppress(OSError):
            probe.unlink()
        if exc.errno == errno.EXDEV:
            raise ConfigError(
                f"the landing folder {landing_path} is on another file system than the input folder {input_path}: "
                "configure one beside the input files, since only there a file can be moved at once."
            ) from exc
        raise ConfigError(
            f"files can't be moved from the input folder {input_path} to {landing_path} ({exc.strerror}): "
            "let the user of the ingest job write both."
        ) from exc
