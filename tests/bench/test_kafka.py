"""The benchmark of Kafka: how samples become figures, and a small run of all parts on a real broker."""

import json
import os
import subprocess
import sys

import pytest

from bench import kafka, kafka_in, kafka_lateness, kafka_others, kafka_out
from bench.common import ROOT, result_path
from bench.kafka_reader import count_lateness
from tests.kafka import jars


def cells(table: str, first: str) -> list[str]:
    [line] = [line for line in table.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]


def test_lateness_is_counted_from_the_first_message_that_is_measured() -> None:
    portions = [(0, b"999000 900 first\n1000040 1000 a\n10"), (0, b"03160 1002 b c\n")]
    assert count_lateness(portions, 1_000) == {"came": 2, "lateness_ms": {"0.0": 1, "1.2": 1}}
    assert count_lateness(portions, 2_000) == {"came": 0, "lateness_ms": {}}


@pytest.mark.parametrize(
    ("lines", "what"),
    [(b"1000000 1000 a\n1000000 1000 a\n", "2 records came of 1"), (b"998000 1000 a\n", "2.0 ms before")],
    ids=["twice", "early"],
)
def test_a_record_that_comes_wrong_is_no_sample(lines: bytes, what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        count_lateness([(0, lines)], 1_000)


def test_records_are_compared_with_lines_of_files_and_the_warm_up_is_left_out() -> None:
    costs = {"client_cpu_s": 1.0, "server_cpu_s": 0.5, "broker_cpu_s": 0.25, "others_cores": 0.125}

    def sample(name: str, number: int, wall_s: float, *stored_ms: int) -> dict[str, object]:
        batches = [{"addBatch": ms} for ms in stored_ms]
        return {"subject": name, "round": number, "wall_s": wall_s, "batches": batches, **costs}

    samples = [
        sample(kafka_in.FILES, 0, 99.0),
        sample(kafka_in.FILES, 1, 1.0, 250),
        sample(kafka_in.DEFAULT, 1, 4.0, 500, 1_500),
        sample(kafka_in.SMALL, 1, 2.0, 1_000),
    ]
    table = kafka_in.table({"rows": 1_000, "rounds": 1, "partitions": 4, "master": "local[2]"}, samples)
    costs_shown = ["1000.00", "500.00", "250.00"]
    assert cells(table, "files") == ["1,000", "1,000", "1,000", "1.00", "4,000", "1.00", "1", *costs_shown]
    assert cells(table, "topic: default") == ["250", "250", "250", "0.25", "500", "0.12", "2", *costs_shown]
    assert cells(table, "topic: batches of 100,000") == [
        "500",
        "500",
        "500",
        "0.50",
        "1,000",
        "0.25",
        "1",
        *costs_shown,
    ]
    assert "at most 0.12 cores" in table


def test_what_did_not_come_is_shown() -> None:
    settings = {"rates": [200], "seconds": 2, "rounds": 1, "patience_sec": 5.0}
    cpu = {"loop_cpu_s": 0.2, "server_cpu_s": 0.1, "broker_cpu_s": 0.4, "wall_s": 2.0}
    about = {"rate": 200, "seconds": 2, "round": 1, **cpu}
    lateness = {"1.5": 99, "20.0": 1}
    samples = [{"subject": name, "came": 100, "lateness_ms": lateness, **about} for name in kafka_out.TITLES]
    samples += [{"subject": "ten", "came": 0, "lateness_ms": {}, **about}]
    samples += [{"subject": name, "came": 400, "lateness_ms": lateness, **about} for name in ("ten_eager", "pausing")]
    table = kafka_others.table(settings, samples)
    used = ["10.0%", "5.0%", "20.0%"]
    assert cells(table, "200/s, agrim: 10") == ["0%", "-", "-", "-", "-", *used]
    assert cells(table, "200/s, ours: at") == ["25%", "1.5", "1.5", "20.0", "20.0", *used]
    assert cells(kafka_lateness.table(settings, samples), "200/s, ours: exactly")[0] == "25%"


@pytest.mark.process
@pytest.mark.xdist_group("kafka")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"in": 6, "latency": 3}, marks=pytest.mark.nightly, id="in"),
        pytest.param({"out": 2, "lateness": 2}, id="out"),
        pytest.param({"others": 5}, marks=pytest.mark.nightly, id="others"),
    ],
)
def test_a_quick_run_measures_everything(parts: dict[str, int]) -> None:
    if os.environ.get("CI") != "true" and (why := jars.why_unavailable()):
        pytest.skip(f"There is no Kafka: {why}")
    command = [
        sys.executable,
        "-P",
        "-m",
        "bench",
        "kafka",
        "--quick",
        "--master",
        "local[2]",
        "--only",
        ",".join(parts),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    assert ended.returncode == 0, ended.stderr
    for part in parts:
        assert f"#### {kafka.TITLES[part]}\n" in ended.stdout
    samples = json.loads(result_path("kafka", quick=True).read_text())["samples"]
    assert {name: len(taken) for name, taken in samples.items()} == parts
