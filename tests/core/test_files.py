"""Small files are there whole or not at all, and a lock has one owner."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core import files
from pipeline.core.files import make_private, make_writable, put_in_place, try_lock, write_whole


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_file_that_can_not_be_written_leaves_what_was_there_and_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / ".state"
    write_whole(path, b"one")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"two")
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == [".state"]


def test_a_file_takes_its_place_with_all_that_was_written(tmp_path: Path) -> None:
    with open(tmp_path / "scratch", "w") as file:
        file.write("all of it")
        put_in_place(file, tmp_path / "place")
    assert (tmp_path / "place").read_text() == "all of it" and os.listdir(tmp_path) == ["place"]


def test_a_folder_is_made_and_tried_and_left_empty(tmp_path: Path) -> None:
    for _ in range(2):
        make_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_writable(tmp_path / "file")


@pytest.mark.parametrize("write", [write_whole, lambda path, data: make_writable(path.parent)])
def test_a_link_in_the_place_of_a_scratch_file_is_not_followed(
    tmp_path: Path, write: Callable[[Path, bytes], object]
) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    folder.mkdir()
    for name in (".tmp-state", f".probe-{os.getpid()}"):
        (folder / name).symlink_to(victim)
    write(folder / "state", b"data")
    assert not victim.exists()


def test_a_folder_on_a_file_system_that_gives_every_file_another_owner_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").mkdir()
    monkeypatch.setattr(files.os, "geteuid", lambda: 12345)  # as on NFS with all_squash
    make_private(tmp_path / "ours")
    assert os.listdir(tmp_path) == ["ours"]


def test_a_lock_has_one_owner(tmp_path: Path) -> None:
    one, other = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert try_lock(one) and not try_lock(other)
    os.close(one)
    assert try_lock(other)
    os.close(other)
