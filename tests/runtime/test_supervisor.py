import hashlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.text import utc_text
from pipeline.runtime import supervisor
from pipeline.runtime.server import PrivateServer, call_server, private_server
from pipeline.runtime.supervisor import drop_sample
from pipeline.web.access import read_tokens

Wait = Callable[..., None]
Processes = Callable[[str], list]
Start = Callable[..., subprocess.Popen[bytes]]

ROOT = Path(__file__).resolve().parents[2]
SUPERVISE = """
import os, sys; from pathlib import Path; from pipeline.config import load_settings
from pipeline.runtime.process import open_standard_fds; from pipeline.runtime import supervisor
supervisor.REPORT_S = float(os.environ.get("REPORT_S", supervisor.REPORT_S))
import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have ignored it, as nohup does
open_standard_fds()
root = sys.argv[1]
flags = {"local": {"state": root + "/.duetime"}, "ingest": {"input": root + "/inbox"}}
sys.exit(supervisor.supervise(Path(root), load_settings(flags, os.environ)))
"""
# A job: writes down what it meets, says that it is up, and stops on SIGTERM. Its name is the script's.
JOB = """
import os, signal, sys
from pathlib import Path
name = Path(__file__).stem
if name == "ingest": Path(__file__).parents[1].joinpath("inbox").mkdir(exist_ok=True)
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
os.write(ready_fd, b"open\\n")
os.write(ready_fd, b"up\\n")
while True: signal.pause()
"""
DEAF = JOB.replace("signal.signal(signal.SIGTERM, stop)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose jobs are stubs."""
    for folder in ("jobs", "conf"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "conf" / "sample.jsonl", tmp_path / "conf")
    for name in ("ingest", "drain", "hydrate", "serve"):
        (tmp_path / "jobs" / f"{name}.py").write_text(JOB)
    return tmp_path


@pytest.fixture
def start(root: Path, spawn: Start, wait_for: Wait, processes: Processes) -> Start:
    """Start the supervisor; with ``wait``, return when all jobs are up."""

    def start_supervisor(*, wait: bool = True, **environ: str) -> subprocess.Popen[bytes]:
        supervisor = spawn([sys.executable, "-c", SUPERVISE, str(root)], **environ)
        if wait:
            words = r"ingest is up.*^(Dashboard: |There is no dashboard: )"
            said = root / "stderr"
            wait_for(
                lambda: re.search(words, said.read_text(), re.M | re.S) and "drain is up" in said.read_text(), "all are"
            )
        return supervisor

    return start_supervisor


@pytest.fixture(autouse=True)
def _no_redis_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.delenv("DUETIME_SAMPLE", raising=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "shown"),
    [(io.StringIO(), "5 s\n10 s\nup\n"), (Terminal(), "\x1b[K5 s\r\x1b[K10 s\r\x1b[Kup\n")],
)
def test_how_long_a_start_takes_is_one_line_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, shown: str
) -> None:
    monkeypatch.setattr(supervisor.sys, "stderr", stderr)
    supervisor.say("5 s", stays=False)
    supervisor.say("10 s", stays=False)
    supervisor.say("up")
    assert stderr.getvalue() == shown


def test_a_message_covers_the_line_that_does_not_stay() -> None:
    """A start may deliver what came due before; the drain loop writes to the same terminal and erases nothing."""
    assert len(supervisor.progress_line(999)) <= len(f"{utc_text(0)}: ")


def read_notes(root: Path) -> list[str]:
    return (root / "jobs" / "notes").read_text().splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_everything_in_order_with_exit_code_0(
    root: Path, start: Start, processes: Processes, number: int
) -> None:
    supervisor = start()
    supervisor.send_signal(number)
    assert supervisor.wait(60) == 0
    url = f"unix://{root}/.duetime/server/redis.sock"
    assert sorted(read_notes(root)) == sorted(
        f"{name} {note}" for name in ("ingest", "drain", "serve") for note in (url, "signal 15 +PONG")
    ), "all used the private server, and had it until they ended"
    assert processes("") == []


def test_with_a_cold_folder_messages_are_brought_back_as_well(root: Path, start: Start, wait_for: Wait) -> None:
    supervisor = start(DUETIME_COLD_FOLDER=str(root / "cold"))
    wait_for(lambda: "hydrate is up" in (root / "stderr").read_text(), "hydrate is")
    supervisor.terminate()
    assert supervisor.wait(60) == 0
    assert {note.partition(" ")[0] for note in read_notes(root)} == {"ingest", "drain", "hydrate", "serve"}


SETTINGS = "note(' '.join(os.environ['DUETIME_API_' + name] for name in ('HOST', 'PORT', 'TOKENS')) + f' {os.nice(0)}')"
SERVE = JOB.replace("note(os.environ", f"{SETTINGS}\nnote(os.environ")


def test_the_dashboard_is_for_who_has_started_it_alone(root: Path, start: Start, wait_for: Wait) -> None:
    (root / "jobs" / "serve.py").write_text(SERVE)
    tokens = root / ".duetime" / "dashboard.tokens"
    tokens.parent.mkdir()
    tokens.write_text("of the start before")
    tokens.chmod(0o644)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        taken_port = taken.getsockname()[1]
        start(DUETIME_API_PORT=str(taken_port), DUETIME_API_HOST="0.0.0.0")
    wait_for(lambda: "Dashboard: " in (root / "stderr").read_text(), "its address is printed")
    address = r"^Dashboard: http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32})$"
    [(port, token)] = re.findall(address, (root / "stderr").read_text(), re.M)
    assert int(port) != taken_port
    assert tokens.stat().st_mode & 0o777 == 0o600
    assert token not in tokens.read_text()
    [(digest, caller)] = read_tokens(str(tokens))
    assert digest == hashlib.sha256(token.encode()).hexdigest()
    assert caller.rights == {"schedule", "read", "operate"}
    assert f"serve 127.0.0.1 {port} {tokens} 10" in read_notes(root)


def test_messages_go_on_without_a_dashboard(root: Path, start: Start, wait_for: Wait, processes: Processes) -> None:
    said = root / "stderr"
    supervisor = start()
    processes("jobs/serve.py")[0].kill()
    wait_for(lambda: "There is no dashboard" in said.read_text(), "it is said")
    assert "it ended by signal 9 (Killed)" in said.read_text()
    assert processes("jobs/drain.py") and processes("jobs/ingest.py")
    supervisor.terminate()
    assert supervisor.wait(60) == 0
    assert said.read_text().count("There is no dashboard") == 1


@pytest.mark.parametrize("trouble", ["none", "fails", "no file"])
def test_a_dashboard_that_does_not_start_is_one_line(root: Path, start: Start, trouble: str) -> None:
    if trouble == "none":
        (root / "jobs" / "serve.py").unlink()
    elif trouble == "fails":
        (root / "jobs" / "serve.py").write_text("raise SystemExit(2)")
    else:
        (root / ".duetime" / "dashboard.tokens").mkdir(parents=True)
    supervisor = start()
    supervisor.terminate()
    assert supervisor.wait(60) == 0
    [line] = [line for line in (root / "stderr").read_text().splitlines() if "There is no dashboard: " in line]
    assert line.endswith("Messages go on without it.")


def test_what_the_jobs_make_is_for_their_user_alone(root: Path, start: Start) -> None:
    """In a checkout and a state folder that others may enter."""
    root.chmod(0o755)
    (root / ".duetime").mkdir(mode=0o755)
    supervisor = start()
    supervisor.terminate()
    assert supervisor.wait(60) == 0
    made = [*(root / ".duetime").iterdir(), root / "inbox", root / "inbox" / "sample.jsonl"]
    assert len(made) >= 3
    assert [path.name for path in made if path.stat().st_mode & 0o077] == []


def test_stdout_is_for_what_drain_prints_alone(root: Path, start: Start) -> None:
    supervisor = start()
    supervisor.terminate()
    supervisor.wait(60)
    assert (root / "stdout").read_text() == "drain prints\n"
    assert "ingest prints\n" in (root / "stderr").read_text()


def test_the_sample_appears_whole_in_the_inbox_when_ingest_is_up(root: Path, start: Start, wait_for: Wait) -> None:
    start()
    wait_for(lambda: "Dropped sample.jsonl" in (root / "stderr").read_text(), "the sample is dropped")
    assert [path.name for path in (root / "inbox").iterdir()] == ["sample.jsonl"]
    assert (root / "inbox" / "sample.jsonl").read_bytes() == (root / "conf" / "sample.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("command", "namespace", "dropped"),
    [
        ("ZADD {duetime:0}:buckets 0 0", "duetime", False),
        ("HSET {duetime:0}:counters stored 1", "duetime", False),
        ("HSET {duetime:0}:counters stored 1", "other", True),
        ("HSET {duetime:0}:meta shards 1", "duetime", True),  # a start that was stopped before anything was stored
    ],
)
def test_the_sample_is_dropped_only_while_the_namespace_has_never_held_a_message(
    root: Path, start: Start, command: str, namespace: str, dropped: bool
) -> None:
    with private_server(root / ".duetime"):
        assert call_server(PrivateServer(root / ".duetime").socket, command.encode()) == b":1\r\n"
    supervisor = start(DUETIME_REDIS_NAMESPACE=namespace)
    supervisor.terminate()
    assert supervisor.wait(60) == 0
    assert [path.name for path in (root / "inbox").iterdir()] == ["sample.jsonl"] * dropped


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    sample = tmp_path / "conf" / "sample.jsonl"
    sample.parent.mkdir()
    sample.write_text("ours")
    (tmp_path / "inbox").mkdir()
    return sample


@pytest.mark.parametrize("trouble", ["inbox", "sample", "taken"])
def test_a_sample_that_cannot_be_dropped_is_one_line_and_replaces_nothing(
    tmp_path: Path, sample: Path, capsys: pytest.CaptureFixture[str], trouble: str
) -> None:
    inbox = tmp_path / "inbox"
    if trouble == "inbox":
        inbox.rmdir()
    elif trouble == "sample":
        sample.unlink()
    else:
        (inbox / "sample.jsonl").write_text("theirs")
    drop_sample(sample, inbox)
    (line,) = capsys.readouterr().err.splitlines()
    assert "The sample could not be dropped" in line
    assert [path.read_text() for path in tmp_path.glob("inbox/*")] == ["theirs"] * (trouble == "taken")


def test_the_sample_can_be_switched_off(root: Path, start: Start) -> None:
    supervisor = start(DUETIME_SAMPLE="0")
    supervisor.terminate()
    assert supervisor.wait(60) == 0
    assert list((root / "inbox").iterdir()) == []


def test_the_users_redis_is_used_gets_no_sample_and_its_password_is_not_shown(
    root: Path, start: Start, processes: Processes
) -> None:
    url = "redis://me:secret@redis.example:6379/0?password=secret"
    supervisor = start(REDIS_URL=url)
    assert processes("valkey-server") == []
    supervisor.terminate()
    assert supervisor.wait(60) == 0
    assert f"drain {url}" in read_notes(root)
    assert "secret" not in (root / "stderr").read_text()
    assert "redis://me:***@redis.example:6379/0?password=***\n" in (root / "stderr").read_text()
    assert list((root / "inbox").iterdir()) == []


def test_no_sample_is_dropped_where_files_are_not_taken_from_a_folder(root: Path, start: Start) -> None:
    supervisor = start(DUETIME_INGEST_SOURCE="socket")
    supervisor.terminate()
    assert supervisor.wait(60) == 0
    assert list((root / "inbox").iterdir()) == []


def test_drain_is_not_started_when_ingest_does_not_get_its_input(root: Path, start: Start) -> None:
    """As a second copy, which would else take messages from the first for some seconds."""
    (root / "jobs" / "ingest.py").write_text("raise SystemExit(2)")
    supervisor = start(wait=False)
    assert supervisor.wait(60) == 2
    assert (root / "stdout").read_text() == ""
    assert not (root / "jobs" / "notes").exists()


def test_drain_does_not_wait_for_spark_and_a_long_start_is_reported(root: Path, start: Start, wait_for: Wait) -> None:
    (root / "jobs" / "ingest.py").write_text(JOB.replace('os.write(ready_fd, b"up\\n")', ""))
    supervisor = start(wait=False, REPORT_S="0.3")
    stderr = root / "stderr"
    wait_for(lambda: "drain is up" in stderr.read_text(), "drain is up")
    wait_for(lambda: stderr.read_text().count("Spark starts ... ") >= 2, "two reports")
    assert "ingest is up" not in stderr.read_text()
    supervisor.terminate()
    assert supervisor.wait(60) == 0


@pytest.mark.parametrize(("name", "code", "expected"), [("drain", 3, 1), ("ingest", 2, 2), ("ingest", 0, 1)])
def test_a_job_that_ends_by_itself_is_named_and_the_other_is_stopped(
    root: Path, start: Start, processes: Processes, name: str, code: int, expected: int
) -> None:
    (root / "jobs" / f"{name}.py").write_text(f"raise SystemExit({code})")
    supervisor = start(wait=False)
    assert supervisor.wait(60) == expected
    assert f"{name} ended by itself, with exit code {code}" in (root / "stderr").read_text()
    assert processes("") == []


def test_a_job_that_is_killed_is_said_to_be(root: Path, start: Start, processes: Processes) -> None:
    supervisor = start()
    processes("jobs/drain.py")[0].kill()
    assert supervisor.wait(60) == 1
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
    assert supervisor.wait(60) == 0
    assert processes("") == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not signal the jobs")
def test_when_the_supervisor_is_killed_everything_ends_and_the_jobs_have_the_server_until_then(
    root: Path, start: Start, wait_for: Wait, processes: Processes
) -> None:
    supervisor = start()
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not processes("jobs/") and not processes("valkey-server"), "jobs, daemon and server are gone")
    assert {f"{name} signal 15 +PONG" for name in ("ingest", "drain", "serve")} < set(read_notes(root))


def test_a_second_stop_signal_kills_a_job_that_does_not_stop(
    root: Path, start: Start, wait_for: Wait, processes: Processes
) -> None:
    (root / "jobs" / "ingest.py").write_text(DEAF)
    supervisor = start()
    supervisor.send_signal(signal.SIGINT)
    wait_for(lambda: not processes("jobs/drain.py"), "drain has stopped")
    assert processes("jobs/ingest.py") != []
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(60) == 0
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
        assert supervisor.wait(60) == 0
