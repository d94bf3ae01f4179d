"""Windows of a partition without broker and server: whoever dies or comes between, each record is stored once, in each shard."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import RedisSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.core.messages import Change
from pipeline.core.records import Records
from pipeline.ingest import kafka_writer, shard_writer
from pipeline.ingest.kafka_reader import Range
from pipeline.ingest.kafka_windows import PartitionMarker, first_marker, is_begun
from pipeline.ingest.kafka_writer import RangeStorer
from pipeline.ingest.rejects import RejectsWriter
from pipeline.ingest.stores import Patience, WriterSettings
from pipeline.ingest.summary import Summary
from pipeline.kafka.cluster import Partition
from pipeline.store.base import Changed, Scheduled, Transaction
from pipeline.store.shards import shard_of
from tests.examples import SHARING_FIXTURES, scaled
from tests.kafka.intake import SENT_MS, line

PARTITION = Partition("t", "0123456789abcdef0123456789abcdef", 0)


class Died(BaseException):
    """A writer is gone, in the middle of what it did."""


@dataclass
class Shard:
    """What a server holds of a partition."""

    marker: str = ""
    stored: Counter[bytes] = field(default_factory=Counter)
    keys: set[str] = field(default_factory=set)
    changes: list[Change] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Store:
    """The shard as one writer sees it: before and after each transaction, something may happen to that writer.

    From its call ``away_at`` on it does not answer, whatever it does with that call itself.
    """

    def __init__(self, shard: Shard, happens: Callable[[], object], away_at: float = inf) -> None:
        self._shard, self._happens = shard, happens
        self._left = away_at

    def _ask(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreUnavailable("no answer")

    def markers(self, source_id: str, part_ids: Sequence[str]) -> list[str]:
        self._ask()
        return [self._shard.marker for _ in part_ids]

    def schedule(self, source_id: str, transaction: Transaction) -> Scheduled | None:
        self._ask()
        self._happens()
        shard = self._shard
        [move] = transaction.moves
        if shard.marker != move.before:
            return None
        assert [*transaction.rows.due_ms] == sorted(transaction.rows.due_ms)
        identified = transaction.identified
        keys, members = (
            pa.array(c, pa.binary()).to_pylist() for c in (identified.idempotency_keys, identified.members)
        )
        keyed = dict(zip(keys, members, strict=True))
        new = [member for key, member in keyed.items() if key not in shard.keys]
        shard.keys |= keyed.keys()
        rows = [each if isinstance(each, bytes) else each.as_py() for each in transaction.rows.members]
        shard.stored.update(rows + new)
        shard.marker = move.after
        shard.sizes.append(len(transaction.rows) + len(transaction.identified))
        self._happens()
        self._ask()
        return Scheduled(len(rows) + len(new), tuple(range(len(transaction.identified) - len(new))))

    def apply(self, changes: Sequence[Change]) -> Changed:
        self._ask()
        self._happens()
        self._shard.changes.extend(changes)
        return Changed(len(changes))

    def wait_for_copies(self, on_disk: bool, replicas: int = 0) -> None: ...


class Log:
    """A range as a reader sees it; it brings a part of what was asked for, as a client does."""

    format = "json"

    def __init__(self, records: Records, begin: int, end: int, portion: int) -> None:
        self.range, self.end = Range(PARTITION, begin, end), end
        self._records, self._portion, self._reads = records, portion, 0

    def read(self, place: int, is_known: bool, end: int, count: int, size: int) -> tuple[Records, int]:
        self._reads += 1
        assert self._reads < 10 * LENGTH, "it never ends"
        end = min(end, self.end)
        wanted = self._records.since(place)
        found = wanted.cut(0, min(count, self._portion))
        found = found.cut(0, len(found) - len(found.since(end)))
        is_all = len(found) == len(wanted) - len(wanted.since(end))
        return found, end if is_all else found.offsets[-1] + 1


@dataclass(frozen=True)
class Writer:
    """One that comes: its range, its limits, and after how many calls of a store it dies or another one comes."""

    begin: int
    end: int
    transaction_messages: int
    portion: int
    happens_at: int
    other: "Writer | None" = None
    dies: bool = False
    away: int = -1  # a shard that does not answer from this writer's call ``away_at`` on
    away_at: int = 0

    def run(self, records: Records, shards: Sequence[Shard], rejects: Path) -> Summary:
        left = self.happens_at

        def happen() -> None:
            nonlocal left
            left -= 1
            assert left > -10 * LENGTH, "it never ends"
            if left == 0:
                if self.other:
                    self.other.try_run(records, shards, rejects)
                if self.dies:
                    raise Died

        stores: Any = [
            (store := Store(shard, happen, self.away_at if number == self.away else inf), store)
            for number, shard in enumerate(shards)
        ]
        log: Any = Log(records, self.begin, self.end, self.portion)
        made = WriterSettings(RedisSettings(), "kafka-x", str(rejects), self.transaction_messages)
        with RejectsWriter(rejects) as place:
            done = RangeStorer(stores, made, log, place, Patience(1), all(shard.marker for shard in shards)).store()
        assert done.away <= {self.away}
        there = [shard for number, shard in enumerate(shards) if number not in done.away]
        assert done.lost == 0 and all(PartitionMarker.of(shard.marker).next >= self.end for shard in there)
        return done

    def try_run(self, records: Records, shards: Sequence[Shard], rejects: Path) -> None:
        try:
            self.run(records, shards, rejects)
        except Died:
            pass


LENGTH = 40


@st.composite
def writers(draw: st.DrawFn, depth: int = 2) -> Writer:
    begin = draw(st.integers(0, LENGTH))
    return Writer(
        0 if draw(st.booleans()) else begin,
        draw(st.integers(begin, LENGTH)),
        draw(st.sampled_from([1, 2, 3, 7])),
        draw(st.sampled_from([1, 2, 5, 100])),
        draw(st.integers(1, 12)),
        draw(writers(depth - 1)) if depth and draw(st.booleans()) else None,
        draw(st.booleans()),
        draw(st.integers(-1, 1)),
        draw(st.integers(0, 12)),
    )


@st.composite
def logs(draw: st.DrawFn) -> Records:
    records = Records()
    for offset in range(LENGTH):
        kind = draw(st.sampled_from(["plain"] * 6 + ["id", "gap", "bad", "blank", "cancel"]))
        value = {
            "id": line(f"{offset}", delay_sec=draw(st.integers(0, 5)), id=f"i{offset}"),
            "plain": line(f"{offset}", delay_sec=draw(st.integers(0, 5))),
            "cancel": b'{"cancel": "c%d"}' % offset,
            "bad": b"bad",
            "blank": b"",
        }.get(kind)
        if value is not None:
            records.extend(Records([offset], [SENT_MS], [value], [None], [()]))
    return records


@settings(max_examples=scaled(200), suppress_health_check=SHARING_FIXTURES)
@given(logs(), st.lists(writers(), max_size=5), st.sampled_from([1, 1, 2]))
def test_each_record_is_stored_once_whoever_dies_comes_between_or_finds_a_shard_away(
    tmp_path: Path, records: Records, came: list[Writer], count: int
) -> None:
    shutil.rmtree(tmp_path / "rejects", ignore_errors=True)
    run_all(tmp_path / "rejects", records, came, count)


def run_all(tmp_path: Path, records: Records, came: list[Writer], count: int) -> None:
    shards = [Shard() for _ in range(count)]
    Writer(0, 0, 1, 1, 0).run(records, shards, tmp_path)  # where the partition begins is known
    for each in came:
        each.try_run(records, shards, tmp_path)
    Writer(0, LENGTH, 5, 100, 0).run(records, shards, tmp_path)
    check(records, shards)
    again = Writer(0, LENGTH, 3, 4, 0).run(records, shards, tmp_path)
    assert (again.stored, again.rejected, again.lines) == (0, 0, LENGTH)
    texts = [path.read_text().splitlines() for path in tmp_path.glob("*.jsonl")]
    rejected = {json.loads(text)["offset"] for lines in texts for text in lines}
    assert rejected == {records.offsets[n] for n, value in enumerate(records.values) if value == b"bad"}


@pytest.mark.parametrize("away", [0, 1])
def test_a_shard_that_was_away_gets_all_of_it_later_and_the_other_one_at_once(tmp_path: Path, away: int) -> None:
    shards, records = [Shard("0"), Shard("0")], Records()
    for offset in range(10):
        records.extend(Records([offset], [SENT_MS], [line(f"{offset}", id=f"i{offset}")], [None], [()]))
    records.extend(Records([10], [SENT_MS], [b"bad"], [None], [()]))
    done = Writer(0, 11, 2, 100, 0, away=away).run(records, shards, tmp_path)
    assert done.lacking == [f"{PARTITION.part_id} {away}"] and shards[away].marker == "0"
    assert shards[1 - away].marker == "11" and done.stored == shards[1 - away].stored.total()
    own = shard_of(PARTITION.part_id, 2)
    assert len([*tmp_path.glob("*.jsonl")]) == (0 if away == own else 1)
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    later = Writer(11, 11, 2, 100, 0).run(records, shards, tmp_path)
    assert later.lacking == [] and shards[away].marker == "11" and all_once_by_key(shards, 10)
    assert len([*tmp_path.glob("*.jsonl")]) == (1 if away == own else 0), "rejects are written once"


def test_a_partition_that_is_not_begun_in_a_shard_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could tell it later where to begin."""
    asked: list[int] = []

    def wait_for_ever(call: Callable[[], object]) -> object:
        try:
            return call()
        except StoreUnavailable:
            asked.append(1)
            raise Died from None

    monkeypatch.setattr(kafka_writer, "retrying", wait_for_ever)
    shards = [Shard(), Shard()]
    Writer(5, 10, 2, 100, 0, away=1).try_run(far_first(10), shards, tmp_path)
    assert asked == [1] and not any(shard.stored for shard in shards)
    Writer(5, 10, 2, 100, 0).run(far_first(10), shards, tmp_path)
    assert [shard.marker for shard in shards] == ["10", "10"]


@settings(max_examples=scaled(100), suppress_health_check=SHARING_FIXTURES)
@given(logs(), st.lists(writers(), min_size=1, max_size=5))
def test_the_markers_of_any_shards_tell_whether_all_of_them_have_one(
    tmp_path: Path, records: Records, came: list[Writer]
) -> None:
    """A job that starts while others are away knows by them which partitions need not wait for all."""

    def wait_for_ever(call: Callable[[], object]) -> object:
        try:
            return call()
        except StoreUnavailable:
            raise Died from None

    shards, has_stored = [Shard(), Shard()], False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kafka_writer, "retrying", wait_for_ever)
        for each in came:
            each.try_run(records, shards, tmp_path / "rejects")
            markers = [shard.marker for shard in shards]
            has_stored = has_stored or any(shard.stored for shard in shards)
            assert is_begun(markers, 2) == all(markers)
            for marker in markers:
                assert not is_begun([marker], 2) or all(markers)
            assert not has_stored or any(is_begun([marker], 2) for marker in markers), (
                "what stores can go on without one"
            )


def test_the_first_marker_of_a_partition_is_no_open_window_and_no_later_one() -> None:
    at = PartitionMarker.of(first_marker(7))
    assert at == PartitionMarker(7, 7) and not at.is_open
    assert not is_begun([first_marker(7)], 2) and is_begun(["7"], 2) and is_begun(["7 9 1 8"], 2)
    assert is_begun([first_marker(7)] * 2, 2) and not is_begun(["", "7"], 2)


def check(records: Records, shards: Sequence[Shard]) -> None:
    """All is there, nothing twice, in its own shard."""
    wanted = Counter(value for value in records.values if value and b"message" in value)
    found = Counter({member: n for shard in shards for member, n in shard.stored.items()})
    assert sum(found.values()) == len(found) == len(wanted)
    cancelled = {value for value in records.values if value and b"cancel" in value}
    assert len({change.key for shard in shards for change in shard.changes}) == len(cancelled)
    for number, shard in enumerate(shards):
        assert PartitionMarker.of(shard.marker) == PartitionMarker(LENGTH, LENGTH)
        assert all(shard_of(change.key, len(shards)) == number for change in shard.changes)
        assert max(shard.sizes, default=0) <= 7


def far_first(count: int) -> Records:
    """Records of which the last is due first."""
    made = Records()
    for offset in range(count):
        value = line(f"{offset}", delay_sec=1000 - offset)
        made.extend(Records([offset], [SENT_MS], [value], [None], [()]))
    return made


def all_once(shards: Sequence[Shard], count: int) -> bool:
    return sorted(member[23:] for shard in shards for member in shard.stored.elements()) == sorted(
        b"%d" % n for n in range(count)
    )


def opened(transaction_messages: int, end: int = 10) -> Writer:
    """Return a writer that dies after the first transaction of its window."""
    return Writer(0, end, transaction_messages, 100, 2, dies=True)


def test_a_window_is_stored_in_order_of_due_time_and_its_marker_says_how_far(tmp_path: Path) -> None:
    shard = Shard("0")
    opened(4).try_run(far_first(10), [shard], tmp_path)
    assert shard.marker == f"0 10 {SENT_MS + 994_000} 6"
    assert [member[23:] for member in shard.stored] == [b"9", b"8", b"7", b"6"]
    total = Writer(0, 10, 5, 3, 0).run(far_first(10), [shard], tmp_path)
    assert (total.lines, total.stored, total.duplicates) == (10, 6, 4) and shard.marker == "10"
    assert all_once([shard], 10)


def test_a_window_is_as_long_as_some_transactions(tmp_path: Path) -> None:
    shard = Shard("0")
    opened(3, 100).try_run(far_first(100), [shard], tmp_path)
    assert PartitionMarker.of(shard.marker).end == 60
    assert [member[23:] for member in shard.stored] == [b"59", b"58", b"57"]


def test_a_range_that_ends_within_an_open_window_leaves_what_is_known_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard("0")
    opened(4).try_run(far_first(10), [shard], tmp_path)
    monkeypatch.setattr(
        shard_writer, "TRANSACTION_BYTES", 1
    )  # what is read as one transaction may be larger as messages
    Writer(0, 8, 3, 100, 0).run(far_first(10), [shard], tmp_path)
    assert shard.marker == f"8 10 {SENT_MS + 994_000} 6"
    assert Writer(8, 10, 3, 100, 0).run(far_first(10), [shard], tmp_path).duplicates == 2
    assert shard.marker == "10" and all_once([shard], 10)


@pytest.mark.parametrize("end", [8, 9, 10])
def test_who_meets_a_window_that_was_opened_meanwhile_goes_on_with_it(tmp_path: Path, end: int) -> None:
    shard = Shard("0")
    Writer(0, 10, 20, 100, 1, other=opened(2, end)).run(far_first(10), [shard], tmp_path)
    assert all_once([shard], 10) and shard.sizes[0] == 2


def test_what_a_window_has_changed_is_not_changed_again_by_who_goes_on_with_it(tmp_path: Path) -> None:
    shard, records = Shard("0"), far_first(10)
    records.extend(Records([10], [SENT_MS], [b'{"cancel": "tea"}'], [None], [()]))
    Writer(0, 11, 4, 100, 3, dies=True).try_run(records, [shard], tmp_path)  # after the change and one transaction
    assert PartitionMarker.of(shard.marker).is_open
    Writer(0, 11, 4, 100, 0).run(records, [shard], tmp_path)
    assert all_once([shard], 10) and [change.key for change in shard.changes] == ["tea"]


def test_who_was_overtaken_leaves_what_the_other_has_stored(tmp_path: Path) -> None:
    shard = Shard("0")
    Writer(0, 10, 20, 100, 1, other=Writer(0, 4, 20, 100, 0)).run(far_first(10), [shard], tmp_path)
    assert all_once([shard], 10)


def test_two_shards_with_windows_of_their_own_get_small_transactions(tmp_path: Path) -> None:
    shards, records = [Shard("0 8 0 0"), Shard("0 10 0 0")], Records()
    for offset in range(10):
        records.extend(Records([offset], [SENT_MS], [line(f"{offset}", id=f"i{offset}")], [None], [()]))
    Writer(0, 10, 2, 100, 0).run(records, shards, tmp_path)
    assert all_once_by_key(shards, 10) and max(shards[0].sizes + shards[1].sizes) == 2


def all_once_by_key(shards: Sequence[Shard], count: int) -> bool:
    return sum(shard.stored.total() for shard in shards) == count == sum(len(shard.keys) for shard in shards)
