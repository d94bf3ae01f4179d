"""Receives lines from a line server (`nc -lk 9999`), as Spark's socket source does, and lands them for Spark.

A line is stamped with the time its last bytes were received and written to `.part-...` at once, so a killed receiver
loses no line it has read; the next one publishes what it finds. What nobody can give back is what only the network or
the kernel held at a kill, as a line server keeps nothing. At the end of a connection an unterminated last line counts
as a line.

A line longer than ``line_bytes_max`` keeps its beginning and loses its end, which is logged and counted; what is kept
is longer than ingest accepts, so it is rejected visibly. When the disk is full nothing more is read until what was read
is written, so the server waits.
"""

import logging
import os
import random
import select
import socket
import threading

from pipeline.core.backoff import backoff_ms
from pipeline.core.clock import Clock, SystemClock
from pipeline.landing.folder import LandingFolder, source_error
from pipeline.landing.lines import LINE_BYTES_MAX
from pipeline.landing.parts import Part, adopt_parts
from pipeline.landing.reports import ReceiverReport

log = logging.getLogger(__name__)

RECEIVE_BYTES = 256 << 10
RECEIVES_PER_STEP = 64
CONNECT_TIMEOUT_S = 2.0
COMPLAIN_EVERY_MS = 60_000.0


class LineReceiver:
    """Lands what one line server sends. Not thread-safe: one loop drives it; ``stopping`` ends its waits.

    Args:
        roll_ms: a landing file is published when its first line is this old ...

        roll_bytes: ... or when it has this many bytes.

        unread_max: with this many landing files waiting for Spark, a file grows on, to ``roll_bytes`` or
            ``roll_ms_behind``.

        line_bytes_max: longer lines are cut; see above.

    Raises:
        ConfigError: the landing folder can't be used, or another ingest job has it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        landing_dir: str | os.PathLike[str],
        *,
        roll_ms: float = 100,
        roll_bytes: int = 4 << 20,
        unread_max: int = 50,
        roll_ms_behind: float = 2000,
        line_bytes_max: int = LINE_BYTES_MAX,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        stopping: threading.Event | None = None,
    ):
        self._address = (host, port)
        self._name = f"{host}:{port}"
        self._roll_ms = roll_ms
        self._roll_bytes = roll_bytes
        self._unread_max = unread_max
        self._roll_ms_behind = roll_ms_behind
        self._line_bytes_max = line_bytes_max
        self._receive_bytes = min(RECEIVE_BYTES, line_bytes_max)  # so only a line begun before can be too long
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._stopping = stopping or threading.Event()
        self._socket: socket.socket | None = None
        self._attempt = 0
        self._retry_at_ms = 0.0
        self._complained_at_ms: float | None = None
        self._begun = bytearray()  # the line whose end has not come yet
        self._dropped = 0  # bytes of it that were not kept
        self._unwritten = b""
        self._part: Part | None = None
        self._last_bytes_ms = self._clock.monotonic_ms()
        self._folder = LandingFolder(landing_dir, reads=self._name)
        try:
            self._report = ReceiverReport(landed=adopt_parts(self._folder, line_bytes_max))
        except OSError as exc:
            self._folder.close()
            raise source_error(exc, f"receiving from {self._name}", self._folder.path) from exc

    @property
    def source_id(self) -> str:
        """16 hex digits that tell this landing folder from every other, for as long as it exists."""
        return self._folder.source_id

    @property
    def quiet_for_ms(self) -> float:
        """How long no byte has been received, counted from the start if there was none."""
        return self._clock.monotonic_ms() - self._last_bytes_ms

    def step(self, timeout_s: float) -> ReceiverReport:
        """Receive what is there, waiting up to ``timeout_s`` for it, and publish what is old or large enough.

        Raises:
            SourceError: the disk is full or failed. Nothing received is lost: the next step writes it before it
                receives more.
        """
        report = self._report
        try:
            self._write(report, b"", 0)
            if self._socket is not None or self._connect(timeout_s):
                self._receive(report, timeout_s)
            self._roll(report)
        except OSError as exc:
            raise source_error(exc, f"receiving from {self._name}", self._folder.path) from exc
        report.connected = self._socket is not None
        self._report = ReceiverReport()
        return report

    def close(self) -> ReceiverReport:
        """Land all that was received, also what the kernel holds and an unterminated line, and free the folder.

        Raises:
            SourceError: the disk is full or failed; what could not be written is lost, apart from what stands in the
                part file.
        """
        report, self._report = self._report, ReceiverReport()
        try:
            if self._socket is not None:
                self._receive(report, 0.0)
            self._end_stream(report)
            self._write(report, b"", 0)
            self._roll(report, everything=True)
        except OSError as exc:
            raise source_error(exc, f"receiving from {self._name}", self._folder.path) from exc
        finally:
            self._disconnect()
            if self._part is not None:
                self._part.close()
            self._folder.close()
        return report

    def _connect(self, timeout_s: float) -> bool:
        """Connect if it is time to; else wait for it, ``timeout_s`` at most."""
        wait_ms = self._retry_at_ms - self._clock.monotonic_ms()
        if self._attempt and wait_ms > 0:
            self._stopping.wait(min(timeout_s, wait_ms / 1000, self._roll_in_s()))
            return False
        try:
            self._socket = socket.create_connection(self._address, CONNECT_TIMEOUT_S)
        except OSError as exc:
            self._complain(f"can't be reached ({exc.strerror or exc})")
            return False
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._attempt = 0
        self._complained_at_ms = None
        log.info("Connected to %s.", self._name)
        return True

    def _complain(self, what: str) -> None:
        """Plan the next try, and say why once, then once a minute."""
        now_ms = self._clock.monotonic_ms()
        self._attempt += 1
        self._retry_at_ms = now_ms + backoff_ms(self._attempt, self._rng.random)
        if self._complained_at_ms is None or now_ms - self._complained_at_ms >= COMPLAIN_EVERY_MS:
            self._complained_at_ms = now_ms
            log.warning("The line server %s %s; trying again until it answers.", self._name, what)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _receive(self, report: ReceiverReport, timeout_s: float) -> None:
        assert self._socket is not None
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLIN)
        if not poller.poll(max(0.0, min(timeout_s, self._roll_in_s())) * 1000):
            return
        for _ in range(RECEIVES_PER_STEP):
            try:
                data = self._socket.recv(self._receive_bytes)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                log.warning("The connection to %s broke (%s).", self._name, exc.strerror or exc)
                data = b""
            if not data:
                self._disconnect()
                self._complain("closed the connection")
                self._end_stream(report)
                return
            self._last_bytes_ms = self._clock.monotonic_ms()
            self._feed(report, data)

    def _feed(self, report: ReceiverReport, data: bytes) -> None:
        """Stamp and write the lines that end in ``data`` and keep the beginning of the next one."""
        first_end = data.find(b"\n")
        if first_end < 0:
            self._begin(data)
            return
        last_end = data.rfind(b"\n")
        stamp = b"%d\t" % self._clock.wall_ms()
        self._begin(data[:first_end])
        lines = stamp + bytes(self._begun) + b"\n"
        if last_end > first_end:
            lines += stamp + data[first_end + 1 : last_end].replace(b"\n", b"\n" + stamp) + b"\n"
        self._note_cut(report)
        self._begun.clear()
        self._begin(data[last_end + 1 :])
        self._write(report, lines, data.count(b"\n"))

    def _begin(self, piece: bytes) -> None:
        room = self._line_bytes_max - len(self._begun)
        self._begun += piece[:room]
        self._dropped += max(0, len(piece) - room)

    def _note_cut(self, report: ReceiverReport) -> None:
        if self._dropped:
            log.warning(
                "A line of %d bytes from %s was cut to %d; it will be rejected.",
                len(self._begun) + self._dropped, self._name, len(self._begun),
            )  # fmt: skip
            report.cut += 1
            self._dropped = 0

    def _end_stream(self, report: ReceiverReport) -> None:
        """Take what has no line end as a line."""
        if self._begun:
            line = b"%d\t%b\n" % (self._clock.wall_ms(), bytes(self._begun))
            self._note_cut(report)
            self._begun.clear()
            self._write(report, line, 1)

    def _write(self, report: ReceiverReport, lines: bytes, count: int) -> None:
        """Append to the part file; what can't be written now is kept for the next call."""
        self._unwritten += lines
        report.lines += count
        while self._unwritten:
            if self._part is None:
                token = self._folder.tokens.make(self._clock.wall_ms())
                self._part = Part.create(self._folder, token, self._name, self._clock.monotonic_ms())
            self._unwritten = self._unwritten[self._part.write(self._unwritten) :]
        if self._part is not None and self._part.size_bytes >= self._roll_bytes:
            self._publish(report)

    def _roll_in_s(self) -> float:
        """Return how long the part file may still grow."""
        if self._part is None:
            return float("inf")
        return max(0.0, self._part.started_ms + self._roll_ms - self._clock.monotonic_ms()) / 1000

    def _roll(self, report: ReceiverReport, everything: bool = False) -> None:
        if self._part is None:
            return
        age_ms = self._clock.monotonic_ms() - self._part.started_ms
        behind = age_ms < self._roll_ms_behind and self._folder.unread() > self._unread_max
        if everything or (age_ms >= self._roll_ms and not behind):
            self._publish(report)

    def _publish(self, report: ReceiverReport) -> None:
        assert self._part is not None
        report.landed.append(self._part.publish(self._folder))
        self._part = None
        self._folder.sync()
