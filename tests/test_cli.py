"""How a job ends: exit codes, sentences, signals."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.cli import Stop, new_parser, open_connection, parse_command, run_main
from pipeline.config import RedisSettings, Settings
from pipeline.core.errors import ConfigError, PipelineError, SinkClosed, StoreUnavailable
from tests.servers import real_server

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def signals_as_before():  # type: ignore[no-untyped-def]
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def outcome(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], main) -> tuple[int, str]:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "argv", ["job"])
    with pytest.raises(SystemExit) as ended:
        run_main("job", main)
    return ended.value.code, capsys.readouterr().err  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("Say it right."), 2),
        (PipelineError("Put it right."), 1),
        (StoreUnavailable("Start it."), 1),
        (SinkClosed("Nobody reads.", 0), 1),
    ],
)
def test_an_expected_error_is_its_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def main(arguments: list[str], stop: Stop) -> int:
        raise error

    assert outcome(monkeypatch, capsys, main) == (code, f"job: {error}\n")


def test_an_unexpected_error_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(arguments: list[str], stop: Stop) -> int:
        raise ValueError("first line\nsecond line")

    code, said = outcome(monkeypatch, capsys, main)
    assert code == 1
    assert said == "job: ValueError: first line (unexpected; --log-level debug shows where)\n"


def test_a_stop_while_the_server_is_not_there_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(arguments: list[str], stop: Stop) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise StoreUnavailable("It was still starting.")

    assert outcome(monkeypatch, capsys, main)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_at_once_and_work_never(number: int) -> None:
    stop = Stop()
    stop.install()
    done = []
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    stop.interrupting(lambda: threading.Event().wait(60))
    assert stop.requested
    os.kill(os.getpid(), number)
    done.append("work goes on")
    stop.interrupting(lambda: done.append("a wait is not even started"))
    assert done == ["work goes on"]


def test_a_signal_at_any_step_around_a_wait_stays_inside() -> None:
    stop = Stop()
    code = Stop.interrupting.__code__

    def run_with_signal_at(step: int) -> bool:
        """Deliver a signal at the n-th instruction; false if there are fewer."""
        seen = 0

        def trace(frame, event, argument):  # type: ignore[no-untyped-def]
            nonlocal seen
            if frame.f_code is not code:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                seen += 1
                if seen == step:
                    sys.settrace(None)
                    stop._on_signal(signal.SIGTERM, None)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            stop.interrupting(lambda: None)
        finally:
            sys.settrace(before)
        return seen >= step

    steps = 0
    while run_with_signal_at(steps + 1):
        steps += 1
        assert stop.requested
        stop.requested = False
    assert steps > 10


def test_output_that_nobody_reads_any_more_is_no_trace_at_the_end() -> None:
    code = "from pipeline.cli import run_main\nrun_main('job', lambda arguments, stop: print('x' * 10) or 0)"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    os.close(writer)
    assert ended.stderr == b""


def test_more_output_than_anybody_reads_ends_as_other_programs_do() -> None:
    code = "from pipeline.cli import run_main\nrun_main('job', lambda arguments, stop: [print('x') for _ in range(99_999)] and 0)"
    command = f'{sys.executable} -c "$1" | head -1; exit ${{PIPESTATUS[0]}}'
    ended = subprocess.run(
        ["bash", "-c", command, "-", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (141, "x\n", "")


def test_a_name_in_a_log_line_or_an_error_forges_no_line_and_drives_no_terminal() -> None:
    code = """
import logging
from pipeline.cli import run_main
from pipeline.core.errors import ConfigError

def main(arguments, stop):
    name = "a\\x1b[2J\\nforged: all is well"
    logging.getLogger("pipeline").warning("left %s where it is", name)
    try:
        raise ValueError("\\x1b[2J")
    except ValueError:
        logging.getLogger("pipeline").warning("with its trace", exc_info=True)
    raise ConfigError(f"Rename {name}.")

run_main("job", main)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)
    lines = ended.stderr.decode().split("\n")
    assert ended.returncode == 2
    assert lines[0].endswith(r"left a\x1b[2J\nforged: all is well where it is")
    assert lines[2].startswith("Traceback")
    assert lines[-3:] == [r"ValueError: \x1b[2J", r"job: Rename a\x1b[2J\nforged: all is well.", ""]
    assert b"\x1b" not in ended.stderr


def test_only_who_stores_or_delivers_warns_of_a_weak_server(caplog: pytest.LogCaptureFixture) -> None:
    with real_server("--appendonly", "no") as server:
        settings = Settings(redis=RedisSettings(url=server.url))
        with open_connection(settings, lambda: False, may_create=False) as connection:
            assert (len(connection.client.time()), connection.exists, len(connection.shards)) == (2, False, 1)
        assert caplog.messages == []
        with open_connection(settings, lambda: False, may_create=True, writes=True) as connection:
            assert connection.exists
        assert [message.partition(",")[0] for message in caplog.messages] == ["Redis keeps no append-only file"]


def test_a_command_knows_its_flags_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text("[ingest]\nport = 1\nhost = 'from-file'\n")
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    parser = new_parser("ingest", "")
    parser.add_argument("--port")
    parser.add_argument("--host")
    arguments = ["--config", str(tmp_path / "own.toml"), "--port", "2", "--namespace", "mine"]
    given, settings = parse_command(parser, arguments, "ingest", "port", "host")
    assert (given.port, settings.ingest.port, settings.ingest.host) == ("2", 2, "from-file")
    assert (settings.redis.namespace, settings.redis.url) == ("mine", "redis://127.0.0.1:1")


LOGGING_JOB = """
import logging
from pipeline.cli import new_parser, parse_command, run_main
from pipeline.core.errors import StoreUnavailable

def main(arguments, stop):
    parse_command(new_parser("job", ""), arguments, "redis")
    log = logging.getLogger("pipeline.some")
    log.info("all is %s", "well")
    log.warning("not so \\x1b good")
    raise StoreUnavailable("Redis does not answer.")

run_main("job", main)
"""


def lines_of_job(*arguments: str) -> list[str]:
    command = [sys.executable, "-c", LOGGING_JOB, *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (2 if "--nonsense" in arguments else 1, "")
    return ended.stderr.splitlines()


def test_a_log_line_has_its_zone_and_from_warnings_on_its_level() -> None:
    fine, bad, last = lines_of_job()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ job: all is well", fine)
    assert bad.endswith(r"Z job: warning: not so \x1b good")
    assert last == "job: Redis does not answer."


def test_a_log_of_json_has_all_of_it() -> None:
    fine, bad, last = (json.loads(line) for line in lines_of_job("--log-format", "json"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fine.pop("time"))
    assert fine == {"level": "info", "job": "job", "logger": "pipeline.some", "message": "all is well"}
    assert (bad["level"], bad["message"]) == ("warning", "not so \x1b good")
    assert (last["level"], last["message"]) == ("error", "Redis does not answer.")


def test_wrong_use_is_one_sentence() -> None:
    assert lines_of_job("--nonsense") == ["job: unrecognized arguments: --nonsense; see --help."]


def test_a_password_in_the_command_line_is_warned_about_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    for url, warnings in (("redis://u:hidden@h", 1), ("redis://h", 0)):
        caplog.clear()
        parse_command(new_parser("job", ""), ["--redis", url], "redis")
        assert [("--redis" in text, "hidden" in text) for text in caplog.messages] == [(True, False)] * warnings
