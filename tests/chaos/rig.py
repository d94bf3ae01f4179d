"""A writer behind a proxy, a server, and whoever takes messages out meanwhile: what a check of a fault is made of."""

import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.pandas.types import to_arrow_schema

from pipeline.config import ColdSettings, RedisSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.clock import SystemClock
from pipeline.core.errors import StoreProtocolError
from pipeline.core.messages import Message
from pipeline.ingest import shard_writer
from pipeline.ingest.cold_folder import IDENTITY_NAME, ColdFolder, ColdPlace
from pipeline.ingest.cold_opening import open_cold
from pipeline.ingest.hydration import Hydrator
from pipeline.ingest.schemas import FILE_ROW
from pipeline.ingest.stores import WriterSettings
from pipeline.ingest.summary import Summary
from pipeline.ingest.writer import BatchWriter
from pipeline.store.cold import read_cold_hours
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.shards import open_shards
from pipeline.store.stats import read_stats
from tests.chaos.proxy import WAIT_SEC, Fault, Proxy, naming, reply_with, running
from tests.servers import RealServer

TRANSACTION_MESSAGES = 10
OTHER_TRANSACTION_MESSAGES = 7
PAST_MS = 1_600_000_200_000  # where a bucket starts, in 2020
COLD_FROM_MS = PAST_MS + 900_000
ARRIVAL_MS = 1_700_000_000_123
PART_BYTES = 850  # so that the large files are some parts each
SOURCE_ID = "chaos"
READS_MAX = (
    1_000  # of markers: a writer that asks for them more often than any check can lead to is going round in circles
)

die = reply_with(b"-ERR the task dies here\r\n")  # the writer meets what it can't try again


class Rig:
    """One namespace on a server, reached by writers through ``proxy`` and by the drain directly.

    Writers write as a batch of one partition does, over files of ``FILES`` by their numbers.
    """

    def __init__(self, server: RealServer, folder: Path, shards: int = 1, has_cold: bool = False) -> None:
        """Open one.

        Args:
            has_cold: about half of all messages wait in cold files, and come back before each drain.
        """
        self.server = server
        self.delivered: Counter[str] = Counter()
        self.hydrated = 0
        self.lost_files = 0  # as the writers have found out
        self._redis = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}", shards=shards)
        self._rejects = folder / "rejects"
        self._cold_folder = folder / "cold"
        self._cold = self._tie_folder() if has_cold else None
        self.proxy = Proxy(server.folder / "s", server.folder / f"p-{self._redis.namespace[-8:]}")
        self.stores = running("schedule")  # a transaction
        self.watches = naming("WATCH")  # what a transaction begins with, in a message of its own
        self.reads = naming("MGET")  # of markers: behind WATCH, after a transaction that failed, and at the end
        self.proxy.trap(self.reads, reply_with(b"-ERR round in circles\r\n"), first=READS_MAX, last=float("inf"))

    def close(self) -> None:
        self.proxy.close()

    def settings(self, transaction_messages: int = TRANSACTION_MESSAGES) -> WriterSettings:
        redis = replace(self._redis, url=self.proxy.url)
        return WriterSettings(redis, SOURCE_ID, str(self._rejects), transaction_messages, cold=self._cold)

    def _tie_folder(self) -> ColdPlace:
        with connect(self._redis) as client:
            tied = open_cold(client, self._redis, ColdSettings(folder=str(self._cold_folder)))
        assert tied is not None
        return replace(tied, horizon_ms=COLD_FROM_MS - ARRIVAL_MS)

    def hydrate(self) -> None:
        """Bring all cold messages back, as all are due."""
        if self._cold is None:
            return
        folder, clock = ColdFolder(self._cold.folder, self._cold.folder_id), SystemClock()
        with connect(self._redis) as client:
            stores, keys = open_shards(client, self._redis), keys_of(self._redis)
            settings = replace(self.settings(), redis=self._redis)
            hydrator = Hydrator(
                uuid.uuid4().hex, folder, client, keys, stores, settings, 1, 0, 0, clock, lambda: False, lambda ms: None
            )
            for lease in hydrator._leases:  # several drain at once, and none waits for another
                lease.hold = lambda: True  # type: ignore[method-assign]
            assert hydrator.look()
            self.hydrated += hydrator.totals.messages

    def write(self, numbers: Iterable[int] | None = None, transaction_messages: int = TRANSACTION_MESSAGES) -> None:
        """Store files in this thread, all of them if nothing else is said, and see that each message is accounted for."""
        chosen = list(range(len(FILES)) if numbers is None else numbers)
        shard_writer.SORTED_MESSAGES = transaction_messages  # so a task stores several times, as it does of many parts
        reports: list[Summary] = []
        writer = BatchWriter(
            self.settings(transaction_messages), SystemClock(), lambda _, summary, __: reports.append(summary)
        )
        partition = Partition(chosen)
        writer(partition, 0)  # type: ignore[arg-type]
        self.lost_files += partition.lost
        [summary] = reports
        counted = summary.stored - summary.stored_again + summary.duplicates
        assert counted == sum(map(accepted, (FILES[number] for number in chosen))), summary

    def writing(self, transaction_messages: int = TRANSACTION_MESSAGES) -> "Writing":
        """Store all files in a thread of its own."""
        return Writing(lambda: self.write(transaction_messages=transaction_messages))

    def crash(self, at: int, transaction_messages: int = TRANSACTION_MESSAGES, fault: Fault = die) -> None:
        """Store all files, and die at the transaction with that number."""
        trap = self.proxy.trap(self.stores, fault, first=at)
        with pytest.raises(StoreProtocolError):
            self.write(transaction_messages=transaction_messages)
        assert trap.was_sprung

    def drain(self) -> None:
        """Deliver and acknowledge everything that is stored now."""
        self.hydrate()
        client = connect(self._redis)
        for store in open_shards(client, self._redis):
            while (claim := store.claim(uuid.uuid4().hex).claim) is not None:
                messages = [Message.from_member(m.member, m.due_ms) for m in claim.messages]
                self.delivered.update(m.body for m in messages)
                assert store.ack(claim, len(messages), [(m.message_id, m.id) for m in messages if m.id != m.message_id])
        client.close()

    def forget_ids(self) -> None:
        """Forget the idempotency keys, as the server does a day after delivery."""
        self.server.client().delete(*(keys.ids() for keys in keys_of(self._redis)))

    def buckets(self, due_ms: int) -> list[str]:
        """The keys of the messages that are due about then, one a shard."""
        return [keys.bucket(due_ms - due_ms % BUCKET_WIDTH_MS) for keys in keys_of(self._redis)]

    def expect_each_once(self, lost_files: bool = False) -> None:
        """Take out what is left and compare everything that was delivered and counted with everything that was sent.

        Args:
            lost_files: whether writers had to store files again that the server had lost.
        """
        self.drain()
        lost, copies = EXPECTED - self.delivered, self.delivered - EXPECTED
        assert (lost, copies) == (Counter(), Counter())
        counters = read_stats(self.server.client(), keys_of(self._redis)).counters
        assert counters["stored"] == counters["delivered"] == EXPECTED.total()
        assert counters["rejected"] == REJECTED
        assert (self.lost_files > 0) == lost_files
        if self._cold is not None:
            assert self.hydrated > EXPECTED.total() // 3
            assert read_cold_hours(self.server.client(), keys_of(self._redis)) == Counter()
            assert [path.name for path in self._cold_folder.iterdir()] == [IDENTITY_NAME]


class Partition:
    """The file rows of a batch of one partition: what ``BatchWriter`` asks of a DataFrame, without Spark."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.lost = 0
        self._numbers = numbers
        self._write: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]

    def mapInArrow(self, write: Any, columns: str) -> "Partition":  # noqa: N802 (Spark's name)
        self._write = write
        return self

    def collect(self) -> list[Row]:
        found = [row for batch in self._write(map(row_of, self._numbers)) for row in batch.to_pylist()]
        self.lost += sum(row["lost"] for row in found)
        return [Row(**row) for row in found]


class Writing:
    """A writer in a thread; ``join`` waits for its end and raises what it raised."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(WAIT_SEC)
        assert not self._thread.is_alive(), "the writer does not end"
        if self._raised is not None:
            raise self._raised

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as exc:
            self._raised = exc


def contents_of_files() -> list[bytes]:
    """The files that every check writes: plain lines, twins, idempotency keys (also across files), rejects, blanks.

    All are due in the past, so a drain takes out at once what is stored. Some files, and the beginning of the first, have no
    keys, as keys tell a transaction from its copy, too.
    """
    files = []
    for name, length in [("a", 60), ("b", 60), *((name, 8) for name in "cdefghijk")]:
        lines: list[dict[str, object] | None] = []
        for number in range(1, length + 1):
            text = f"{name}{number}"
            has_key = name not in "ei" and (name, number // 30) != ("a", 0)
            due = PAST_MS + number * 3 % 4 * 900_000  # several buckets, out of order, many due together
            if number % 10 == 3:
                lines.append({"message": f"twin {name}{number // 10}", "due": PAST_MS + 5})
                lines.append({"message": f"twin {name}{number // 10}", "due": PAST_MS + 5})
            elif number % 10 == 5 and has_key:
                lines.append({"message": text, "due": due, "id": f"id-{text}"})
            elif number % 20 == 6 and has_key:
                lines.append({"message": "the same order", "due": due, "id": "order-1"})
            elif number % 20 == 8:
                lines.append({"message": text})
            elif number % 20 == 18:
                lines.append(None)
            else:
                lines.append({"message": text, "due": due})
        files.append(b"".join((json.dumps(line).encode() if line else b"") + b"\n" for line in lines))
    return files


def requests_of(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines() if line]


def accepted(content: bytes) -> int:
    """How many messages a file brings, those included whose idempotency key is known."""
    return sum("due" in request for request in requests_of(content))


def deliveries_of(files: Iterable[bytes]) -> Counter[str]:
    """What must be delivered of ``contents_of_files``, found without any code of the pipeline."""
    sent = [request for content in files for request in requests_of(content) if "due" in request]
    without_id = [request["message"] for request in sent if "id" not in request]
    by_id = {request["id"]: request["message"] for request in sent if "id" in request}
    return Counter([*without_id, *by_id.values()])


FILES = contents_of_files()
EXPECTED = deliveries_of(FILES)
REJECTED = sum(len(requests_of(content)) - accepted(content) for content in FILES)


def row_of(number: int) -> pa.RecordBatch:
    """One of the files as Spark hands it to a task; all but the first are segments, cut anywhere."""
    row = {
        "value": FILES[number],
        "path": f"OZ0aaaabbbbb{number:02d}.{1 + 3 * number}.json.a+jsonl",
        "arrival_ms": ARRIVAL_MS,
    }
    return pa.RecordBatch.from_pylist([row], schema=to_arrow_schema(FILE_ROW))
