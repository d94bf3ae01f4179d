"""What the pages have to show in tests and on pictures: a little data as an operator would have it, a lot, and hostile data."""

import base64
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pipeline.config import ALL_TOPICS, TopicSettings
from pipeline.consume.consumer import Consumer
from pipeline.consume.opening import join_group
from pipeline.core.buckets import bucket_start_ms
from pipeline.core.clock import SystemClock
from pipeline.core.messages import Message
from pipeline.core.stop import Stop
from pipeline.drain.stats import Totals
from pipeline.store.connection import connect
from pipeline.store.heartbeats import IngestProgress, LoopProgress, write_ingest, write_loop
from pipeline.store.ingest_heartbeat import IngestHeartbeat
from pipeline.store.redis_store import RedisStore
from tests.client.builders import KEYS
from tests.servers import RealServer
from tests.store.builders import set_topic
from tests.web.running import Api, settings_of

HOUR_SEC, DAY_SEC = 3_600, 86_400
LONG_AGO_MS = 1_500_000_000_000
BATCH = 5_000
TEXTS = {
    "reminders": "Your appointment is tomorrow at 09:30. Reply C to confirm.",
    "mail": "Your trial ends in three days. Here is what you would lose.",
    "invoices": json.dumps({"invoice": 4711, "amount": {"value": "129.90", "currency": "EUR"}, "lines": [1, 2, 3]}),
    "sms": "Ihr Paket kommt heute zwischen 14 und 16 Uhr. 📦",
}
SETTINGS = TopicSettings(sink="stream", attempts_max=1, lease_sec=30)
FAILURE = """Traceback (most recent call last):
  File "/srv/billing/handler.py", line 41, in charge
    gateway.charge(invoice)
ConnectionError: the payment gateway at pay.example answered 503 Service Unavailable"""

# What a page must show and never be: as text of a message, header, id, group or failure.
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "</textarea></pre></bdi></title><script>alert(3)</script>",
    "\" autofocus onfocus=alert(4) x=\"",
    "' onmouseover='alert(5)",
    "<form action=http://foreign.invalid/ method=post><button>Press</button></form>",
    "<style>* { display: none !important }</style><link rel=stylesheet href=http://foreign.invalid/x.css>",
    "<meta http-equiv=refresh content='0;url=http://foreign.invalid/'><base href=http://foreign.invalid/>",
    "<svg onload=alert(6)><a xlink:href=javascript:alert(7)>x</a></svg><iframe srcdoc='<script>alert(8)</script>'>",
    "javascript:alert(9)//http://foreign.invalid/",
    "{{ 7 * 7 }}{% for x in y %}${7*7}<%= 7*7 %>#{7*7}",
    "\u202egnp.exe\u2066 \u200b\ufeff hidden \u2028 line",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07 \x08\x08\x00\x7f\x9b",
    "data: x\n\nevent: parts\ndata: <script>alert(10)</script>\n\n",
    "&lt;script&gt;alert(11)&lt;/script&gt; &amp;#60;",
    "\ud7ff\U0010ffff\ufffd a\u0300\u0301\u0302\u0303" * 5,
)  # fmt: skip
LONG_LINE = "A" * 100_000
# Values of Kafka that are no text, as ADR 19 has them; the second pretends to be one.
BYTES = (
    {"message": base64.b64encode(bytes(range(256)) * 4).decode(), "headers": {"duetime-encoding": "base64"}},
    {"message": "<b>no base64</b>", "headers": {"duetime-encoding": "base64", "kafka-key-base64": "<i>"}},
)
# Names that the rules allow, and that mean something to a browser or a server.
NAMES = (".", "..", "new", "__proto__", "favicon.ico")


@contextmanager
def consuming(server: RealServer, topic: str, group: str, limit: int = 100) -> Iterator[Consumer]:
    """A consumer of a group that has everything of its topic from the beginning."""
    client = connect(settings_of(server.url).redis)
    try:
        settings = settings_of(server.url)
        consumer = join_group(client, settings, topic, group, f"{group}-1", "beginning", None, Stop())
        consumer.limit = limit
        yield consumer
    finally:
        client.close()


def move_due(server: RealServer, settings: TopicSettings = SETTINGS) -> None:
    """Do what a drain loop does with topics that have streams."""
    with server.client() as client:
        set_topic(client, KEYS, ALL_TOPICS, settings)
        store = RedisStore(client, KEYS)
        for holder in range(10_000):
            reply = store.claim(f"scenery-{holder}")
            if reply.next_due_ms is None or reply.next_due_ms > reply.now_ms:
                return
    raise AssertionError("there is always more that is due")


def schedule_rhythm(api: Api, count: int, seed: int = 7) -> None:
    """Schedule messages of four topics over seven days, most of them by day and soon, as people send them."""
    draw = random.Random(seed)
    lines: list[dict[str, Any]] = []
    while len(lines) < count:
        delay = draw.expovariate(1 / (14 * HOUR_SEC)) + 60
        by_day = (1 + math.sin((delay / DAY_SEC) * 2 * math.pi)) / 2
        if delay > 7 * DAY_SEC or draw.random() > 0.15 + 0.85 * by_day:
            continue
        number = len(lines)
        topic = draw.choices([*TEXTS], [5, 3, 2, 2])[0]
        line = {
            "message": TEXTS[topic],
            "topic": topic,
            "delay_sec": round(delay, 3),
            "id": f"{topic}-{4_000 + number}",
        }
        if topic in ("mail", "invoices"):
            line["headers"] = {"trace-id": f"{draw.getrandbits(64):016x}", "locale": "de-DE"}
        lines.append(line)
    store_lines(api, lines)


def store_lines(api: Api, lines: list[Any]) -> None:
    for start in range(0, len(lines), BATCH):
        stored = api.batch(lines[start : start + BATCH]).raise_for_status().json()
        assert stored["stored"] == len(lines[start : start + BATCH]), stored


def have_streams(server: RealServer, api: Api, delivered: int = 60) -> None:
    """Deliver messages to groups: one that is done, one that lags and has some in work, and letters of two reasons."""
    lines = [
        {"message": TEXTS[topic], "topic": topic, "delay_sec": 0, "headers": {"trace-id": f"{number:016x}"}}
        for number in range(delivered)
        for topic in ("mail", "invoices")
    ]
    store_lines(api, lines)
    move_due(server)
    with consuming(server, "mail", "crm") as crm:
        crm.ack(*crm.take())
    with consuming(server, "invoices", "billing", limit=delivered // 2) as billing:
        entries = billing.take()
        for entry in entries[:5]:
            billing.nack(entry, FAILURE)
        billing.refuse(entries[5], "an invoice without a number can't be charged")
        billing.ack(*entries[6:-3])
    store_lines(api, [{"message": TEXTS["sms"], "topic": "sms", "due": LONG_AGO_MS + number} for number in range(3)])
    move_due(server, replace(SETTINGS, expire_after_sec=60))
    move_due(server)  # and the usual settings are there again


def have_jobs(server: RealServer) -> None:
    """Let it seem as if two drain loops and an ingest job ran, and one loop had ended."""
    now_ms = SystemClock().wall_ms()
    draw = random.Random(7)
    with server.client() as client:
        for number, (name, share) in enumerate((("mars-2211", 1.0), ("venus-874", 0.6), ("mars-1902", 0.1))):
            totals = Totals()
            for topic, weight in (("reminders", 900), ("mail", 500), ("invoices", 260), ("sms", 240)):
                stats = totals.of_topic(topic)
                for _ in range(round(weight * share)):
                    stats.delivered += 1
                    stats.lateness.add(round(draw.lognormvariate(0.8, 1.1)))
                totals.delivered += stats.delivered
            totals.claimed = totals.delivered
            totals.late_on_arrival = round(6 * share)
            totals.errors = {"ConnectionError": 3} if number == 1 else {}
            progress = LoopProgress(
                loop_id=name, started_ms=now_ms - 5_000_000 + number, has_ended=number == 2, stats=totals
            )
            write_loop(client, KEYS, progress)
        ingest = IngestProgress(
            source_id="6f1d2c3b4a596877", reads="/srv/duetime/inbox", started_ms=now_ms - 7_000_000, batches=214,
            files=1_204, lines=450_002, stored=449_871, duplicates=120, rejected=9, blank=2, cancelled=14, replaced=31,
            last_batch_ms=now_ms - 11_600, last_lines=2_114, last_lines_per_sec=11_061, last_took_ms=1_190,
            last_oldest_waiting_ms=0, last_phases_ms={"addBatch": 902, "queryPlanning": 140, "walCommit": 38},
        )  # fmt: skip
        write_ingest(client, KEYS, ingest)
        IngestHeartbeat(client, KEYS, ingest.source_id).publish()


def have_little(server: RealServer, api: Api) -> None:
    """What a small shop would have at noon: 1,800 messages, four topics, two groups, some letters, a pause."""
    schedule_rhythm(api, 1_800)
    have_streams(server, api)
    have_jobs(server)
    api.put("/v1/topics/sms/pause").raise_for_status()
    store_lines(api, [{"message": TEXTS["sms"], "topic": "sms", "delay_sec": 0} for _ in range(4)])
    move_due(server)


def have_a_lot(server: RealServer, api: Api, waiting: int = 40_000, topics: int = 300, letters: int = 2_000) -> None:
    """Long names, many topics, many messages at one moment, many letters."""
    have_little(server, api)
    long = "a-topic-with-the-longest-name-that-is-allowed-which-is-of-64-cha"
    names = [long, *(f"tenant-{number:04}.events" for number in range(topics))]
    lines: list[Any] = [
        {"message": f"message {number} " + "of a tenant " * (number % 40), "topic": names[number % len(names)],
         "delay_sec": 30 + (number * number) % (2 * DAY_SEC), "id": f"{'long-id-' * 15}{number:08}"}
        for number in range(waiting)
    ]  # fmt: skip
    store_lines(api, lines)
    store_lines(api, [{"message": "now", "topic": name, "delay_sec": 0} for name in names])
    expired = [
        {"message": f"letter {number}", "topic": names[number % 20], "due": LONG_AGO_MS + number}
        for number in range(letters)
    ]
    move_due(server)
    store_lines(api, expired)
    move_due(server, replace(SETTINGS, expire_after_sec=60))
    move_due(server)


def together(count: int) -> list[str]:
    """Return the hostile texts, some in one: so a browser is done with them sooner."""
    return ["\n".join(HOSTILE[first : first + count]) for first in range(0, len(HOSTILE), count)]


def have_hostile(server: RealServer, api: Api) -> list[str]:
    """Store the hostile texts wherever a text can be, and return the ids of those that wait."""
    texts = [HOSTILE[0], *together(3)]
    ids = [f"hostile-{number}" for number in range(len(texts))]
    lines: list[Any] = []
    for number, text in enumerate(texts):
        other = texts[(number + 1) % len(texts)]
        headers = {text[:200]: other, "x": text}
        lines.append({"message": text, "delay_sec": HOUR_SEC, "id": ids[number], "headers": headers})
        lines.append({"message": text, "delay_sec": 0, "topic": "hostile", "headers": headers})
        lines.append({"message": text, "due": LONG_AGO_MS, "topic": "expired", "headers": headers})
    lines.append(
        {"message": LONG_LINE, "delay_sec": HOUR_SEC, "id": "hostile-long", "headers": {"long": LONG_LINE[:9_000]}}
    )
    lines += [{**each, "delay_sec": HOUR_SEC, "id": f"bytes-{number}"} for number, each in enumerate(BYTES)]
    lines += [{"message": name, "delay_sec": HOUR_SEC, "id": name, "topic": name} for name in NAMES]
    lines += [{"message": name, "delay_sec": 0, "topic": name} for name in NAMES]
    store_lines(api, lines)
    with server.client() as client:
        set_topic(client, KEYS, "expired", replace(SETTINGS, expire_after_sec=60))
    move_due(server)
    with consuming(server, "hostile", "group") as consumer:
        for number, entry in enumerate(consumer.take()):
            consumer.refuse(entry, f"{HOSTILE[number % len(HOSTILE)]}\n{HOSTILE[0]}")
    have_what_others_wrote(server)
    return [*ids, "hostile-long", "bytes-0", "bytes-1", *NAMES]


def have_what_others_wrote(server: RealServer) -> None:
    """Store what our own programs never would: hostile names and reasons, and bytes that are no UTF-8."""
    due_ms = SystemClock().wall_ms() + HOUR_SEC * 1_000
    start_ms = bucket_start_ms(due_ms)
    members = [
        Message(due_ms, "by another program", HOSTILE[0], headers={"x": "y"}).to_member(f"{'P' * 14}00000001"),
        f"{'P' * 14}00000002mnot \udcff UTF-8".encode(errors="surrogateescape"),
        b"<script>alert(12)</script>",
    ]
    letter = {"message": HOSTILE[0], "id": HOSTILE[3], "topic": HOSTILE[0], "group": HOSTILE[0], "reason": HOSTILE[3]}
    with server.client() as client:
        client.zadd(KEYS.bucket(start_ms), dict.fromkeys(members, due_ms))
        client.zadd(KEYS.buckets(), {str(start_ms): start_ms})
        for topic in ("hostile", HOSTILE[0]):
            client.sadd(KEYS.topics(), topic)
            client.sadd(KEYS.dead_topics(), topic)
            client.xadd(KEYS.dead(topic), {**letter, "detail": HOSTILE[1], "headers": HOSTILE[2], "died_ms": "x"})
