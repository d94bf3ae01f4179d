"""Rows that cancel and replace, from files to the store: their order, the files they are in and replays do not matter."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import RedisSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.core.messages import Change, Message
from pipeline.ingest import parsing
from pipeline.ingest.shard_writer import ShardWriter
from pipeline.ingest.stores import WriterSettings, open_changing_stores, open_stores
from pipeline.ingest.summary import Summary
from pipeline.ingest.transactions import PartQueue
from pipeline.ingest.writer import PartitionWriter
from pipeline.store.base import Changed, Scheduled, Transaction
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.shards import shard_of
from tests.examples import SHARING_FIXTURES, scaled
from tests.ingest.files import ARRIVAL_MS, parsed
from tests.servers import RealServer

DUE_MS = ARRIVAL_MS + 60_000
BUCKET_MS = 600_000


@pytest.fixture
def writing(server: RealServer, tmp_path: Path) -> WriterSettings:
    redis = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}")
    return WriterSettings(redis, "source", str(tmp_path / "rejects"), transaction_messages=2)


def line(**fields: Any) -> str:
    return json.dumps(fields)


def plain(text: str, key: str = "", due_ms: int = DUE_MS) -> str:
    return line(message=text, due=due_ms, **({"id": key} if key else {}))


def replacing(text: str, key: str, due_ms: int = DUE_MS) -> str:
    return line(message=text, due=due_ms, id=key, replace=True)


def cancelling(key: str) -> str:
    return line(cancel=key)


def token_of(number: int) -> str:
    return f"{number:014d}"


def write(writing: WriterSettings, files: dict[int, Sequence[str]]) -> Summary:
    """Write files as one partition; their number says which came first."""
    rows = [
        {
            "path": f"{token_of(number)}.1.json.{number}+jsonl",
            "arrival_ms": ARRIVAL_MS,
            "value": "".join(f"{each}\n" for each in lines).encode(),
        }
        for number, lines in files.items()
    ]
    return PartitionWriter(writing).write([pa.RecordBatch.from_pylist(rows)])


@dataclass(frozen=True)
class Left:
    """What a namespace holds, all shards together."""

    members: dict[bytes, float]
    places: dict[str, str]
    cancelled: set[str]
    buckets: set[tuple[int, int]]


def look(writing: WriterSettings) -> Left:
    client, left = connect(writing.redis), Left({}, {}, set(), set())
    for shard, keys in enumerate(keys_of(writing.redis)):
        for start in client.zrange(keys.buckets(), 0, -1):
            left.buckets.add((shard, int(start)))
            left.members.update(client.zrange(keys.bucket(int(start)), 0, -1, withscores=True))
        left.places.update({key.decode(): place.decode() for key, place in client.hgetall(keys.places()).items()})
        left.cancelled.update(key.decode() for key in client.zrange(keys.cancelled(), 0, -1))
    client.close()
    return left


@dataclass(frozen=True)
class Row:
    """A row of a file; ``kind`` is plain, replace or cancel, and ``key`` "" for one without an id."""

    kind: str
    key: str
    due_ms: int

    def text(self, name: str) -> str:
        if self.kind == "cancel":
            return cancelling(self.key)
        return replacing(name, self.key, self.due_ms) if self.kind == "replace" else plain(name, self.key, self.due_ms)


def expected(files: dict[int, list[Row]], shards: int) -> Left:
    """Say what is left of rows: of each key nothing if it was cancelled, else the greatest replacement, else the other one."""
    left = Left({}, {}, set(), set())
    best: dict[str, tuple[bool, str, Row]] = {}
    for number, rows in files.items():
        for line_no, row in enumerate(rows, start=1):
            message_id = f"{token_of(number)}{line_no:08x}"
            if row.kind == "cancel":
                left.cancelled.add(row.key)
                continue
            key = row.key or message_id
            best[key] = max(
                best.get(key, (False, "", row)), (row.kind == "replace", message_id, row), key=lambda b: b[:2]
            )
    for key, (is_replacement, message_id, row) in best.items():
        if key in left.cancelled:
            continue
        if row.key:
            left.members[f'{message_id}j{{"message":"{message_id}","id":"{key}"}}'.encode()] = row.due_ms
            left.places[key] = f"{message_id}{row.due_ms}{'r' * is_replacement}"
            left.buckets.add((shard_of(key, shards), row.due_ms - row.due_ms % BUCKET_MS))
        else:
            left.members[f"{message_id}m{message_id}".encode()] = row.due_ms
    return left


KEYS = ["a", "b", "c"]
DUES = [DUE_MS, DUE_MS + 1, DUE_MS + BUCKET_MS]


@st.composite
def rows_of_files(draw: st.DrawFn) -> dict[int, list[Row]]:
    """Rows in files, at most one of each key that is plain: which of two stays depends on their order."""
    rows = [Row("plain", key, draw(st.sampled_from(DUES))) for key in draw(st.sets(st.sampled_from(KEYS)))]
    changes = st.builds(
        Row, st.sampled_from(["replace", "replace", "cancel"]), st.sampled_from(KEYS), st.sampled_from(DUES)
    )
    others = st.builds(Row, st.just("plain"), st.just(""), st.sampled_from(DUES))
    rows += draw(st.lists(st.one_of(changes, others), max_size=8))
    files: dict[int, list[Row]] = {number: [] for number in range(draw(st.integers(1, 5)))}
    for row in draw(st.permutations(rows)):
        files[draw(st.sampled_from(sorted(files)))].append(row)
    return files


@settings(max_examples=scaled(150), suppress_health_check=SHARING_FIXTURES)
@given(
    files=rows_of_files(),
    shards=st.sampled_from([1, 3]),
    at_once=st.integers(1, 4),
    part_bytes=st.integers(1, 300),
    data=st.data(),
)
def test_any_order_of_rows_files_partitions_and_replays_ends_in_the_same(
    server: RealServer,
    writing: WriterSettings,
    files: dict[int, list[Row]],
    shards: int,
    at_once: int,
    part_bytes: int,
    data: st.DataObject,
) -> None:
    server.client().flushall()
    writing = replace(writing, redis=replace(writing.redis, shards=shards), transaction_messages=at_once)
    replays = data.draw(st.lists(st.sampled_from(sorted(files)), max_size=4))
    order = data.draw(st.permutations([*files, *replays]))
    cuts = data.draw(st.sets(st.integers(1, len(order))))
    texts = {
        number: [row.text(f"{token_of(number)}{line_no:08x}") for line_no, row in enumerate(rows, start=1)]
        for number, rows in files.items()
    }
    total = Summary()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "PART_BYTES", part_bytes)
        for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), len(order)], strict=True):
            # A file is in a batch once; here its replays are partitions of their own.
            for partition in split_repeats(order[first:last]):
                total.add(write(writing, {number: texts[number] for number in partition}))
    wanted, found = expected(files, shards), look(writing)
    assert (found.members, found.places, found.cancelled) == (wanted.members, wanted.places, wanted.cancelled)
    assert found.buckets >= wanted.buckets
    counted = (total.stored, total.duplicates, total.cancelled, total.replaced)
    assert (sum(counted), total.late, total.lost) == (total.lines, 0, 0)


def split_repeats(order: Sequence[int]) -> list[list[int]]:
    partitions: list[list[int]] = [[]]
    for number in order:
        if number in partitions[-1]:
            partitions.append([])
        partitions[-1].append(number)
    return partitions


def test_a_part_counts_what_its_rows_did_and_a_replay_does_nothing(writing: WriterSettings) -> None:
    first = [
        plain("one", "a"),
        plain("two", "b"),
        plain("three"),
        replacing("new two", "b"),
        cancelling("a"),
        cancelling("c"),
    ]
    assert write(writing, {1: first}) == Summary(lines=6, stored=1, duplicates=2, cancelled=2, replaced=1)
    assert write(writing, {1: first}) == Summary(lines=6, duplicates=6)
    assert write(
        writing, {2: [replacing("newer", "b"), replacing("no", "c"), plain("no", "a"), cancelling("x y")]}
    ) == Summary(lines=4, replaced=1, duplicates=2, rejected=1, first_reject="2.jsonl line 4, bad_id")
    assert write(writing, {0: [replacing("older", "b")]}) == Summary(lines=1, duplicates=1)
    assert sorted(member[22:] for member in look(writing).members) == [b'j{"message":"newer","id":"b"}', b"mthree"]


def test_rows_of_what_is_in_flight_or_delivered_are_late(writing: WriterSettings) -> None:
    write(writing, {1: [plain("one", "a"), plain("two", "b", DUE_MS + 1)]})
    [store] = open_stores(writing.redis)
    store._now_ms = lambda: DUE_MS
    claim = store.claim("loop:0").claim
    store._now_ms = None
    assert claim and len(claim.messages) == 1
    late = [cancelling("a"), replacing("late", "a"), cancelling("b")]
    assert write(writing, {2: late}) == Summary(lines=3, late=2, cancelled=1)


def test_a_part_without_messages_has_its_marker_in_each_shard_that_it_changes(writing: WriterSettings) -> None:
    writing = replace(writing, redis=replace(writing.redis, shards=3))
    rows = [cancelling(f"key-{number}") for number in range(20)]
    assert write(writing, {1: rows}) == Summary(lines=20, cancelled=20)
    assert [store.markers("source", [token_of(1)]) for store in open_stores(writing.redis)] == [["all"]] * 3
    assert write(writing, {1: rows}) == Summary(lines=20, duplicates=20)


def test_a_replay_changes_nothing_that_was_done_meanwhile(writing: WriterSettings) -> None:
    rows = [cancelling("a"), replacing("one", "b")]
    write(writing, {1: rows})
    [by_id] = open_changing_stores(writing)
    message = Message(DUE_MS, "again", id="a", message_id=f"{token_of(9)}00000001")
    assert by_id.replace(message, lifts_cancellation=True).message
    assert by_id.cancel("b").message
    before = look(writing)
    assert write(writing, {1: rows}) == Summary(lines=2, duplicates=2)
    assert look(writing) == before


class Unsteady:
    """A shard that is away for some calls, and that may have lost its latest changes when it comes back."""

    def __init__(self, client: "redis.Redis", writing: WriterSettings, fails_at: set[int], loses: bool) -> None:
        [self.store], [self.by_id] = open_stores(writing.redis), open_changing_stores(writing)
        self._client = client
        self._fails_at, self._loses, self._calls = fails_at, loses, 0

    def _call(self) -> None:
        self._calls += 1
        if self._calls in self._fails_at:
            if self._loses:
                self._client.flushall()
            raise StoreUnavailable("Redis does not answer.")

    def markers(self, source_id: str, part_ids: Sequence[str]) -> list[str]:
        self._call()
        return self.store.markers(source_id, part_ids)

    def schedule(self, source_id: str, transaction: Transaction) -> Scheduled | None:
        self._call()
        return self.store.schedule(source_id, transaction)

    def wait_for_copies(self, on_disk: bool, replicas: int = 0) -> None:
        self._call()

    def apply(self, changes: Sequence[Change]) -> Changed:
        self._call()
        return self.by_id.apply(changes)


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("fails_at", [{1}, {2}, {3}, {4}, {3, 4}, {3, 4, 5}])
def test_what_a_server_lost_when_it_was_away_is_changed_again(
    server: RealServer, writing: WriterSettings, fails_at: set[int], loses: bool
) -> None:
    rows = [plain("no", "a"), plain("old", "b"), plain("other"), cancelling("a"), replacing("new", "b")]
    shard = Unsteady(server.client(), writing, fails_at, loses)
    writer = ShardWriter(shard, shard, writing)
    writer.add(PartQueue(parsed("\n".join(rows).encode(), token=token_of(1))))
    assert writer.finish().lost == 0
    assert sorted(member[22:] for member in look(writing).members) == [b'j{"message":"new","id":"b"}', b"mother"]
    assert look(writing).cancelled == {"a"}
