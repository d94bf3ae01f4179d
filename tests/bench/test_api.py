"""The benchmark of the API: how samples become figures, and a small run."""

import json
import subprocess
import sys

import pytest

from bench import api
from bench.common import ROOT, Options, new_result, result_path


def test_a_table_has_medians_of_the_rounds() -> None:
    def sample(wall_s: float) -> dict[str, object]:
        return {
            "wall_s": wall_s,
            "messages": 1_000,
            "api_cpu_s": 0.5,
            "server_cpu_s": 0.1,
            "p50_ms": 1.5,
            "p99_ms": 3.0,
        }

    settings = {"seconds": 1.0, "rounds": 3, "lines": 100, "ids": 10}
    result = new_result("api", Options(), settings) | {"samples": {"get": [sample(s) for s in (1, 2, 4)], "cancel": []}}
    [line] = [line for line in api.tables(result).splitlines() if line.startswith("| GET")]
    assert [cell.strip() for cell in line.strip("| ").split("|")][1:] == [
        "500",
        "250",
        "1,000",
        "1.50",
        "3.00",
        "500",
        "100",
    ]


@pytest.mark.process
def test_a_quick_run_measures_everything() -> None:
    command = [sys.executable, "-P", "-m", "bench", "api", "--quick"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    for title in api.TITLES.values():
        assert f"| {title} " in ended.stdout
    samples = json.loads(result_path("api", quick=True).read_text())["samples"]
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys(api.TITLES, 1)
