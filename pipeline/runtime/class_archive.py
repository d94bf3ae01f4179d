"""An archive of Spark's classes that Java maps instead of reading them from 250 jars: a start takes a third less.

It is made once for each Java and Spark, by a run of the ingest job of its own with the lowest priority: beside the first
``./spark-submit.sh`` without arguments, or before the tests. It lies in ``.venv/share``, 170 MB; Java ignores one that doesn't fit
its jars.
"""

import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from pipeline.core.files import try_lock
from pipeline.runtime.java import Java
from pipeline.runtime.process import open_lock

log = logging.getLogger(__name__)

ARCHIVE = "DUETIME_CLASS_ARCHIVE"  # the variable that names it to Java's shim, whether it is there or not
# Set by the command that starts everything on one machine: a job by itself, as in production, starts no second Java unasked.
MAKE = "DUETIME_MAKE_CLASS_ARCHIVE"
REQUEST = '{"message": "for the archive", "delay_sec": 3600}\n'
LOWEST_PRIORITY = 19
TIMEOUT_SEC = 600  # for a machine that is busy: alone it takes 35
STOP_SEC = 5  # for what is killed to be gone
CGROUPS = Path("/sys/fs/cgroup")
MEMORY_MIN = 2 << 30  # bytes that must be free: it is a second Java with a heap of a gigabyte


def archive_environ(java: Java, spark_home: Path, conf_dir: Path, share: Path) -> dict[str, str]:
    """Return what Java's shim needs to find the archive: nothing where ``conf_dir`` must be on the class path.

    Java makes no archive of a class path with a folder in it. Spark puts its configuration there for Hadoop's files and the like;
    ours has none, and the logging is passed by its name.
    """
    for_classes = {path.name for path in conf_dir.glob("*") if path.suffix in (".xml", ".properties", ".yaml")}
    if for_classes != {"log4j2.properties"}:
        return {}
    # What Java compares before it maps an archive: its jars, and its own archive, which an update in place replaces.
    compared = sorted(
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in (*spark_home.glob("jars/*.jar"), *java.home.glob("lib/server/*.jsa"))
    )
    fits = hashlib.sha256(repr((str(java.home), java.version, str(spark_home), compared)).encode()).hexdigest()[:12]
    return {ARCHIVE: str(share / f"spark-{fits}.jsa")}


def make_archive(
    environ: Mapping[str, str], root: Path, processes: list[subprocess.Popen[bytes]] | None = None
) -> bool:
    """Make the archive that ``environ`` names, if it is not there; return whether it is there now.

    Args:
        processes: takes the process that is started, for somebody who may want to end it.
    """
    archive = Path(environ.get(ARCHIVE, ""))
    if archive.is_file() or not environ.get(ARCHIVE) or _free_memory() < MEMORY_MIN:
        return archive.is_file()
    lock = open_lock(archive.with_suffix(".lock"))
    try:
        if not try_lock(lock):
            return False  # somebody else makes it
        with TemporaryDirectory(prefix="duetime-", ignore_cleanup_errors=True) as folder:
            made = archive.with_suffix(".new")
            process = _start(environ, root, Path(folder), made)
            if processes is not None:
                processes.append(process)
            try:
                said, _ = process.communicate(timeout=TIMEOUT_SEC)  # Java has the same stdout, and writes as it ends
            finally:
                kill(process)
        if process.returncode == 0 and made.exists():
            made.chmod(0o644)  # it is of Spark alone, and for all who use this environment
            made.replace(archive)
            for other in set(archive.parent.glob("spark-*.jsa")) - {archive}:
                other.unlink(missing_ok=True)
        else:
            log.debug("no archive of Spark's classes was made: %s", said.decode(errors="replace")[-500:])
    finally:
        os.close(lock)
    return archive.is_file()


def _start(environ: Mapping[str, str], root: Path, folder: Path, made: Path) -> "subprocess.Popen[bytes]":
    """Start a job that has nothing to do with any other: settings, a server and an inbox of its own."""
    inbox, settings = folder / "inbox", folder / "settings.toml"
    inbox.mkdir()
    (inbox / "one.jsonl").write_text(REQUEST, encoding="utf-8")
    settings.touch()
    kept = {name: environ[name] for name in ("PATH", "HOME", "JAVA_HOME", "TMPDIR") if name in environ}
    own = {
        "DUETIME_CONFIG": str(settings),
        "DUETIME_LOCAL_STATE": str(folder / "state"),
        "DUETIME_INGEST_INPUT": str(inbox),
        "DUETIME_INGEST_REJECTS": str(folder / "rejects"),
        "PYTHONPATH": str(root),
        "SPARK_SUBMIT_OPTS": f"-XX:ArchiveClassesAtExit={made} -Xlog:disable",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeline.runtime.submit", str(root / "jobs" / "ingest.py"), "--once"],
        env=kept | own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)
    return process


@contextmanager
def archive_made_beside(root: Path) -> Iterator[None]:
    """Make the archive in the background while the block runs, if ``MAKE`` asks for it; given up at the block's end."""
    if not os.environ.get(MAKE):
        yield
        return
    processes: list[subprocess.Popen[bytes]] = []

    def make() -> None:
        try:
            make_archive(os.environ, root, processes)
        except (OSError, subprocess.SubprocessError):
            log.debug("no archive of Spark's classes was made", exc_info=True)

    thread = Thread(target=make, name="class-archive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for _ in range(STOP_SEC * 10):
            for process in processes:
                kill(process)
            thread.join(0.1)
            if not thread.is_alive():
                break


def kill(process: "subprocess.Popen[bytes]") -> None:
    """End it and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _free_memory() -> int:
    """Return the bytes that are free for us without swapping; where Linux doesn't say it, as many as are needed."""
    free = [MEMORY_MIN]
    with suppress(OSError, ValueError, IndexError):
        [line] = (
            line for line in Path("/proc/meminfo").read_text("ascii").splitlines() if line.startswith("MemAvailable:")
        )
        free = [int(line.split()[1]) * 1024]
    with suppress(
        OSError, ValueError, IndexError
    ):  # a container, or a service of systemd, may have less than the machine
        group = CGROUPS / Path("/proc/self/cgroup").read_text("utf-8").splitlines()[-1].split(":", 2)[2].lstrip("/")
        free.append(int((group / "memory.max").read_text("ascii")) - int((group / "memory.current").read_text("ascii")))
    return min(free)
