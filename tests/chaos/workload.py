"""Files of requests of every kind, and what must become of each of their lines."""

import gzip
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

COLUMNS = ("message", "delay_sec", "due", "id", "topic")
DELAYS_SEC = (0, 0, 0.25, 1.5, 12)
DUE_MS = 1_700_000_000_000
BAD_LINES = (
    ("not json", "not_json"),
    ('{"message":"no time"}', "missing_due"),
    ('{"message":"more","delay_sec":0} text', "trailing_text"),
)

Delivery = tuple[str, str, str, str, int]


class Workload:
    """Makes files and remembers what must be delivered, and how often, and where a line is refused, and why."""

    def __init__(self, seed: int) -> None:
        self.expected: Counter[Delivery] = Counter()
        self.rejected: Counter[tuple[str, int, str]] = Counter()
        self._random = Random(seed)
        self._files = 0
        self._texts = 0
        self._ids: list[dict[str, Any]] = []

    def drop(self, inbox: Path, lines: int) -> None:
        """Put a JSON, a CSV and a gzipped file into the inbox, each of so many lines. No job may read the inbox meanwhile.

        Their arrival is known beforehand: the time of change that is given to their content, which is later than the change
        of the inode, and is past when this returns.
        """
        arrival_ms = time.time_ns() // 1_000_000 + 1_000
        for make, suffix in ((self._json, ".jsonl"), (self._csv, ".csv"), (self._json, ".jsonl.gz")):
            self._files += 1
            name = f"{self._files}{suffix}"
            content = make(name, lines, arrival_ms)
            work = inbox / f"{name}.tmp"
            work.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
            os.utime(work, ns=(arrival_ms * 1_000_000,) * 2)
            work.rename(inbox / name)
            assert (inbox / name).stat().st_ctime_ns < arrival_ms * 1_000_000, "this machine is too slow"
        while time.time_ns() <= arrival_ms * 1_000_000:
            Event().wait(0.01)

    def _json(self, name: str, lines: int, arrival_ms: int) -> bytes:
        rows: list[str] = []
        while len(rows) < lines:
            kind = self._random.random()
            if kind < 0.05:
                rows.append(self._random.choice(("", "  \t")))
            elif kind < 0.1:
                line, reason = self._random.choice(BAD_LINES)
                rows.append(line)
                self.rejected[name, len(rows), reason] += 1
            else:
                request = self._request(arrival_ms)
                if kind < 0.2 and "id" not in request:  # twins
                    rows.append(json.dumps(request))
                    self._expect(request, arrival_ms)
                rows.append(json.dumps(request))
        return "".join(row + "\n" for row in rows).encode()

    def _csv(self, name: str, lines: int, arrival_ms: int) -> bytes:
        rows = [",".join(COLUMNS)]
        for _ in range(lines):
            if self._random.random() < 0.05:
                rows.append("no time,,,,")
                self.rejected[name, len(rows), "missing_due"] += 1
            else:
                request = self._request(arrival_ms, with_headers=False)
                rows.append(",".join(f'"{request[c]}"' if c in request else "" for c in COLUMNS))
        return "".join(row + "\n" for row in rows).encode()

    def _request(self, arrival_ms: int, with_headers: bool = True) -> dict[str, Any]:
        """Make a request and note what it must lead to; an id that was used before comes again now and then."""
        kind = self._random.random()
        if kind < 0.05 and self._ids:
            return self._random.choice(self._ids)
        self._texts += 1
        request: dict[str, Any] = {"message": f"message {self._texts}, \u00e4\u4e16"}
        if kind < 0.2:
            request |= {"due": DUE_MS + self._texts, "id": f"order-{self._texts}"}
            self._ids.append(request)
        else:
            request["delay_sec"] = self._random.choice(DELAYS_SEC)
        if kind > 0.8:
            request["topic"] = self._random.choice(("mail", "push"))
        if kind > 0.9 and with_headers:
            request["headers"] = {"n": str(self._texts)}
        self._expect(request, arrival_ms)
        return request

    def _expect(self, request: Mapping[str, Any], arrival_ms: int) -> None:
        due_ms = request.get("due", arrival_ms + round(1_000 * request.get("delay_sec", 0)))
        self.expected[delivery(request, request.get("id", ""), due_ms)] += 1


def delivery(fields: Mapping[str, Any], idempotency_key: str, due_ms: int) -> Delivery:
    headers = json.dumps(fields.get("headers") or {}, sort_keys=True)
    return fields["message"], fields.get("topic", "default"), headers, idempotency_key, due_ms


def deliveries(records: Iterable[Mapping[str, Any]]) -> Counter[Delivery]:
    """Count the records of ``jobs/drain.py --format json``."""
    return Counter(delivery(r, r["id"] if r["id"].startswith("order-") else "", r["due_ms"]) for r in records)
