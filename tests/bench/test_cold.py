"""The benchmark of cold messages: how samples become figures, and a small run of both parts."""

import subprocess
import sys

import pytest

from bench import bounded, cold
from bench.common import ROOT, load_result
from tests.bench.test_drain import cells


def test_figures_are_for_each_message_and_ten_times_as_many_are_estimated_by_them() -> None:
    settings = {"messages": 1_000_000, "hours": 720, "maxmemory": 500_000_000, "master": "local[2]"}
    sample = {
        "write_s": 30.0, "files": 4, "disk_bytes": 8_000_000, "cold": 1_000_000, "used_memory_cold": 2_000_000,
        "hour": 1_400, "hydrate_s": 0.5, "grown_hour": 200_000, "used_memory_hour": 2_200_000,
        "drain_s": 0.1, "delivered": 1_400, "peak_used_memory": 3_000_000, "peak_rss": {"hydrator": 150_000_000},
    }  # fmt: skip
    table = bounded.table(settings, [sample])
    for first, shown in {
        "scheduled": "33,333", "cold files": "4", "bytes": "8.0", "brought": "2,800", "delivered, each": "1,400",
        "delivered a": "14,000", "Redis, MB: the most": "3.0", "most memory of the hydrator": "150",
    }.items():  # fmt: skip
        assert cells(table, first) == [shown]
    assert "10,000,000, worked out from these and not run: 0.08 GB of disk in 40 files, 5 minutes" in table
    assert "14,000 messages that is in Redis after 5.0 s and takes 4 MB there" in table
    assert "may hold 500 MB (`maxmemory`)" in table


@pytest.mark.process
@pytest.mark.xdist_group("benchmarks")
@pytest.mark.timeout(300)
def test_a_quick_run_measures_both_parts() -> None:
    command = [sys.executable, "-P", "-m", "bench", "cold", "--quick", "--rows", "5000", "--messages", "20000"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    result = load_result("cold", quick=True)
    assert result is not None
    assert [sample["subject"] for sample in result["samples"]["cold"]] == [*cold.SUBJECTS]
    [sample] = result["samples"]["bounded"]
    assert 0 < sample["delivered"] == sample["hour"] < 100 and sample["cold"] == 20_000
    assert 0 < sample["peak_used_memory"] < result["settings"]["bounded"]["maxmemory"] == 500_000_000
    assert {*sample["peak_rss"]} == {"driver", "jvm", "python worker", "hydrator", "drain loop", "server"}
    assert all(sample["peak_rss"].values())
    assert cold.tables(result) in ended.stdout
