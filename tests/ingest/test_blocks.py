"""The blocks in which rows are written down: the same messages whenever they are read, and damage is an error."""

import binascii
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.core.errors import PipelineError
from pipeline.core.ids import TOKEN_HALF_BITS, arrival_ms, decode_token
from pipeline.core.messages import Message
from pipeline.ingest import blocks
from pipeline.ingest.blocks import BLOCK_ROWS, Block, Packing, add_digests, digest_of, read_block, rests_of
from tests.ingest.files import ARRIVAL_MS

MASK = (1 << TOKEN_HALF_BITS) - 1


def packed(packing: Packing, rows: int, text: str = "m", keys: list[str | None] | None = None) -> Iterator[Block]:
    due_ms = pa.array(ARRIVAL_MS + np.arange(rows)[::-1])
    rest = pa.array([f"m{text}{n}" for n in range(rows)])
    yield from packing.add(due_ms, rest, pa.array(keys or [None] * rows, pa.string()), due_ms)


def test_a_block_gives_the_messages_that_were_packed() -> None:
    packing = Packing(ARRIVAL_MS, 7, 3)
    assert [*packed(packing, 3, "é ", [None, "k", None])] == []
    [(line, rows, _)] = packing.finish()
    assert [*packing.finish()] == [] and rows == 3
    part = read_block(line.encode())
    members = part.members.to_pylist()
    messages = [Message.from_member(member, int(due_ms)) for member, due_ms in zip(members, part.due_ms, strict=True)]
    assert [(message.body, message.due_ms - ARRIVAL_MS) for message in messages] == [("é 0", 2), ("é 1", 1), ("é 2", 0)]
    assert [message.message_id for message in messages] == [f"{part.part_id}{number:08x}" for number in (1, 2, 3)]
    assert part.idempotency_keys.to_pylist() == [None, b"k", None]
    assert (part.lines, part.line_nos.tolist()) == (3, [1, 2, 3])
    assert rests_of(part.members).to_pylist() == ["mé 0".encode(), "mé 1".encode(), "mé 2".encode()]
    assert arrival_ms(messages[0].message_id[:7]) == ARRIVAL_MS, "so the lateness of what came in late is told"


def test_a_block_without_keys_has_nulls() -> None:
    packing = Packing(ARRIVAL_MS, 7, 3)
    [*packed(packing, 2)]
    [(line, *_)] = packing.finish()
    assert read_block(line.encode()).idempotency_keys.to_pylist() == [None, None]


def test_a_block_is_full_by_rows_or_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = Packing(ARRIVAL_MS, 7, 3)
    found = [*packed(packing, BLOCK_ROWS - 1), *packed(packing, 3), *packing.finish()]
    assert [block.rows for block in found] == [BLOCK_ROWS + 2]
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1_000)
    found = [*packed(packing, 100, "long " * 20), *packing.finish()]
    assert sum(block.rows for block in found) == 100 and 10 < len(found) < 20
    assert len({block.line.partition(" ")[0] for block in found}) == len(found)


def test_no_two_blocks_of_a_table_have_the_same_token() -> None:
    tokens = {blocks.token_of(ARRIVAL_MS, MASK - 5, task, number) for task in range(50) for number in range(50)}
    assert len(tokens) == 2_500
    assert {decode_token(token)[0] for token in tokens} == {ARRIVAL_MS}
    assert tokens.isdisjoint(
        blocks.token_of(ARRIVAL_MS, MASK // 3, task, number) for task in range(50) for number in range(50)
    )


ROW = st.tuples(st.integers(-100, 100), st.text("ab\0é", max_size=4))


def digest(rows: Sequence[tuple[int, str]]) -> int:
    asked_ms, texts = zip(*rows, strict=True) if rows else ((), ())
    return digest_of(pa.array(asked_ms, pa.int64()), pa.array(texts, pa.string()))


@given(st.lists(ROW, max_size=8), st.randoms(use_true_random=False), st.integers(0, 8))
def test_the_digest_of_rows_is_the_same_in_any_order_and_division(
    rows: list[tuple[int, str]], random: Random, cut: int
) -> None:
    others = rows.copy()
    random.shuffle(others)
    assert add_digests([digest(others[:cut]), digest(others[cut:])]) == digest(rows)


@given(st.lists(ROW, max_size=4), st.lists(ROW, max_size=4))
@example([(1, "a"), (2, "b")], [(1, "b"), (2, "a")])
@example([(1, "a"), (1, "a"), (2, "b")], [(1, "a"), (2, "b"), (2, "b")])
@example([(1, "a"), (1, "a")], [(1, "b"), (1, "b")])
@example([], [(0, "")])
def test_other_rows_have_another_digest(some: list[tuple[int, str]], others: list[tuple[int, str]]) -> None:
    assert (digest(some) == digest(others)) == (Counter(some) == Counter(others))


def test_the_digest_of_rows_is_that_of_every_version() -> None:
    """It is kept in Redis, and compared when a batch is played again."""
    assert digest([(5, "mtea"), (-6, "mé")]) == 5191485340965367653


def test_a_damaged_block_is_an_error() -> None:
    packing = Packing(ARRIVAL_MS, 7, 3)
    [*packed(packing, 1_000)]
    [(line, *_)] = packing.finish()
    token, rows, text = line.split(" ")
    half = binascii.b2a_base64(binascii.a2b_base64(text)[:2_000], newline=False).decode()
    for damaged in (
        line[:-4],
        line[:-1],
        line[: len(line) // 2],
        f"{token} 999 {text}",
        f"{token} {rows} {half}",
        token,
        "",
    ):
        with pytest.raises(PipelineError, match="is damaged"):
            read_block(damaged.encode())
