"""What is dropped lands once, complete, with the time at which it arrived; what can't be ingested is kept with a reason."""

import fcntl
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core import files
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError, SourceError
from pipeline.landing import gatekeeper as gatekeeper_module
from pipeline.landing import inspection, splitter
from pipeline.landing.folder import LandingFolder
from tests.clock import ManualClock
from tests.landing.conftest import LINE, NOW_MS, Folders, mtime_ms, step_until_idle


def test_a_complete_file_lands_under_a_unique_name_with_its_arrival_time(folders: Folders) -> None:
    folders.drop("a b.json", LINE, NOW_MS - 7000)
    report = folders.open().step()
    (path,) = folders.landed()
    (name,) = folders.names()
    assert (name.kind, name.first_line, name.original_name) == ("json", 1, "a b.json")
    assert path.read_bytes() == LINE
    assert mtime_ms(path) == NOW_MS - 7000
    assert not report.busy and not report.waiting
    assert folders.hidden() == []
    assert not (folders.inbox / "a b.json").exists()


def test_files_that_were_there_before_the_start_land_in_the_order_of_their_arrival(folders: Folders) -> None:
    for name, age in (("a.json", 1), ("b.csv", 3), ("c.JSONL", 2)):
        folders.drop(name, LINE, NOW_MS - age * 1000)
    folders.open().step()
    assert folders.originals() == ["b.csv", "c.JSONL", "a.json"]


def test_a_small_csv_file_says_that_its_first_data_line_is_line_2(folders: Folders) -> None:
    folders.drop("a.csv", b"message,delay_sec\nm,1\n")
    folders.open().step()
    assert folders.lines() == [(2, b"m,1\n")]


def test_the_same_name_dropped_twice_is_two_landing_files(folders: Folders) -> None:
    gatekeeper = folders.open()
    for text in (b"1\n", b"2\n"):
        folders.drop("a.json", text)
        gatekeeper.step()
    assert [line for _, line in folders.lines()] == [b"1\n", b"2\n"]


def test_a_file_that_is_open_for_writing_waits_however_still_it_is(folders: Folders, clock: ManualClock) -> None:
    gatekeeper = folders.open()
    writer = open(folders.inbox / "a.json", "ab", buffering=0)  # noqa: SIM115
    writer.write(b'{"mess')
    for _ in range(3):
        clock.advance_ms(10_000)
        report = gatekeeper.step()
        assert report.waiting == 1 and 0 < report.wait_s(5) <= 0.05
        assert folders.landed() == []
    writer.write(b'age":"m","delay_sec":1}\n')
    writer.close()
    assert gatekeeper.step().waiting == 0
    assert folders.lines() == [(1, LINE)]


def test_a_file_that_another_process_writes_waits(folders: Folders) -> None:
    gatekeeper = folders.open()
    path = str(folders.inbox / "a.json")
    script = f"f = open({path!r}, 'w'); f.write('1'); f.flush(); print(); input(); f.close(); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        assert gatekeeper.step().waiting == 1
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        gatekeeper.step()
        assert folders.originals() == ["a.json"]
        process.communicate("\n")


def test_without_taking_new_files_it_goes_on_with_what_it_took(folders: Folders) -> None:
    gatekeeper = folders.open(segment_bytes=len(LINE), slice_ms=0)
    folders.drop("a.json", LINE * 3)
    with open(folders.inbox / "written.json", "wb"):
        assert gatekeeper.step().busy
        folders.drop("b.json", LINE)
        reports = [gatekeeper.step(take_new=False) for _ in range(4)]
    assert not reports[-1].busy
    assert set(folders.originals()) == {"a.json"}
    assert [report.waiting for report in reports] == [1] * 4
    gatekeeper.step()
    assert "b.json" in folders.originals()


def test_append_and_close_lands_each_time_what_was_appended(folders: Folders) -> None:
    gatekeeper = folders.open()
    for text in (b"1\n", b"2\n", b"3\n"):
        with open(folders.inbox / "a.json", "ab") as file:
            file.write(text)
        gatekeeper.step()
    assert [line for _, line in folders.lines()] == [b"1\n", b"2\n", b"3\n"]


def test_cp_and_mv_land(folders: Folders, tmp_path: Path) -> None:
    source = tmp_path / "source.json"
    source.write_bytes(LINE)
    gatekeeper = folders.open()
    subprocess.run(["cp", source, folders.inbox / "copied.json"], check=True)
    subprocess.run(["mv", source, folders.inbox / "moved.json"], check=True)
    gatekeeper.step()
    assert set(folders.originals()) == {"copied.json", "moved.json"}


def test_a_writer_that_opens_the_file_while_it_is_claimed_holds_up_its_landing(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last moment a name can be opened is just before the rename; the second look must see that writer."""
    folders.drop("a.json", b"1\n")
    gatekeeper = folders.open()
    writers = []
    rename = os.rename

    def open_then_rename(source, target):
        if str(source).endswith("a.json") and not writers:
            writers.append(open(source, "ab"))  # noqa: SIM115
        rename(source, target)

    monkeypatch.setattr(gatekeeper_module.os, "rename", open_then_rename)
    assert gatekeeper.step().waiting == 1
    assert folders.landed() == []
    writers[0].write(b"2\n")
    writers[0].close()
    gatekeeper.step()
    assert [line for _, line in folders.lines()] == [b"1\n", b"2\n"]


def test_a_claimed_file_that_is_still_written_survives_a_restart(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_a_writer_that_opens_the_file_while_it_is_claimed_holds_up_its_landing(folders, monkeypatch)
    for path in folders.landed():
        path.unlink()
    writer = open(folders.landing / ".work-OTdaXV-------0.1790000000123.json.plain.b.json", "wb")  # noqa: SIM115
    gatekeeper = folders.reopen()
    assert gatekeeper.step().waiting == 1
    writer.write(b"3\n")
    writer.close()
    gatekeeper.step()
    (path,) = folders.landed()
    assert path.name == "OTdaXV-------0.1.json.b+json"
    assert mtime_ms(path) == 1_790_000_000_123


def change_ms(path: Path) -> int:
    return path.stat(follow_symlinks=False).st_ctime_ns // 1_000_000


@pytest.mark.parametrize("how", ["mv", "cp -p", "while the job was down", "written"])
def test_a_file_counts_from_when_it_came_however_old_its_content(folders: Folders, tmp_path: Path, how: str) -> None:
    source, dropped = tmp_path / "export.json", folders.inbox / "a.json"
    source.write_bytes(LINE)
    os.utime(source, ns=(1_000_000_000,) * 2)
    gatekeeper = None if how == "while the job was down" else folders.open()
    subprocess.run([*(["cp", "-p"] if how == "cp -p" else ["mv"]), source, dropped], check=True)
    if how == "written":
        dropped.write_bytes(LINE)
    came_ms = change_ms(dropped)
    (gatekeeper or folders.open()).step()
    (path,) = folders.landed()
    assert mtime_ms(path) == came_ms


def test_an_old_file_that_is_moved_in_counts_from_now(folders: Folders, tmp_path: Path) -> None:
    before_ms = change_ms(folders.inbox) - 1000
    subprocess.run("touch -d '2 hours ago' f && mv f inbox/f.json", shell=True, check=True, cwd=tmp_path)
    folders.open(clock=SystemClock()).step()
    (path,) = folders.landed()
    assert before_ms <= mtime_ms(path) <= SystemClock().wall_ms()


def test_a_time_in_the_future_becomes_now(folders: Folders) -> None:
    folders.drop("future.json", LINE, NOW_MS + 3_600_000)
    folders.open().step()
    assert [mtime_ms(path) for path in folders.landed()] == [NOW_MS]


def test_the_claim_keeps_the_arrival_over_a_kill_and_a_restart(
    folders: Folders, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right after the first rename, which is itself a change of the inode, and once more before the second."""
    folders.drop("a.json", LINE, NOW_MS - 7000)
    with monkeypatch.context() as patch:
        patch.setattr(LandingFolder, "sync", raise_killed)
        with pytest.raises(KilledError):
            folders.open().step()
    (work,) = folders.hidden()
    (folders.landing / work).touch()  # whatever happens to the inode now
    clock.advance_ms(60_000)
    with monkeypatch.context() as patch:
        patch.setattr(LandingFolder, "publish", raise_killed)
        with pytest.raises(KilledError):
            folders.reopen().step()
    clock.advance_ms(60_000)
    folders.reopen().step()
    assert [mtime_ms(path) for path in folders.landed()] == [NOW_MS - 7000]


def test_the_arrival_through_a_link_is_the_later_of_the_link_and_its_file(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "late.json").write_bytes(LINE)
    os.utime(tmp_path / "late.json", ns=((NOW_MS - 9000) * 1_000_000,) * 2)
    (tmp_path / "old.json").write_bytes(LINE)
    for name in ("late.json", "old.json"):
        (folders.inbox / name).symlink_to(tmp_path / name)
    came_ms = change_ms(folders.inbox / "old.json")
    step_until_idle(folders.open())
    arrivals = {
        name.original_name: mtime_ms(path) for name, path in zip(folders.names(), folders.landed(), strict=True)
    }
    assert arrivals == {"late.json": NOW_MS - 9000, "old.json": came_ms}


class KilledError(BaseException):
    """The process dies here."""


def raise_killed(*args: object) -> None:
    raise KilledError


def test_a_future_time_that_may_not_be_changed_is_left_behind_by_copying(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.drop("a.json", LINE, NOW_MS + 3_600_000)
    gatekeeper = folders.open()
    utime = os.utime

    def refuse_the_original(path: int, **options: Any) -> None:
        if os.fstat(path).st_mtime_ns // 1_000_000 == NOW_MS + 3_600_000:
            raise PermissionError(1, "Operation not permitted")
        utime(path, **options)

    monkeypatch.setattr(inspection.os, "utime", refuse_the_original)
    step_until_idle(gatekeeper)
    assert folders.lines() == [(1, LINE)]
    assert mtime_ms(folders.landed()[0]) == NOW_MS


def test_an_empty_file_lands(folders: Folders) -> None:
    folders.drop("a.json", b"")
    folders.open().step()
    assert folders.originals() == ["a.json"]


class TestWhereTheKernelCannotTell:
    @pytest.fixture(autouse=True)
    def no_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(descriptor: int, command: int, *args: int) -> int:
            if command == fcntl.F_SETLEASE:
                raise PermissionError(13, "Permission denied")
            return 0

        monkeypatch.setattr("pipeline.landing.completeness.fcntl.fcntl", refuse)

    def test_a_file_lands_when_it_has_not_changed_for_the_quiet_period(
        self, folders: Folders, clock: ManualClock
    ) -> None:
        gatekeeper = folders.open(quiet_period_ms=1000)
        folders.drop("a.json", b"1\n")
        assert gatekeeper.step().waiting == 1
        clock.advance_ms(999)
        assert gatekeeper.step().waiting == 1
        folders.drop("a.json", b"1\n2\n")  # it grows: the clock starts again
        clock.advance_ms(1)
        assert gatekeeper.step().waiting == 1
        clock.advance_ms(999)
        assert gatekeeper.step().waiting == 1
        clock.advance_ms(1)
        assert gatekeeper.step().waiting == 0
        assert folders.originals() == ["a.json"]

    def test_a_file_whose_writer_was_seen_to_close_it_lands_at_once(self, folders: Folders) -> None:
        folders.drop("a.json")
        folders.open(hints=Hints({"a.json": True})).step()
        assert folders.originals() == ["a.json"]

    def test_a_file_that_was_seen_created_and_not_closed_waits_longer(
        self, folders: Folders, clock: ManualClock
    ) -> None:
        folders.drop("a.json")
        gatekeeper = folders.open(hints=Hints({"a.json": False}))
        gatekeeper.step()
        clock.advance_ms(int(inspection.OPEN_QUIET_PERIOD_MS) - 1)
        assert gatekeeper.step().waiting == 1
        clock.advance_ms(1)
        gatekeeper.step()
        assert folders.originals() == ["a.json"]


class Hints:
    """What a watcher would know."""

    def __init__(self, known: dict[str, bool]) -> None:
        self.known = known

    def closed(self, name: str) -> bool | None:
        return self.known.get(name)


def test_unfinished_names_are_left_alone_and_not_reported(folders: Folders) -> None:
    names = [".a.json", "_a.json", "a.json~", "a.json.tmp", "a.json.part", "a.json.crdownload", "a.json._COPYING_"]
    for name in names:
        folders.drop(name)
    report = folders.open().step()
    assert not report.waiting and not report.ignored and not report.quarantined
    assert folders.landed() == []
    assert all((folders.inbox / name).exists() for name in names)


def test_an_unknown_type_and_a_folder_are_reported_once_for_each_change(folders: Folders, clock: ManualClock) -> None:
    gatekeeper = folders.open()
    path = folders.drop("a.txt")
    (folders.inbox / "sub").mkdir()
    (folders.inbox / "sub" / "x.json").write_bytes(LINE)
    assert {(ignored.file, ignored.reason) for ignored in gatekeeper.step().ignored} == {
        ("a.txt", "unknown_type"),
        ("sub", "is_a_directory"),
    }
    assert gatekeeper.step().ignored == []
    os.utime(path, ns=(1, 1))
    clock.advance_ms(1000)
    assert gatekeeper.step().ignored == []  # seen to change: it has to be still first
    clock.advance_ms(1000)
    assert [ignored.file for ignored in gatekeeper.step().ignored] == ["a.txt"]
    assert gatekeeper.step().ignored == [] and path.exists() and (folders.inbox / "sub" / "x.json").exists()


def put_nothing_readable(folders: Folders, what: str) -> Path:
    path = folders.inbox / "x.json"
    if what == "directory":
        path.mkdir()
    elif what == "dangling link":
        path.symlink_to("nowhere.json")
    elif what == "link to itself":
        path.symlink_to("x.json")
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif what == "link to a device":
        path.symlink_to("/dev/null")
    return path


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("directory", "is_a_directory"), ("dangling link", "not_a_regular_file"), ("link to itself", "not_a_regular_file"),
        ("fifo", "not_a_regular_file"), ("socket", "not_a_regular_file"), ("link to a device", "not_a_regular_file"),
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_moved_to_quarantine_with_a_record(
    folders: Folders, clock: ManualClock, what: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders.inbox)  # a socket's path may be 107 bytes long
    path = put_nothing_readable(folders, what) if what != "socket" else bind_here(folders)
    gatekeeper = folders.open()
    assert gatekeeper.step().waiting == 1
    clock.advance_ms(1000)
    report = gatekeeper.step()
    (put,) = report.quarantined
    assert (put.file, put.reason) == ("x.json", reason)
    assert not report.waiting
    assert not os.path.lexists(path)
    assert os.path.lexists(put.path) and Path(put.path).parent == folders.quarantine
    (record,) = folders.rejects.glob("*.jsonl")
    token = Path(put.path).name.partition(".")[0]
    assert record.name == f"{utc_date(clock.wall_ms())}-x.json-{token}.jsonl"
    fields = json.loads(record.read_text())
    assert fields == {
        "file": "x.json", "line": None, "reason": reason, "detail": put.detail, "raw": None, "quarantined": put.path,
    }  # fmt: skip
    assert list(fields) == ["file", "line", "reason", "detail", "raw", "quarantined"]
    assert folders.landed() == []


def utc_date(epoch_ms: int) -> str:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).date().isoformat()


def bind_here(folders: Folders) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("x.json")
    return folders.inbox / "x.json"


def test_a_file_without_permission_is_moved_to_quarantine_after_the_quiet_period(
    folders: Folders, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.drop("a.json")
    gatekeeper = folders.open()
    open_file = os.open

    def refuse(path: str, *args: Any, **options: Any) -> int:
        if str(path).endswith("a.json"):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *args, **options)

    monkeypatch.setattr(inspection.os, "open", refuse)
    assert gatekeeper.step().waiting == 1
    clock.advance_ms(1000)
    assert [put.reason for put in gatekeeper.step().quarantined] == ["not_readable"]


def test_what_can_not_be_moved_is_reported_once_and_the_rest_lands(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.drop("a.json", mtime_ms=1000)
    folders.drop("b.json")
    gatekeeper = folders.open()
    rename = os.rename

    def refuse(source: str, target: str) -> None:
        if str(source).endswith("inbox/a.json"):
            raise PermissionError(1, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(gatekeeper_module.os, "rename", refuse)
    report = gatekeeper.step()
    assert [(ignored.file, ignored.reason) for ignored in report.ignored] == [("a.json", "not_movable")]
    assert folders.originals() == ["b.json"]
    report = gatekeeper.step()
    assert report.ignored == [] and not report.waiting


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_to_a_file_lands_as_a_copy_and_the_file_stays(folders: Folders, tmp_path: Path, relative: bool) -> None:
    target = tmp_path / "target.json"
    target.write_bytes(LINE)
    (folders.inbox / "a.json").symlink_to("../target.json" if relative else target)
    step_until_idle(folders.open())
    (path,) = folders.landed()
    assert path.read_bytes() == LINE
    assert not path.is_symlink()
    assert target.read_bytes() == LINE
    assert not os.path.lexists(folders.inbox / "a.json")
    assert folders.hidden() == []


def test_a_link_whose_file_is_being_written_waits(folders: Folders, tmp_path: Path) -> None:
    target = tmp_path / "target.json"
    (folders.inbox / "a.json").symlink_to(target)
    gatekeeper = folders.open()
    with open(target, "wb") as writer:
        assert gatekeeper.step().waiting == 1
        writer.write(LINE)
    step_until_idle(gatekeeper)
    assert folders.lines() == [(1, LINE)]


def test_a_link_of_one_user_to_a_file_of_another_is_not_followed(
    folders: Folders, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "secret.json"
    target.write_bytes(LINE)
    (folders.inbox / "a.json").symlink_to(target)
    stat = os.stat

    def other_owner(path: str, **options: Any) -> os.stat_result:
        status = list(stat(path, **options))
        status[4] += 1
        return os.stat_result(status)

    monkeypatch.setattr(inspection.os, "stat", other_owner)
    monkeypatch.setattr(inspection.os, "geteuid", lambda: 12345)
    gatekeeper = folders.open()
    gatekeeper.step()
    clock.advance_ms(1000)
    assert [put.reason for put in gatekeeper.step().quarantined] == ["not_readable"]
    assert target.exists() and folders.landed() == []


def test_a_file_with_another_hard_link_lands_as_a_copy_that_nobody_else_can_change(
    folders: Folders, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(LINE)
    os.link(other, folders.inbox / "a.json")
    step_until_idle(folders.open())
    other.write_bytes(b"changed\n")
    assert folders.lines() == [(1, LINE)]


@pytest.mark.parametrize("broken", ["half", "empty", "not gzip", "text after it", "bad checksum"])
def test_nothing_of_a_broken_gzip_file_lands(folders: Folders, broken: str) -> None:
    whole = gzip.compress(b"".join(b"%d\n" % number for number in range(20_000)))
    data = {
        "half": whole[: len(whole) // 2], "empty": b"", "not gzip": LINE, "text after it": whole + b"text",
        "bad checksum": whole[:-6] + b"xx" + whole[-4:],
    }[broken]  # fmt: skip
    (folders.inbox / "a.json.gz").write_bytes(data)
    (put,) = step_until_idle(folders.open(segment_bytes=1000))
    assert (put.file, put.reason) == ("a.json.gz", "corrupt_gzip")
    assert Path(put.path).read_bytes() == data
    assert folders.landed() == [] and folders.hidden() == []
    assert len(list(folders.rejects.iterdir())) == 1


def test_many_small_gzip_files_land_whole(folders: Folders) -> None:
    for number in range(50):
        folders.drop(f"{number}.json.gz", b"%d\n" % number)
    step_until_idle(folders.open())
    assert sorted(int(line) for _, line in folders.lines()) == list(range(50))
    assert folders.hidden() == []


def test_a_file_that_vanishes_while_it_is_looked_at_is_nothing(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folders.drop("a.json")
    gatekeeper = folders.open()
    judge = gatekeeper._inspector.judge

    def vanish(*args: Any) -> inspection.Verdict:
        path.unlink(missing_ok=True)
        return judge(*args)

    monkeypatch.setattr(gatekeeper._inspector, "judge", vanish)
    report = gatekeeper.step()
    assert not report.waiting and not report.ignored
    assert folders.landed() == []


def test_a_file_that_vanishes_between_the_look_and_the_claim_is_nothing(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folders.drop("a.json")
    gatekeeper = folders.open()
    claim = gatekeeper._claim
    monkeypatch.setattr(gatekeeper, "_claim", lambda name: (path.unlink(), claim(name)))
    assert not gatekeeper.step().waiting
    assert folders.landed() == []


def test_a_second_ingest_job_is_refused_with_the_owner_of_the_folder(folders: Folders) -> None:
    gatekeeper = folders.open()
    with pytest.raises(ConfigError, match=rf"another ingest job \(pid {os.getpid()}\) reads .*inbox"):
        folders.open()
    gatekeeper.close()
    gatekeeper.close()
    folders.open().step()


def test_the_source_id_lasts(folders: Folders) -> None:
    gatekeeper = folders.open()
    first = gatekeeper.source_id
    assert folders.reopen().source_id == first
    assert len(first) == 16 and int(first, 16) >= 0
    folders.opened.pop().close()
    (folders.landing / ".source-id").write_text("torn")
    with pytest.raises(ConfigError, match="damaged"):
        folders.open()
    (folders.landing / ".source-id").write_text(first)
    folders.open()  # the failed one gave the lock back


def test_a_landing_folder_on_another_file_system_is_refused(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def cross_device(source: str, target: str) -> None:
        if Path(source).parent != Path(target).parent:
            raise OSError(18, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(gatekeeper_module.os, "rename", cross_device)
    with pytest.raises(ConfigError, match="another file system"):
        folders.open()
    assert [path.name for path in folders.inbox.iterdir()] == [".landing"]


def test_an_input_folder_that_is_not_there_or_is_the_landing_folder_is_refused(folders: Folders) -> None:
    made = partial(
        gatekeeper_module.Gatekeeper, quarantine_dir=folders.quarantine, rejects_dir=folders.rejects, segment_bytes=1
    )
    with pytest.raises(ConfigError, match="no does not exist; make it, or correct --input"):
        made(folders.root / "no", folders.landing)
    with pytest.raises(ConfigError, match="itself"):
        made(folders.inbox, folders.inbox)


OTHER_UID = 12345


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ("a link to a folder", "is a link"),
        ("a link to nothing", "is a link"),
        ("another user's", f"belongs to another user .uid {OTHER_UID}"),
        ("open to all", "may be written by every user"),
    ],
)
def test_a_landing_folder_that_somebody_else_may_have_made_is_refused(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str, why: str
) -> None:
    if planted.startswith("a link"):
        theirs = tmp_path / "theirs"
        if planted == "a link to a folder":
            theirs.mkdir()
        folders.landing.symlink_to(theirs)
    else:
        folders.landing.mkdir()
        if planted == "another user's":
            status = folders.landing.lstat()
            theirs_status = os.stat_result((*status[:4], OTHER_UID, *status[5:]))  # only root could give it away
            lstat = os.lstat
            monkeypatch.setattr(
                files.os, "lstat", lambda path: theirs_status if path == folders.landing else lstat(path)
            )
        else:
            folders.landing.chmod(0o777)
    with pytest.raises(ConfigError, match=why):
        folders.open()
    assert not [*folders.landing.iterdir()] if folders.landing.exists() else True


def test_the_landing_folder_is_for_its_user_alone(folders: Folders) -> None:
    folders.open()
    assert folders.landing.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("before", "after"), [(0o755, 0o755), (0o775, 0o755), (0o2770, 0o2750)])
def test_a_landing_folder_of_the_same_user_goes_on_and_the_group_may_no_longer_write_it(
    folders: Folders, before: int, after: int
) -> None:
    folders.landing.mkdir()
    folders.landing.chmod(before)
    folders.drop("a.json")
    folders.open().step()
    assert folders.originals() == ["a.json"]
    assert folders.landing.stat().st_mode & 0o7777 == after


@pytest.mark.parametrize("name", [".lock", ".tmp-source-id"])
def test_a_link_in_the_place_of_a_file_of_ours_overwrites_nothing(folders: Folders, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folders.landing.mkdir(mode=0o700)
    (folders.landing / name).symlink_to(victim)
    if name == ".lock":
        with pytest.raises(ConfigError, match=r"\.lock"):
            folders.open()
    else:
        folders.open()
    assert victim.read_text() == "mine"


def test_a_segment_replaces_a_link_and_not_what_it_points_to(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folders.drop("a.json.gz", LINE)
    gatekeeper = folders.open()
    claim = gatekeeper._claim

    def claim_and_plant(name: str) -> None:
        claim(name)
        (folders.landing / f".seg-{gatekeeper._claimed[-1].token}").symlink_to(victim)

    monkeypatch.setattr(gatekeeper, "_claim", claim_and_plant)
    step_until_idle(gatekeeper)
    assert folders.lines() == [(1, LINE)] and victim.read_text() == "mine"


def test_an_input_folder_that_goes_away_is_a_source_error(folders: Folders) -> None:
    gatekeeper = folders.open()
    shutil.rmtree(folders.inbox)
    with pytest.raises(SourceError, match="looking for files"):
        gatekeeper.step()


def test_a_full_disk_is_reported_and_the_rest_is_done(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.drop("a.json", b"1\n", 1000)
    folders.drop("b.json.gz", b"2\n", 2000)
    gatekeeper = folders.open()

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(splitter.os, "fsync", full)
        patch.setattr(LandingFolder, "sync", lambda self: None)
        with pytest.raises(SourceError, match=r"disk of .* is full: make room; landing b\.json\.gz goes on"):
            gatekeeper.step()
        with pytest.raises(SourceError, match="full"):
            gatekeeper.step()
    step_until_idle(gatekeeper)
    assert folders.originals() == ["a.json", "b.json.gz"]
    assert [line for _, line in folders.lines()] == [b"1\n", b"2\n"] and folders.hidden() == []


def test_a_stop_leaves_the_rest_for_the_next_step(folders: Folders) -> None:
    for number in range(600):
        folders.drop(f"{number:03}.json", b"%d\n" % number)
    gatekeeper = folders.open()
    asked = iter([False, True, True])
    gatekeeper.step(lambda: next(asked))
    assert len(folders.landed()) == 256
    gatekeeper.step()
    assert len(folders.landed()) == 600


def test_tokens_go_on_rising_after_a_restart_with_the_clock_set_back(folders: Folders, clock: ManualClock) -> None:
    folders.drop("a.json")
    folders.open().step()
    clock.epoch_ms -= 3_600_000
    folders.drop("b.json")
    folders.reopen().step()
    assert folders.originals() == ["a.json", "b.json"]


def test_a_file_that_comes_while_the_folder_is_listed_settles_too(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, listing, waits = folders.inbox / "late.json", os.scandir, []

    def come_and_list(path: str) -> Any:
        folders.drop(late.name)
        return listing(path)

    def soon_after() -> int:
        return late.stat().st_ctime_ns // 1_000_000 + 3 if late.exists() else 0

    inspector = inspection.Inspector(folders.inbox, [], 0, None)
    monkeypatch.setattr(os, "scandir", come_and_list)
    monkeypatch.setattr(inspection, "Event", lambda: SimpleNamespace(wait=waits.append))
    assert [name for name, _ in inspector.list_entries(soon_after)] == [late.name]
    assert waits == [(inspection.SETTLE_MS - 3) / 1_000]


LIKE_MV = """
import os, pathlib, select, sys, time
for name in sys.argv[2:]:
    target = os.path.join(sys.argv[1], os.path.basename(name))
    began = time.clock_gettime(5)  # CLOCK_REALTIME_COARSE, by which Linux notes when a file changed
    os.rename(name, target)
    select.select([], [], [], 0.002)  # mv takes microseconds, if nobody takes its processor away
    is_there = os.path.lexists(target)
    print(int(is_there), time.time() - began)
"""


def test_mv_of_several_files_ends_well_while_they_are_taken(folders: Folders, tmp_path: Path) -> None:
    """GNU mv looks at each file once more after it has renamed it, and fails if it is gone."""
    gatekeeper = folders.open(clock=SystemClock())
    names = [tmp_path / f"{number}.json" for number in range(200)]
    for name in names:
        name.write_bytes(LINE)
    command = [sys.executable, "-c", LIKE_MV, str(folders.inbox), *map(str, names)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as moving:
        while moving.poll() is None:
            gatekeeper.step()
        assert moving.stdout is not None
        looks = [line.split() for line in moving.stdout]
    in_time = [is_there for is_there, took_sec in looks if float(took_sec) * 1_000 < inspection.SETTLE_MS - 1]
    assert len(looks) == 200 and len(in_time) > 20
    assert set(in_time) == {"1"}
    step_until_idle(gatekeeper)
    assert len(folders.landed()) == 200
