"""The benchmark beside peers: how what a worker writes becomes figures, what is installed, and a small run."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench import peer_programs, peers
from bench.common import ROOT, Options, new_result, result_path
from bench.peer_programs import PEERS, find_peers, read_handled
from bench.peer_subjects import OURS, OURS_PIPE, Subject


def line(number: int, us: int = 1_700_000_000_000_000) -> bytes:
    return b"%d reminder %09d for a customer\n" % (us, number)


def cells(table: str, first: str) -> list[str]:
    [row] = [row for row in table.splitlines() if row.startswith(f"| {first}")]
    return [cell.strip() for cell in row.strip("| ").split("|")][1:]


def run_quickly(folder: str, *options: str) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "bench", "peers", "--quick", *options]
    environ = os.environ | {"BENCH_PEERS": folder}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, json.loads(result_path("peers", quick=True).read_text())


def test_what_handlers_write_is_read_to_the_microsecond() -> None:
    portions = [(1, line(7) + line(3, 1_700_000_000_001_500)[:20]), (2, line(3, 1_700_000_000_001_500)[20:])]
    assert read_handled(portions) == [(7, 1_700_000_000_000.0), (3, 1_700_000_000_001.5)]


@pytest.mark.parametrize(
    "written",
    [b"Started worker\n", line(1) + b"\n", line(1)[:-2] + b"\n", b" " + line(1), line(1)[1:], line(1)[:-1]],
    ids=["log", "empty", "cut", "indented", "milliseconds", "no end"],
)
def test_anything_else_that_a_worker_writes_is_an_error(written: bytes) -> None:
    with pytest.raises(RuntimeError, match=r"A worker wrote|ends within a line"):
        read_handled([(1, written)])


def test_what_came_twice_and_what_did_not_come_is_counted() -> None:
    handled = [(0, 5.0), (2, 6.0), (0, 7.0), (0, 8.0)]
    assert peers.count_wrong(handled, 4) == {"twice": 2, "lost": 2}
    with pytest.raises(RuntimeError, match="Job 2 was handled, of 2"):
        peers.count_wrong(handled, 2)


def test_lateness_is_counted_from_the_first_job_that_is_measured_and_early_stays_early() -> None:
    handled = [(0, 900.0), (1, 1_000.04), (2, 999.99), (3, 2_234.0), (4, 1_012.6), (4, 400.0)]
    counts = peers.count_lateness(handled, [0, 1_000, 1_000, 1_000, 1_000], first=1)
    assert counts == {"lateness_ms": {"-600": 1, "-0.1": 1, "0": 1, "13": 1, "1230": 1}}


def result(absent: list[str], failed: dict[str, str]) -> dict[str, Any]:
    def backlog(subject: str, number: int, drain_s: float, lost: int = 0) -> dict[str, Any]:
        costs = {"client_cpu_s": 1.0, "server_cpu_s": 0.5, "others_cores": 0.25}
        about = {"subject": subject, "round": number, "jobs": 1_000, "schedule_s": number / 10}
        return {**about, "drain_s": drain_s, "twice": 0, "lost": lost, **costs}

    def late(subject: str, rate: int, twice: int, lost: int = 0, **ms: int) -> dict[str, Any]:
        counts = {name.removeprefix("ms").replace("_", "-"): count for name, count in ms.items()}
        return {
            "subject": subject,
            "rate": rate,
            "twice": twice,
            "lost": lost,
            "lateness_ms": counts,
            "others_cores": 0.5,
        }

    settings = {
        "jobs": {"ours": 1_000, "rq": 1_000, "arq": 1_000},
        "rounds": 3,
        "rates": [200, 1_000],
        "lateness_rounds": 2,
        "memory_jobs": 500,
        "seconds": 8,
        "absent": absent,
        "failed": failed,
    }
    ours = [backlog("ours", number, drain_s) for number, drain_s in ((1, 0.1), (2, 0.2), (3, 0.5))]
    lateness = [late("ours", 200, 0, ms1=99, ms7=1), late("ours", 1_000, 0, ms2=100)]
    lateness += [late("rq", 200, 1, ms_300=50, ms40=50), late("rq", 1_000, 2, 1, ms1000=97, ms5000=3)]
    samples = {"backlog": [*ours, backlog("rq", 1, 1.0, lost=500)], "lateness": lateness}
    samples["memory"] = [{"subject": name, "jobs": 500, "data_bytes": 61_500} for name in ("ours", "rq")]
    return new_result("peers", Options(), settings) | {"samples": samples}


def test_a_table_has_medians_and_says_what_came_early_twice_or_not() -> None:
    table = peers.tables(result([], {"arq": "it broke"}))
    rates, busy = ["5,000", "123", "5,000", "2,000", "10,000"], ["0.25", "0.50"]
    assert cells(table, "ours") == ["1,000", *rates, "1.0", "1.0", "2.0", "2.0", "0%", "0", "0", *busy]
    late = ["-300.0", "40.0", "1,000.0", "5,000.0 of 99%"]
    assert cells(table, "rq") == ["1,000", "10,000", "123", "500", "500", "500", *late, "25%", "3", "500", *busy]
    assert "| arq" not in table
    assert "arq failed, and is left out: it broke" in table
    assert "not installed" not in table


def test_a_table_says_which_peers_are_not_there() -> None:
    assert "asynq is not installed, and so not measured." in peers.tables(result(["asynq"], {"arq": "x"}))


def test_a_peer_that_fails_is_left_out_and_named_and_ours_ends_the_run() -> None:
    settings: dict[str, Any] = {"failed": {}}
    measurement = peers._Measurement(settings, [])
    rq, ours = (Subject(name, [], lambda _: nullcontext(None)) for name in ("rq", OURS_PIPE))  # type: ignore[arg-type, return-value]

    def fail() -> dict[str, Any]:
        raise RuntimeError("it broke\nbadly")

    assert measurement._guarded(rq, fail) == []
    assert settings["failed"] == {"rq": "it broke"}
    assert measurement._guarded(rq, dict) == []
    with pytest.raises(RuntimeError, match="pipe: it broke"):
        measurement._guarded(ours, fail)


def test_what_is_not_ready_in_time_gets_more_time() -> None:
    measurement = peers._Measurement({"failed": {}, "start_ms": 200}, [])
    subject = Subject("rq", [], lambda _: nullcontext(None))  # type: ignore[arg-type, return-value]
    measurement._rates["rq"] = 1_000.0
    leads: list[int] = []

    def take() -> dict[str, Any]:
        leads.append(measurement._ready_ms(subject, 1_000, 2))
        if len(leads) < 3:
            raise peers.Late("Too late.")
        return {"taken": 1}

    assert measurement._guarded(subject, take) == [{"taken": 1}]
    assert leads == [1_900, 3_800, 7_600]


def test_each_peer_has_a_program_and_pins_exact_versions() -> None:
    for name, peer in PEERS.items():
        assert peer.version()[0].isdigit(), name
        assert (
            peer_programs.PROGRAMS / "asynq" / "main.go" if peer.kind == "go" else Path(peer.command()[1])
        ).is_file()
        if peer.kind == "python":
            assert all("==" in line for line in peer.pins().read_text().splitlines()), name


def test_a_peer_is_there_once_its_pinned_version_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_PEERS", str(tmp_path))
    assert find_peers() == {}
    peer = PEERS["huey"]
    peer.stamp().write_bytes(peer.pins().read_bytes())
    assert find_peers() == {"huey": peer}
    peer.stamp().write_text("huey==1.0\n")
    assert find_peers() == {}


def test_what_can_not_be_had_is_said_and_the_rest_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(command: list[str], **_: object) -> None:
        if command[0] == "npm":
            raise FileNotFoundError("no npm")
        if command[0] == "go":
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setenv("BENCH_PEERS", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", install)
    peer_programs.install_peers()
    assert find_peers().keys() == PEERS.keys() - {"BullMQ", "asynq"}
    said = capsys.readouterr().err
    assert "BullMQ can't be had here: no npm" in said
    assert "asynq can't be had here" in said


def test_a_peer_that_lacks_a_package_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(command: list[str], **_: object) -> None:
        if command[-1] == "check" and "rq" in Path(command[0]).parts:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setenv("BENCH_PEERS", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", install)
    peer_programs.install_peers()
    assert find_peers().keys() == PEERS.keys() - {"rq"}
    assert "rq can't be had here" in capsys.readouterr().err


def test_what_redis_py_needs_on_an_older_python_is_pinned() -> None:
    """An environment has what is pinned and no more; Debian 12 has Python 3.11.2."""
    pins = [peer.pins().read_text() for peer in PEERS.values() if peer.kind == "python"]
    assert all('async-timeout==5.0.1; python_full_version < "3.11.3"' in text for text in pins if "redis==" in text)


@pytest.mark.slow
def test_ours_is_measured_where_no_peer_is_installed(tmp_path: Path) -> None:
    table, kept = run_quickly(str(tmp_path))
    for name in OURS:
        assert cells(table, name)[-5:-2] == ["0%", "0", "0"]
    assert kept["settings"]["absent"] == [*PEERS]
    assert "BullMQ is not installed, and so not measured." in table


@pytest.mark.nightly
@pytest.mark.timeout(420)
def test_each_peer_that_is_installed_handles_all_jobs() -> None:
    if not find_peers():
        pytest.skip("no peer is installed: bench/run.sh peers --install")
    table, kept = run_quickly(str(peer_programs.peers_folder()))
    assert kept["settings"]["failed"] == {}
    for name in find_peers():
        assert cells(table, name)[-3] == "0", name
