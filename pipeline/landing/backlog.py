"""Claimed files that have to be written out, one after the other, and what a former process left half done."""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable

from pipeline.core.clock import Clock
from pipeline.landing.folder import SCRATCH_PREFIX, LandingFolder, source_error
from pipeline.landing.names import DONE_PREFIX, SEGMENT_PREFIX, WorkName, parse_token, parse_work_name
from pipeline.landing.quarantine import Quarantine
from pipeline.landing.reports import LandingReport
from pipeline.landing.splitter import BrokenInput, Split

log = logging.getLogger(__name__)


class Backlog:
    """The queue of splits. False when it is empty."""

    def __init__(self, folder: LandingFolder, quarantine: Quarantine, clock: Clock):
        self._folder = folder
        self._quarantine = quarantine
        self._clock = clock
        self._splits: deque[Split] = deque()
        self._copies: list[WorkName] = []  # files that fitted into one segment, not published yet

    def __bool__(self) -> bool:
        return bool(self._splits or self._copies)

    def add(self, split: Split) -> None:
        self._splits.append(split)

    def advance(self, report: LandingReport, slice_ms: float, should_stop: Callable[[], bool]) -> None:
        """Write out files until about ``slice_ms`` have passed, and say in ``report`` what landed.

        Raises:
            SourceError: the disk is full or something failed; the next call goes on from there.
        """
        end_ms = self._clock.monotonic_ms() + slice_ms
        doing = "landing files"
        try:
            while self._splits and not should_stop():
                doing = f"landing {self._splits[0].work.original_name}"
                self._advance_first(self._splits[0], report)
                if self._clock.monotonic_ms() >= end_ms:
                    break
        except OSError as exc:
            raise source_error(exc, doing, self._folder.path) from exc
        finally:
            self._land_copies(report)

    def _advance_first(self, split: Split, report: LandingReport) -> None:
        try:
            more, landed = split.advance()
        except BrokenInput as broken:
            self._put_aside(split, broken.reason, broken.detail, report)
            self._splits.popleft()
            return
        if landed is not None:
            report.landed.append(landed)
        # The times of its segments count up from the work's; whatever is claimed from now on is later.
        self._folder.tokens.reserve(split.last_token)
        if more:
            return
        if split.fits_one_segment:
            self._copies.append(split.work)
        elif split.cut_lines:
            detail = (
                f"{split.cut_lines} lines, line {split.cut_first_line} the first, are too long for any message: they were cut "
                "and will be rejected; all other lines have landed, and the whole file is kept aside."
            )
            self._put_aside(split, "line_too_long", detail, report)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder.join(str(split.work)))
            split.clean_up()
        self._splits.popleft()

    def _put_aside(self, split: Split, reason: str, detail: str, report: LandingReport) -> None:
        work = split.work
        try:
            put = self._quarantine.put(self._folder.join(str(work)), work.token, work.quoted, reason, detail)
            report.quarantined.append(put)
        except FileNotFoundError:
            log.warning("%s was taken out of the landing folder before it was ingested.", work.original_name)
        split.clean_up()

    def _land_copies(self, report: LandingReport) -> None:
        if not self._copies:
            return
        try:
            self._folder.sync()
            while self._copies:
                copy = self._copies[-1]
                report.landed.append(self._folder.publish(copy, os.stat(self._folder.join(str(copy))).st_size))
                self._copies.pop()
        except OSError as exc:
            raise source_error(exc, "landing files", self._folder.path) from exc


def recover_work(folder: LandingFolder) -> list[WorkName]:
    """Find the work that a former process did not finish, oldest first, and clear away what belongs to none."""
    names = folder.names()
    works: dict[int, WorkName] = {}
    for name in sorted(names):
        work = parse_work_name(name)
        if work is None:
            continue
        other = works.get(work.token.random_bits)
        if other is not None:
            # The plain copy of a gzipped file is complete; only the removal of the original was missed.
            gzipped, work = (other, work) if other.gzipped else (work, other)
            os.unlink(folder.join(str(gzipped)))
        works[work.token.random_bits] = work
    for name in names:
        for prefix in (DONE_PREFIX, SEGMENT_PREFIX, SCRATCH_PREFIX):
            if name.startswith(prefix):
                token = parse_token(name.removeprefix(prefix))
                if token is None or token.random_bits not in works:
                    os.unlink(folder.join(name))
    return sorted(works.values(), key=lambda work: work.token.epoch_ms)
