"""Ports of loopback for servers that tests start."""

import fcntl
import os
import random
import socket
from pathlib import Path

BUS = 10_000  # the port of a cluster's own protocol is so much higher
# With those of the buses below the ports that the kernel gives to outgoing connections: one of these could take the port of a
# server that is not up yet, or down. A client that tries again and again could even connect to itself.
PORTS = range(12_000, 22_000)

_random = random.SystemRandom()  # no test's seed lets two processes try the same ones
_taken: set[int] = set()
# Of each port a byte of this file is locked for as long as the process lives, so no other process of tests gets it meanwhile.
_locks = os.open(Path("/tmp", f"duetime-test-ports-{os.getuid()}"), os.O_RDWR | os.O_CREAT, 0o600)


def free_port() -> int:
    """Return a port that nobody has and no other test will get, and whose neighbour for the bus of a cluster is free, too."""
    for port in _random.sample(PORTS, len(PORTS)):
        if port not in _taken and _lock(port) and _is_free(port) and _is_free(port + BUS):
            _taken.add(port)
            return port
    raise AssertionError("no port is free")


def _lock(port: int) -> bool:
    try:
        fcntl.lockf(_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that were closed lately don't matter
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
