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

import httpx

from tests.e2e.commands import Checkout, Command, processes_of
from tests.ports import free_port
from tests.waiting import wait_until

SAMPLE_END = "That was the sample."
MADE = (".duetime", "inbox", "rejects", "scratch")
TIMES = {"twice": 2, "moved": 1, "copied": 1, "slow": 3, "old": 1, "future": 1, "zipped": 1, "csv": 1}


def test_the_first_command_from_start_to_second_start(checkout: Checkout) -> None:
    """One run, since each start costs seconds: sample, all ways to drop a file, stop, second start."""
    first = checkout.run(environ={"SPARK_LOCAL_DIRS": str(checkout.root / "scratch")})
    first.wait_for_line(SAMPLE_END)
    assert [line.split(": ", 1)[1] for line in first.lines()][-1].startswith(SAMPLE_END)

    drop_in_every_way(checkout.inbox)
    checkout.drop("later.jsonl", {"message": "after the restart", "delay_sec": 45})
    for text, times in TIMES.items():
        first.wait_for(lambda c, t=text, n=times: shown(c, t) >= n, f"{times} x {text}", 60)
    assert open_to_others(checkout.root) == set()
    first.wait_for(lambda _: len(list((checkout.root / "rejects").glob("*.jsonl"))) >= 3, "rejects")
    assert [(r["file"], r["line"], r["reason"]) for r in checkout.rejects()] == [
        ("broken.json.gz", None, "corrupt_gzip"),
        ("folder.json", None, "is_a_directory"),
        ("mixed.jsonl", 2, "missing_due"),
    ]

    # What was dropped and is gone was another user's to protect; what we made is open to nobody else.
    assert readable_by_others(checkout.root) == {"jobs"}
    assert first.stop(signal.SIGINT) == 0, first.screen()
    assert processes_of(checkout.root) == []
    assert problems(first) == []
    assert not [p for p in checkout.inbox.rglob("*") if p.name.endswith(".tmp")]
    for text, times in TIMES.items():
        assert shown(first, text) == times, first.screen()

    port = free_port()
    with (checkout.root / "conf" / "spark-defaults.conf").open("a") as conf:
        conf.write(f"spark.ui.enabled true\nspark.ui.port {port}\n")
    second = checkout.run()
    second.wait_for_line("ingest is up", timeout_sec=90)
    assert httpx.get(f"http://127.0.0.1:{port}/", follow_redirects=True).status_code == 200
    assert open_to_others(checkout.root) == set(), "nor is Spark's own page, where it is switched on"
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


def open_to_others(folder: Path) -> set[str]:
    """The addresses beside loopback on which processes listen that run in or name a folder: some of Java do."""
    import psutil

    found = []
    for process in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            connections = psutil.Process(int(process.partition(":")[0])).net_connections("inet")
            found += [
                each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN
            ]
    assert found, "the dashboard listens, and Spark does"
    return {address for address in found if not ipaddress.ip_address(address).is_loopback}


def readable_by_others(root: Path) -> set[str]:
    """What another user of the machine can read, or connect to, of what a run has made, and of the project; only root can try."""
    root.chmod(0o755)
    made = [path for name in MADE for path in [root / name, *(root / name).rglob("*")]]
    assert any(path.is_socket() for path in made) and all(len(list((root / name).iterdir())) for name in MADE)
    if os.geteuid() != 0:
        return {path.name for path in (*made, root / "jobs") if path.lstat().st_mode & 0o077}
    look = 'while read -r path; do if [ -r "$path" ] || [ -w "$path" ]; then basename "$path"; fi; done'
    asked = subprocess.run(
        ["bash", "-c", look],
        user=65534,
        group=65534,
        extra_groups=[],
        input="".join(f"{path}\n" for path in (*made, root / "jobs")),
        capture_output=True,
        text=True,
        check=True,
    )
    return {*asked.stdout.splitlines()}


def problems(command: Command) -> list[str]:
    """Return what looks like a warning or an exception of Spark or Python; a healthy run has none."""
    return [line for _, line in command.err if re.search(r"WARN|ERROR|Exception|Traceback", line)]


def drop_in_every_way(inbox: Path) -> None:
    elsewhere = inbox.parent
    line = lambda text: json.dumps({"message": text, "delay_sec": 0}) + "\n"  # noqa: E731
    for _ in range(2):
        (elsewhere / "work").write_text(line("twice"))
        (elsewhere / "work").rename(inbox / "same.json")
        wait_until(lambda: not (inbox / "same.json").exists(), "same.json is taken")
    with (inbox / "slow.json").open("w") as writer:
        writer.write(line("slow"))
        writer.flush()
        (elsewhere / "moved.json").write_text(line("moved"))
        shutil.move(elsewhere / "moved.json", inbox / "moved.json")
        wait_until(
            lambda: not (inbox / "moved.json").exists(), "what is moved in is taken while another file is written"
        )
        writer.write(line("slow"))
        writer.flush()
        (elsewhere / "copied.json").write_text(line("copied"))
        shutil.copyfile(elsewhere / "copied.json", inbox / "copied.json")  # it may be taken at once
        wait_until(lambda: not (inbox / "copied.json").exists(), "and what is copied in")
        writer.write(line("slow"))
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
