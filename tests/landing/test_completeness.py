"""The kernel knows who writes a file; where it does not, a file must not change for a while."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.landing.completeness import Stability, Writers, leases_are_reliable, writers_of

BREAK_A_LEASE = """
import fcntl, os, signal, sys
from pipeline.landing import completeness
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
completeness.fcntl.fcntl = fcntl_with_a_writer_in_between
print(completeness.writers_of(os.open(path, os.O_RDONLY)).value)
"""


def break_a_lease(path: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BREAK_A_LEASE, str(path), how], check=False, capture_output=True, text=True, timeout=60
    )


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_a_lease_that_is_broken_while_we_hold_it_does_not_kill_us(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    done = break_a_lease(path, "safe")
    assert (done.returncode, done.stdout) == (0, "none\n"), done.stderr
    assert break_a_lease(path, "unsafe").returncode < 0, "control: without the other signal it does"


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_the_kernel_knows_whether_anybody_writes(tmp_path: Path) -> None:
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


def test_without_leases_it_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pipeline.landing.completeness.fcntl.F_SETLEASE")
    assert writers_of(0) is Writers.UNKNOWN


@pytest.mark.parametrize(
    ("path", "reliable"),
    [
        ("/inbox/a", True),
        ("/mnt/share/a", False),
        ("/mnt/share/fast/a", True),
        ("/mnt/sharp", True),
        ("/mnt/with space/x", False),
    ],
)
def test_leases_are_trusted_on_file_systems_that_only_this_kernel_writes(tmp_path: Path, path: str, reliable: bool):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:1 / /mnt/share rw shared:2 - nfs4 server:/x rw\n"
        "24 23 0:2 / /mnt/share/fast rw - tmpfs tmpfs rw\n"
        "25 22 0:3 / /mnt/with\\040space rw - fuse.x x rw\n"
    )
    assert leases_are_reliable(path, str(mounts)) is reliable
    assert leases_are_reliable(path, str(tmp_path / "none")) is False


def test_stability_is_lost_with_every_change_and_kept_over_a_rename(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1")
    seen = Stability(1000)
    assert not seen.is_stable("a", path.stat(), 0)
    assert not seen.is_stable("a", path.stat(), 999)
    assert seen.is_stable("a", path.stat(), 1000)
    os.utime(path, ns=(5, 5))
    assert not seen.is_stable("a", path.stat(), 1001)
    seen.carry_over("a", "b")
    assert seen.is_stable("b", path.stat(), 1002)
    path.write_bytes(b"12")
    assert not seen.is_stable("b", path.stat(), 1003)
    seen.forget_all_but(set())
    assert not seen.is_stable("b", path.stat(), 9999)
