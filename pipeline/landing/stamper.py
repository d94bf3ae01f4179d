"""Makes stamped lines of a byte stream, wherever its packets end."""

import logging

log = logging.getLogger(__name__)


class LineStamper:
    """Puts the time of arrival before each line: ``<epoch ms>\\t<line>\\n``.

    Args:
        name: where the lines come from, for the log.

        line_bytes_max: longer lines are cut. What is fed at once must not be longer, so that only a line begun before
            can be too long.
    """

    def __init__(self, name: str, line_bytes_max: int):
        self._name = name
        self._line_bytes_max = line_bytes_max
        self._begun = bytearray()  # the line whose end has not come yet
        self._dropped = 0  # bytes of it that were not kept
        self.cut = 0
        """How many lines have lost their end."""

    @property
    def has_begun(self) -> bool:
        """Whether the end of a line is outstanding."""
        return bool(self._begun)

    def feed(self, data: bytes, arrival_ms: int) -> bytes:
        """Return the lines that end in ``data``, and keep the beginning of the next one."""
        first_end = data.find(b"\n")
        if first_end < 0:
            self._begin(data)
            return b""
        last_end = data.rfind(b"\n")
        stamp = b"%d\t" % arrival_ms
        self._begin(data[:first_end])
        lines = stamp + bytes(self._begun) + b"\n"
        if last_end > first_end:
            lines += stamp + data[first_end + 1 : last_end].replace(b"\n", b"\n" + stamp) + b"\n"
        self._finish()
        self._begin(data[last_end + 1 :])
        return lines

    def end(self, arrival_ms: int) -> bytes:
        """Return what has no line end as a line; nothing if there is nothing."""
        if not self._begun:
            return b""
        line = b"%d\t%b\n" % (arrival_ms, bytes(self._begun))
        self._finish()
        return line

    def _begin(self, piece: bytes) -> None:
        room = self._line_bytes_max - len(self._begun)
        self._begun += piece[:room]
        self._dropped += max(0, len(piece) - room)

    def _finish(self) -> None:
        if self._dropped:
            log.warning(
                "A line of %d bytes from %s was cut to %d; it will be rejected.",
                len(self._begun) + self._dropped, self._name, len(self._begun),
            )  # fmt: skip
            self.cut += 1
            self._dropped = 0
        self._begun.clear()
