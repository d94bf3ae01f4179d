"""Writes a large, gzipped, linked or foreign file out as plain landing files of bounded size, cut at line ends.

One claimed file becomes a row of segments. For each, in this order:

    1. `.seg-<token>` is written and made durable
    2. `.done-<token of the work>` records that it is written and where the next one starts
    3. `.seg-<token>` is renamed to its landing name

After a crash the record tells which segments exist: the last one recorded is published if its `.seg-` is still there,
and nothing that was ever published is made again, even if Spark has read it and it is gone. The landing names follow
from the work's token, so they are the same in every run. Memory is bounded by the longest line kept.

A file that fits into one segment takes no record: its copy replaces the claimed file as plain work.

A line longer than ``line_bytes_max`` is cut there. What is left is still longer than ingest accepts, so it is rejected
visibly, and ``cut_lines`` tells the gatekeeper to keep the original aside instead of deleting it.
"""

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.core.clock import Clock
from pipeline.landing.folder import LandingFolder, write_whole
from pipeline.landing.lines import BLOCK_BYTES, Block, LineBlocks
from pipeline.landing.names import DONE_PREFIX, SEGMENT_PREFIX, Token, WorkName
from pipeline.landing.reports import Landed


class BrokenInput(Exception):
    """Nothing of the file can be used: ``reason`` is a code, ``detail`` one sentence. Nothing of it has landed."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class Progress:
    """The content of `.done-<token>`. ``offset`` counts decompressed bytes, ``line`` original lines from 1."""

    arrival_ms: int
    segments: int = 0
    offset: int = 0
    line: int = 1
    last_name: str = ""
    last_bytes: int = 0
    finished: bool = False
    cut_lines: int = 0
    cut_first_line: int = 0


class Split:
    """The writing out of one claimed file, a bounded part at a time; it may be thrown away at any moment."""

    def __init__(
        self,
        folder: LandingFolder,
        work: WorkName,
        source_path: str,
        *,
        segment_bytes: int,
        line_bytes_max: int,
        clock: Clock,
    ):
        self.work = work
        self._folder = folder
        self._source_path = source_path
        self._segment_bytes = segment_bytes
        self._line_bytes_max = line_bytes_max
        self._clock = clock
        self._done_path = _done_path(folder, work)
        self._steps: Iterator[Landed | None] | None = None
        self._progress = Progress(0)
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

    def advance(self) -> tuple[bool, Landed | None]:
        """Do the next part; return whether there is more, and the segment that was published.

        Raises:
            BrokenInput: the file can't be used.
            OSError: reading or writing failed; the next call goes on from the last segment recorded.
        """
        self._steps = self._steps or self._run()
        try:
            return True, next(self._steps)
        except StopIteration:
            return False, None
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            self._steps = None
            detail = f"The gzip data is damaged or incomplete ({exc}): send the file again."
            raise BrokenInput("corrupt_gzip", detail) from exc
        except BaseException:
            self._steps = None
            raise

    def clean_up(self) -> None:
        """Remove the record, once the claimed file is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._done_path)

    def _run(self) -> Iterator[Landed | None]:
        recorded = self._read_progress()
        if recorded is None and self.work.gzipped:
            yield from self._check_gzip()
        with self._open() as raw, self._decoded(raw) as source:
            progress = self._progress = recorded or Progress(self._arrival_ms(raw))
            header = self._read_header(source)
            if recorded is not None:
                yield self._publish(progress)
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
                yield self._publish(progress)

    def _write_segment(self, blocks: LineBlocks, header: bytes, progress: Progress) -> None:
        """Write and sync the next segment and move ``progress`` past it."""
        path = self._segment_path(progress.segments)
        size = lines = 0
        name = self.work.landing_name(progress.segments, progress.line)
        with open(path, "wb") as out:
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
            os.utime(out.fileno(), ns=(progress.arrival_ms * 1_000_000,) * 2)
            os.fsync(out.fileno())
        following = blocks.take()
        blocks.put_back(following)
        progress.finished = following is None
        progress.segments += 1
        progress.line += lines
        progress.last_name, progress.last_bytes = name, len(header) + size

    def _publish(self, progress: Progress) -> Landed | None:
        """Publish the last segment recorded, unless that was done before a crash."""
        try:
            os.rename(self._segment_path(progress.segments - 1), self._folder.join(progress.last_name))
        except FileNotFoundError:
            return None
        return Landed(self.work.original_name, progress.last_name, progress.last_bytes)

    def _replace_work(self) -> None:
        """Put the copy, which holds everything, in the place of the claimed file: plain work of the same token."""
        copied = WorkName(self.work.token, self.work.kind, False, self.work.quoted)
        os.rename(self._segment_path(0), self._folder.join(str(copied)))
        if copied != self.work:
            os.unlink(self._folder.join(str(self.work)))
        self.work = copied
        self.fits_one_segment = True

    def _check_gzip(self) -> Iterator[None]:
        """Read the whole file once, so that a broken one is found before anything of it is published."""
        with self._open() as raw:
            if not os.fstat(raw.fileno()).st_size:
                raise BrokenInput(
                    "corrupt_gzip", "The file is empty, and even an empty gzip file has 20 bytes: send it again."
                )
            with self._decoded(raw) as source:
                while source.read(BLOCK_BYTES):
                    yield None

    def _open(self) -> BinaryIO:
        try:
            return open(self._source_path, "rb")
        except FileNotFoundError as exc:
            raise BrokenInput("not_a_regular_file", "The link leads nowhere any more: drop the file itself.") from exc
        except PermissionError as exc:
            raise BrokenInput(
                "not_readable", "The file may not be read by the user of the ingest job: change its mode."
            ) from exc

    def _decoded(self, raw: BinaryIO) -> BinaryIO:
        return gzip.GzipFile(fileobj=raw, mode="rb") if self.work.gzipped else raw  # type: ignore[return-value]

    def _read_header(self, source: BinaryIO) -> bytes:
        if self.work.kind != "csv":
            return b""
        header = source.readline(self._line_bytes_max)
        if len(header) == self._line_bytes_max and not header.endswith(b"\n"):
            raise BrokenInput(
                "header_too_long",
                f"The header line has more than {self._line_bytes_max} bytes: begin with the field names.",
            )
        return header

    def _arrival_ms(self, raw: BinaryIO) -> int:
        return min(os.fstat(raw.fileno()).st_mtime_ns // 1_000_000, self._clock.wall_ms())

    def _segment_path(self, segment: int) -> str:
        return self._folder.join(f"{SEGMENT_PREFIX}{self.work.token.plus(segment)}")

    def _read_progress(self) -> Progress | None:
        try:
            with open(self._done_path, "rb") as file:
                return Progress(**json.load(file))
        except FileNotFoundError:
            return None


def is_begun(folder: LandingFolder, work: WorkName) -> bool:
    """Tell whether segments of a claimed file have landed already."""
    return Path(_done_path(folder, work)).exists()


def _done_path(folder: LandingFolder, work: WorkName) -> str:
    return folder.join(f"{DONE_PREFIX}{work.token}")
