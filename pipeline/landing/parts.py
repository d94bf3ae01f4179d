"""Part files: lines received and written, not published yet."""

import contextlib
import os

from pipeline.core.ids import TOKEN_LENGTH
from pipeline.landing.folder import LandingFolder
from pipeline.landing.names import PART_PREFIX, Token, landing_name, parse_token, quote_name

_STAMP_BYTES_MAX = 32


class PartFile:
    """An open part file. ``started_ms`` is monotonic."""

    def __init__(self, path: str, descriptor: int, token: Token, quoted: str, started_ms: float):
        self._path = path
        self._descriptor = descriptor
        self._token = token
        self._quoted = quoted
        self.started_ms = started_ms
        self.size_bytes = os.fstat(descriptor).st_size

    @classmethod
    def create(cls, folder: LandingFolder, token: Token, name: str, started_ms: float) -> "PartFile":
        """Make a new part file for lines from ``name`` (host:port)."""
        path = folder.join(f"{PART_PREFIX}{token}.{quote_name(name)}")
        return cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), token, quote_name(name), started_ms)

    def write(self, data: bytes) -> int:
        """Append ``data`` or the beginning of it; return how many bytes are written."""
        written = os.write(self._descriptor, data)
        self.size_bytes += written
        return written

    def publish(self, folder: LandingFolder) -> None:
        """Make the lines durable, then give the file its landing name (durable when the folder is synced).

        Raises:
            OSError: the disk failed; it is still an open part file and can be published later.
        """
        os.fsync(self._descriptor)
        os.rename(self._path, folder.join(landing_name(self._token, 1, "sock", self._quoted)))
        with contextlib.suppress(OSError):  # it is durable and has its name; nothing is left that could fail
            self.close()

    def close(self) -> None:
        """Close the file; what is written stays. Closing twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def end_last_line(self, line_bytes_max: int) -> None:
        """Give a line that a kill tore its line end, so that it is seen and rejected; a torn stamp goes."""
        start = max(0, self.size_bytes - line_bytes_max - _STAMP_BYTES_MAX)
        tail = os.pread(self._descriptor, self.size_bytes - start, start)
        torn = tail[tail.rfind(b"\n") + 1 :]
        if not torn:
            return
        if b"\t" in torn:
            os.pwrite(self._descriptor, b"\n", self.size_bytes)
            self.size_bytes += 1
        else:
            self.size_bytes -= len(torn)
            os.ftruncate(self._descriptor, self.size_bytes)


def adopt_parts(folder: LandingFolder, line_bytes_max: int) -> None:
    """Publish the part files of a receiver that was killed, oldest first."""
    for name in sorted(folder.names()):
        token = parse_token(name.removeprefix(PART_PREFIX)[:TOKEN_LENGTH]) if name.startswith(PART_PREFIX) else None
        if token is None:
            continue
        quoted = name[len(PART_PREFIX) + TOKEN_LENGTH + 1 :]
        part = PartFile(folder.join(name), os.open(folder.join(name), os.O_RDWR | os.O_NOFOLLOW), token, quoted, 0.0)
        part.end_last_line(line_bytes_max)
        if part.size_bytes:
            part.publish(folder)
        else:
            part.close()
            os.unlink(folder.join(name))
    folder.sync()
