"""What a piece of work costs: time, CPU of our processes and of the server, memory of the data, and who else was busy."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from bench.common import Sample
from bench.server import Server

_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # guest time is counted in user already


@dataclass(frozen=True, slots=True)
class _Reading:
    wall_s: float
    client_cpu_s: float
    server_cpu_s: float
    fork_cpu_s: float
    machine_cpu_s: float


def measure(server: Server, work: Callable[[], object]) -> Sample:
    """Run ``work`` and return its sample.

    ``client_cpu_s`` is of this process and all below it: the JVM and the Python workers. ``server_cpu_s`` is the server's own,
    ``server_fork_cpu_s`` that of rewriting its file in a child. ``others_cores`` is how many cores' worth of time went to
    processes that are none of these. ``data_bytes`` is by how much the data grew.
    """
    bytes_before = server.data_bytes()
    before = _read(server)
    work()
    after = _read(server)
    wall_s = after.wall_s - before.wall_s
    client, own = after.client_cpu_s - before.client_cpu_s, after.server_cpu_s - before.server_cpu_s
    fork = after.fork_cpu_s - before.fork_cpu_s
    others = after.machine_cpu_s - before.machine_cpu_s - client - own - fork
    return {
        "wall_s": round(wall_s, 4),
        "client_cpu_s": round(client, 3),
        "server_cpu_s": round(own, 4),
        "server_fork_cpu_s": round(fork, 4),
        "others_cores": round(max(others, 0.0) / wall_s, 2),
        "data_bytes": server.data_bytes() - bytes_before,
    }


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process, its descendants, and those of them that have ended and were waited for."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # ended meanwhile
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _read(server: Server) -> _Reading:
    cpu = server.info("cpu")
    return _Reading(
        wall_s=time.monotonic(),
        client_cpu_s=tree_cpu_s(),
        server_cpu_s=cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        fork_cpu_s=cpu["used_cpu_user_children"] + cpu["used_cpu_sys_children"],
        machine_cpu_s=sum(seconds for name, seconds in psutil.cpu_times()._asdict().items() if name not in _NOT_BUSY),
    )
