"""Schedule a message with plain redis-py, and nothing of Duetime but its wire format.

python schedule.py DELAY_SEC TOPIC MESSAGE [ID]
ID is an idempotency key: called again with it, also after an error, the program schedules nothing twice.
REDIS_URL is the server, such as redis://127.0.0.1:6379 or unix:///path/to/socket; NAMESPACE is Duetime's.
"""

import json
import math
import os
import re
import secrets
import sys
from pathlib import Path

import redis

SCRIPTS = Path(__file__).resolve().parents[1]
SCHEDULE, SCHEDULE_ONCE = (SCRIPTS.joinpath(f"{name}.lua").read_text() for name in ("schedule", "schedule_once"))
BUCKET_MS = 600_000


def schedule(
    client: "redis.Redis", delay_sec: float, topic: str, message: str, key: str = "", namespace: str = "duetime"
) -> str:
    """Schedule a message; returns its id, with which it is delivered, or "" if the idempotency key ``key`` is known.

    The namespace has one shard; of several, a message with a key belongs into the shard crc32(key) mod shards.

    Raises:
        redis.exceptions.RedisError: the server refused it, or did not answer: then it may be scheduled.
    """
    seconds, microseconds = client.time()  # the server's clock is the one that counts
    due_ms = seconds * 1000 + microseconds // 1000 + math.ceil(delay_sec * 1000)
    start_ms = due_ms - due_ms % BUCKET_MS
    message_id = secrets.token_hex(11)  # 22 characters that no other message has
    tag = f"{{{namespace}:0}}"
    keys, wake = [f"{tag}:bucket:{start_ms}", f"{tag}:buckets"], f"{tag}:wake"
    if not key:
        member = f"{message_id}j{json.dumps({'topic': topic, 'message': message})}"
        client.eval(SCHEDULE, len(keys), *keys, due_ms, start_ms, member, wake)
        return message_id
    member = f"{message_id}j{json.dumps({'topic': topic, 'message': message, 'id': key})}"
    keys += [f"{tag}:places", f"{tag}:ids", f"{tag}:cancelled"]
    is_new = client.eval(SCHEDULE_ONCE, len(keys), *keys, due_ms, start_ms, member, wake, key)
    return key if is_new else ""


def main(arguments: list[str]) -> int:
    """Schedule what the command line says."""
    if len(arguments) not in (3, 4):
        print("schedule.py: usage: schedule.py DELAY_SEC TOPIC MESSAGE [ID]", file=sys.stderr)
        return 2
    delay_sec, topic, message, key = (*arguments, "")[:4]
    if (
        not re.fullmatch(r"[0-9]{1,8}(\.[0-9]+)?", delay_sec)
        or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", topic)
        or not message
        or not re.fullmatch(r"[A-Za-z0-9._:-]{0,128}", key)
    ):
        print(
            "schedule.py: a number of seconds, a topic of 1 to 64 of A-Z a-z 0-9 . _ -, and a text are needed;"
            " an id has 1 to 128 of A-Z a-z 0-9 . _ : -",
            file=sys.stderr,
        )
        return 2
    try:
        client = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379"))
        message_id = schedule(client, float(delay_sec), topic, message, key, os.environ.get("NAMESPACE", "duetime"))
    except redis.exceptions.RedisError as exc:
        print(f"schedule.py: the message is not known to be scheduled: {exc}", file=sys.stderr)
        return 1
    print(f"{message_id} is scheduled" if message_id else f"{key} is known: the first message with it counts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
