"""The drain benchmarks: how samples become figures, and a small run of each part as users start it."""

import json
import socket
import subprocess
import threading
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bench import claims, drain, flood, idle, lateness, throughput
from bench.common import ROOT, result_path
from bench.filling import KEYS, overdue_pairs, reveal, store_pairs
from bench.loops import NULL, PIPE, running, split_lines, start_pinger
from bench.server import Server, empty_server
from pipeline.config import DrainSettings, RedisSettings
from pipeline.store.connection import connect
from pipeline.store.redis_store import RedisStore

COSTS = {"others_cores": 0.5, "loops_cpu_s": 1.0, "server_cpu_s": 0.5}


def cells(table: str, first: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {first}"))
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]


def portion(*records: tuple[str, int, int]) -> tuple[int, bytes]:
    """What the loop writes of messages (id, due_ms, lateness_ms), read 1.26 ms after second 1."""
    lines = ({"id": name, "due_ms": due_ms, "lateness_ms": late_ms} for name, due_ms, late_ms in records)
    return 1_001_260_000, "".join(json.dumps(line) + "\n" for line in lines).encode()


def test_a_line_has_the_time_at_which_its_end_was_read() -> None:
    assert list(split_lines([(1, b"a\nb"), (2, b"b"), (3, b"\nc\nd\n")])) == [
        (1, b"a"),
        (3, b"bb"),
        (3, b"c"),
        (3, b"d"),
    ]
    with pytest.raises(RuntimeError, match="ends within a line"):
        list(split_lines([(1, b"a\nb")]))
    assert list(split_lines([(1, b"a\nb")], ended_early=True)) == [(1, b"a")]


def test_lateness_is_counted_as_told_and_as_seen() -> None:
    counts = lateness.count_lateness([portion(("a", 1000, 0), ("b", 999, 2), ("c", 1000, 0))], 3)
    assert counts == {"lateness_ms": {"0": 2, "2": 1}, "read_ms": {"1.3": 2, "2.3": 1}}
    assert lateness.expand(counts["read_ms"]) == [1.3, 1.3, 2.3]


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ([("a", 1000, 0), ("a", 1000, 0)], "different ones"),
        ([("a", 1000, 0)], "1 lines came of 2"),
        ([("a", 1000, 0), ("b", 1002, -1)], "1 ms before"),
    ],
    ids=["twice", "lost", "early"],
)
def test_a_message_that_comes_wrong_is_no_sample(records: list[tuple[str, int, int]], what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        lateness.count_lateness([portion(*records)], 2)


class FakeLoop:
    """A loop that has written something."""

    def __init__(self, *portions: tuple[int, bytes]) -> None:
        self.reader = self
        self.portions = portions


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ([("a", 2, 0), ("b", 1, 0)], "1 messages came out of order"),
        ([("b", 1, 0), ("a", 1, 0)], "1 messages came out of order"),
        ([("a", 1, 0), ("a", 1, 0)], "1 different ones"),
    ],
    ids=["by time", "within a time", "twice"],
)
def test_a_flood_out_of_order_is_no_sample(records: list[tuple[str, int, int]], what: str) -> None:
    loop: Any = FakeLoop(portion(("a", 1, 3), ("b", 1, 7)))
    assert flood.check_order(loop, 2) == {"lateness_ms_max": 7}
    loop = FakeLoop(portion(*records))
    with pytest.raises(RuntimeError, match=what):
        flood.check_order(loop, 2)


def test_our_loops_must_deliver_once_and_the_others_at_least_once() -> None:
    lines = b"".join(b"x: reminder %09d for a customer\n" % number for number in (0, 1, 2, 1))
    loops: Any = [FakeLoop((1, lines))]
    assert throughput._check_lines("one", loops, 3) == {"again": 1}
    with pytest.raises(RuntimeError, match="more than once"):
        throughput._check_lines("ours", loops, 3)
    with pytest.raises(RuntimeError, match="lost 1 of 4"):
        throughput._check_lines("one", loops, 4)


def test_throughput_says_how_many_times_as_fast_ours_is() -> None:
    def sample(subject: str, loops: int, wall_s: float, output: str = NULL, **more: int) -> dict[str, Any]:
        about = {"subject": subject, "loops": loops, "output": output, "messages": 1000, "wall_s": wall_s}
        return {**about, **COSTS, **more}

    settings = {"messages": {"ours": 1000, "one": 1000, "ten": 60}, "rounds": 3, "loops": [1, 2]}
    samples = [sample("ours", 1, 0.1), sample("ours", 1, 0.2), sample("ours", 1, 0.4), sample("one", 1, 2.0)]
    samples += [sample("ours", 1, 1.0, PIPE, again=0), sample("ours", 2, 1.0, PIPE, again=0)]
    to_null, to_pipe = throughput.table(settings, samples).split("Text to a pipe")
    assert cells(to_null, "ours") == ["5,000", "2,500", "10,000", "-", "", "1,000.0", "500.0", "-"]
    assert cells(to_null, throughput.TITLES["one"]) == ["500", "500", "500", "-", "10.0 ×", "1,000.0", "500.0", "-"]
    assert cells(to_pipe, "ours")[3:] == ["1,000", "", "1,000.0", "500.0", "0"]


def test_lateness_shows_both_clocks() -> None:
    settings = {"rates": [200], "seconds": 2, "rounds": 1}
    used = {"rate": 200, "seconds": 2, "loop_cpu_s": 0.5, "server_cpu_s": 0.1, "script_calls": 20}
    counts = {"lateness_ms": {"0": 99, "7": 1}, "read_ms": {"0.5": 98, "9.5": 2}}
    row = cells(lateness.table(settings, [{**used, **counts}]), "200")
    assert row == ["0", "0", "7", "7", "0.5", "9.5", "9.5", "9.5", "25.0%", "5.0%", "10"]


def test_idle_shows_rates() -> None:
    sample = {"loops": 4, "wall_s": 2.0, "sent": 3, "called": 12, "loops_cpu_s": 0.01, "server_cpu_s": 0.02}
    table = idle.table({"seconds": 2, "messages": 10}, [sample])
    assert cells(table, "4 loops") == ["1.50", "6.00", "0.50%", "1.00%"]


def test_claims_are_compared_with_the_first_level() -> None:
    def sample(scheduled: int, us: int, remark: str = "") -> dict[str, Any]:
        return {"scheduled": scheduled, "remark": remark, "server_us": us, "client_us": 2.0 * us}

    settings = {"levels": [10, 1000], "limit": 100, "claims": 1, "rounds": 1}
    table = claims.table(settings, [sample(1000, 300), sample(10, 200), sample(10, 100, "alone at the end")])
    assert [line.split("|")[1].strip() for line in table.splitlines()[4:]] == ["10", "1,000", "10 alone at the end"]
    assert cells(table, "1,000") == ["300", "300", "300", "300", "1.50", "600"]


def test_the_flood_shows_the_worst_of_all_rounds() -> None:
    def sample(subject: str, longest_us: int) -> dict[str, Any]:
        pings = {"ping_ms_before": {"0.1": 10}, "ping_ms": {"0.2": 90, "5.0": 10}}
        sizes = {"rss_bytes": 2**20, "peak_rss_bytes": 2**21}
        return {"subject": subject, "messages": 1000, "wall_s": 0.5, "longest_script_us": longest_us, **pings, **sizes}

    samples = [sample("ours", 1500), sample("ours", 2500), sample("stream", 900_000)]
    table = flood.table({"messages": 1000, "rounds": 2}, samples)
    assert cells(table, "ours") == ["2,000", "2.5", "0.1", "0.1", "0.2", "5.0", "5.0", "1", "2"]
    assert cells(table, "Alexander")[1] == "900.0"


def test_a_ping_is_sent_whether_or_not_the_one_before_is_answered() -> None:
    with TemporaryDirectory(prefix="dt-", dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        listener.settimeout(30)
        pinger = start_pinger(Server(f"unix://{folder}/s", None))
        with running([pinger]), listener.accept()[0] as connection:
            connection.settimeout(30)
            asked = b""
            while asked.count(b"PING\r\n") < 20:  # none is answered yet
                asked += connection.recv(1024)
            answerer = threading.Thread(target=_answer_pings, args=(connection, asked.count(b"PING\r\n")))
            answerer.start()
            pinger.finish()
            answerer.join(30)
        assert pinger.reader is not None
        samples = json.loads(b"".join(portion for _, portion in pinger.reader.portions))
    assert len(samples) >= 20
    assert all(us > 0 for _, us in samples)


def _answer_pings(connection: socket.socket, waiting: int) -> None:
    while waiting:
        connection.sendall(b"+PONG\r\n" * waiting)
        waiting = connection.recv(1024).count(b"PING\r\n")


def test_messages_appear_in_one_moment(tmp_path: Any) -> None:
    pairs = overdue_pairs(1000)
    with empty_server(tmp_path) as server, server.client.pubsub(ignore_subscribe_messages=True) as bell:
        bell.subscribe(KEYS.wake())
        bell.get_message(timeout=60)
        store_pairs(server, pairs, throughput.HIDDEN)
        assert not server.client.exists(KEYS.buckets())
        reveal(server)
        starts = server.client.zrange(KEYS.buckets(), 0, -1)
        members = [m.encode() for start in starts for m in server.client.zrange(KEYS.bucket(int(start)), 0, -1)]
        assert members == [member for _, member in pairs]
        assert bell.get_message(timeout=60) is not None


def test_a_level_keeps_its_size_from_visit_to_visit(tmp_path: Any) -> None:
    with empty_server(tmp_path) as server:
        level = claims.Level(server, 20_000)
        level.fill()
        client = connect(RedisSettings(url=server.url))
        store = RedisStore(client, level.keys, DrainSettings(claim_limit=100), now_ms=lambda: level.now_ms)
        level.warm_up(store)
        before = set(server.client.zrange(level.keys.bucket(claims.START_MS), 0, -1))
        assert (len(before), server.messages()) == (10_000, 20_000)
        for _ in range(2):
            samples = level.visit(store)
            assert len(samples) == 10
            assert all(sample["server_us"] > 0 < sample["client_us"] for sample in samples)
            assert server.messages() == 20_000
        assert len(before - set(server.client.zrange(level.keys.bucket(claims.START_MS), 0, -1))) > 1_900
        client.close()


def test_levels_acquire_actives_and_the_first_comes_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.claims.WORK", tmp_path)
    samples = claims.take_samples({"levels": [10_000, 20_000], "limit": 100, "claims": 10, "rounds": 2})
    assert [(s["scheduled"], s["remark"], s["round"]) for s in samples[::10]] == [
        (20_000, "", 1), (10_000, "", 1), (10_000, "", 2), (20_000, "", 2),
        (10_000, "alone at the end", 1), (10_000, "alone at the end", 2),
    ]  # fmt: skip


def check_throughput(samples: list[dict[str, Any]]) -> None:
    assert {sample["subject"] for sample in samples} == set(throughput.TITLES)
    ours = [sample for sample in samples if sample["subject"] == "ours"]
    assert sorted((s["loops"], s["output"]) for s in ours) == [(n, output) for n in (1, 2) for output in (NULL, PIPE)]
    assert [s["again"] for s in ours if s["output"] == PIPE] == [0, 0]


def check_lateness(samples: list[dict[str, Any]]) -> None:
    assert [sum(sample["lateness_ms"].values()) for sample in samples] == [400, 2000, 20_000]
    assert [sum(sample["read_ms"].values()) for sample in samples] == [400, 2000, 20_000]


def check_idle(samples: list[dict[str, Any]]) -> None:
    [sample] = samples
    assert 0 < sample["sent"] < sample["called"]


def check_claims(samples: list[dict[str, Any]]) -> None:
    assert {sample["scheduled"] for sample in samples} == set(claims.QUICK_LEVELS)


def check_flood(samples: list[dict[str, Any]]) -> None:
    ours, unbounded = samples
    assert {ours["subject"], unbounded["subject"]} == set(flood.TITLES)
    assert unbounded["scripts_over_1_ms"] >= 1  # SLOWLOG saw the one script that moves all
    assert ours["peak_rss_bytes"] >= ours["rss_bytes"] > 0
    assert sum(ours["ping_ms"].values()) > 0 < sum(ours["ping_ms_before"].values())


@pytest.mark.slow
@pytest.mark.xdist_group("benchmarks")  # its parts write one file
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [check_throughput, check_lateness, check_idle, check_claims, check_flood])
def test_each_part_runs_and_leaves_its_samples(check: Callable[[list[dict[str, Any]]], None]) -> None:
    part = check.__name__.removeprefix("check_")
    options = ["--rows", "5000"] if part in ("throughput", "flood", "idle") else []
    command = ["bench/run.sh", "drain", "--quick", "--only", part, "--rounds", "1", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(result_path("drain", quick=True).read_text())
    assert list(result["samples"]) == list(result["settings"]) == [part]
    check(result["samples"][part])
    assert drain.tables(result) in done.stdout
