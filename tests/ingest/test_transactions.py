"""From a parsed part to transactions: order, markers, and where a writer takes up again."""

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.ids import message_id
from pipeline.ingest.parsing import ParsedPart, RejectedLine
from pipeline.ingest.shard_writer import split_by_shard
from pipeline.ingest.transactions import ALL_STORED, PartQueue, Step
from pipeline.store.base import NO_MARKER, Transaction
from pipeline.store.shards import shard_of
from tests.ingest.files import TOKEN

START_MS = 1_700_000_400_000  # where a bucket begins
BYTES_MAX = 10**6


def queue_of(*due_ms: int, ids: dict[int, str] | None = None, token: str = TOKEN, rejected: int = 0) -> PartQueue:
    """A queue of one line for each due time, from line 1 on; ids by index."""
    return PartQueue(part_of(*due_ms, ids=ids, token=token, rejected=rejected))


def part_of(*due_ms: int, ids: dict[int, str] | None = None, token: str = TOKEN, rejected: int = 0) -> ParsedPart:
    lines = range(1, len(due_ms) + 1)
    members = pa.array([f"{message_id(token, line)}m{line}".encode() for line in lines], pa.binary())
    refused: list[RejectedLine] = [None] * rejected  # type: ignore[list-item]
    return ParsedPart(
        part_id=token,
        line_nos=np.array(lines, np.int64),
        due_ms=np.array(due_ms, np.int64),
        members=members,
        idempotency_keys=pa.array([(ids or {}).get(index) for index in range(len(due_ms))], pa.binary()),
        rejected=refused,
        lines=len(lines),
        blank=0,
    )


def steps(queues: list[PartQueue], messages_max: int, bytes_max: int = BYTES_MAX) -> list[Transaction]:
    """All transactions, each of them stored."""
    found = []
    while step := Step(queues, messages_max, bytes_max):
        found.append(step.transaction)
        step.advance()
    return found


def bodies(transactions: list[Transaction]) -> list[str]:
    """The messages in the order in which they are stored; those with an id follow the others of their transaction."""
    found: list[bytes] = []
    for transaction in transactions:
        found += pa.array(transaction.rows.members).to_pylist()
        found += transaction.identified.members.to_pylist()
    return [member.decode()[23:] for member in found]


def test_messages_are_stored_in_order_of_due_time_then_of_lines() -> None:
    (transaction,) = steps([queue_of(START_MS + 5, START_MS, START_MS + 600_000, START_MS)], 10)
    assert list(transaction.rows.due_ms) == [START_MS, START_MS, START_MS + 5, START_MS + 600_000]
    assert bodies([transaction]) == ["2", "4", "1", "3"]
    (move,) = transaction.moves
    assert (move.part_id, move.before, move.after) == (TOKEN, NO_MARKER, ALL_STORED)


def test_a_part_is_stored_in_several_transactions_each_from_the_marker_of_the_one_before() -> None:
    found = steps([queue_of(9, 8, 7, 7, 5)], 2)
    assert bodies(found) == ["5", "3", "4", "2", "1"]
    assert [(t.moves[0].before, t.moves[0].after) for t in found] == [
        ("", "7 00000003"), ("7 00000003", "8 00000002"), ("8 00000002", "all")
    ]  # fmt: skip


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 7), st.integers(1, 7), st.randoms())
def test_whatever_was_stored_before_the_rest_is_stored_once(
    dues: list[int], size: int, other_size: int, chance: random.Random
) -> None:
    ids = {index: f"id-{index}" for index in range(len(dues)) if chance.random() < 0.3}
    first, again = queue_of(*dues, ids=ids), queue_of(*dues, ids=ids)
    stored: list[str] = []
    while (step := Step([first], size, BYTES_MAX)) and chance.random() < 0.7:
        stored += bodies([step.transaction])
        step.advance()
    assert again.resume(first.marker) == len(stored)
    stored += bodies(steps([again], other_size))
    assert sorted(stored, key=int) == [str(line) for line in range(1, len(dues) + 1)]
    assert again.is_stored


def test_a_marker_that_went_back_is_followed() -> None:
    queue = queue_of(1, 2, 3)
    steps([queue], 1)
    assert (queue.is_stored, queue.resume("1 00000001"), queue.left, queue.is_stored) == (True, 1, 2, False)
    assert queue.resume(NO_MARKER) == 0


def test_small_files_are_stored_together_in_order_of_due_time() -> None:
    queues = [queue_of(3, 1, token="A" * 14), queue_of(token="B" * 14), queue_of(2, token="C" * 14)]
    (transaction,) = steps(queues, 10)
    assert [move.after for move in transaction.moves] == ["all"] * 3
    assert list(transaction.rows.due_ms) == [1, 2, 3]


def test_a_transaction_ends_in_the_middle_of_a_file_when_it_is_full() -> None:
    found = steps([queue_of(1, 2, token="A" * 14), queue_of(1, 2, 3, token="B" * 14)], 3)
    assert [[(m.part_id[0], m.after) for m in t.moves] for t in found] == [
        [("A", "all"), ("B", "1 00000001")], [("B", "all")]
    ]  # fmt: skip


def test_a_transaction_of_several_files_has_what_is_due_first_in_any_of_them() -> None:
    found = steps([queue_of(1, 4, 5, token="A" * 14), queue_of(2, 3, 6, token="B" * 14), queue_of(token="C" * 14)], 3)
    assert [list(t.rows.due_ms) for t in found] == [[1, 2, 3], [4, 5, 6]]
    assert [[(m.part_id[0], m.after) for m in t.moves] for t in found] == [
        [("A", "1 00000001"), ("B", "3 00000002"), ("C", "all")], [("A", "all"), ("B", "all")]
    ]  # fmt: skip


def test_many_messages_of_one_millisecond_in_several_files_make_no_transaction_too_long() -> None:
    found = steps([queue_of(*[7] * 5, token="A" * 14), queue_of(6, *[7] * 5, 8, token="B" * 14)], 4)
    assert [list(t.rows.due_ms) for t in found] == [[6, 7, 7, 7], [7] * 4, [7] * 3 + [8]]


def test_long_messages_of_several_files_make_shorter_transactions_and_each_has_one_at_least() -> None:
    found = steps(
        [queue_of(1, 3, token="A" * 14), queue_of(2, 4, token="B" * 14)], 100, 50
    )  # each member takes 24 bytes
    assert [list(t.rows.due_ms) for t in found] == [[1, 2], [3, 4]]
    found = steps([queue_of(1, 3, token="A" * 14), queue_of(2, 4, token="B" * 14)], 100, 1)
    assert [list(t.rows.due_ms) for t in found] == [[1], [2], [3], [4]]


@pytest.mark.parametrize(("bytes_max", "sizes"), [(1, [1, 1, 1, 1]), (48, [2, 2]), (1000, [4])])
def test_long_messages_make_shorter_transactions(bytes_max: int, sizes: list[int]) -> None:
    found = steps([queue_of(1, 2, 3, 4)], 100, bytes_max)  # each member takes 24 bytes
    assert [len(t.rows) for t in found] == sizes


def test_messages_with_an_id_go_apart_and_rejects_are_counted_once_at_the_end() -> None:
    found = steps([queue_of(3, 2, 1, ids={1: "b"}, rejected=7)], 2)
    assert [t.identified.idempotency_keys.to_pylist() for t in found] == [[b"b"], []]
    assert [bodies([t]) for t in found] == [["3", "2"], ["1"]]
    assert [t.rejected for t in found] == [0, 7]


@given(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), max_size=20), st.integers(1, 5))
def test_every_message_goes_to_one_shard_and_an_idempotency_key_always_to_the_same(ids: list[str], shards: int) -> None:
    given = {index: idempotency_key for index, idempotency_key in enumerate(ids) if idempotency_key}
    parts = split_by_shard(part_of(*range(len(ids)), ids=given, rejected=2), shards)
    assert sorted(line for part in parts.values() for line in part.line_nos.tolist()) == list(range(1, len(ids) + 1))
    own = shard_of(TOKEN, shards)
    assert {shard: len(part.rejected) for shard, part in parts.items() if part.rejected} == {own: 2}
    for shard, part in parts.items():
        for index, line in enumerate(part.line_nos.tolist()):
            idempotency_key = ids[line - 1]
            assert part.idempotency_keys[index].as_py() == (idempotency_key.encode() or None)
            assert shard == (shard_of(idempotency_key, shards) if idempotency_key else own)
            assert (part.due_ms[index], part.members[index].as_py()[23:]) == (line - 1, b"%d" % line)


def test_a_part_without_messages_still_moves_its_marker() -> None:
    (transaction,) = steps([queue_of(rejected=2)], 5)
    assert (transaction.moves[0].after, len(transaction.rows), transaction.rejected) == (ALL_STORED, 0, 2)
