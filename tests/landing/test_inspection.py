"""What is not lines is found out before it lands, and what was judged can't be exchanged for something else."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.landing import gatekeeper as gatekeeper_module
from pipeline.landing import inspection
from tests.landing.conftest import LINE, Folders, step_until_idle

REQUESTS = [{"message": "m", "delay_sec": 1}, {"message": "größe", "delay_sec": 2}]
ONE_DOCUMENT = "This file is one JSON document over several lines; write one object a line."


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps(REQUESTS[0], indent=2),
        json.dumps(REQUESTS, indent=1) + "\n",
        "[\n" + ",\n".join(map(json.dumps, REQUESTS)) + "\n]\n",
        "\ufeff\r\n\n{\r\n" + json.dumps(REQUESTS[0])[1:],
    ],
    ids=["pretty-printed object", "pretty-printed array", "array of lines", "mark and blank lines first"],
)
def test_a_json_document_over_several_lines_is_one_sentence(folders: Folders, name: str, text: str) -> None:
    path = folders.drop(name, text.encode())
    content = path.read_bytes()
    (put,) = step_until_idle(folders.open())
    assert (put.file, put.reason, put.detail) == (name, "not_json_lines", ONE_DOCUMENT)
    assert Path(put.path).read_bytes() == content
    assert folders.landed() == [] and folders.hidden() == []


@pytest.mark.parametrize(
    "data",
    [
        LINE,
        LINE * 3,
        b"{\n" + LINE,
        b'{"message":\n"m"}\n' + LINE,
        json.dumps(REQUESTS).encode() + b"\n\n",
        b"[\n" * 100_000,
        b"[\n\xff\n]\n",
        b"",
        b"\n\n",
        b"[" + b" " * inspection._FIRST_LINE_BYTES_MAX + b"\n]",
    ],
    ids=[
        "a line", "lines", "a bad first line", "a document and a line", "a document in one line", "deep", "not UTF-8", "empty",
        "blank", "a long first line",
    ],
)  # fmt: skip
def test_any_other_file_is_read_line_by_line(folders: Folders, data: bytes) -> None:
    folders.drop("a.json", data)
    assert step_until_idle(folders.open()) == []
    assert [path.read_bytes() for path in folders.landed()] == [data]


def test_a_large_document_is_not_looked_through(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "DOCUMENT_BYTES_MAX", 1000)
    for name, size in (("fits.json", 1000), ("too_large.json", 1001)):
        folders.drop(name, b"[\n" + b" " * (size - 3) + b"]")
    (put,) = step_until_idle(folders.open())
    assert put.file == "fits.json"
    assert folders.originals() == ["too_large.json"]


def test_a_csv_file_is_never_a_json_document(folders: Folders) -> None:
    folders.drop("a.csv", b"[\n]\n")
    assert step_until_idle(folders.open()) == []
    assert folders.originals() == ["a.csv"]


def exchange_at_the_claim(monkeypatch: pytest.MonkeyPatch, name: str, exchange: Callable[[str], object]) -> None:
    """Exchange an entry in the last moment in which it has its old name."""
    rename = os.rename

    def exchange_then_rename(source: Any, target: Any) -> None:
        if str(source).endswith(name):
            os.unlink(source)
            exchange(source)
        rename(source, target)

    monkeypatch.setattr(gatekeeper_module.os, "rename", exchange_then_rename)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("exchange", [os.mkfifo, os.mkdir, lambda path: os.mknod(path, 0o140600)])
def test_what_is_no_file_any_more_at_the_claim_neither_blocks_nor_lands(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, exchange: Callable[[str], object], restart: bool
) -> None:
    folders.drop("a.json")
    gatekeeper = folders.open()
    with monkeypatch.context() as patch:
        exchange_at_the_claim(patch, "inbox/a.json", exchange)
        if restart:
            patch.setattr(gatekeeper, "_publish_claimed", lambda: None)
            gatekeeper.step()
        else:
            quarantined = step_until_idle(gatekeeper)
    if restart:
        quarantined = step_until_idle(folders.reopen())
    assert [put.file for put in quarantined] == ["a.json"]
    assert quarantined[0].reason in ("not_a_regular_file", "is_a_directory")
    assert folders.landed() == [] and folders.hidden() == []


@pytest.fixture
def link(folders: Folders, tmp_path: Path) -> Path:
    """A link in the input folder to ``d/f.json``, where ``d`` can be turned."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "f.json").write_bytes(LINE)
    (tmp_path / "d").symlink_to("ours")
    path = folders.inbox / "a.json"
    path.symlink_to("../d/f.json")
    return path


@pytest.mark.parametrize("restart", [False, True])
def test_a_link_that_is_turned_to_another_users_file_after_it_was_judged_is_not_read(
    folders: Folders, tmp_path: Path, link: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    (tmp_path / "theirs").mkdir()
    secret = tmp_path / "theirs" / "f.json"
    secret.write_bytes(b"secret\n")
    secret_inode, fstat = secret.stat().st_ino, os.fstat

    def theirs(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        return status if status.st_ino != secret_inode else os.stat_result([*status[:4], status[4] + 1, *status[5:10]])

    monkeypatch.setattr(inspection.os, "fstat", theirs)
    monkeypatch.setattr(inspection.os, "geteuid", lambda: 12345)
    gatekeeper = folders.open(slice_ms=0)
    monkeypatch.setattr(gatekeeper, "_write_out", lambda should_stop: None)
    gatekeeper.step()
    assert not os.path.lexists(link), "it was claimed"
    (tmp_path / "d").unlink()
    (tmp_path / "d").symlink_to("theirs")
    if restart:
        gatekeeper = folders.reopen()
    else:
        monkeypatch.setattr(gatekeeper, "_write_out", type(gatekeeper)._write_out.__get__(gatekeeper))
    (put,) = step_until_idle(gatekeeper)
    assert put.reason == "not_readable"
    assert folders.landed() == []
    assert b"secret" not in b"".join(path.read_bytes() for path in folders.rejects.glob("*.jsonl"))


@pytest.mark.parametrize("restart", [False, True])
def test_a_link_whose_file_becomes_a_pipe_after_it_was_judged_does_not_block(
    folders: Folders, tmp_path: Path, link: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    gatekeeper = folders.open()
    with monkeypatch.context() as patch:
        patch.setattr(gatekeeper, "_write_out", lambda should_stop: None)
        gatekeeper.step()
    (tmp_path / "ours" / "f.json").unlink()
    os.mkfifo(tmp_path / "ours" / "f.json")
    (put,) = step_until_idle(folders.reopen() if restart else gatekeeper)
    assert (put.file, put.reason) == ("a.json", "not_a_regular_file")
    assert folders.landed() == []


def test_a_file_that_is_exchanged_for_a_link_between_two_looks_is_not_followed(
    folders: Folders, tmp_path: Path
) -> None:
    (tmp_path / "other.json").write_bytes(LINE)
    path = folders.drop("a.json")
    status = path.lstat()
    path.unlink()
    path.symlink_to(tmp_path / "other.json")
    with pytest.raises(inspection.UnusableFile, match="replaced"):
        inspection.open_input(str(path), status)


def test_a_link_leads_to_nothing_but_files_of_its_owner_or_is_our_own(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(LINE)
    path = folders.inbox / "a.json"
    path.symlink_to(tmp_path / "f")
    of_another = os.stat_result([*path.lstat()[:4], path.lstat().st_uid + 1, *path.lstat()[5:10]])
    with pytest.raises(inspection.UnusableFile, match="different users"):
        inspection.open_input(str(path), of_another)
    os.close(inspection.open_input(str(path), path.lstat()))
