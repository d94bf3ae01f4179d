"""Writes a large, gzipped, linked or foreign file out as plain landing files of bounded size, cut at line ends.

One claimed file becomes a row of segments. For each, in this order:

    1. `.seg-<token>` is written and made durable
    2. `.done-<token of the work>` records that it is written and where the next one starts
    3. `.seg-<token>` is renamed to its landing name

After a crash the record shows which segments exist: the last one recorded is published if its `.seg-` is still there,
and nothing that was ever published is made a second time, even if Spark has read it and it is gone. The landing names and
the arrival follow from the name of the work, so they are the same in every run. Memory is bounded by the longest line kept.

A file that fits into one segment takes no record: its copy replaces the claimed file as plain work.

A line longer than ``line_bytes_max`` is cut there. What is left is still longer than ingest accepts, so it is rejected
visibly, and ``cut_lines`` lets the gatekeeper quarantine the original instead of deleting it.
"""

import contextlib
import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import BinaryIO

from pipeline.core.files import create, write_whole
from pipeline.landing.folder import LandingFolder
from pipeline.landing.inspection import UnusableFile, check_lines, open_input
from pipeline.landing.lines import BLOCK_BYTES, Block, LineBlocks
from pipeline.landing.names import DONE_PREFIX, SEGMENT_PREFIX, Token, WorkName


@dataclass(slots=True)
class Progress:
    """The content of `.done-<token>`. ``offset`` counts decompressed bytes, ``line`` original lines from 1."""

    segments: int = 0
    offset: int = 0
    line: int = 1
    last_name: str = ""
    finished: bool = False
    cut_lines: int = 0
    cut_first_line: int = 0


class Split:
    """The writing out of one claimed file, a bounded step at a time; it may be thrown away at any moment.

    Args:
        links_from: the folder from which a relative symlink counts.
    """

    def __init__(
        self,
        folder: LandingFolder,
        links_from: str | os.PathLike[str],
        work: WorkName,
        *,
        segment_bytes: int,
        line_bytes_max: int,
    ):
        self.work = work
        self._folder = folder
        self._links_from = links_from
        self._segment_bytes = segment_bytes
        self._line_bytes_max = line_bytes_max
        self._done_path = _done_path(folder, work)
        self._steps: Iterator[None] | None = None
        self._progress = Progress()
        self.fits_one_segment = False

    @property
    def last_token(self) -> Token:
        """The token of the last segment made so far."""
        return self.work.token.plus(max(0, self._progress.segments - 1))

    @property
    def cut_lines(self) -> int:
        """How many lines were too long and lost their end."""
        return self._progress.cut_lines

    @property
    def cut_first_line(self) -> int:
        """The original number of the first of them."""
        return self._progress.cut_first_line

    def advance(self) -> bool:
        """Do the next step, which publishes at most one segment; return whether there is more.

        Raises:
            UnusableFile: the file can't be ingested.
            OSError: reading or writing failed; the next call goes on from the last segment recorded.
        """
        self._steps = self._steps or self._run()
        try:
            next(self._steps)
        except StopIteration:
            return False
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            self._steps = None
            detail = f"The gzip data is damaged or incomplete ({exc}): send the file again."
            raise UnusableFile("corrupt_gzip", detail) from exc
        except BaseException:
            self._steps = None
            raise
        return True

    def clean_up(self) -> None:
        """Remove the record, once the claimed file is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._done_path)

    def _run(self) -> Iterator[None]:
        recorded = self._read_progress()
        if recorded is None:
            yield from self._check()
        with self._open() as raw, self._decoded(raw) as source:
            progress = self._progress = recorded or Progress()
            header = self._read_header(source)
            if recorded is not None:
                self._publish(progress)
                yield
            elif header:
                progress.offset, progress.line = len(header), 2
            source.seek(progress.offset)  # in decompressed text; gzip decompresses its way there
            blocks = LineBlocks(source, self._line_bytes_max)
            while not progress.finished:
                self._write_segment(blocks, header, progress)
                if progress.finished and progress.segments == 1 and not progress.cut_lines:
                    self._replace_work()
                    return
                write_whole(self._done_path, json.dumps(asdict(progress)).encode())
                self._folder.sync()
                self._publish(progress)
                yield

    def _write_segment(self, blocks: LineBlocks, header: bytes, progress: Progress) -> None:
        """Write and sync the next segment and move ``progress`` past it."""
        path = self._segment_path(progress.segments)
        size = lines = 0
        name = self.work.landing_name(progress.segments, progress.line)
        with create(path) as out:
            out.write(header)
            while (block := blocks.take()) is not None:
                end = len(block.data)
                if size + end > self._segment_bytes:
                    end = block.data.rfind(b"\n", 0, max(0, self._segment_bytes - size)) + 1
                    if not end and not size:  # one line fills more than a segment
                        end = block.data.find(b"\n") + 1 or len(block.data)
                if end < len(block.data):
                    blocks.put_back(Block(block.data[end:], block.source_bytes - end, block.cut))
                    block = Block(block.data[:end], end)
                out.write(block.data)
                size += end
                progress.offset += block.source_bytes
                if block.cut:
                    progress.cut_first_line = progress.cut_first_line or progress.line + lines
                    progress.cut_lines += 1
                lines += block.data.count(b"\n")
                if blocks.has_returned:
                    break
            out.flush()
            os.utime(out.fileno(), ns=(self.work.arrival_ms * 1_000_000,) * 2)
            os.fsync(out.fileno())
        following = blocks.take()
        blocks.put_back(following)
        progress.finished = following is None
        progress.segments += 1
        progress.line += lines
        progress.last_name = name

    def _publish(self, progress: Progress) -> None:
        """Publish the last segment recorded, unless that was done before a crash."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._segment_path(progress.segments - 1), self._folder.join(progress.last_name))

    def _replace_work(self) -> None:
        """Put the copy, which holds everything, in the place of the claimed file: plain work of the same token."""
        copied = WorkName(self.work.token, self.work.arrival_ms, self.work.kind, False, self.work.quoted)
        os.rename(self._segment_path(0), self._folder.join(str(copied)))
        if copied != self.work:
            os.unlink(self._folder.join(str(self.work)))
        self.work = copied
        self.fits_one_segment = True

    def _check(self) -> Iterator[None]:
        """Find out whether the file can be ingested before anything of it is published; a gzipped one is read to its end."""
        with self._open() as raw:
            if self.work.gzipped and not os.fstat(raw.fileno()).st_size:
                raise UnusableFile(
                    "corrupt_gzip", "The file is empty, and even an empty gzip file has 20 bytes: send it again."
                )
            with self._decoded(raw) as source:
                if self.work.kind == "json":
                    check_lines(source)
                while self.work.gzipped and source.read(BLOCK_BYTES):
                    yield

    def _open(self) -> BinaryIO:
        """Open the claimed file, or what it links to; checked here, since a link can be exchanged at any time."""
        path = self._folder.join(str(self.work))
        try:
            entry = os.lstat(path)
            if stat.S_ISLNK(entry.st_mode):
                path = os.path.join(self._links_from, os.readlink(path))
            return open(open_input(path, entry), "rb")
        except FileNotFoundError as exc:
            raise UnusableFile("not_a_regular_file", "It was taken out of the landing folder.") from exc

    def _decoded(self, raw: BinaryIO) -> BinaryIO:
        return gzip.GzipFile(fileobj=raw, mode="rb") if self.work.gzipped else raw  # type: ignore[return-value]

    def _read_header(self, source: BinaryIO) -> bytes:
        if self.work.kind != "csv":
            return b""
        header = source.readline(self._line_bytes_max)
        if len(header) == self._line_bytes_max and not header.endswith(b"\n"):
            raise UnusableFile(
                "header_too_long",
                f"The header line has more than {self._line_bytes_max} bytes: begin with the field names.",
            )
        return header

    def _segment_path(self, segment: int) -> str:
        return self._folder.join(f"{SEGMENT_PREFIX}{self.work.token.plus(segment)}")

    def _read_progress(self) -> Progress | None:
        try:
            with open(self._done_path, "rb") as file:
                return Progress(**json.load(file))
        except FileNotFoundError:
            return None


def is_started(folder: LandingFolder, work: WorkName) -> bool:
    """Return whether segments of a claimed file have landed already."""
    return os.path.lexists(_done_path(folder, work))


def _done_path(folder: LandingFolder, work: WorkName) -> str:
    return folder.join(f"{DONE_PREFIX}{work.token}")
