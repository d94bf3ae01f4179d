"""Write ``version-1.json``: a namespace with every kind of key, as this version leaves it.

    .venv/bin/python -m tests.wire.write

Until version 1 is released the file may be written anew. After that it is frozen: every later program must read it, and a new
version of the wire format gets a file of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config import ROOT, RedisSettings, TopicSettings
from pipeline.core.clock import SystemClock
from pipeline.core.cold import cold_place
from pipeline.core.messages import Cancellation, Message, Replacement
from pipeline.store.base import NO_MARKER, NO_ROWS, Changed, MarkerMove, MessageRows, Transaction
from pipeline.store.by_id import MessagesById
from pipeline.store.campaigns import Campaign, Campaigns
from pipeline.store.cold import HydratorHeartbeat, HydratorLease, HydratorProgress
from pipeline.store.connection import connect
from pipeline.store.heartbeats import write_ingest
from pipeline.store.keys import Keys
from pipeline.store.layout import FORMAT_VERSION, cold_folder_id, outbox_id
from pipeline.store.namespace import open_namespace
from pipeline.store.outbox import Outbox
from pipeline.store.redis_store import RedisStore
from pipeline.store.topics import Topics
from pipeline.web.sessions import Sessions
from tests.consume.conftest import TOPIC, Stage
from tests.ingest.test_progress import progress
from tests.servers import RealServer, real_server
from tests.store.builders import set_topic, transaction
from tests.wire.namespace import read_namespace

FILE = Path(__file__).with_name(f"version-{FORMAT_VERSION}.json")
PAST_MS, FUTURE_MS = 1_000, 4_102_444_800_000  # the year 2100
DAY_MS = 86_400_000

CAMPAIGN = Campaign(stage="sale-1", folder="s3a://staging/sale-1", arrival_ms=PAST_MS, files=2, refused=1)


def fill(server: RealServer) -> Keys:
    """Bring an empty server into a state that has all there can be, and return the keys of its namespace."""
    client, user, keys = server.client(), connect(RedisSettings(url=server.url)), Keys("duetime")
    settings = RedisSettings(url=server.url)
    assert open_namespace(user, settings, may_create=True)
    run_a_loop(server)
    write_ingest(user, keys, progress("source", PAST_MS))
    campaigns = Campaigns(user, [keys])
    campaigns.note_stage(CAMPAIGN.folder)
    assert campaigns.begin("sale", CAMPAIGN, 3_600) == CAMPAIGN
    campaigns.note_stage("s3a://staging/sale-2")
    stage = Stage(client, user, keys)
    fill_streams(stage)
    fill_topics(stage)
    fill_outbox(stage, settings)
    set_topic(client, keys, "default", TopicSettings(sink="screen"))
    Sessions(user, keys).begin("0" * 64)
    fill_buckets(RedisStore(user, keys))
    fill_rate_limit(stage)
    messages = MessagesById(user, [keys], DAY_MS)
    assert messages.cancel("order-4").message
    replacement = Message(FUTURE_MS, "message 6", "default", "order-6", {"lang": "de"}, f"{'L' * 14}00000006")
    assert messages.apply([Replacement(replacement), Cancellation("order-7")]) == Changed(cancelled=1, replaced=1)
    fill_cold(user, keys)
    return keys


def fill_cold(user: Any, keys: Keys) -> None:
    """Leave a message with an idempotency key and one without in a cold file, of which one more was brought in."""
    assert cold_folder_id(user, RedisSettings(), "0123456789abcdef")
    keyed = MessageRows([FUTURE_MS], pa.array([cold_place(f"{'M' * 14}00000003", FUTURE_MS)]), pa.array([b"order-9"]))
    waits = MessageRows([FUTURE_MS - 1, FUTURE_MS], [], [])
    move = MarkerMove("M" * 14, NO_MARKER, f"0 00000000 {FUTURE_MS - 1}")
    assert RedisStore(user, keys).schedule("files", Transaction([move], NO_ROWS, NO_ROWS, 0, waits, keyed))
    came = MessageRows([FUTURE_MS - 1], [f"{'M' * 14}00000001mmessage 1".encode()])
    move = MarkerMove(f"{'M' * 14}+0", NO_MARKER, f"{FUTURE_MS - 1} 00000001")
    assert RedisStore(user, keys).hydrate("cold", Transaction([move], came, NO_ROWS, 0))
    assert HydratorLease(user, keys, "hydrator", DAY_MS).hold()
    HydratorHeartbeat(user, keys, "hydrator", SystemClock(), hydrated).publish()


def hydrated(name: str, started_ms: int) -> HydratorProgress:
    return HydratorProgress(
        hydrator_id=name,
        started_ms=PAST_MS,
        messages=1,
        files=0,
        until_ms=FUTURE_MS,
        lead_ms=DAY_MS,
        is_done=True,
        problem="",
    )


def run_a_loop(server: RealServer) -> None:
    """Let a real drain loop leave its heartbeat and its counters."""
    store = RedisStore(connect(RedisSettings(url=server.url)), Keys("duetime"))
    assert store.schedule("files", file_of("P" * 14, (1, PAST_MS), identified=((2, PAST_MS, "order-1"),), rejected=3))
    command = [sys.executable, "-P", str(ROOT / "jobs" / "drain.py"), "--redis", server.url, "--until-empty"]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL, timeout=60)


def fill_streams(stage: Stage) -> None:
    """Leave in a group an entry that nobody has read, pending ones, one to be retried and a dead letter; and an ordered group."""
    reader = stage.open("reader")
    stage.send("acknowledged", "pending", "retried", "retried later", "dead", headers={"lang": "de"})
    done, _, retried, later, dead = reader.take()
    assert reader.ack(done)
    reader.nack(retried)
    stage.move_when_due()
    [_] = reader.take()
    assert reader.store.schedule_retry(later, FUTURE_MS, 2)
    assert reader.store.dead_letter(dead, "failed", "ValueError: no", PAST_MS)
    stage.open("first", group="ledger", ordered=True).take()
    stage.send("not read")


def fill_topics(stage: Stage) -> None:
    """Pause a topic before another message comes due."""
    stage.send("before the pause")
    Topics(stage.user, [stage.keys]).pause(TOPIC, PAST_MS)
    stage.send("held")


def fill_rate_limit(stage: Stage) -> None:
    """Leave a message that waits for the rate limit of its topic, which another one has used up."""
    set_topic(stage.client, stage.keys, "slow", replace(stage.settings, max_rate=1))
    stage.client.zadd(stage.keys.buckets(), {"0": 0})
    for number in (1, 2):
        member = Message(PAST_MS, f"message {number}", "slow").to_member(f"{'R' * 14}{number:08x}")
        stage.client.zadd(stage.keys.bucket(0), {member: PAST_MS})
    stage.move()


def fill_outbox(stage: Stage, settings: RedisSettings) -> None:
    """Leave a message that a loop is about to write to Kafka."""
    set_topic(stage.client, stage.keys, "default", TopicSettings(sink="kafka"))
    store = RedisStore(stage.user, stage.keys)
    assert store.schedule("files", file_of("K" * 14, identified=((1, PAST_MS, "order-8"),)))
    assert store.claim("for Kafka").moved
    assert outbox_id(stage.user, settings)
    outbox = Outbox(stage.user, stage.keys, "loop", DAY_MS)
    assert outbox.acquire()
    assert [entry.id for entry in outbox.read("", "", 1) or ()] == ["order-8"]


def fill_buckets(store: RedisStore) -> None:
    """Leave a claim in flight, one message of which was tried before, and messages that are due later."""
    due = file_of("D" * 14, (1, PAST_MS), (2, PAST_MS), identified=((3, PAST_MS, "order-3"),))
    assert store.schedule("files", due)
    first = store.claim("given back").claim
    assert first is not None
    store.release(first, 2)
    claim = store.claim("in flight").claim
    assert claim is not None
    assert store.ack(claim, 1, [])
    later = file_of(
        "L" * 14, (1, FUTURE_MS), identified=((2, FUTURE_MS, "order-2"), (3, FUTURE_MS, "order-4")), after="5 1"
    )
    assert store.schedule("files", later)


def writing(token: str) -> Callable[[int, str], bytes]:
    def write(line: int, idempotency_key: str) -> bytes:
        headers = {"lang": "de"} if idempotency_key else {}
        return Message(0, f"message {line}", id=idempotency_key, headers=headers).to_member(f"{token}{line:08x}")

    return write


def file_of(token: str, *rows: tuple[int, int], **options: Any) -> Transaction:
    return transaction(*rows, token=token, member_of=writing(token), **options)


def main() -> None:
    """Write the file."""
    with real_server() as server:
        keys = fill(server)
        found = read_namespace(server.client(), keys.namespace)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{FILE}: {len(found)} keys")


if __name__ == "__main__":
    main()
