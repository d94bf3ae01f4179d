"""The scale benchmark: how samples become figures, and a small run."""

import subprocess
import sys

import pytest

from bench import scale
from bench.common import ROOT, load_result
from tests.bench.test_drain import cells


def test_figures_are_of_all_rounds() -> None:
    settings = {"shards": (1, 6), "places": ((3, 6),), "loops": (1,), "messages": 1_000, "rounds": 2, "seconds": 2}
    used = {"loop_cpu_s": 0.2, "server_cpu_s": 0.1}
    late = [
        {
            "shards": shards,
            "seconds": 2,
            "lateness_ms": {"1": 99, str(10 * shards): 3},
            "read_ms": {"1.5": 90, top: 12},
            **used,
        }
        for shards, top in ((1, "10.5"), (6, "21.0"))
        for _ in range(2)
    ]
    table = scale.lateness_table(settings, late)
    assert cells(table, "1 ") == ["1", "10", "10", "10", "10.5", "1.00", "10.0%", "5.0%"]
    assert cells(table, "6 ") == ["1", "60", "60", "60", "21.0", "2.00", "10.0%", "5.0%"]
    about = {"masters": 3, "shards": 6, "loops": 1, "messages": 1_000}
    fast = [{**about, "wall_s": wall_s, "loops_cpu_s": 0.01, "servers_cpu_s": 0.004} for wall_s in (0.1, 0.2, 0.4)]
    assert cells(scale.throughput_table(settings, fast), "3 × 6, 1 loop") == ["5,000", "2,500", "10,000", "10.0", "4.0"]


@pytest.mark.process
@pytest.mark.xdist_group("benchmarks")
@pytest.mark.timeout(200)
def test_a_quick_run_measures_both_parts() -> None:
    command = [sys.executable, "-P", "-m", "bench", "scale", "--quick"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr
    result = load_result("scale", quick=True)
    assert result is not None
    assert {part: len(samples) for part, samples in result["samples"].items()} == {"lateness": 2, "throughput": 1}
