"""Another client of the server: ``python -m bench.pinger SOCKET`` sends PING a thousand times a second until its input ends.

Then it prints how long each took, as JSON: pairs of the time at which it was sent (epoch ms) and microseconds. It does not wait for
a reply before it sends the next: a server that is blocked for a second is asked a thousand times meanwhile, and each one counts.
"""

import json
import select
import socket
import sys
import time
from collections import deque

from pipeline.cli import announce_ready

INTERVAL_NS = 1_000_000
REPLY_SEC_MAX = 60.0
REPLY = b"+PONG\r\n"


def ping_until_end(path: str) -> list[tuple[float, float]]:
    """Return (time it was sent, microseconds) of each PING."""
    samples: list[tuple[float, float]] = []
    sent: deque[int] = deque()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REPLY_SEC_MAX)
        connection.connect(path)
        announce_ready()
        offset_ns = time.time_ns() - time.monotonic_ns()
        planned_ns, rest, is_over = time.monotonic_ns(), b"", False
        while not is_over or sent:
            now_ns = time.monotonic_ns()
            if now_ns >= planned_ns and not is_over:
                sent.append(now_ns)
                connection.sendall(b"PING\r\n")
                planned_ns = (
                    max(planned_ns, now_ns - INTERVAL_NS) + INTERVAL_NS
                )  # what this process overslept is left out
            wait_sec = REPLY_SEC_MAX if is_over else max(planned_ns - time.monotonic_ns(), 0) / 1e9
            readable = select.select([connection] if is_over else [connection, sys.stdin], [], [], wait_sec)[0]
            if connection in readable:
                rest += connection.recv(1 << 16)
                replied_ns = time.monotonic_ns()
                while rest.startswith(REPLY):
                    rest = rest.removeprefix(REPLY)
                    sent_ns = sent.popleft()
                    samples.append(((sent_ns + offset_ns) / 1e6, (replied_ns - sent_ns) / 1e3))
                if not REPLY.startswith(rest):
                    raise RuntimeError(f"The server answered {rest!r} to PING.")
            is_over = is_over or sys.stdin in readable
    return samples


if __name__ == "__main__":
    json.dump(ping_until_end(sys.argv[1]), sys.stdout)
    print()
