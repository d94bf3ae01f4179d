"""Everything that a namespace holds, read past the store, as plain values that compare."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from pipeline.core.messages import Message
from pipeline.store.keys import Keys
from tests.model.reference import MESSAGE_ID_LENGTH, ReferenceServer
from tests.model.topics import Entry


@dataclass(frozen=True)
class Snapshot:
    """``names`` are the kinds of keys that exist: what stands before the first colon. ``moved`` is the index of the markers."""

    names: frozenset[str]
    index: frozenset[int]
    buckets: dict[int, dict[bytes, int]]
    leases: dict[str, int]
    claims: dict[str, list[tuple[bytes, int]]]
    attempts: dict[str, int]
    places: dict[str, str]
    ids: dict[str, float]
    cancelled: dict[str, float]
    markers: dict[tuple[str, str], str]
    moved: dict[tuple[str, str], float]
    counters: dict[str, int]
    topics: frozenset[str]
    dead_topics: frozenset[str]
    streams: dict[str, list[Entry]]
    outboxes: dict[str, list[Entry]]
    dead: dict[str, list[Entry]]
    held: dict[str, dict[bytes, int]]
    pauses: dict[str, int]
    rate_limits: dict[str, float]
    held_topics: dict[str, float]
    settings: frozenset[str]

    def waiting(self) -> list[tuple[bytes, int]]:
        """The messages in all buckets."""
        return [row for held in self.buckets.values() for row in held.items()]

    def everything(self) -> list[bytes]:
        """The messages in all buckets and claims; one that is in two places comes twice."""
        return [m for m, _ in self.waiting()] + [m for rows in self.claims.values() for m, _ in rows]


def read_server(client: Any, keys: Keys) -> Snapshot:
    """Read a server that holds this namespace alone."""
    tag = keys.wake().removesuffix("wake")
    found = sorted(key.decode() for key in client.keys("*"))
    pipeline = client.pipeline(transaction=False)
    for key in found:
        kind = key.removeprefix(tag).partition(":")[0]
        if kind in ("attempts", "counters", "places", "pauses", "rate_limits", "topic_settings"):
            pipeline.hgetall(key)
        elif kind == "marker":
            pipeline.get(key)
        elif kind == "claim":
            pipeline.lrange(key, 0, -1)
        elif kind in ("stream", "outbox", "retry", "dead"):
            pipeline.xrange(key)
        elif kind in ("topics", "dead_topics"):
            pipeline.smembers(key)
        else:
            pipeline.zrange(key, 0, -1, withscores=True)
    values: dict[str, dict[str, Any]] = {}
    for key, value in zip(found, pipeline.execute(), strict=True):
        kind, _, rest = key.removeprefix(tag).partition(":")
        values.setdefault(kind, {})[rest] = value
    claims = values.get("claim", {})
    return Snapshot(
        names=frozenset(values),
        index=frozenset(int(start) for start, _ in _only(values, "buckets")),
        buckets={
            int(start): {same_text(m): int(due) for m, due in rows} for start, rows in values.get("bucket", {}).items()
        },
        leases={token.decode(): int(until) for token, until in _only(values, "claims")},
        claims={
            token: [(m, int(due_ms)) for m, due_ms in zip(rows[::2], rows[1::2], strict=True)]
            for token, rows in claims.items()
        },
        attempts={name.decode(): int(count) for name, count in dict(_only(values, "attempts")).items()},
        places={name.decode(): place.decode() for name, place in dict(_only(values, "places")).items()},
        ids={name.decode(): until for name, until in _only(values, "ids")},
        cancelled={name.decode(): until for name, until in _only(values, "cancelled")},
        markers={
            (source, token): marker.decode()
            for (source, _, token), marker in ((name.partition(":"), f) for name, f in values.get("marker", {}).items())
        },
        moved={
            (source, token.decode()): at_ms
            for source, moves in values.get("markers", {}).items()
            for token, at_ms in moves
        },
        counters={name.decode(): int(count) for name, count in dict(_only(values, "counters")).items() if int(count)},
        topics=frozenset(topic.decode() for topic in _only(values, "topics")),
        dead_topics=frozenset(topic.decode() for topic in _only(values, "dead_topics")),
        streams={
            name: [entry_of(fields) for _, fields in entries]
            for name, entries in {**values.get("stream", {}), **values.get("retry", {})}.items()
        },
        outboxes={
            name: [entry_of(fields) for _, fields in entries] for name, entries in values.get("outbox", {}).items()
        },
        dead={topic: [entry_of(fields) for _, fields in entries] for topic, entries in values.get("dead", {}).items()},
        held={topic: {same_text(m): int(due) for m, due in rows} for topic, rows in values.get("held", {}).items()},
        pauses={topic.decode(): int(since) for topic, since in dict(_only(values, "pauses")).items()},
        rate_limits={topic.decode(): float(go_ms) for topic, go_ms in dict(_only(values, "rate_limits")).items()},
        held_topics={topic.decode(): at_ms for topic, at_ms in _only(values, "held_topics")},
        settings=frozenset(topic.decode() for topic in dict(_only(values, "topic_settings"))),
    )


def entry_of(fields: dict[bytes, bytes]) -> Entry:
    """Read an entry of a stream or the outbox, or a dead letter."""
    if len(fields) == 1:
        [(due, member)] = fields.items()
        message = Message.read_member(member, int(due))
        return message.id, message.body, message.topic, message.due_ms, 1, ""
    names = (b"id", b"message", b"topic", b"due_ms", b"attempt")
    entry_id, message, topic, due_ms, attempt = (fields[name].decode() for name in names)
    return entry_id, message, topic, int(due_ms), int(attempt), fields.get(b"reason", b"").decode()


def same_text(stored: bytes) -> bytes:
    """Return a member with the fields of its JSON in one order, as ``to_member`` writes them; scripts write them in any."""
    head, body = stored[: MESSAGE_ID_LENGTH + 1], stored[MESSAGE_ID_LENGTH + 1 :]
    if head.endswith(b"r"):
        return head + json.dumps(json.loads(body), sort_keys=True).encode()
    return Message.from_member(stored, 0).to_member() if head.endswith(b"j") else stored


def read_reference(server: ReferenceServer) -> Snapshot:
    """Say what the reference holds in the same way."""
    there = {
        "bucket": server.buckets,
        "buckets": server.buckets,
        "claim": server.claims,
        "claims": server.claims,
        "attempts": server.attempts,
        "places": server.places,
        "ids": server.ids,
        "cancelled": server.cancelled,
        "marker": server.markers,
        "markers": server.markers,
        "counters": server.counters,
        "topics": server.topics.names,
        "stream": [name for name in server.topics.streams if ":" not in name],
        "retry": [name for name in server.topics.streams if ":" in name],
        "outbox": server.topics.outboxes,
        "dead": server.topics.dead,
        "dead_topics": server.topics.dead,
        "held": server.topics.held,
        "pauses": server.topics.pauses,
        "rate_limits": server.topics.rate_limits,
        "held_topics": server.topics.held_topics,
        "topic_settings": server.topics.settings,
    }
    return Snapshot(
        names=frozenset(name for name, values in there.items() if values),
        index=frozenset(server.buckets),
        buckets={start: {same_text(m): due for m, due in held.items()} for start, held in server.buckets.items()},
        leases={token: lease.until_ms for token, lease in server.claims.items()},
        claims={token: list(lease.rows) for token, lease in server.claims.items()},
        attempts=dict(server.attempts),
        places={name: str(place) for name, place in server.places.items()},
        ids=dict(server.ids),
        cancelled=dict(server.cancelled),
        markers={file: marker.text for file, marker in server.markers.items()},
        moved={file: marker.moved_ms for file, marker in server.markers.items()},
        counters=dict(+Counter(server.counters)),
        topics=frozenset(server.topics.names),
        dead_topics=frozenset(server.topics.dead),
        streams={name: list(entries) for name, entries in server.topics.streams.items()},
        outboxes={name: list(entries) for name, entries in server.topics.outboxes.items()},
        dead={topic: list(entries) for topic, entries in server.topics.dead.items()},
        held={topic: {same_text(m): due for m, due in rows.items()} for topic, rows in server.topics.held.items()},
        pauses=dict(server.topics.pauses),
        rate_limits=dict(server.topics.rate_limits),
        held_topics=dict(server.topics.held_topics),
        settings=frozenset(server.topics.settings),
    )


def _only(values: dict[str, dict[str, Any]], kind: str) -> Any:
    """Return the value of a kind of which there is one key, or nothing."""
    return values.get(kind, {}).get("", ())
