"""A wait ends when something happens in the folder; where nothing reports that, it is a poll."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.landing import watcher as watcher_module
from pipeline.landing.watcher import Watcher

linux = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Watcher]:
    made = Watcher(tmp_path)
    yield made
    made.close()


def look(watcher: Watcher, timeout_s: float) -> bool:
    """Do as the loop does."""
    changed = watcher.wait(timeout_s)
    watcher.catch_up()
    return changed


def elapsed_s(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


@linux
def test_it_waits_as_long_as_nothing_happens(watcher: Watcher) -> None:
    assert elapsed_s(lambda: watcher.wait(0.05)) >= 0.045
    assert look(watcher, 0) is False


@linux
@pytest.mark.parametrize("change", ["close", "move in", "create", "mode"])
def test_a_change_ends_the_wait_at_once(tmp_path: Path, change: str) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    path = inbox / "a.json"
    writer = open(path, "wb") if change in ("close", "mode") else None  # noqa: SIM115
    watcher = Watcher(inbox)
    do = {
        "close": lambda: writer.close(),  # noqa: PLW0108
        "move in": lambda: os.rename(outside, path), "create": lambda: os.link(outside, path),
        "mode": lambda: path.chmod(0o644),
    }[change]  # fmt: skip
    timer = threading.Timer(0.05, do)
    timer.start()
    assert look(watcher, 600) is True
    timer.join()
    assert look(watcher, 0) is False
    if writer:
        writer.close()
    watcher.close()


@linux
def test_a_change_ends_every_wait_until_it_is_noted(tmp_path: Path, watcher: Watcher) -> None:
    (tmp_path / "a.json").touch()
    assert watcher.wait(1) and watcher.wait(1)
    watcher.catch_up()
    assert watcher.wait(0) is False


@linux
def test_looking_at_a_file_does_not_wake_the_one_who_looks(tmp_path: Path, watcher: Watcher) -> None:
    (tmp_path / "a.json").touch()
    look(watcher, 0)
    (tmp_path / "a.json").read_bytes()
    (tmp_path / "a.json").rename(tmp_path.parent / "moved out")
    assert look(watcher, 0) is False


@linux
def test_it_knows_who_was_seen_to_close_a_file(tmp_path: Path, watcher: Watcher) -> None:
    assert watcher.closed("a") is None
    with open(tmp_path / "a", "wb"):
        look(watcher, 1)
        assert watcher.closed("a") is False
    look(watcher, 1)
    assert watcher.closed("a") is True


@linux
def test_when_events_are_lost_it_knows_nothing_and_goes_on(
    tmp_path: Path, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    look(watcher, 1)
    assert watcher.closed("a") is True
    flags = watcher._flags
    overflow = type("Event", (), {"mask": flags.Q_OVERFLOW, "name": ""})()
    monkeypatch.setattr(watcher._inotify, "read", lambda timeout: [overflow])
    (tmp_path / "b").touch()
    assert look(watcher, 1) is True
    assert watcher.closed("a") is None
    assert watcher._inotify is not None


def check_that_it_polls(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "POLL_S", 0.02)
    assert watcher._inotify is None
    assert look(watcher, 600) is True  # and not after so long
    assert look(watcher, 0) is True


def test_without_inotify_it_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inotify_simple", None)
    check_that_it_polls(Watcher(tmp_path), monkeypatch)


@linux
def test_when_no_watch_is_left_it_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import inotify_simple

    def no_watch(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inotify_simple.INotify, "add_watch", no_watch)
    check_that_it_polls(Watcher(tmp_path), monkeypatch)
    assert "every 200 ms" in caplog.text


@linux
def test_when_the_folder_goes_away_or_inotify_breaks_it_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inbox").mkdir()
    watcher = Watcher(tmp_path / "inbox")
    (tmp_path / "inbox").rmdir()
    assert look(watcher, 1) is True
    check_that_it_polls(watcher, monkeypatch)
    broken = Watcher(tmp_path)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), broken._inotify.fileno())
    look(broken, 0.01)
    monkeypatch.undo()
    assert broken._inotify is None
