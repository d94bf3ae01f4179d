"""From samples to figures: statistics, tables, files, the README."""

import importlib
import json
from pathlib import Path

import pytest

from bench import common, guard, latency, profiles, report
from bench.__main__ import BENCHMARKS, parse_arguments
from bench.common import Options, format_table, percentile, spread_of

COSTS = {
    "client_cpu_s": 2.0,
    "server_cpu_s": 1.0,
    "server_fork_cpu_s": 0.0,
    "others_cores": 0.25,
    "data_bytes": 125_000,
}


def result(name: str, settings: dict[str, object], samples: dict[str, list[dict[str, object]]]) -> common.Result:
    made = common.new_result(name, Options(), settings)
    return made | {"server_settings": {"appendfsync": "always", "save": ""}, "samples": samples}


def cells(table: str, first: str) -> list[str]:
    [line] = [line for line in table.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]


def test_a_spread_has_the_median_and_the_extremes() -> None:
    assert spread_of([5.0, 1.0, 2.0]) == common.Spread(median=2.0, least=1.0, most=5.0)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_a_percentile_is_a_sample(percent: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == expected


def test_a_table_lines_up() -> None:
    assert format_table(("", "rows"), [("a", "1"), ("bcd", "12,345")]) == (
        "|     |   rows |\n|-----|-------:|\n| a   |      1 |\n| bcd | 12,345 |"
    )


def test_a_result_is_read_back_as_it_was_with_a_line_for_each_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    made = result("ingest", {"rows": 5}, {"ours": [{"wall_s": 1.5}, {"wall_s": 2.5}], "usual": [{"wall_s": 3.5}]})
    path = common.save_result(made)
    assert common.load_result("ingest") == made
    assert '      {"wall_s": 2.5}\n' in path.read_text()
    assert common.load_result("ingest", quick=True) is None
    common.save_result(made | {"quick": True, "samples": {}})
    assert common.load_result("ingest") == made


def test_every_benchmark_can_be_run_laid_out_and_shown() -> None:
    marked = report._MARKED.findall(report.README.read_text())
    assert sorted(name for _, name, _ in marked) == sorted(BENCHMARKS)
    for name in BENCHMARKS:
        module = importlib.import_module(f"bench.{name}")
        assert callable(module.run)
        assert callable(module.tables)
        assert parse_arguments([name])[0] == name


def test_the_guard_finds_what_has_fallen_by_a_third_beside_its_yardstick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(**us: list[float]) -> common.Result:
        samples = {name: [{"us": each, "least_us": 1.0} for each in taken] for name, taken in us.items()}
        return result("guard", {"yardsticks": dict.fromkeys(us, "nothing")}, samples)  # type: ignore[arg-type]

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert guard.fallen_parts(measured(read=[9.0])) == {}, "nothing is kept"
    common.save_result(measured(read=[2.0, 2.0, 9.0], gone=[1.0]))
    assert guard.fallen_parts(measured(read=[2.9, 2.9, 1.0], new=[9.0])) == {}
    assert guard.fallen_parts(measured(read=[3.1, 3.1, 1.0])) == {
        "read": "read: 0.32 of its yardstick's speed, and it was 0.50."
    }
    elsewhere = measured(read=[3.1]) | {"machine": {"cpu": "another one"}}
    assert guard.fallen_parts(elsewhere) == {}
    assert cells(guard.tables(measured(read=[2.0])), "read") == ["2.00", "1.00", "0.50", "nothing"]


def test_ingest_compares_with_the_usual_way_and_leaves_the_warm_up_out() -> None:
    def samples(*seconds: float) -> list[dict[str, object]]:
        return [{"round": number, "wall_s": wall_s, **COSTS} for number, wall_s in enumerate(seconds)]

    settings = {"rows": 1000, "rounds": 3, "files": 4, "master": "local[2]"}
    made = result("ingest", settings, {"ours": samples(99, 1, 2, 4), "usual": samples(99, 4, 4, 4)})
    from bench.ingest import TITLES, tables

    assert cells(tables(made), TITLES["ours"]) == ["500", "250", "1,000", "2.00", "2000.00", "1000.00", "125"]
    assert cells(tables(made), TITLES["usual"])[3] == "1.00"
    assert "at most 0.25 cores" in tables(made)


def test_backlog_shows_each_level() -> None:
    from bench.backlog import tables

    settings = {"rows": 1000, "rounds": 1, "master": "local[2]"}
    made = result("backlog", settings, {"0": [{"wall_s": 0.5, **COSTS}], "1,000": [{"wall_s": 1.0, **COSTS}]})
    assert cells(tables(made), "0") == ["2,000", "2,000", "2,000", "1000.00"]
    assert cells(tables(made), "1,000") == ["1,000", "1,000", "1,000", "1000.00"]


def test_a_drop_gets_the_batch_that_took_it() -> None:
    drops = [{"file": number, "dropped_at": 1000.0 + number, "stored_ms": 300.0} for number in range(3)]
    batches = [
        {"numInputRows": 1, "timestamp": "1970-01-01T00:16:40.050Z", "durationMs": {"addBatch": 1}},
        {"numInputRows": 2, "timestamp": "1970-01-01T00:16:42.100Z", "durationMs": {"addBatch": 2}},
    ]
    joined = latency.join_batches(drops, batches)
    assert [(j["trigger_ms"], j["spark_ms"]["addBatch"]) for j in joined] == [(50.0, 1), (1100.0, 2), (100.0, 2)]
    assert latency.join_batches(drops, batches[:1]) == drops
    settings = {"files": 3, "lines": 10, "master": "local[2]", "trigger": "100 milliseconds"}
    table = latency.tables(result("latency", settings, {"drops": joined}))
    assert cells(table, "drop to stored") == ["300"] * 4
    assert cells(table, "drop to start") == ["100", "1,100", "1,100", "1,100"]
    assert "addBatch" not in latency.tables(result("latency", settings, {"drops": drops}))


def test_only_what_stands_between_markers_is_replaced() -> None:
    text = "before\n<!-- a: x -->\nold\n<!-- end -->\nbetween\n<!-- b: x -->\n<!-- end -->\nafter\n"
    filled = report.fill_markers(text, {"a": "| one |", "b": "| two |"})
    assert filled == (
        "before\n<!-- a: x -->\n\n| one |\n\n<!-- end -->\nbetween\n<!-- b: x -->\n\n| two |\n\n<!-- end -->\nafter\n"
    )
    assert report.fill_markers(filled, {"a": "| one |", "b": "| two |"}) == filled


def test_stacks_of_task_threads_are_read() -> None:
    def event(thread: str, *frames: tuple[str, str, str]) -> dict[str, object]:
        listed = [{"method": {"type": {"name": c}, "name": m}, "type": kind} for c, m, kind in frames]
        return {"values": {"sampledThread": {"javaName": thread}, "stackTrace": {"frames": listed}}}

    events = [
        event(
            "Executor task launch worker-0",
            ("a/b/C$$Lambda/17", "apply", "Interpreted"),
            ("a/D", "run", "JIT compiled"),
        ),
        event("main", ("a/b/C", "main", "Interpreted")),
    ]
    [stack] = profiles.read_stacks(json.dumps({"recording": {"events": events}}))
    assert [(frame.method, frame.is_interpreted) for frame in stack] == [("C.apply", True), ("D.run", False)]
