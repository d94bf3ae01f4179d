import os
import subprocess
import sys

import pytest

from pipeline.landing.wholeness import Stillness, Writers, leases_tell, writers_of

BREAK_A_LEASE = """
import fcntl, os, signal, sys
from pipeline.landing import wholeness
path, safe = sys.argv[1], sys.argv[2] == "safe"
real = fcntl.fcntl
def fcntl_with_a_writer_in_between(descriptor, command, *args):
    if command == fcntl.F_SETSIG and not safe:
        return 0
    if command == fcntl.F_SETLEASE and args[0] == fcntl.F_UNLCK:
        if os.fork() == 0:
            try:
                os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except BlockingIOError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 7, "the lease was not broken"
    return real(descriptor, command, *args)
wholeness.fcntl.fcntl = fcntl_with_a_writer_in_between
print(wholeness.writers_of(os.open(path, os.O_RDONLY)).value)
"""


def break_a_lease(path, how):
    return subprocess.run(
        [sys.executable, "-c", BREAK_A_LEASE, str(path), how], check=False, capture_output=True, text=True, timeout=20
    )


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_a_lease_that_is_broken_while_we_hold_it_does_not_kill_us(tmp_path):
    path = tmp_path / "a"
    path.touch()
    done = break_a_lease(path, "safe")
    assert (done.returncode, done.stdout) == (0, "none\n"), done.stderr
    assert break_a_lease(path, "unsafe").returncode < 0, "control: without the other signal it does"


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_the_kernel_tells_whether_anybody_writes(tmp_path):
    path = tmp_path / "a"
    writer = open(path, "wb")  # noqa: SIM115
    reader = os.open(path, os.O_RDONLY)
    other_reader = os.open(path, os.O_RDONLY)
    assert writers_of(reader) is Writers.SOME
    writer.close()
    assert writers_of(reader) is Writers.NONE
    with open(path, "ab"):
        assert writers_of(reader) is Writers.SOME
    os.close(reader)
    os.close(other_reader)


def test_without_leases_it_is_unknown(tmp_path, monkeypatch):
    monkeypatch.delattr("pipeline.landing.wholeness.fcntl.F_SETLEASE")
    assert writers_of(0) is Writers.UNKNOWN


@pytest.mark.parametrize(
    ("path", "tells"),
    [
        ("/inbox/a", True),
        ("/mnt/share/a", False),
        ("/mnt/share/fast/a", True),
        ("/mnt/sharp", True),
        ("/mnt/with space/x", False),
    ],
)
def test_leases_are_trusted_on_file_systems_that_only_this_kernel_writes(tmp_path, path, tells):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:1 / /mnt/share rw shared:2 - nfs4 server:/x rw\n"
        "24 23 0:2 / /mnt/share/fast rw - tmpfs tmpfs rw\n"
        "25 22 0:3 / /mnt/with\\040space rw - fuse.x x rw\n"
    )
    assert leases_tell(path, str(mounts)) is tells
    assert leases_tell(path, str(tmp_path / "none")) is False


def test_stillness_is_lost_with_every_change_and_kept_over_a_rename(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"1")
    still = Stillness(1000)
    assert not still.is_still("a", path.stat(), 0)
    assert not still.is_still("a", path.stat(), 999)
    assert still.is_still("a", path.stat(), 1000)
    os.utime(path, ns=(5, 5))
    assert not still.is_still("a", path.stat(), 1001)
    still.carry_over("a", "b")
    assert still.is_still("b", path.stat(), 1002)
    path.write_bytes(b"12")
    assert not still.is_still("b", path.stat(), 1003)
    still.forget_all_but(set())
    assert not still.is_still("b", path.stat(), 9999)
