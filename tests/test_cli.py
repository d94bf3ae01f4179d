"""How a job ends: exit codes, sentences, signals."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.cli import Stop, run_main
from pipeline.core.errors import ConfigError, PipelineError, SinkClosed, StoreUnavailable

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
    stop.interrupting(lambda: done.append("a wait is not even begun"))
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


def test_more_output_than_anybody_reads_is_told_in_a_sentence() -> None:
    code = "from pipeline.cli import run_main\nrun_main('job', lambda arguments, stop: [print('x') for _ in range(99_999)] and 0)"
    command = f'{sys.executable} -c "$1" | head -1; exit ${{PIPESTATUS[0]}}'
    ended = subprocess.run(
        ["bash", "-c", command, "-", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "x\n", "job: Nobody reads the output any more.\n")
