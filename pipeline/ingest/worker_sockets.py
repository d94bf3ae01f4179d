"""The folder of the unix sockets over which Spark's Python workers talk to Java, and the settings that make them do so.

Over TCP the pieces of a small batch wait for acknowledgements that the other side delays, 40 ms each. Who may open the folder
may talk to the workers, so it is for our user alone. It is short, as the path of a socket is limited, and goes with the job.
"""

import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Final

from pyspark import SparkConf

from pipeline.core.files import try_lock

PREFIX: Final = "duetime-workers-"
PATH_BYTES_MAX: Final = 60  # Spark refuses 61: what a socket's name adds has to fit into macOS's 104
TRIES: Final = 3
ENABLED: Final = "spark.python.unix.domain.socket.enabled"
FOLDER: Final = "spark.python.unix.domain.socket.dir"
DAEMON: Final = "spark.python.daemon.module"
SPARKS_SWITCH: Final = "PYSPARK_UDS_MODE"  # the variable from which Spark takes whether they are enabled


def settings_for(folder: Path, given: SparkConf) -> dict[str, str]:
    """Return Spark's settings for workers that talk over sockets in ``folder``, and are quiet when they are cut off.

    None where executors are on other machines, or where whoever starts the job has set one of them.
    """
    ours = {ENABLED: "true", FOLDER: str(folder), DAEMON: "pipeline.ingest.quiet_daemon"}
    is_local = re.match(r"local(\[|$)", given.get("spark.master", "")) is not None
    return ours if is_local and SPARKS_SWITCH not in os.environ and not any(map(given.contains, ours)) else {}


@contextmanager
def socket_folder(places: Sequence[str] = ()) -> Iterator[Path | None]:
    """Have a private folder while the block lasts; None if no place has room for a short one, so that TCP is what is left.

    Folders that jobs have left which were killed are removed: their locks are free.

    Args:
        places: where to look, in order; by default the folder for temporary files, then /tmp.
    """
    held: int | None = None
    folder: Path | None = None
    for place in places or (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(place)) + 1 + len(PREFIX) + 8 > PATH_BYTES_MAX:
            continue
        with suppress(OSError):
            _remove_left(Path(place))
            folder, held = _make(Path(place))
            break
    try:
        yield folder
    finally:
        if folder is not None and held is not None:
            rmtree(folder, ignore_errors=True)
            os.close(held)


def _make(place: Path) -> tuple[Path, int]:
    """Make a folder and lock it; return it and the descriptor that holds the lock.

    Raises:
        OSError: it can't be made or locked there.
    """
    for _ in range(TRIES):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        held = -1
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            if try_lock(held) and folder.exists():
                return folder, held
        except FileNotFoundError:
            pass
        except OSError:
            folder.rmdir()
            raise
        if held >= 0:
            os.close(held)  # another job has just taken it for one that was left
    raise FileNotFoundError(f"folders in {place} vanish")


def _remove_left(place: Path) -> None:
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if try_lock(lock):
                    rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
