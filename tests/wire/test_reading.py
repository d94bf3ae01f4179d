"""This program reads what every release with its version of the wire format has written; see ``write``."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from pipeline.config import RedisSettings
from pipeline.core.cold import COLD_HOUR_MAX, HOUR_MS
from pipeline.core.messages import Message
from pipeline.store.base import Scheduled, State
from pipeline.store.by_id import MessagesById
from pipeline.store.campaigns import Campaigns
from pipeline.store.cold import read_cold_hours, read_hydrators
from pipeline.store.connection import connect
from pipeline.store.dead_letters import DeadLetters
from pipeline.store.heartbeats import add_up_loops, read_ingests, read_loops
from pipeline.store.keys import Keys
from pipeline.store.layout import cold_folder_id
from pipeline.store.namespace import open_namespace
from pipeline.store.outbox import Outbox
from pipeline.store.redis_store import RedisStore
from pipeline.store.stats import read_stats
from pipeline.store.topics import Topics
from tests.consume.conftest import GROUP, TOPIC, Stage
from tests.servers import RealServer
from tests.store.builders import keyed
from tests.wire.namespace import read_namespace, write_namespace
from tests.wire.write import CAMPAIGN, DAY_MS, FILE, FUTURE_MS, PAST_MS, file_of, fill

KEYS = Keys("duetime")
HEADERS = {"lang": "de"}


@pytest.fixture
def stage(server: RealServer) -> Stage:
    """A server that holds what is in the file, and nothing else."""
    client = server.client()
    write_namespace(client, json.loads(FILE.read_text(encoding="utf-8")))
    return Stage(client, connect(RedisSettings(url=server.url)), KEYS)


def test_the_file_holds_every_kind_of_key_that_there_is_now(server: RealServer) -> None:
    """If this fails after a release, the new kind goes into a file of its own."""
    fill(server)
    now = read_namespace(server.client(), "duetime")
    written = json.loads(FILE.read_text(encoding="utf-8"))
    kinds = Counter(key.split(":")[2] for key in written)
    assert Counter(key.split(":")[2] for key in now) == kinds
    assert [one["type"] for one in now.values()] == [one["type"] for one in written.values()]
    no_arguments = {name for name in dir(Keys) if not name.startswith("_")} - {
        "namespace",
        "shard",
        "suffix",
        "slot",
        "tag",
        "wake",
        "target",
        "aside",
    }
    assert kinds.keys() == no_arguments


def test_what_is_written_is_what_was_read(stage: Stage) -> None:
    assert read_namespace(stage.client, "duetime") == json.loads(FILE.read_text(encoding="utf-8"))


def test_the_namespace_is_one_of_ours_and_everything_in_it_counts(stage: Stage) -> None:
    assert open_namespace(stage.user, RedisSettings(namespace="duetime"), may_create=False)
    stats = read_stats(stage.user, [KEYS])
    assert (stats.scheduled, stats.held, stats.in_flight, stats.outbox, stats.dead) == (9, 2, 2, 1, 1)
    assert stats.throttled == 1
    assert stats.counters == {"stored": 13, "rejected": 3, "delivered": 13, "dead": 1, "cancelled": 1}


def test_markers_and_idempotency_keys_are_known(stage: Stage) -> None:
    store = RedisStore(stage.user, KEYS)
    assert store.markers("files", [letter * 14 for letter in "PDLX"]) == ["all", "all", "5 1", ""]
    assert sorted(part_id for part_id, _ in store.marked_parts("files")) == [letter * 14 for letter in "DKLMP"]
    known = store.schedule("files", file_of("X" * 14, identified=((1, PAST_MS, "order-3"), (2, PAST_MS, "order-5"))))
    assert known is not None
    assert known == Scheduled(1, (0,))


def test_what_waits_in_cold_files_is_known(stage: Stage) -> None:
    assert cold_folder_id(stage.user, RedisSettings(namespace="duetime")) == "0123456789abcdef"
    assert read_cold_hours(stage.user, [KEYS]) == {COLD_HOUR_MAX: 2}
    assert RedisStore(stage.user, KEYS).markers("cold", [f"{'M' * 14}+0"]) == [f"{FUTURE_MS - 1} 00000001"]
    [progress] = read_hydrators(stage.user, KEYS)
    assert (progress.messages, progress.until_ms) == (1, FUTURE_MS)
    found = MessagesById(stage.user, [KEYS], DAY_MS, now_ms=lambda: PAST_MS).cancel("order-9")
    assert found.message == Message(COLD_HOUR_MAX * HOUR_MS, "", id="order-9", message_id=f"{'M' * 14}00000003")
    assert read_cold_hours(stage.user, [KEYS]) == {COLD_HOUR_MAX: 1}


def test_the_outbox_is_taken_over_when_its_lease_is_over(stage: Stage) -> None:
    outbox = Outbox(stage.user, KEYS, "another", DAY_MS)
    assert not outbox.acquire()
    stage.client.delete(KEYS.forwarder())
    assert outbox.acquire()
    [entry] = outbox.read("", "", 10) or ()
    assert entry[1:] == ("default", "order-8", PAST_MS, b"message 1", HEADERS)
    outbox.leave()


def test_messages_are_found_by_their_idempotency_keys(stage: Stage) -> None:
    messages = MessagesById(stage.user, [KEYS], DAY_MS, now_ms=lambda: PAST_MS)
    states = [messages.get(f"order-{number}").state for number in range(1, 8)]
    known = [State.DELIVERED, State.SCHEDULED, State.IN_FLIGHT, State.CANCELLED, State.UNKNOWN]
    assert states == [*known, State.SCHEDULED, State.CANCELLED]
    assert messages.cancel("order-2").message == Message(
        FUTURE_MS, "message 2", "default", "order-2", HEADERS, f"{'L' * 14}00000002"
    )


def test_a_replacement_is_known_as_one(stage: Stage) -> None:
    messages = MessagesById(stage.user, [KEYS], DAY_MS, now_ms=lambda: PAST_MS)
    there, message_id = messages.get("order-6").message, f"{'K' * 14}00000001"
    assert there is not None
    assert messages.replace(replace(there, body="older", message_id=message_id)).message == there
    other = messages.get("order-2").message
    assert other is not None
    assert messages.replace(replace(other, body="replaced", message_id=message_id)).message != other


def test_a_claim_in_flight_is_taken_back_and_delivered(stage: Stage) -> None:
    store = RedisStore(stage.user, KEYS, now_ms=lambda: FUTURE_MS - 1)
    assert store.reclaim() == 2
    claim = store.claim("another").claim
    assert claim is not None
    assert [Message.from_member(one.member, one.due_ms).body for one in claim.messages] == ["message 2", "message 3"]
    assert [one.attempt for one in claim.messages] == [3, 2]
    assert store.ack(claim, 2, keyed(claim))


def test_messages_of_every_form_are_delivered_when_they_are_due(stage: Stage) -> None:
    assert Topics(stage.user, [KEYS]).resume(TOPIC) == 1
    store = RedisStore(stage.user, KEYS, now_ms=lambda: FUTURE_MS)
    store.reclaim()
    found = []
    for number in range(9):
        claim = store.claim(f"{number}").claim
        found += [Message.from_member(one.member, one.due_ms) for one in claim.messages] if claim else []
    later = [message for message in found if message.message_id.startswith("L")]
    assert [(one.body, one.id, one.headers) for one in later] == [
        ("message 1", f"{'L' * 14}00000001", {}),
        ("message 2", "order-2", HEADERS),
        ("message 6", "order-6", HEADERS),
    ]
    retried = stage.client.xrevrange(KEYS.retry(TOPIC, GROUP), count=1)[0][1]
    assert (retried[b"message"], retried[b"attempt"]) == (b"retried later", b"2")


def test_groups_go_on_where_they_were(stage: Stage) -> None:
    billing, ledger = Topics(stage.user, [KEYS]).groups(TOPIC)
    assert (billing.name, billing.pending, [one.name for one in billing.consumers]) == (GROUP, 2, ["reader"])
    assert (ledger.name, ledger.pending) == ("ledger", 5)
    reader = stage.open("reader")  # the same consumer, started again
    entries = reader.take()
    assert sorted((one.body, one.attempt) for one in entries if one.body in ("pending", "retried")) == [
        ("pending", 2),
        ("retried", 3),
    ]
    assert entries[0].headers == HEADERS
    while more := reader.take():
        entries += more
    assert {"not read", "before the pause"} <= {one.body for one in entries}
    assert reader.ack(*entries)
    assert stage.pending() == 0


def test_a_pause_holds_and_ends(stage: Stage) -> None:
    topics = Topics(stage.user, [KEYS])
    assert topics.names() == [TOPIC, "slow"]
    info = topics.look(TOPIC)
    assert (info.held, info.dead, info.paused_ms) == (1, 1, PAST_MS)
    assert topics.resume(TOPIC) == 1
    stage.move()
    assert topics.look(TOPIC).held == 0
    assert stage.client.xrevrange(KEYS.stream(TOPIC), count=1)[0][1][b"message"] == b"held"


def test_what_waits_for_a_rate_limit_goes_on_when_it_may(stage: Stage) -> None:
    [(topic, next_ms)] = stage.client.zrange(KEYS.held_topics(), 0, -1, withscores=True)
    assert (topic, stage.client.zcard(KEYS.held("slow"))) == (b"slow", 1)
    for now_ms, texts in ((int(next_ms) - 1, [b"message 1"]), (int(next_ms), [b"message 1", b"message 2"])):
        store = RedisStore(stage.user, KEYS, now_ms=lambda now_ms=now_ms: now_ms)
        while store.claim(f"{now_ms}:{len(texts)}").moved:
            pass
        assert [fields[b"message"] for _, fields in stage.client.xrange(KEYS.stream("slow"))] == texts


def test_a_dead_letter_is_read_and_scheduled_again(stage: Stage) -> None:
    letters = DeadLetters(stage.user, [KEYS])
    [letter] = letters.of_topic(TOPIC)
    assert (letter.body, letter.reason, letter.detail, letter.group) == ("dead", "failed", "ValueError: no", GROUP)
    assert (letter.headers, letter.due_ms, letter.died_ms, letter.attempt) == (HEADERS, PAST_MS, PAST_MS, 1)
    assert letters.redrive(letter, FUTURE_MS)


def test_what_the_jobs_said_of_themselves_is_read(stage: Stage) -> None:
    assert [one.source_id for one in read_ingests(stage.user, KEYS)] == ["source"]
    assert Campaigns(stage.user, [KEYS]).find("sale") == CAMPAIGN
    loops = add_up_loops(one.stats for one in read_loops(stage.user, KEYS))
    assert (loops.delivered, loops.claimed) == (2, 2)
