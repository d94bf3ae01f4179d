"""The command without arguments, as the README shows it."""

import gzip
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.e2e.commands import Checkout, Command, processes_of

SAMPLE_END = "That was the sample."
TIMES = {"twice": 2, "moved": 1, "copied": 1, "slow": 3, "old": 1, "future": 1, "zipped": 1, "csv": 1}


def test_the_first_command_from_start_to_second_start(checkout: Checkout) -> None:
    """One run, since each start costs seconds: sample, all ways to drop a file, stop, second start."""
    first = checkout.run()
    first.wait_for_line(SAMPLE_END)
    assert [line.split(": ", 1)[1] for line in first.lines()][-1].startswith(SAMPLE_END)

    drop_in_every_way(checkout.inbox)
    checkout.drop("later.jsonl", {"message": "after the restart", "delay_sec": 45})
    for text, times in TIMES.items():
        first.wait_for(lambda c, t=text, n=times: shown(c, t) >= n, f"{times} x {text}", 60)
    assert {
        address for address in listening_of(checkout.root) if not ipaddress.ip_address(address).is_loopback
    } == set()
    assert can_nobody_else_list(checkout.root) == {".duetime": False, "jobs": True}
    first.wait_for(lambda _: len(list((checkout.root / "rejects").glob("*.jsonl"))) >= 3, "rejects")
    assert [(r["file"], r["line"], r["reason"]) for r in checkout.rejects()] == [
        ("broken.json.gz", None, "corrupt_gzip"),
        ("folder.json", None, "is_a_directory"),
        ("mixed.jsonl", 2, "missing_due"),
    ]

    assert first.stop(signal.SIGINT) == 0, first.screen()
    assert processes_of(checkout.root) == []
    assert problems(first) == []
    assert not [p for p in checkout.inbox.rglob("*") if p.name.endswith(".tmp")]
    for text, times in TIMES.items():
        assert shown(first, text) == times, first.screen()

    second = checkout.run()
    second.wait_for_line("ingest is up", timeout_sec=90)
    copy = checkout.run()
    assert copy.end() == 2, copy.screen()
    assert "another ingest job" in copy.screen()
    assert "drain is up" not in copy.screen(), "its loop would take messages from the first one"
    second.wait_for_line("after the restart", timeout_sec=90)
    checkout.drop("second.jsonl", {"message": "second start", "delay_sec": 0})
    second.wait_for(lambda c: shown(c, "second start") == 1, "a message of the second start", 60)
    assert second.stop(signal.SIGTERM) == 0, second.screen()
    assert shown(second, "Hello! This one waited a second.") == 0, "the sample is for an empty namespace"
    assert problems(second) == []
    assert processes_of(checkout.root) == []


def listening_of(folder: Path) -> list[str]:
    """The addresses on which processes listen that run in or name a folder: some of Java do."""
    import psutil

    found = []
    for process in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            connections = psutil.Process(int(process.partition(":")[0])).net_connections("inet")
            found += [
                each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN
            ]
    assert found, "the dashboard listens, and Spark does"
    return found


def can_nobody_else_list(root: Path) -> dict[str, bool]:
    """Say which folders of a checkout another user of the machine can look into; only root can try."""
    root.chmod(0o755)
    names = (".duetime", "jobs")
    if os.geteuid() != 0:
        return {name: bool((root / name).stat().st_mode & 0o005) for name in names}
    listed = {name: subprocess.run(["ls", root / name], user=65534, capture_output=True, check=False) for name in names}
    return {name: ended.returncode == 0 for name, ended in listed.items()}


def problems(command: Command) -> list[str]:
    """Return what looks like a warning or an exception of Spark or Python; a healthy run has none."""
    return [line for _, line in command.err if re.search(r"WARN|ERROR|Exception|Traceback", line)]


def drop_in_every_way(inbox: Path) -> None:
    elsewhere = inbox.parent
    line = lambda text: json.dumps({"message": text, "delay_sec": 0}) + "\n"  # noqa: E731
    for _ in range(2):
        (elsewhere / "work").write_text(line("twice"))
        (elsewhere / "work").rename(inbox / "same.json")
        wait_until(lambda: not (inbox / "same.json").exists())
    (elsewhere / "moved.json").write_text(line("moved"))
    shutil.move(elsewhere / "moved.json", inbox / "moved.json")
    (elsewhere / "copied.json").write_text(line("copied"))
    shutil.copyfile(elsewhere / "copied.json", inbox / "copied.json")  # it may be taken at once
    with (inbox / "slow.json").open("w") as writer:
        for _ in range(3):
            writer.write(line("slow"))
            writer.flush()
            wait_until(lambda: False, 0.4)
    (elsewhere / "old.json").write_text(line("old"))
    os.utime(elsewhere / "old.json", (0, 86_400))
    (elsewhere / "old.json").rename(inbox / "old.json")
    (elsewhere / "future.json").write_text(line("future"))
    os.utime(elsewhere / "future.json", (time.time() + 10**6, time.time() + 10**6))
    (elsewhere / "future.json").rename(inbox / "future.json")
    whole = gzip.compress(line("zipped").encode() * 1)
    (inbox / "zipped.json.gz").write_bytes(whole)
    (inbox / "broken.json.gz").write_bytes(gzip.compress(os.urandom(1000))[:500])
    (inbox / "folder.json").mkdir()
    (inbox / "rows.csv").write_text("message,delay_sec\ncsv,0\n")
    (inbox / "mixed.jsonl").write_text('{"message":"fine","delay_sec":0}\n{"message":"no time"}\n\n')


def shown(command: Command, text: str) -> int:
    return sum(line.endswith(f": {text}") for line in command.lines())


def wait_until(condition, timeout_sec: float = 10) -> None:  # type: ignore[no-untyped-def]
    import threading

    deadline = time.monotonic() + timeout_sec
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.02)
