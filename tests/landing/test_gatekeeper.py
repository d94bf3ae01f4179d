import fcntl
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, SourceError
from pipeline.landing import folder as folder_module
from pipeline.landing import gatekeeper as gatekeeper_module
from pipeline.landing import inspection
from pipeline.landing.names import parse_landing_name

LINE = b'{"message":"m","delay_sec":1}\n'
NOW_MS = 1_800_000_000_000


def mtime_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


def step_until_idle(keeper, clock=None):
    reports = [keeper.step()]
    while reports[-1].busy:
        reports.append(keeper.step())
    return reports


def all_landed(reports):
    return [landed for report in reports for landed in report.landed]


def test_a_whole_file_lands_under_a_unique_name_with_its_arrival_time(folders):
    folders.drop("a b.json", LINE, NOW_MS - 7000)
    report = folders.open().step()
    (path,) = folders.landed()
    name = parse_landing_name(path.name)
    assert (name.kind, name.first_line, name.original_name) == ("json", 1, "a b.json")
    assert [(landed.file, landed.landing_name, landed.size_bytes) for landed in report.landed] == [
        ("a b.json", path.name, len(LINE))
    ]
    assert path.read_bytes() == LINE and mtime_ms(path) == NOW_MS - 7000
    assert report.idle and folders.hidden() == [] and not (folders.inbox / "a b.json").exists()


def test_files_that_were_there_before_the_start_land_in_the_order_they_were_written(folders):
    for name, age in (("a.json", 1), ("b.csv", 3), ("c.JSONL", 2)):
        folders.drop(name, LINE, NOW_MS - age * 1000)
    report = folders.open().step()
    assert [landed.file for landed in report.landed] == ["b.csv", "c.JSONL", "a.json"]
    assert [path.name for path in folders.landed()] == [landed.landing_name for landed in report.landed]


def test_a_small_csv_file_says_that_its_first_data_line_is_line_2(folders):
    folders.drop("a.csv", b"message,delay_sec\nm,1\n")
    folders.open().step()
    assert folders.lines() == [(2, b"m,1\n")]


def test_the_same_name_dropped_twice_is_two_landing_files(folders):
    keeper = folders.open()
    for text in (b"1\n", b"2\n"):
        folders.drop("a.json", text)
        keeper.step()
    assert [line for _, line in folders.lines()] == [b"1\n", b"2\n"]


def test_a_file_that_is_open_for_writing_waits_however_still_it_is(folders, clock):
    keeper = folders.open()
    writer = open(folders.inbox / "a.json", "ab", buffering=0)  # noqa: SIM115
    writer.write(b'{"mess')
    for _ in range(3):
        clock.advance_ms(10_000)
        report = keeper.step()
        assert report.waiting == 1 and not report.landed and not report.idle and 0 < report.wait_s(5) <= 0.05
    writer.write(b'age":"m","delay_sec":1}\n')
    writer.close()
    report = keeper.step()
    assert len(report.landed) == 1 and report.waiting == 0
    assert folders.lines() == [(1, LINE)]


def test_a_file_that_another_process_writes_waits(folders):
    keeper = folders.open()
    path = str(folders.inbox / "a.json")
    script = f"f = open({path!r}, 'w'); f.write('1'); f.flush(); print(); input(); f.close(); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        assert keeper.step().waiting == 1
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert len(keeper.step().landed) == 1
        process.communicate("\n")


def test_without_taking_new_files_it_goes_on_with_what_it_took(folders):
    keeper = folders.open(segment_bytes=len(LINE), slice_ms=0)
    folders.drop("a.json", LINE * 3)
    with open(folders.inbox / "written.json", "wb"):
        assert keeper.step().busy
        folders.drop("b.json", LINE)
        reports = [keeper.step(take_new=False) for _ in range(4)]
    assert not reports[-1].busy and {landed.file for landed in all_landed(reports)} == {"a.json"}
    assert [report.waiting for report in reports] == [1] * 4
    reports.append(keeper.step())
    assert "b.json" in {landed.file for landed in reports[-1].landed}


def test_append_and_close_lands_each_time_what_was_appended(folders):
    keeper = folders.open()
    for text in (b"1\n", b"2\n", b"3\n"):
        with open(folders.inbox / "a.json", "ab") as file:
            file.write(text)
        keeper.step()
    assert [line for _, line in folders.lines()] == [b"1\n", b"2\n", b"3\n"]


def test_cp_and_mv_land(folders, tmp_path):
    source = tmp_path / "source.json"
    source.write_bytes(LINE)
    keeper = folders.open()
    subprocess.run(["cp", source, folders.inbox / "copied.json"], check=True)
    subprocess.run(["mv", source, folders.inbox / "moved.json"], check=True)
    assert {landed.file for landed in keeper.step().landed} == {"copied.json", "moved.json"}


def test_a_writer_that_opens_the_file_while_it_is_claimed_holds_up_its_landing(folders, monkeypatch):
    """The last moment a name can be opened is just before the rename; the second look must see that writer."""
    folders.drop("a.json", b"1\n")
    keeper = folders.open()
    writers = []
    rename = os.rename

    def open_then_rename(source, target):
        if str(source).endswith("a.json") and not writers:
            writers.append(open(source, "ab"))  # noqa: SIM115
        rename(source, target)

    monkeypatch.setattr(gatekeeper_module.os, "rename", open_then_rename)
    report = keeper.step()
    assert report.waiting == 1 and not report.landed
    writers[0].write(b"2\n")
    writers[0].close()
    assert len(keeper.step().landed) == 1
    assert [line for _, line in folders.lines()] == [b"1\n", b"2\n"]


def test_a_claimed_file_that_is_still_written_survives_a_restart(folders, monkeypatch):
    test_a_writer_that_opens_the_file_while_it_is_claimed_holds_up_its_landing(folders, monkeypatch)
    writer = open(folders.landing / ".work-OTdaXV-------0.json.plain.b.json", "wb")  # noqa: SIM115
    folders.opened.pop().close()
    keeper = folders.open()
    assert keeper.step().waiting == 1
    writer.write(b"3\n")
    writer.close()
    assert [landed.landing_name for landed in keeper.step().landed] == ["OTdaXV-------0.1.json.b+json"]


def test_a_time_in_the_future_becomes_now_and_an_old_time_stays(folders):
    folders.drop("future.json", LINE, NOW_MS + 3_600_000)
    folders.drop("old.json", LINE, 1000)
    folders.open().step()
    assert [mtime_ms(path) for path in folders.landed()] == [1000, NOW_MS]


def test_a_future_time_that_may_not_be_changed_is_left_behind_by_copying(folders, monkeypatch):
    folders.drop("a.json", LINE, NOW_MS + 3_600_000)
    keeper = folders.open()
    utime = os.utime

    def refuse_the_original(path, **options):
        if os.fstat(path).st_mtime_ns // 1_000_000 == NOW_MS + 3_600_000:
            raise PermissionError(1, "Operation not permitted")
        utime(path, **options)

    monkeypatch.setattr(gatekeeper_module.os, "utime", refuse_the_original)
    step_until_idle(keeper)
    assert folders.lines() == [(1, LINE)]
    assert mtime_ms(folders.landed()[0]) == NOW_MS


def test_an_empty_file_lands(folders):
    folders.drop("a.json", b"")
    assert len(folders.open().step().landed) == 1


class TestWhereTheKernelCannotTell:
    @pytest.fixture(autouse=True)
    def no_leases(self, monkeypatch):
        def refuse(descriptor, command, *args):
            if command == fcntl.F_SETLEASE:
                raise PermissionError(13, "Permission denied")
            return 0

        monkeypatch.setattr("pipeline.landing.wholeness.fcntl.fcntl", refuse)

    def test_a_file_lands_when_it_has_been_still_for_the_settling_time(self, folders, clock):
        keeper = folders.open(settle_ms=1000)
        folders.drop("a.json", b"1\n")
        assert keeper.step().waiting == 1
        clock.advance_ms(999)
        assert keeper.step().waiting == 1
        folders.drop("a.json", b"1\n2\n")  # it grows: the clock starts again
        clock.advance_ms(1)
        assert keeper.step().waiting == 1
        clock.advance_ms(999)
        assert keeper.step().waiting == 1
        clock.advance_ms(1)
        report = keeper.step()
        assert len(report.landed) == 1 and report.idle

    def test_a_file_whose_writer_was_seen_to_close_it_lands_at_once(self, folders):
        folders.drop("a.json")
        keeper = folders.open(hints=Hints({"a.json": True}))
        assert len(keeper.step().landed) == 1

    def test_a_file_that_was_seen_created_and_not_closed_waits_longer(self, folders, clock):
        folders.drop("a.json")
        keeper = folders.open(hints=Hints({"a.json": False}))
        keeper.step()
        clock.advance_ms(int(inspection.OPEN_SETTLE_MS) - 1)
        assert keeper.step().waiting == 1
        clock.advance_ms(1)
        assert len(keeper.step().landed) == 1


class Hints:
    def __init__(self, known):
        self.known = known

    def closed(self, name):
        return self.known.get(name)


def test_unfinished_names_are_left_alone_and_not_reported(folders):
    names = [".a.json", "_a.json", "a.json~", "a.json.tmp", "a.json.part", "a.json.crdownload", "a.json._COPYING_"]
    for name in names:
        folders.drop(name)
    report = folders.open().step()
    assert report.idle and not report.landed and not report.ignored and not report.quarantined
    assert all((folders.inbox / name).exists() for name in names)


def test_an_unknown_type_and_a_folder_are_reported_once_for_each_change(folders, clock):
    keeper = folders.open()
    path = folders.drop("a.txt")
    (folders.inbox / "sub").mkdir()
    (folders.inbox / "sub" / "x.json").write_bytes(LINE)
    assert {(ignored.file, ignored.reason) for ignored in keeper.step().ignored} == {
        ("a.txt", "unknown_type"),
        ("sub", "is_a_directory"),
    }
    assert keeper.step().ignored == []
    os.utime(path, ns=(1, 1))
    clock.advance_ms(1000)
    assert keeper.step().ignored == []  # seen to change: it has to be still first
    clock.advance_ms(1000)
    assert [ignored.file for ignored in keeper.step().ignored] == ["a.txt"]
    assert keeper.step().ignored == [] and path.exists() and (folders.inbox / "sub" / "x.json").exists()


def put_nothing_readable(folders, what):
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
def test_what_can_not_be_read_is_put_aside_with_a_record(folders, clock, what, reason, monkeypatch):
    monkeypatch.chdir(folders.inbox)  # a socket's path may be 107 bytes long
    path = put_nothing_readable(folders, what) if what != "socket" else bind_here(folders)
    keeper = folders.open()
    assert keeper.step().waiting == 1
    clock.advance_ms(1000)
    report = keeper.step()
    (put,) = report.quarantined
    assert (put.file, put.reason) == ("x.json", reason) and report.idle
    assert not os.path.lexists(path) and os.path.lexists(put.path) and Path(put.path).parent == folders.quarantine
    (record,) = folders.rejects.glob("*.jsonl")
    assert record.name == Path(put.path).name + ".jsonl"
    assert json.loads(record.read_text()) == {
        "raw": None, "file": "x.json", "line": None, "reason": reason, "detail": put.detail, "quarantined": put.path,
    }  # fmt: skip
    assert folders.landed() == []


def bind_here(folders):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("x.json")
    return folders.inbox / "x.json"


def test_a_file_without_permission_is_put_aside_once_it_is_still(folders, clock, monkeypatch):
    folders.drop("a.json")
    keeper = folders.open()
    open_file = os.open

    def refuse(path, *args, **options):
        if str(path).endswith("a.json"):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *args, **options)

    monkeypatch.setattr(inspection.os, "open", refuse)
    assert keeper.step().waiting == 1
    clock.advance_ms(1000)
    assert [put.reason for put in keeper.step().quarantined] == ["not_readable"]


def test_what_can_not_be_moved_is_reported_once_and_the_rest_lands(folders, monkeypatch):
    folders.drop("a.json", mtime_ms=1000)
    folders.drop("b.json")
    keeper = folders.open()
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith("inbox/a.json"):
            raise PermissionError(1, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(gatekeeper_module.os, "rename", refuse)
    report = keeper.step()
    assert [(ignored.file, ignored.reason) for ignored in report.ignored] == [("a.json", "not_movable")]
    assert [landed.file for landed in report.landed] == ["b.json"]
    report = keeper.step()
    assert report.ignored == [] and report.idle


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_to_a_file_lands_as_a_copy_and_the_file_stays(folders, tmp_path, relative):
    target = tmp_path / "target.json"
    target.write_bytes(LINE)
    os.utime(target, ns=((NOW_MS - 9000) * 1_000_000,) * 2)
    (folders.inbox / "a.json").symlink_to("../target.json" if relative else target)
    step_until_idle(folders.open())
    (path,) = folders.landed()
    assert path.read_bytes() == LINE and not path.is_symlink() and mtime_ms(path) == NOW_MS - 9000
    assert target.read_bytes() == LINE and not os.path.lexists(folders.inbox / "a.json") and folders.hidden() == []


def test_a_link_whose_file_is_being_written_waits(folders, tmp_path):
    target = tmp_path / "target.json"
    (folders.inbox / "a.json").symlink_to(target)
    keeper = folders.open()
    with open(target, "wb") as writer:
        assert keeper.step().waiting == 1
        writer.write(LINE)
    step_until_idle(keeper)
    assert folders.lines() == [(1, LINE)]


def test_a_link_of_one_user_to_a_file_of_another_is_not_followed(folders, tmp_path, clock, monkeypatch):
    target = tmp_path / "secret.json"
    target.write_bytes(LINE)
    (folders.inbox / "a.json").symlink_to(target)
    stat = os.stat

    def other_owner(path, **options):
        status = list(stat(path, **options))
        status[4] += 1
        return os.stat_result(status)

    monkeypatch.setattr(inspection.os, "stat", other_owner)
    monkeypatch.setattr(inspection.os, "geteuid", lambda: 12345)
    keeper = folders.open()
    keeper.step()
    clock.advance_ms(1000)
    assert [put.reason for put in keeper.step().quarantined] == ["not_readable"]
    assert target.exists() and folders.landed() == []


def test_a_file_with_another_hard_link_lands_as_a_copy_that_nobody_else_can_change(folders, tmp_path):
    other = tmp_path / "other.json"
    other.write_bytes(LINE)
    os.link(other, folders.inbox / "a.json")
    step_until_idle(folders.open())
    other.write_bytes(b"changed\n")
    assert folders.lines() == [(1, LINE)]


@pytest.mark.parametrize("broken", ["half", "empty", "not gzip", "text after it", "bad checksum"])
def test_nothing_of_a_broken_gzip_file_lands(folders, broken):
    whole = gzip.compress(b"".join(b"%d\n" % number for number in range(20_000)))
    data = {
        "half": whole[: len(whole) // 2], "empty": b"", "not gzip": LINE, "text after it": whole + b"text",
        "bad checksum": whole[:-6] + b"xx" + whole[-4:],
    }[broken]  # fmt: skip
    (folders.inbox / "a.json.gz").write_bytes(data)
    reports = step_until_idle(folders.open(segment_bytes=1000))
    (put,) = [put for report in reports for put in report.quarantined]
    assert (put.file, put.reason) == ("a.json.gz", "corrupt_gzip")
    assert Path(put.path).read_bytes() == data
    assert folders.landed() == [] and folders.hidden() == [] and all_landed(reports) == []
    assert len(list(folders.rejects.iterdir())) == 1


def test_many_small_gzip_files_land_whole(folders):
    for number in range(50):
        folders.drop(f"{number}.json.gz", b"%d\n" % number)
    reports = step_until_idle(folders.open())
    assert sorted(int(line) for _, line in folders.lines()) == list(range(50))
    assert len(all_landed(reports)) == 50 and folders.hidden() == []


def test_a_file_that_vanishes_while_it_is_looked_at_is_nothing(folders, monkeypatch):
    path = folders.drop("a.json")
    keeper = folders.open()
    judge = keeper._inspector.judge

    def vanish(*args):
        path.unlink(missing_ok=True)
        return judge(*args)

    monkeypatch.setattr(keeper._inspector, "judge", vanish)
    report = keeper.step()
    assert report.idle and not report.landed and not report.ignored


def test_a_file_that_vanishes_between_the_look_and_the_claim_is_nothing(folders, monkeypatch):
    path = folders.drop("a.json")
    keeper = folders.open()
    claim = keeper._claim
    monkeypatch.setattr(keeper, "_claim", lambda name: (path.unlink(), claim(name)))
    report = keeper.step()
    assert report.idle and not report.landed


def test_a_second_ingest_job_is_told_who_reads_the_folder(folders):
    keeper = folders.open()
    with pytest.raises(ConfigError, match=rf"another ingest job \(pid {os.getpid()}\) reads .*inbox"):
        folders.open()
    keeper.close()
    keeper.close()
    folders.open().step()


def test_the_source_id_lasts(folders):
    keeper = folders.open()
    first = keeper.source_id
    keeper.close()
    assert folders.open().source_id == first and len(first) == 16 and int(first, 16) >= 0
    folders.opened.pop().close()
    (folders.landing / ".source-id").write_text("torn")
    with pytest.raises(ConfigError, match="damaged"):
        folders.open()
    (folders.landing / ".source-id").write_text(first)
    folders.open()  # the failed one gave the lock back


def test_a_landing_folder_on_another_file_system_is_refused(folders, monkeypatch):
    rename = os.rename

    def cross_device(source, target):
        if Path(source).parent != Path(target).parent:
            raise OSError(18, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(gatekeeper_module.os, "rename", cross_device)
    with pytest.raises(ConfigError, match="another file system"):
        folders.open()
    assert [path.name for path in folders.inbox.iterdir()] == [".landing"]


def test_an_input_folder_that_is_not_there_or_is_the_landing_folder_is_refused(folders):
    with pytest.raises(ConfigError, match="create it"):
        gatekeeper_module.Gatekeeper(folders.root / "no", folders.landing, folders.quarantine, folders.rejects)
    with pytest.raises(ConfigError, match="itself"):
        gatekeeper_module.Gatekeeper(folders.inbox, folders.inbox, folders.quarantine, folders.rejects)


def test_an_input_folder_that_goes_away_is_a_source_error(folders):
    keeper = folders.open()
    shutil.rmtree(folders.inbox)
    with pytest.raises(SourceError, match="looking for files"):
        keeper.step()


def test_a_full_disk_is_told_and_what_was_done_is_in_the_next_report(folders, monkeypatch):
    folders.drop("a.json", b"1\n", 1000)
    folders.drop("b.json.gz", b"2\n", 2000)
    keeper = folders.open()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.landing.splitter.os.fsync", full)
        patch.setattr(folder_module.LandingFolder, "sync", lambda self: None)
        with pytest.raises(SourceError, match=r"disk of .* is full: make room; landing b\.json\.gz goes on"):
            keeper.step()
        with pytest.raises(SourceError, match="full"):
            keeper.step()
    reports = step_until_idle(keeper)
    assert [landed.file for landed in all_landed(reports)] == ["a.json", "b.json.gz"]
    assert [line for _, line in folders.lines()] == [b"1\n", b"2\n"] and folders.hidden() == []


def test_a_stop_leaves_the_rest_for_the_next_step(folders):
    for number in range(600):
        folders.drop(f"{number:03}.json", b"%d\n" % number)
    keeper = folders.open()
    asked = iter([False, True, True])
    assert len(keeper.step(lambda: next(asked)).landed) == 256
    assert len(keeper.step().landed) == 344


def test_tokens_go_on_rising_after_a_restart_with_the_clock_set_back(folders, clock):
    folders.drop("a.json")
    folders.open().step()
    folders.opened.pop().close()
    clock.wall -= 3_600_000
    folders.drop("b.json")
    folders.open().step()
    assert [parse_landing_name(path.name).original_name for path in folders.landed()] == ["a.json", "b.json"]
