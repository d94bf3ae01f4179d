"""What is measured: the workload, the raw sender, and one small run of everything in a process."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import redis

from bench import client
from bench.common import ROOT, result_path
from bench.ingest import TITLES
from bench.raw import fill_buffers, pack_buckets, pack_command, pack_zadds, pack_zrems, send_buffers
from bench.server import empty_server
from bench.workload import ARRIVAL_MS, bucket_start_ms, message_text, write_workload
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.core.messages import Message
from pipeline.landing.names import parse_landing_name
from pipeline.store.by_id import MessagesById
from pipeline.store.keys import Keys

KEYS = Keys("bench-test")


def test_a_workload_is_the_same_every_time_and_its_members_are_those_of_its_lines(tmp_path: Path) -> None:
    first, again = write_workload(tmp_path / "a", 1000), write_workload(tmp_path / "b", 1000)
    members = list(first.members())
    assert members == list(again.members())
    paths = sorted(first.folder.iterdir())
    assert len(paths) == 4
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in sorted(again.folder.iterdir())]
    expected = []
    for path in paths:
        name = parse_landing_name(path.name)
        assert name is not None
        assert path.stat().st_mtime_ns == ARRIVAL_MS * 1_000_000
        for line, request in enumerate(map(json.loads, path.read_text().splitlines()), start=1):
            due_ms = ARRIVAL_MS + request["delay_sec"] * 1000
            expected.append((due_ms, f"{name.token}{line:08x}", request["message"]))
    decoded = [Message.from_member(member, due_ms) for due_ms, member in members]
    assert [(m.due_ms, m.message_id, m.body) for m in decoded] == expected
    assert len({due_ms for due_ms, _ in members}) > 900
    other = dict(write_workload(tmp_path / "c", 1000, generation=1).members())
    assert set(other.values()).isdisjoint(member for _, member in members)
    assert set(other) == {due_ms for due_ms, _ in members}


def test_a_message_has_33_bytes() -> None:
    assert {len(message_text(number)) for number in (0, 7, 999_999_999)} == {33}


def test_packed_commands_store_exactly_the_pairs_and_take_them_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.raw.PAIRS_PER_COMMAND", 10)
    pairs = sorted(write_workload(tmp_path / "landing", 3000).members())
    with empty_server(tmp_path) as server:
        sent = send_buffers(server.socket, fill_buffers(pack_zadds(pairs, KEYS)))
        sizes = Counter(bucket_start_ms(due_ms) for due_ms, _ in pairs)
        buckets = sorted(sizes)
        assert sent == sum(-(-size // 10) + 1 for size in sizes.values())
        assert server.messages() == 3000
        stored = [
            (int(due_ms), member.encode())
            for start in buckets
            for member, due_ms in server.client.zrange(KEYS.bucket(start), 0, -1, withscores=True)
        ]
        assert stored == pairs
        assert [int(start) for start in server.client.zrange(KEYS.buckets(), 0, -1)] == buckets
        send_buffers(server.socket, fill_buffers(pack_zrems(pairs, KEYS)))
        assert server.messages() == 0
        assert server.facts()["settings"]["appendfsync"] == "always"
    assert [path.name for path in tmp_path.iterdir()] == ["landing"]


def test_whole_buckets_are_packed_with_the_places_of_their_ids(tmp_path: Path) -> None:
    messages = sorted(write_workload(tmp_path / "landing", 3000, form="id").messages())
    with empty_server(tmp_path) as server:
        sent = send_buffers(server.socket, fill_buffers(pack_buckets(messages, KEYS)))
        assert sent == 3 * len({bucket_start_ms(due_ms) for due_ms, _, _ in messages})
        assert server.messages() == 3000
        due_ms, member, key = messages[1234]
        with redis.Redis.from_url(server.url) as client:  # the bench's own one decodes replies
            found = MessagesById(client, [KEYS], id_retention_ms=1_000).get(key).message
        assert found
        assert (found.due_ms, found.message_id) == (due_ms, member[:MESSAGE_ID_LENGTH].decode())


def test_a_refused_command_is_no_sample(tmp_path: Path) -> None:
    with empty_server(tmp_path) as server, pytest.raises(RuntimeError, match="WRONGTYPE"):
        send_buffers(server.socket, [(pack_command(b"SADD", b"k", b"m") + pack_command(b"ZADD", b"k", b"1", b"m"), 2)])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_subjects_store_what_they_must_and_leave_a_result() -> None:
    """The checks are in the benchmark itself; here they are run."""
    command = ["bench/run.sh", "ingest", "--quick", "--rows", "2000", "--rounds", "1", "--master", "local[2]"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    samples = json.loads(result_path("ingest", quick=True).read_text())["samples"]
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys(TITLES, 2)
    assert all(title in done.stdout for title in TITLES.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "sizes", "taken"),
    [
        ("latency", ["--rounds", "3"], {"drops": 3}),
        ("backlog", ["--rows", "50000", "--rounds", "1", "--max", "0"], {"0": 1, "0, again at the end": 1}),
    ],
)
def test_the_other_benchmarks_of_ingest_run_and_leave_a_result(
    name: str, sizes: list[str], taken: dict[str, int]
) -> None:
    command = ["bench/run.sh", name, "--quick", "--master", "local[2]", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    samples = json.loads(result_path(name, quick=True).read_text())["samples"]
    assert {part: len(found) for part, found in samples.items()} == taken


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_benchmark_of_streams_runs_and_leaves_a_result() -> None:
    command = ["bench/run.sh", "streams", "--quick", "--rows", "1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    samples = json.loads(result_path("streams", quick=True).read_text())["samples"]
    assert {part: len(found) for part, found in samples.items()} == {
        "transfer": 2,
        "topics": 2,
        "handling": 3,
        "groups": 2,
        "takeover": 200,
    }


@pytest.mark.slow
def test_the_guard_runs_and_leaves_a_result() -> None:
    command = ["bench/run.sh", "guard", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    kept = json.loads(result_path("guard", quick=True).read_text())
    assert {len(samples) for samples in kept["samples"].values()} == {2}
    assert kept["samples"].keys() == kept["settings"]["yardsticks"].keys()


def test_the_benchmark_of_the_client_runs_and_leaves_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_PEERS", str(tmp_path))  # without those that this checkout may have
    command = ["bench/run.sh", "client", "--quick", "--rows", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    [sample] = json.loads(result_path("client", quick=True).read_text())["samples"]["verbs"]
    assert sample.keys() - {"subject", "round"} == client.VERBS.keys()
