import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.runtime import supervisor as tested
from pipeline.runtime.supervisor import drop_sample

Wait = Callable[..., None]
Processes = Callable[[str], list]
Start = Callable[..., subprocess.Popen[bytes]]

ROOT = Path(__file__).resolve().parents[2]
SUPERVISE = """
import os, sys; from pathlib import Path; from pipeline.config import load_settings
from pipeline.runtime.process import open_standard_fds; from pipeline.runtime.supervisor import supervise
import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have ignored it, as nohup does
open_standard_fds()
root = sys.argv[1]
flags = {"local": {"state": root + "/.duetime"}, "ingest": {"input": root + "/inbox"}}
sys.exit(supervise(Path(root), load_settings(flags, os.environ)))
"""
# A job: writes down what it meets, says that it is up, and stops on SIGTERM. Its name is the script's.
JOB = """
import os, signal, sys
from pathlib import Path
name = Path(__file__).stem
print(f"{name} prints", flush=True)
def note(text):
    with open(Path(__file__).parent / "notes", "a") as notes: print(name, text, file=notes)
def stop(number, frame):
    from pipeline.runtime.server import call_server
    url = os.environ["REDIS_URL"]
    answer = call_server(url.removeprefix("unix://"), b"PING") if url.startswith("unix:") else b""
    note(f"signal {number} {answer.decode().strip()}")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note(os.environ["REDIS_URL"])
ready_fd = int(os.environ["DUETIME_READY_FD"])
os.write(ready_fd, b"1\\n"); os.close(ready_fd)
while True: signal.pause()
"""
DEAF = JOB.replace("signal.signal(signal.SIGTERM, stop)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose two jobs are stubs."""
    for folder in ("jobs", "conf"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "conf" / "sample.jsonl", tmp_path / "conf")
    for name in ("ingest", "drain"):
        (tmp_path / "jobs" / f"{name}.py").write_text(JOB)
    return tmp_path


@pytest.fixture
def start(root: Path, spawn: Start, wait_for: Wait, processes: Processes) -> Start:
    """Start the supervisor; with ``wait``, return when both jobs are up."""

    def start_supervisor(*, wait: bool = True, **environ: str) -> subprocess.Popen[bytes]:
        supervisor = spawn([sys.executable, "-c", SUPERVISE, str(root)], **environ)
        if wait:
            said = root / "stderr"
            wait_for(lambda: "ingest is up" in said.read_text() and "drain is up" in said.read_text(), "both are up")
        return supervisor

    return start_supervisor


@pytest.fixture(autouse=True)
def _no_redis_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.delenv("DUETIME_SAMPLE", raising=False)


def read_notes(root: Path) -> list[str]:
    return (root / "jobs" / "notes").read_text().splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_everything_in_order_with_exit_code_0(
    root: Path, start: Start, processes: Processes, number: int
) -> None:
    supervisor = start()
    supervisor.send_signal(number)
    assert supervisor.wait(20) == 0
    url = f"unix://{root}/.duetime/server/redis.sock"
    assert sorted(read_notes(root)) == sorted(
        f"{name} {note}" for name in ("ingest", "drain") for note in (url, "signal 15 +PONG")
    ), "both used the private server, and had it until they ended"
    assert processes("") == []


def test_stdout_is_for_what_drain_prints_alone(root: Path, start: Start) -> None:
    supervisor = start()
    supervisor.terminate()
    supervisor.wait(20)
    assert (root / "stdout").read_text() == "drain prints\n"
    assert "ingest prints\n" in (root / "stderr").read_text()


def test_the_sample_appears_whole_in_the_inbox_when_ingest_is_up(root: Path, start: Start, wait_for: Wait) -> None:
    start()
    wait_for(lambda: "Dropped sample.jsonl" in (root / "stderr").read_text(), "the sample is dropped")
    assert [path.name for path in (root / "inbox").iterdir()] == ["sample.jsonl"]
    assert (root / "inbox" / "sample.jsonl").read_bytes() == (root / "conf" / "sample.jsonl").read_bytes()


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    sample = tmp_path / "conf" / "sample.jsonl"
    sample.parent.mkdir()
    sample.write_text("ours")
    (tmp_path / "inbox").mkdir()
    return sample


def _refuse_links(*_: object) -> None:
    raise PermissionError(errno.EPERM, "this file system has none")


@pytest.mark.parametrize("links", [True, False])
def test_the_sample_replaces_nothing(
    tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], links: bool
) -> None:
    if not links:
        monkeypatch.setattr(tested.os, "link", _refuse_links)
    inbox = tmp_path / "inbox"
    (inbox / "sample.jsonl").write_text("theirs")
    (inbox / "sample-2.jsonl").symlink_to("nowhere")
    drop_sample(sample, inbox)
    assert (inbox / "sample.jsonl").read_text() == "theirs"
    assert (inbox / "sample-2.jsonl").is_symlink()
    assert sorted(path.name for path in inbox.iterdir()) == ["sample-2.jsonl", "sample-3.jsonl", "sample.jsonl"]
    assert (inbox / "sample-3.jsonl").read_text() == "ours"
    assert (inbox / "sample-3.jsonl").stat().st_nlink == 1
    assert "Dropped sample-3.jsonl into inbox/" in capsys.readouterr().err


def test_a_sample_that_finds_every_name_taken_is_one_line(
    tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tested, "SAMPLE_NAMES_MAX", 2)
    for _ in range(3):
        drop_sample(sample, tmp_path / "inbox")
    assert sorted(path.name for path in (tmp_path / "inbox").iterdir()) == ["sample-2.jsonl", "sample.jsonl"]
    assert len(capsys.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize("broken", ["inbox", "sample", "disk"])
def test_a_sample_that_cannot_be_dropped_is_one_line(
    tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    inbox = tmp_path / "inbox"
    if broken == "inbox":
        inbox.rmdir()
    elif broken == "sample":
        sample.unlink()
    else:

        def write(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(tested.os, "link", _refuse_links)
        monkeypatch.setattr(tested.os, "write", write)
    drop_sample(sample, inbox)
    (line,) = capsys.readouterr().err.splitlines()
    assert "The sample could not be dropped" in line
    assert not inbox.exists() or list(inbox.iterdir()) == []


def test_the_sample_can_be_switched_off(root: Path, start: Start) -> None:
    supervisor = start(DUETIME_SAMPLE="0")
    supervisor.terminate()
    assert supervisor.wait(20) == 0
    assert list((root / "inbox").iterdir()) == []


def test_the_users_redis_is_used_and_its_password_not_shown(root: Path, start: Start, processes: Processes) -> None:
    url = "redis://me:secret@redis.example:6379/0?password=secret"
    supervisor = start(REDIS_URL=url)
    assert processes("valkey-server") == []
    supervisor.terminate()
    assert supervisor.wait(20) == 0
    assert f"drain {url}" in read_notes(root)
    assert "secret" not in (root / "stderr").read_text()
    assert "redis://redis.example:6379/0" in (root / "stderr").read_text()


def test_no_sample_is_dropped_where_files_are_not_taken_from_a_folder(root: Path, start: Start) -> None:
    supervisor = start(DUETIME_INGEST_SOURCE="socket")
    supervisor.terminate()
    assert supervisor.wait(20) == 0
    assert not (root / "inbox").exists()


@pytest.mark.parametrize(("name", "code", "expected"), [("drain", 3, 1), ("ingest", 2, 2), ("ingest", 0, 1)])
def test_a_job_that_ends_by_itself_is_named_and_the_other_is_stopped(
    root: Path, start: Start, processes: Processes, name: str, code: int, expected: int
) -> None:
    (root / "jobs" / f"{name}.py").write_text(f"raise SystemExit({code})")
    supervisor = start(wait=False)
    assert supervisor.wait(20) == expected
    assert f"{name} ended by itself, with exit code {code}" in (root / "stderr").read_text()
    assert processes("") == []


def test_a_job_that_is_killed_is_said_to_be(root: Path, start: Start, processes: Processes) -> None:
    supervisor = start()
    processes("jobs/drain.py")[0].kill()
    assert supervisor.wait(20) == 1
    assert "drain ended by itself, by signal 9 (Killed)" in (root / "stderr").read_text()


def test_it_is_done_only_when_what_a_job_has_started_is_gone_too(
    root: Path, start: Start, processes: Processes
) -> None:
    """As Spark's JVM, which ends a moment after its Python."""
    wait = "import threading; threading.Event().wait(1.5)"
    start_other = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {wait!r}, __file__])\n"
    (root / "jobs" / "ingest.py").write_text(start_other + JOB)
    supervisor = start()
    supervisor.terminate()
    assert supervisor.wait(20) == 0
    assert processes("") == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no kernel tells the jobs")
def test_when_the_supervisor_is_killed_everything_ends_and_the_jobs_have_the_server_until_then(
    root: Path, start: Start, wait_for: Wait, processes: Processes
) -> None:
    supervisor = start()
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not processes("jobs/") and not processes("valkey-server"), "jobs, keeper and server are gone")
    assert {"ingest signal 15 +PONG", "drain signal 15 +PONG"} < set(read_notes(root))


def test_a_second_stop_signal_kills_a_job_that_does_not_stop(
    root: Path, start: Start, wait_for: Wait, processes: Processes
) -> None:
    (root / "jobs" / "ingest.py").write_text(DEAF)
    supervisor = start()
    supervisor.send_signal(signal.SIGINT)
    wait_for(lambda: not processes("jobs/drain.py"), "drain has stopped")
    assert processes("jobs/ingest.py") != []
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(20) == 0
    assert processes("") == []


def test_it_runs_with_stdin_closed(root: Path, wait_for: Wait) -> None:
    command = [sys.executable, "-c", SUPERVISE, str(root)]
    with open(root / "stderr", "wb") as stderr:
        supervisor = subprocess.Popen(
            ["bash", "-c", 'exec "$@" <&-', "-", *command],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        wait_for(lambda: "drain is up" in (root / "stderr").read_text(), "drain is up")
    finally:
        supervisor.terminate()
        assert supervisor.wait(20) == 0
