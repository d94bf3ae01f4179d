"""What a namespace may hold when nothing runs: keys that stay by design, keys that expire, and keys that messages are in.

A new kind of key is a leak until it is named here, with what bounds it.
"""

from collections import defaultdict
from typing import Any

from pipeline.core.cold import COLD_PLACE_LENGTH

# Kinds of keys without a time to live, and what keeps each of them small.
PERMANENT = {
    "meta": "six fields",
    "counters": "some fields",
    "topics": "one member for each topic that holds anything",
    "topic_settings": "one field for each topic with settings of its own",
    "stream": "the retention of the topic",
    "outbox": "what is not in Kafka yet, for as long as Kafka does not answer",
    "retry": "the retention of the topic",
    "dead": "until somebody schedules its letters again or drops them",
    "dead_topics": "one member for each topic that has dead letters",
    "groups": "one field for each group of the topic, until it is dropped",
    "pauses": "one field for each paused topic",
    "rate_limits": "one field for each topic with a max_rate",
    "held_topics": "one member for each topic of which something is held, or was when a claim looked last",
    "ids": "forgotten a day after delivery, by any drain loop",
    "cancelled": "forgotten a day after the cancellation, by any drain loop",
    "cold": "one field for each hour in which something is due that waits in a cold file",
    "hydrations": "one member for each hydrator of the last hour",
    "marker": "forgotten when its file is gone",
    "markers": "one member for each marker",
    "ingests": "one member for each source of the last week",
    "drains": "one member for each loop of the last hour",
    "stages": "one member for each table that is written down now, or was within a week of a crash",
}
EXPIRING = {"campaign", "ingest", "drain", "active", "forwarder", "hydrator", "hydration", "session"}
WITH_MESSAGES = {
    "bucket",
    "buckets",
    "claim",
    "claims",
    "attempts",
    "held",
    "places",
}  # there only while messages are in them, and indexed


def find_leaks(client: Any) -> list[str]:
    """Say what is on a server that nothing will ever remove, or that nothing will ever find."""
    kinds: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    said = []
    for key in client.scan_iter():
        tag, _, rest = key.decode("utf-8", "replace").partition("}:")
        kind, _, name = rest.partition(":")
        kinds[tag][kind].add(name)
        if kind in EXPIRING and client.ttl(key) < 0:
            said.append(f"{tag}}}:{rest} never expires")
        elif kind not in PERMANENT.keys() | EXPIRING | WITH_MESSAGES:
            said.append(f"{tag}}}:{rest} is of no kind that is known")
    for tag, names in kinds.items():
        said += [f"{tag}}}: {sentence}" for sentence in _unindexed(client, tag, names)]
    return sorted(said)


def _unindexed(client: Any, tag: str, names: dict[str, set[str]]) -> list[str]:
    def members(index: str) -> set[str]:
        return {member.decode("utf-8", "replace") for member in client.zrange(f"{tag}}}:{index}", 0, -1)}

    topics, dead_topics = (
        {topic.decode("utf-8", "replace") for topic in client.smembers(f"{tag}}}:{index}")}
        for index in ("topics", "dead_topics")
    )
    found = {
        "buckets that are not indexed": names["bucket"] - members("buckets"),
        "buckets that are indexed and empty": members("buckets") - names["bucket"],
        "claims without a lease": names["claim"] - members("claims"),
        "leases without a claim": members("claims") - names["claim"],
        "held messages of unknown topics": names["held"] - topics,
        "dead letters of topics that are not indexed": {
            topic for topic in names["dead"] - dead_topics if client.xlen(f"{tag}}}:dead:{topic}")
        },
        "places of messages that are not there": _lost_places(client, tag, names),
    }
    return [f"{what}: {', '.join(sorted(those))}" for what, those in found.items() if those]


def _lost_places(client: Any, tag: str, names: dict[str, set[str]]) -> set[str]:
    there = {member[:22] for name in names["claim"] for member in client.lrange(f"{tag}}}:claim:{name}", 0, -1)}
    for kind in ("bucket", "held"):
        there |= {member[:22] for name in names[kind] for member in client.zrange(f"{tag}}}:{kind}:{name}", 0, -1)}
    places = client.hgetall(f"{tag}}}:places") if "places" in names else {}
    return {
        key.decode("utf-8", "replace")
        for key, place in places.items()
        if place[:22] not in there and len(place) != COLD_PLACE_LENGTH
    }
