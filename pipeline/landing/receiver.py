"""Receives lines from a line server (`nc -lk 9999`), as Spark's socket source does, and lands them for Spark.

A line is stamped with the time its last bytes were received and written to `.part-...` at once, so a killed receiver
loses no line it has read; the next one publishes what it finds. What nobody can give back is what only the network or
the kernel held at a kill, as a line server keeps nothing. At the end of a connection an unterminated last line counts
as a line.

A line longer than ``line_bytes_max`` keeps its beginning and loses its end, which is logged; what is kept is longer than
ingest accepts, so it is rejected visibly. When the disk is full nothing more is read until what was read
is written, so the server waits.
"""

import contextlib
import logging
import os
import random
import select
import socket

from pipeline.core.backoff import backoff_ms
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.text import visible
from pipeline.landing.folder import LandingFolder, source_error
from pipeline.landing.lines import LINE_CUT_BYTES, LineStamper
from pipeline.landing.parts import PartFile, adopt_parts

log = logging.getLogger(__name__)

RECEIVE_BYTES = 256 << 10
RECEIVES_PER_STEP = 64
CONNECT_TIMEOUT_S = 2.0
COMPLAIN_EVERY_MS = 60_000.0


class LineReceiver:
    """Lands what one line server sends. Not thread-safe: one loop drives it, by ``wait`` and ``step`` in turn.

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
        line_bytes_max: int = LINE_CUT_BYTES,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ):
        self._address = (host, port)
        self._name = visible(f"{host}:{port}")
        self._roll_ms = roll_ms
        self._roll_bytes = roll_bytes
        self._unread_max = unread_max
        self._roll_ms_behind = roll_ms_behind
        self._receive_bytes = min(RECEIVE_BYTES, line_bytes_max)
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._socket: socket.socket | None = None
        self._attempt = 0
        self._retry_at_ms = 0.0
        self._complained_at_ms: float | None = None
        self._stamper = LineStamper(self._name, line_bytes_max)
        self._unwritten = b""
        self._part: PartFile | None = None
        self._keep_until_ms = 0.0  # when a part that was kept open for Spark to catch up is looked at again
        self._stuck = False  # the disk failed in the last step
        self._is_finished = False
        self._last_sign_ms = self._clock.monotonic_ms()  # of the last bytes, else of the first connection
        self.has_connected = False
        """Whether the line server was ever reached."""
        self._has_received = False
        self.has_ended = False
        """Whether the line server has closed a connection after it had sent something."""
        self.quiet_for_ms = 0.0
        """How long nothing had come by the last step, counted from the first connection if nothing ever came."""
        self._folder = LandingFolder(landing_dir, reads=self._name)
        self.source_id = self._folder.source_id
        """16 hex digits that distinguish this landing folder from every other, for as long as it exists."""
        try:
            adopt_parts(self._folder, line_bytes_max)
        except OSError as exc:
            self._folder.close()
            raise source_error(exc, f"receiving from {self._name}", self._folder.path) from exc

    def wait(self, timeout_s: float) -> None:
        """Return when the next ``step`` has something to do, at the latest after ``timeout_s``.

        It only polls, so any exception may leave it at any point. After a failure of the disk it lasts ``timeout_s``.
        """
        poller = select.poll()
        if not self._stuck:
            timeout_s = min(timeout_s, self._roll_in_s())
            if self._socket is not None:
                poller.register(self._socket.fileno(), select.POLLIN)
            else:
                timeout_s = min(timeout_s, (self._retry_at_ms - self._clock.monotonic_ms()) / 1000)
        poller.poll(max(0.0, timeout_s) * 1000)

    def step(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s``, then receive what is there and publish what is old or large enough.

        It takes in 16 MiB at most and, when it is time to connect, about ``CONNECT_TIMEOUT_S`` for each of the server's
        addresses.

        Raises:
            SourceError: the disk is full or failed. Nothing received is lost: the next step writes it before it
                receives more.
        """
        if timeout_s > 0:
            self.wait(timeout_s)
        try:
            self._write()
            if self._socket is not None or self._connect():
                self._receive()
            else:
                self.quiet_for_ms = self._clock.monotonic_ms() - self._last_sign_ms
            self._roll()
        except OSError as exc:
            self._stuck = True
            raise source_error(exc, f"receiving from {self._name}", self._folder.path) from exc
        self._stuck = False

    def finish(self) -> None:
        """Land all that was received, also what the kernel holds and an unterminated line, and receive no more.

        The folder stays locked until ``close``. If the disk fails, a warning says what is lost; what stands in the part file
        is landed by the next receiver. Finishing twice is fine.
        """
        if self._is_finished:
            return
        self._is_finished = True
        try:
            self._write()
            if self._socket is not None:
                self._receive()
            self._end_stream()
            self._roll(everything=True)
        except OSError as exc:
            log.warning(
                "Not all that came from %s could be written to %s (%s): %d lines are lost; what is written there lands "
                "at the next start.",
                self._name, self._folder.path, exc.strerror or exc,
                self._unwritten.count(b"\n") + self._stamper.has_unfinished_line,
            )  # fmt: skip
        finally:
            self._disconnect()
            if self._part is not None:
                with contextlib.suppress(OSError):
                    self._part.close()

    def close(self) -> None:
        """Finish, and free the folder. Closing twice is fine."""
        try:
            self.finish()
        finally:
            self._folder.close()

    def _connect(self) -> bool:
        """Connect if it is time to."""
        if self._clock.monotonic_ms() < self._retry_at_ms:
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
        if not self.has_connected:
            self.has_connected = True
            self._last_sign_ms = self._clock.monotonic_ms()
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

    def _receive(self) -> None:
        """Receive what the kernel holds, or the beginning of it."""
        assert self._socket is not None
        for _ in range(RECEIVES_PER_STEP):
            try:
                data = self._socket.recv(self._receive_bytes)
            except (BlockingIOError, InterruptedError):
                self.quiet_for_ms = self._clock.monotonic_ms() - self._last_sign_ms
                return
            except OSError as exc:
                log.warning("The connection to %s broke (%s).", self._name, exc.strerror or exc)
                data = b""
            if not data:
                self._disconnect()
                self._complain("closed the connection")
                self.has_ended = self._has_received
                self._end_stream()
                return
            self._has_received = True
            self._last_sign_ms = self._clock.monotonic_ms()
            self.quiet_for_ms = 0.0
            self._write(self._stamper.feed(data, self._clock.wall_ms()))

    def _end_stream(self) -> None:
        """Take what has no line end as a line."""
        self._write(self._stamper.end(self._clock.wall_ms()))

    def _write(self, lines: bytes = b"") -> None:
        """Append to the part file; what can't be written now is kept for the next call."""
        self._unwritten += lines
        while self._unwritten:
            if self._part is None:
                token = self._folder.tokens.make(self._clock.wall_ms())
                self._part = PartFile.create(self._folder, token, self._name, self._clock.monotonic_ms())
            self._unwritten = self._unwritten[self._part.write(self._unwritten) :]
        if self._part is not None and self._part.size_bytes >= self._roll_bytes:
            self._publish()

    def _roll_in_s(self) -> float:
        """Return how long the part file may still grow."""
        if self._part is None:
            return float("inf")
        roll_at_ms = max(self._part.started_ms + self._roll_ms, self._keep_until_ms)
        return max(0.0, roll_at_ms - self._clock.monotonic_ms()) / 1000

    def _roll(self, everything: bool = False) -> None:
        if self._part is None:
            return
        now_ms = self._clock.monotonic_ms()
        age_ms = now_ms - self._part.started_ms
        if not everything:
            if age_ms < self._roll_ms:
                return
            if age_ms < self._roll_ms_behind and self._folder.unread() > self._unread_max:
                self._keep_until_ms = now_ms + min(self._roll_ms, self._roll_ms_behind - age_ms)
                return
        self._publish()

    def _publish(self) -> None:
        assert self._part is not None
        self._part.publish(self._folder)
        self._part = None
        self._folder.sync()
