"""Queries over a landing folder: their checkpoint lost, old or moved, and writers that outlive them."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pipeline.core.clock import SystemClock
from pipeline.ingest.query import start_query
from pipeline.ingest.readers import read_landing, read_landing_once
from pipeline.ingest.writer import BatchWriter
from pipeline.landing.names import TokenMaker, landing_name, quote_name
from tests.chaos.proxy import WAIT_SEC, Exchange, Fault, after, before
from tests.chaos.rig import FILES, OTHER_TRANSACTION_MESSAGES, TRANSACTION_MESSAGES, Rig, Writing
from tests.servers import RealServer

LANDED_MS = 1_700_000_000_000
MIB = 1024 * 1024


@dataclass
class Ingest:
    """A landing folder, and what reads it into the rig's namespace."""

    spark: SparkSession
    rig: Rig
    landing: Path
    checkpoint: Path
    tokens: TokenMaker

    def land(self, *contents: bytes) -> None:
        for content in contents:
            work = self.landing / ".work"
            work.write_bytes(content)
            work.rename(self.landing / landing_name(self.tokens.make(LANDED_MS), 1, "json", quote_name("a.jsonl")))

    def start(self, transaction_messages: int = TRANSACTION_MESSAGES) -> StreamingQuery:
        """Start a query that takes in what is there."""
        files = read_landing(self.spark, str(self.landing), MIB)
        return start_query(files, self.writer(transaction_messages), str(self.checkpoint), None)

    def run(self, transaction_messages: int = TRANSACTION_MESSAGES) -> None:
        assert self.start(transaction_messages).awaitTermination(int(WAIT_SEC))

    def writing(self, transaction_messages: int = TRANSACTION_MESSAGES) -> Writing:
        """Write all landing files as one batch in a thread, which no query can stop."""
        files = read_landing_once(self.spark, str(self.landing)).coalesce(1)
        return Writing(lambda: self.writer(transaction_messages)(files, 0))

    def writer(self, transaction_messages: int) -> BatchWriter:
        return BatchWriter(self.rig.settings(transaction_messages), SystemClock(), lambda *_: None)


@pytest.fixture
def ingest(spark: SparkSession, server: RealServer, tmp_path: Path) -> Iterator[Ingest]:
    landing = tmp_path / "landing"
    landing.mkdir()
    with closing(Rig(server, tmp_path)) as rig:
        yield Ingest(spark, rig, landing, tmp_path / "checkpoint", TokenMaker())


def test_a_checkpoint_that_is_deleted_costs_nothing(ingest: Ingest) -> None:
    ingest.land(*FILES)
    ingest.run()
    ingest.rig.drain()
    assert list(ingest.landing.iterdir()), "with nothing there is nothing to read again"
    shutil.rmtree(ingest.checkpoint)
    ingest.run(OTHER_TRANSACTION_MESSAGES)
    ingest.rig.expect_each_once()


def test_a_checkpoint_from_an_older_copy_costs_nothing(ingest: Ingest, tmp_path: Path) -> None:
    ingest.land(*FILES[:1])
    ingest.run()
    shutil.copytree(ingest.checkpoint, tmp_path / "copy")
    for content in FILES[1:3], FILES[3:]:
        ingest.land(*content)
        ingest.run()
    ingest.rig.drain()
    assert list(ingest.landing.iterdir()), "with nothing there is nothing to read again"
    shutil.rmtree(ingest.checkpoint)
    (tmp_path / "copy").rename(ingest.checkpoint)
    ingest.run(OTHER_TRANSACTION_MESSAGES)
    ingest.rig.expect_each_once()


def test_a_checkpoint_that_is_moved_goes_on(ingest: Ingest, tmp_path: Path) -> None:
    ingest.land(*FILES[:2])
    ingest.run()
    ingest.rig.drain()
    ingest.checkpoint = ingest.checkpoint.rename(tmp_path / "elsewhere")
    ingest.land(*FILES[2:])
    ingest.run(OTHER_TRANSACTION_MESSAGES)
    ingest.rig.expect_each_once()


@pytest.mark.parametrize("stall", [before, after])
def test_what_a_stopped_query_has_under_way_may_come_late(
    ingest: Ingest, stall: Callable[[Callable[[], object]], Fault]
) -> None:
    """Its transaction reaches the server when the next query has stored, and a drain delivered, everything."""
    gate, arrived = threading.Event(), threading.Event()

    def late(exchange: Exchange) -> None:
        try:
            stall(gate.wait)(exchange)
        finally:
            arrived.set()

    trap = ingest.rig.proxy.trap(ingest.rig.stores, late, first=4)
    ingest.land(*FILES)
    query = ingest.start()
    trap.wait()
    query.stop()
    ingest.run(OTHER_TRANSACTION_MESSAGES)
    ingest.rig.drain()
    gate.set()
    assert arrived.wait(WAIT_SEC)
    ingest.rig.expect_each_once()


def test_a_writer_that_no_stop_reaches_stores_nothing_twice(ingest: Ingest) -> None:
    gate = threading.Event()
    trap = ingest.rig.proxy.trap(ingest.rig.stores, before(gate.wait), first=4)
    ingest.land(*FILES)
    zombie = ingest.writing(OTHER_TRANSACTION_MESSAGES)
    trap.wait()
    ingest.run()
    ingest.rig.drain()
    gate.set()
    zombie.join()
    ingest.rig.expect_each_once()


def test_two_batches_of_the_same_files_at_the_same_time_store_them_once(ingest: Ingest) -> None:
    ingest.land(*FILES)
    ingest.rig.proxy.trap(ingest.rig.stores, after(ingest.rig.drain), last=float("inf"))
    writers = [ingest.writing(size) for size in (TRANSACTION_MESSAGES, OTHER_TRANSACTION_MESSAGES)]
    for writer in writers:
        writer.join()
    ingest.rig.expect_each_once()
