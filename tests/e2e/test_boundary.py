"""A minute of real time across a bucket boundary."""

import json
import os
import threading
import uuid

import pytest

from pipeline.config import DrainSettings, RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.core.messages import Message
from pipeline.drain.loop import DrainLoop
from pipeline.sinks.screen import ScreenSink
from pipeline.store.base import NO_MARKER, MarkerMove, Transaction
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.wakeup import WakeListener
from tests.servers import real_server
from tests.store.builders import in_keyed_rows, in_rows

BUCKET_MS = 600_000
MESSAGES, SECONDS = 1_000, 60
TOKEN = "P" * 14


class ShiftedClock(SystemClock):
    """The machine's clock, shifted so that a bucket boundary is half the test away."""

    def __init__(self) -> None:
        now_ms = super().wall_ms()
        self._shift_ms = (BUCKET_MS - now_ms % BUCKET_MS) - SECONDS * 500

    def wall_ms(self) -> int:
        return super().wall_ms() + self._shift_ms


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_messages_in_a_minute_come_once_each_in_order_none_early() -> None:
    clock = ShiftedClock()
    first_ms = clock.wall_ms() + 500
    dues = [first_ms + n * SECONDS * 1_000 // MESSAGES for n in range(MESSAGES)]
    assert dues[0] // BUCKET_MS != dues[-1] // BUCKET_MS, "the boundary must lie in between"
    with real_server() as server:
        keys = Keys(f"test-{uuid.uuid4().hex}")
        settings = DrainSettings()
        client = connect(RedisSettings(url=server.url))
        store = RedisStore(client, keys, settings, now_ms=clock.wall_ms)
        for start_ms in sorted({due_ms - due_ms % BUCKET_MS for due_ms in dues}):
            of_bucket = [(n, due_ms) for n, due_ms in enumerate(dues) if due_ms - due_ms % BUCKET_MS == start_ms]
            messages = [(due_ms, Message(due_ms, str(n)).to_member(f"{TOKEN}{n:08x}")) for n, due_ms in of_bucket]
            move = MarkerMove(f"{TOKEN}.{start_ms}", NO_MARKER, "all")
            store.schedule("s", Transaction([move], in_rows(messages), in_keyed_rows([]), 0))
        reader, writer = os.pipe()
        received: list[bytes] = []
        with os.fdopen(reader, "rb") as stream:
            reading = threading.Thread(target=lambda: received.extend(stream))
            reading.start()
            wake_listener = WakeListener(client, [keys])
            try:
                DrainLoop(
                    store=store,
                    sink=ScreenSink("json", clock, writer),
                    clock=clock,
                    waiter=wake_listener,
                    loop_id=uuid.uuid4().hex,
                    wait_ms_max=settings.wait_ms_max,
                    until="empty",
                    stopping=lambda: False,
                    random=lambda: 0.0,
                    request_reclaim=lambda: None,
                ).run()
            finally:
                wake_listener.close()
                os.close(writer)
                reading.join()
        client.close()
    records = [json.loads(line) for line in received]
    assert [int(r["message"]) for r in records] == list(range(MESSAGES))
    assert [r["due_ms"] for r in records] == dues
    assert min(r["lateness_ms"] for r in records) >= 0
    assert {r["attempt"] for r in records} == {1}
