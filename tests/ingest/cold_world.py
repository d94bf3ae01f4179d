"""A namespace with a cold folder, whose writers and hydrators run in this process."""

import json
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config import ColdSettings, RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.core.ids import encode_token
from pipeline.core.messages import Message
from pipeline.ingest.cold_folder import ColdFolder, ColdName
from pipeline.ingest.cold_opening import open_cold
from pipeline.ingest.cold_reading import ColdFinder
from pipeline.ingest.hydration import Hydrator
from pipeline.ingest.stores import WriterSettings
from pipeline.ingest.summary import Summary
from pipeline.ingest.writer import PartitionWriter
from pipeline.store.by_id import MessagesById
from pipeline.store.cold import read_cold_hours
from pipeline.store.connection import connect, server_ms
from pipeline.store.keys import keys_of
from pipeline.store.shards import open_shards
from tests.cluster import Node
from tests.servers import RealServer

HOUR_MS = 3_600_000
RETENTION_MS = 86_400_000
ALL_HOURS = 100_000.0  # a lead that everything is within


class ColdWorld:
    """All is cold that is due an hour after its file came in, or later. ``now_ms`` is the beginning of an hour, the last one."""

    def __init__(
        self,
        server: "RealServer | Node",
        path: Path,
        shards: int = 1,
        transaction_messages: int = 5,
        namespace: str = "",
        url: str = "",
    ) -> None:
        self.server = server
        self.redis = RedisSettings(url=server.url, namespace=namespace or f"test-{uuid.uuid4().hex}", shards=shards)
        self.client = connect(self.redis)
        self.shards = keys_of(self.redis)
        self.path = path / "cold"
        tied = open_cold(self.client, self.redis, ColdSettings(folder=url or str(self.path)))
        assert tied is not None
        self.place = replace(tied, horizon_ms=HOUR_MS)
        self.folder = ColdFolder(self.place.folder, self.place.folder_id)
        self.settings = WriterSettings(
            self.redis, "source", str(path / "rejects"), transaction_messages, cold=self.place
        )
        self.now_ms = server_ms(self.client) // HOUR_MS * HOUR_MS
        self._files = 0

    def token(self, number: int) -> str:
        return encode_token(self.now_ms, number)

    def write(
        self, *files: Sequence[dict[str, Any]], token: str = "", settings: WriterSettings | None = None
    ) -> Summary:
        """Write files of request lines as one partition; each gets a new token, unless one is given for a single one."""
        rows = []
        for lines in files:
            self._files += 1
            rows.append(
                {
                    "path": f"{token or self.token(self._files)}.1.json.a+jsonl",
                    "arrival_ms": self.now_ms,
                    "value": "".join(f"{json.dumps(each)}\n" for each in lines).encode(),
                }
            )
        return PartitionWriter(settings or self.settings).write([pa.RecordBatch.from_pylist(rows)])

    def line(self, text: str, hours: float, key: str = "", **more: Any) -> dict[str, Any]:
        """A request that is due so many hours from ``now_ms``."""
        return {"message": text, "due": self.now_ms + round(hours * HOUR_MS), **({"id": key} if key else {}), **more}

    def hydrator(self, lead_hours: float = ALL_HOURS, name: str = "", archive_ms: float = 0, url: str = "") -> Hydrator:
        redis = replace(self.redis, url=url or self.redis.url)
        client = connect(redis)
        return Hydrator(
            name or uuid.uuid4().hex,
            self.folder,
            client,
            self.shards,
            open_shards(client, redis),
            replace(self.settings, redis=redis),
            round(lead_hours * HOUR_MS),
            archive_ms,
            0,
            SystemClock(),
            lambda: False,
            lambda ms: None,
        )

    def hydrate(self, lead_hours: float = ALL_HOURS) -> int:
        """Bring in what is due soon; returns how many messages came."""
        hydrator = self.hydrator(lead_hours)
        assert hydrator.look()
        hydrator.leave()
        return hydrator.totals.messages

    def by_id(self) -> MessagesById:
        """A program that can read the folder."""
        return MessagesById(self.client, self.shards, RETENTION_MS, read_cold=ColdFinder(self.folder, SystemClock()))

    def waiting(self) -> dict[str, int]:
        """The messages in Redis, each with the milliseconds from ``now_ms`` to when it is due. No text comes twice."""
        found: list[tuple[str, int]] = []
        for keys in self.shards:
            for start in self.client.zrange(keys.buckets(), 0, -1):
                members = self.client.zrange(keys.bucket(int(start)), 0, -1, withscores=True)
                assert members, "an empty bucket is indexed"
                found += [(Message.from_member(member, 0).body, int(score) - self.now_ms) for member, score in members]
        assert len(dict(found)) == len(found), "a message is there twice"
        return dict(found)

    def cold_hours(self) -> dict[int, int]:
        """How many cold messages Redis counts for each hour from ``now_ms`` on."""
        return {
            hour - self.now_ms // HOUR_MS: count for hour, count in read_cold_hours(self.client, self.shards).items()
        }

    def places(self) -> dict[str, bytes]:
        return {
            key.decode(): place for keys in self.shards for key, place in self.client.hgetall(keys.places()).items()
        }

    def counters(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for keys in self.shards:
            found.update({name.decode(): int(count) for name, count in self.client.hgetall(keys.counters()).items()})
        return found

    def names(self) -> list[ColdName]:
        return sorted(self.folder.names(), key=str)
