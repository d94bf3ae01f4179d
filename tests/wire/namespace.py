"""A namespace as text: every key with its type and members, read from one server and written into another.

Nothing here knows what the keys mean, and no DUMP of a server's own format is used. Times to live are left out: a
key that expires is marked, and restored with an hour.
"""

from typing import Any

RESTORED_SEC = 3_600
BYTES = "surrogateescape"  # for the places of cold messages, which are no text


def read_namespace(client: Any, namespace: str) -> dict[str, Any]:
    """Return every key of a namespace, in order."""
    found = {}
    for key in sorted(client.scan_iter(f"{{{namespace}:*")):
        kind = client.type(key).decode()
        value = {"type": kind, "value": _READ[kind](client, key)}
        found[key.decode()] = value | ({"expires": True} if client.ttl(key) >= 0 else {})
    return found


def write_namespace(client: Any, keys: dict[str, Any]) -> None:
    """Write what ``read_namespace`` returned into a server that has none of the keys."""
    for key, described in keys.items():
        _WRITE[described["type"]](client, key, described["value"])
        if described.get("expires"):
            client.expire(key, RESTORED_SEC)


def _scored(client: Any, key: bytes) -> list[list[str]]:
    rows = client.execute_command("ZRANGE", key, 0, -1, "WITHSCORES")
    return [[member.decode(), _score(score)] for member, score in rows]


def _score(score: float) -> str:
    return "+inf" if score == float("inf") else f"{score:.0f}"


def _texts(pairs: Any) -> dict[str, str]:
    return {name.decode(): value.decode(errors=BYTES) for name, value in pairs.items()}


def _stream(client: Any, key: bytes) -> dict[str, Any]:
    entries = [[entry_id.decode(), _texts(fields)] for entry_id, fields in client.xrange(key)]
    groups = {}
    for group in client.xinfo_groups(key):
        pending = client.xpending_range(key, group["name"], "-", "+", 1_000)
        groups[group["name"].decode()] = {
            "last_id": group["last-delivered-id"].decode(),
            "pending": [
                [row["message_id"].decode(), row["consumer"].decode(), row["times_delivered"]] for row in pending
            ],
        }
    return {"last_id": client.xinfo_stream(key)["last-generated-id"].decode(), "entries": entries, "groups": groups}


def _write_stream(client: Any, key: str, stream: dict[str, Any]) -> None:
    for entry_id, fields in stream["entries"]:
        client.xadd(key, fields, id=entry_id)
    for name, group in stream["groups"].items():
        client.xgroup_create(key, name, group["last_id"], mkstream=True)
        for entry_id, consumer, count in group["pending"]:
            client.xclaim(key, name, consumer, 0, [entry_id], retrycount=count, force=True, justid=True)
    client.execute_command("XSETID", key, stream["last_id"])


_READ = {
    "string": lambda client, key: client.get(key).decode(),
    "hash": lambda client, key: dict(sorted(_texts(client.hgetall(key)).items())),
    "list": lambda client, key: [value.decode() for value in client.lrange(key, 0, -1)],
    "set": lambda client, key: sorted(value.decode() for value in client.smembers(key)),
    "zset": _scored,
    "stream": _stream,
}
_WRITE = {
    "string": lambda client, key, value: client.set(key, value),
    "hash": lambda client, key, value: client.hset(
        key, mapping={name: text.encode(errors=BYTES) for name, text in value.items()}
    ),
    "list": lambda client, key, value: client.rpush(key, *value),
    "set": lambda client, key, value: client.sadd(key, *value),
    "zset": lambda client, key, value: client.zadd(key, dict(value)),
    "stream": _write_stream,
}
