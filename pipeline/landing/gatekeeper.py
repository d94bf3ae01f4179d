"""Moves complete files from the input folder into the landing folder: immutable files under unique names, for Spark.

The way of a file: it is judged where it lies; renamed into the landing folder as `.work-...`, which claims it and hides
its old name from every writer; judged once more, in case a writer opened it in between; and then published by a second
rename, or written out by a ``Split`` if it is large, gzipped or a link. Each rename is atomic, and the token in the
work name is the one it is published under, so a crash anywhere neither loses a file nor lands it twice. The landing
folder is synced between the two renames: a power cut can't give a file that Spark has read back to the input folder.

The arrival of a file is when it came into the input folder: the later of its last change of content and of its inode, which
a rename into the folder is, too. The claim notes it in the work name, and it becomes the time of the landing file before
that is published, so it is the same whatever happens later.

A symlink to a regular file is landed as a copy of what it points to, and the link is removed. The link must belong to
the owner of the file or to the job's user, so that nobody can have the job read another user's file. A file with several
hard links is copied too: its other names could still be written.
"""

import contextlib
import logging
import os
import stat
from collections import deque
from collections.abc import Callable
from errno import EACCES, EBUSY, EPERM, EXDEV
from functools import partial
from pathlib import Path

from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import ConfigError, SourceError
from pipeline.core.text import visible
from pipeline.landing.folder import LandingFolder, check_rename, require_input, source_error
from pipeline.landing.inspection import Action, Hints, Inspector, UnusableFile, check_lines, open_input, set_arrival
from pipeline.landing.lines import LINE_CUT_BYTES
from pipeline.landing.names import WorkName, kind_of, printable_name, quote_name
from pipeline.landing.quarantine import Quarantine
from pipeline.landing.reports import LandingReport, RefusedFile
from pipeline.landing.splitter import Split, is_started

log = logging.getLogger(__name__)

BATCH_FILES = 256  # claimed between two syncs of the landing folder
_NOT_MOVABLE = {EACCES, EPERM, EBUSY, EXDEV}


class Gatekeeper:
    """Lands the files of one input folder, in the order of their arrival. Not thread-safe: one loop drives it.

    Args:
        segment_bytes: larger files are written out as several landing files of at most about this size.

        quiet_period_ms: how long a file must not change where nothing shows whether it is still being written.

        slice_ms: after about this long one step stops working on large files, so that small ones are not kept waiting.

        line_bytes_max: longer lines of files that are written out are cut.

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
        segment_bytes: int,
        quiet_period_ms: float = 1000,
        slice_ms: float = 200,
        line_bytes_max: int = LINE_CUT_BYTES,
        clock: Clock | None = None,
        hints: Hints | None = None,
    ):
        self._input = Path(input_dir).absolute()
        self._input_prefix = os.path.join(self._input, "")
        require_input(self._input)
        if Path(landing_dir).absolute() == self._input:
            raise ConfigError(
                f"The landing folder can't be the input folder {self._input} itself: configure another one."
            )
        self._clock = clock or SystemClock()
        self._segment_bytes = segment_bytes
        self._slice_ms = slice_ms
        self._folder = LandingFolder(landing_dir, reads=str(self._input))
        try:
            check_rename(self._input, self._folder.path)
            self._quarantine = Quarantine(quarantine_dir, rejects_dir)
            own = (self._folder.path, self._quarantine.path, self._quarantine.rejects_path)
            self._inspector = Inspector(self._input, own, quiet_period_ms, hints)
            self._claimed: list[WorkName] = self._folder.recover_work()
        except BaseException:
            self._folder.close()
            raise
        self.landing_path = self._folder.path
        self.source_id = self._folder.source_id
        """16 hex digits that distinguish this landing folder from every other, for as long as it exists."""
        self._split = partial(
            Split, self._folder, self._input, segment_bytes=segment_bytes, line_bytes_max=line_bytes_max
        )
        self._splits: deque[Split] = deque()  # claimed files that have to be written out, one after the other
        self._copies: list[WorkName] = []  # those that fitted into one segment, not published yet
        self._known: dict[str, int] = {}  # entries that were left and reported, with their time of change
        self._unripe = 0  # entries that the last scan left, as they may still be written
        self._report = LandingReport()
        self._trouble: SourceError | None = None

    def close(self) -> None:
        """Give the folder back. What is half done is finished by the next gatekeeper."""
        self._folder.close()

    def step(self, should_stop: Callable[[], bool] = lambda: False, *, take_new: bool = True) -> LandingReport:
        """Look through the input folder once, land what is complete, and work on large files for about ``slice_ms``.

        Args:
            take_new: False leaves the input folder alone and only goes on with what was taken before.

        Raises:
            SourceError: the disk is full or something failed; all that could be done was done, and nothing is lost. The
                next step goes on, and its report includes what this one did.
        """
        self._trouble = None
        found = self._scan() if take_new else []
        for start in range(0, max(1, len(found)), BATCH_FILES):
            if should_stop():
                break
            for name, status in found[start : start + BATCH_FILES]:
                self._take(name, status)
            self._publish_claimed()
        self._write_out(should_stop)
        self._report.waiting = self._unripe + len(self._claimed)
        self._report.busy = bool(self._splits or self._copies)
        if self._trouble is not None:
            raise self._trouble
        report, self._report = self._report, LandingReport()
        return report

    def _scan(self) -> list[tuple[str, os.stat_result]]:
        """List the entries to be judged, and forget what is known of entries that are gone."""
        self._unripe = 0
        try:
            found = self._inspector.list_entries(self._clock.wall_ms)
        except OSError as exc:
            self._note_trouble(exc, "looking for files", self._input)
            return []
        present = {name for name, _ in found}
        self._known = {name: changed for name, changed in self._known.items() if name in present}
        self._inspector.stability.forget_all_but(present.union(map(str, self._claimed)))
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
                # While it changes it is not reported over and over.
                if name not in self._known or self._inspector.stability.is_stable(name, status, now_ms):
                    self._leave(name, status, verdict.reason, verdict.detail)
            elif verdict.action is Action.QUARANTINE:
                token = self._folder.tokens.make(self._clock.wall_ms())
                path = self._input_prefix + name
                self._report.quarantined.append(
                    self._quarantine.put(path, token, quote_name(name), verdict.reason, verdict.detail)
                )
            elif verdict.action is Action.TAKE:
                self._claim(name)
        except FileNotFoundError:
            return  # its owner took it away
        except OSError as exc:
            if exc.errno not in _NOT_MOVABLE:
                self._note_trouble(exc, f"taking in {visible(printable_name(name))}")
                return
            detail = (
                f"It can't be moved out of the folder ({exc.strerror}): let the ingest job's user write the folder."
            )
            self._leave(name, status, "not_movable", detail)

    def _leave(self, name: str, status: os.stat_result, reason: str, detail: str) -> None:
        self._known[name] = status.st_mtime_ns
        self._report.ignored.append(RefusedFile(printable_name(name), reason, detail))

    def _claim(self, name: str) -> None:
        """Rename an entry to its work name, which keeps its arrival."""
        path, now_ms = self._input_prefix + name, self._clock.wall_ms()
        kind, gzipped = kind_of(name) or ("", False)
        arrival_ms = self._inspector.arrival_ms(name, now_ms)
        work = WorkName(self._folder.tokens.make(now_ms), arrival_ms, kind, gzipped, quote_name(name))
        os.rename(path, self._folder.join(str(work)))
        self._inspector.stability.carry_over(name, str(work))
        self._claimed.append(work)

    def _publish_claimed(self) -> None:
        """Make the claims durable and publish those that nobody writes."""
        if not self._claimed:
            return
        claimed, self._claimed = self._claimed, []
        try:
            self._folder.sync()
        except OSError as exc:
            self._claimed = claimed
            self._note_trouble(exc, "landing files")
            return
        for work in claimed:
            try:
                if not self._publish(work):
                    self._claimed.append(work)
            except FileNotFoundError:
                _log_taken_out(work)
            except OSError as exc:
                self._claimed.append(work)
                self._note_trouble(exc, f"landing {visible(work.original_name)}")

    def _publish(self, work: WorkName) -> bool:
        """Publish one claimed file, or begin to write it out; False if somebody still writes it."""
        path = self._folder.join(str(work))
        entry = os.lstat(path)
        if stat.S_ISLNK(entry.st_mode):
            self._splits.append(self._split(work))
            return True
        try:
            with open(open_input(path, entry), "rb") as file:
                if not self._inspector.is_complete(str(work), file.fileno(), self._clock.monotonic_ms()):
                    return False
                status = os.fstat(file.fileno())
                is_plain = not work.gzipped and status.st_nlink == 1 and status.st_size <= self._segment_bytes
                # What was started to be written out, in smaller segments perhaps, has landed in part.
                if not is_plain or is_started(self._folder, work) or not set_arrival(file.fileno(), work.arrival_ms):
                    self._splits.append(self._split(work))
                    return True
                if work.kind == "json":
                    check_lines(file)
        except BlockingIOError:
            return False
        except UnusableFile as fault:
            self._put_in_quarantine(work, fault.reason, fault.detail)
            return True
        self._folder.publish(work)
        return True

    def _write_out(self, should_stop: Callable[[], bool]) -> None:
        """Work on the files that are written out until about ``slice_ms`` have passed."""
        end_ms = self._clock.monotonic_ms() + self._slice_ms
        doing = "landing files"
        try:
            while self._splits and not should_stop():
                doing = f"landing {visible(self._splits[0].work.original_name)}"
                if self._finish(self._splits[0]):
                    self._splits.popleft()
                if self._clock.monotonic_ms() >= end_ms:
                    break
        except OSError as exc:
            self._note_trouble(exc, doing)
        try:
            if self._copies:
                self._folder.sync()
            while self._copies:
                self._folder.publish(self._copies[-1])
                self._copies.pop()
        except OSError as exc:
            self._note_trouble(exc, "landing files")

    def _finish(self, split: Split) -> bool:
        """Do the next step of a split; return whether it was the last one."""
        try:
            has_more = split.advance()
        except UnusableFile as fault:
            self._put_in_quarantine(split.work, fault.reason, fault.detail)
            split.clean_up()
            return True
        # The times of its segments count up from the work's; whatever is claimed from now on is later.
        self._folder.tokens.reserve(split.last_token)
        if has_more:
            return False
        if split.fits_one_segment:
            self._copies.append(split.work)
            return True
        if split.cut_lines:
            detail = (
                f"{split.cut_lines} lines, line {split.cut_first_line} the first, are too long for any message: they were cut "
                "and will be rejected; all other lines have landed, and the whole file is kept here."
            )
            self._put_in_quarantine(split.work, "line_too_long", detail)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder.join(str(split.work)))
        split.clean_up()
        return True

    def _put_in_quarantine(self, work: WorkName, reason: str, detail: str) -> None:
        try:
            path = self._folder.join(str(work))
            self._report.quarantined.append(self._quarantine.put(path, work.token, work.quoted, reason, detail))
        except FileNotFoundError:
            _log_taken_out(work)

    def _note_trouble(self, exc: OSError, doing: str, where: Path | None = None) -> None:
        """Keep the first trouble of this step; the rest of the step is done all the same."""
        self._trouble = self._trouble or source_error(exc, doing, where or self._folder.path)


def _log_taken_out(work: WorkName) -> None:
    log.warning("%s was taken out of the landing folder before it was ingested.", visible(work.original_name))
