"""The loops that ours is compared with, each a program: ``python -m bench.rivals NAME URL``.

Four are what texts show that teach how to deliver messages later with a sorted set, written anew as the texts have them: what they
ask of Redis, in which order, how much at a time, and when they sleep. Two of these sleep a second after every ten messages; the
same without that pause, as long as there is work, is here too. The last is no way to deliver anything, as a crash loses up to 500
messages: it is what redis-py can get out of a sorted set.
"""

import json
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import redis

from bench.raw import Pair, pack_command, pack_zadd
from bench.workload import message_text
from pipeline.cli import announce_ready
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.core.text import utc_text

QUEUE, STAGED = "delay-queue", "staged-queue"
STREAM, GROUP = "messages", "printers"
PAUSE_SEC = 1.0
POP_COUNT = 500  # as many as our claim_limit

MOVE_DUE_TO_STREAM = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'WITHSCORES')
for i = 1, #due, 2 do
  redis.call('XADD', KEYS[2], '*', 'message', due[i])
  redis.call('ZREM', KEYS[1], due[i])
end
return #due / 2
"""


def poll_and_remove(client: Any, pause_sec: float) -> None:
    """Alexander, "Building a Delayed Message System with Redis and FastAPI", the first way: all that is due, removed one by one."""
    while True:
        now = datetime.now(UTC).timestamp()
        messages = client.zrangebyscore(QUEUE, "-inf", now, withscores=True)
        for message, timestamp in messages:
            print(f"{datetime.fromtimestamp(timestamp, UTC).strftime('%Y-%m-%d %H:%M:%S')}: {message}")
            client.zrem(QUEUE, message)
        time.sleep(pause_sec if messages else PAUSE_SEC)


def move_to_stream(client: Any, pause_sec: float) -> None:
    """The same text, its second way: a script moves all that is due into a stream, which a second thread reads by tens."""

    def move() -> None:
        client.eval(MOVE_DUE_TO_STREAM, 2, QUEUE, STREAM, datetime.now(UTC).timestamp())

    def poll() -> None:
        while True:
            time.sleep(PAUSE_SEC)
            move()

    with suppress(redis.exceptions.ResponseError):  # another loop has made it
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    move()  # before the second thread looks, which otherwise would sleep a second for nothing
    threading.Thread(target=poll, daemon=True).start()
    while True:
        streams = client.xreadgroup(GROUP, "consumer", {STREAM: ">"}, count=10)
        for _, entries in streams:
            for entry_id, fields in entries:
                print(f"{datetime.now(UTC).strftime('%Y-%m-%d %H:%M:%S')}: {fields['message']}")
                client.xack(STREAM, GROUP, entry_id)
        time.sleep(pause_sec if streams else PAUSE_SEC)


def take_one(client: Any, pause_sec: float) -> None:
    """ "Delay Queue" (the text of the class RedisDelayingQueue): one message at a time, the one whose zrem succeeds handles it."""
    while True:
        values = client.zrangebyscore(QUEUE, 0, time.time(), start=0, num=1)
        if not values:
            time.sleep(PAUSE_SEC)
            continue
        if client.zrem(QUEUE, values[0]):
            print(json.loads(values[0])["msg"])


def take_ten(client: Any, pause_sec: float) -> None:
    """agrim, "Implementing delayed message support with Apache Kafka": ten a second, a key for each body; without Kafka.

    The text deletes those keys, or lets them expire, as an improvement; several loops then meet keys that are gone.
    """
    while True:
        ids = client.zrange(QUEUE, 0, time.time(), byscore=True, offset=0, num=10)
        for message_id in ids:
            print(json.loads(client.get(message_id))["message"])
        if ids:
            client.zrem(QUEUE, *ids)
        time.sleep(pause_sec if ids else PAUSE_SEC)


def pop_many(client: Any, pause_sec: float) -> None:
    """ZPOPMIN of 500, as lines of our own form. Nothing protects a message between the reply and the screen."""
    while True:
        popped = client.zpopmin(QUEUE, POP_COUNT)
        if not popped:
            time.sleep(PAUSE_SEC)
        sys.stdout.write(
            "".join([f"{utc_text(int(due_ms))}: {member[MESSAGE_ID_LENGTH + 1 :]}\n" for member, due_ms in popped])
        )


def pack_texts(pairs: list[Pair]) -> Iterator[bytes]:
    """The message is the member, its score in seconds."""
    return pack_zadd(STAGED, ((due_ms / 1000, message_text(n).encode()) for n, (due_ms, _) in enumerate(pairs)))


def pack_json(pairs: list[Pair]) -> Iterator[bytes]:
    """The member is JSON, with an id that makes it unique."""
    return pack_zadd(
        STAGED,
        (
            (due_ms / 1000, json.dumps({"id": str(uuid.UUID(int=n)), "msg": message_text(n)}).encode())
            for n, (due_ms, _) in enumerate(pairs)
        ),
    )


def pack_ids(pairs: list[Pair]) -> Iterator[bytes]:
    """The member is an id; the body is a string of that name."""
    for n in range(len(pairs)):
        body = json.dumps({"topic": "T", "message": message_text(n)}).encode()
        yield pack_command(b"SETNX", str(uuid.UUID(int=n)).encode(), body)
    yield from pack_zadd(
        STAGED, ((due_ms / 1000, str(uuid.UUID(int=n)).encode()) for n, (due_ms, _) in enumerate(pairs))
    )


def pack_ours(pairs: list[Pair]) -> Iterator[bytes]:
    """Members and scores as ours, in one sorted set."""
    return pack_zadd(STAGED, pairs)


def has_no_queue(client: Any, count: int) -> bool:
    """Whether everything is taken out of the sorted set."""
    return not client.exists(QUEUE)


def has_read_stream(client: Any, count: int) -> bool:
    """Whether everything went through the stream and is acknowledged."""
    if client.exists(QUEUE) or not client.exists(STREAM):
        return False
    [group] = client.xinfo_groups(STREAM)
    return bool(group["entries-read"] == count and group["pending"] == 0)


@dataclass(frozen=True, slots=True)
class Rival:
    """A loop, how its messages are stored in ``STAGED``, and how to see that all are delivered.

    ``pause_sec`` is its sleep while there is work.
    """

    title: str
    run: Callable[[Any, float], None]
    pack: Callable[[list[Pair]], Iterator[bytes]]
    is_done: Callable[[Any, int], bool] = has_no_queue
    pause_sec: float = PAUSE_SEC


RIVALS = {
    "poll": Rival("Alexander: all that is due, zrem each", poll_and_remove, pack_texts),
    "stream": Rival("Alexander: script to stream, 10 a second", move_to_stream, pack_texts, has_read_stream),
    "stream_eager": Rival("Alexander: script to stream, no pause", move_to_stream, pack_texts, has_read_stream, 0.0),
    "one": Rival("RedisDelayingQueue: take one, zrem", take_one, pack_json),
    "ten": Rival("agrim: 10 a second, GET each", take_ten, pack_ids),
    "ten_eager": Rival("agrim: no pause", take_ten, pack_ids, pause_sec=0.0),
    "ceiling": Rival("ceiling: ZPOPMIN 500, nothing safe", pop_many, pack_ours),
}


def main(name: str, url: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    client = redis.Redis.from_url(url, decode_responses=True)
    client.ping()
    announce_ready()
    sys.stdin.readline()
    rival = RIVALS[name]
    rival.run(client, rival.pause_sec)


if __name__ == "__main__":
    main(*sys.argv[1:])
