"""The loop that moves messages into streams, as users run it: killed, cut off and robbed of its server, each message moves once."""

import signal
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import redis

from pipeline.config import RedisSettings
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.stats import read_stats
from tests.chaos.proxy import Fault, Proxy, after, before, instead, lose_reply, refuse, running
from tests.e2e.commands import Checkout, Command
from tests.servers import RealServer, real_server
from tests.store.builders import transaction

KEYS = Keys("duetime")
MESSAGES = 1_000
CLAIM_LIMIT = 10
DUE_MS = 1_700_000_000_000
TOPICS = ("mail", "news", "default")
CLAIMS = running("claim")


class Transfer:
    """A server with messages that are due, and a proxy in front of it."""

    def __init__(self, checkout: Checkout, server: RealServer) -> None:
        self.server = server
        self.proxy = Proxy(server.folder / "s", server.folder / "p")
        self._checkout = checkout
        self._restarting = threading.Lock()

    def store(self) -> Counter[str]:
        """Store messages of several topics in several buckets; returns their texts."""
        texts = {line: f"message {line}" for line in range(1, MESSAGES + 1)}

        def member_of(line: int, idempotency_key: str) -> bytes:
            topic = TOPICS[line % len(TOPICS)]
            return f'{"P" * 14}{line:08x}j{{"message":"{texts[line]}","topic":"{topic}"}}'.encode()

        rows = [(line, DUE_MS + line * 5_000) for line in texts]
        stored = RedisStore(connect(RedisSettings(url=self.server.url)), KEYS).schedule(
            "s", transaction(*rows, member_of=member_of)
        )
        assert stored and stored.stored == MESSAGES
        return Counter(texts.values())

    def start(self, *options: str) -> Command:
        environ = {"REDIS_URL": self.proxy.url, "DUETIME_DRAIN_CLAIM_LIMIT": str(CLAIM_LIMIT)}
        return self._checkout.run("jobs/drain.py", "--sink", "stream", *options, environ=environ)

    def moved(self) -> Counter[str]:
        client = self.server.client()
        entries = (entry for topic in TOPICS for _, entry in client.xrange(KEYS.stream(topic)))
        try:
            return Counter(fields[b"message"].decode() for fields in entries)
        except redis.exceptions.RedisError:
            return Counter()  # the server is away

    def left(self) -> int:
        return read_stats(self.server.client(), [KEYS]).scheduled

    def restart(self) -> None:
        # Two loops may meet their traps at once, and a second server would take the first one's socket.
        with self._restarting:
            self.server.kill()
            self.server.start()


@pytest.fixture
def transfer(checkout: Checkout) -> Iterator[Transfer]:
    with real_server() as server:
        made = Transfer(checkout, server)
        yield made
        made.proxy.close()


def test_killed_at_every_step_it_moves_each_message_once(transfer: Transfer) -> None:
    expected = transfer.store()
    for number in range(1, 9):
        loop = transfer.start()
        kill = loop.process.kill
        # Before a claim reaches the server, and when it is executed and the loop does not know.
        trap = transfer.proxy.trap(CLAIMS, (instead, after)[number % 2](kill), first=number)
        trap.wait()
        assert loop.end() == -signal.SIGKILL
        transfer.proxy.clear()
        assert sum(transfer.moved().values()) + transfer.left() == MESSAGES
    assert 0 < transfer.left() < MESSAGES, "the kills came too late to show anything"
    assert transfer.start("--until-empty").end() == 0
    assert transfer.moved() == expected


@pytest.mark.parametrize("fault", [lose_reply, refuse], ids=["executed, reply lost", "lost before"])
def test_cut_off_again_and_again_it_moves_each_message_once_and_says_so(transfer: Transfer, fault: Fault) -> None:
    expected = transfer.store()
    traps = [transfer.proxy.trap(CLAIMS, fault, first=first) for first in (2, 5, 6, 7, 30)]
    loop = transfer.start("--until-empty")
    assert loop.end() == 0
    assert all(trap.was_sprung for trap in traps)
    assert transfer.moved() == expected
    assert "waiting for Redis: Redis does not answer" in loop.screen()
    assert "Redis answers again" in loop.screen()


def test_a_server_that_is_killed_under_it_holds_each_message_once(transfer: Transfer) -> None:
    loops = [transfer.start() for _ in range(2)]
    client = transfer.server.client()
    for loop in loops:
        loop.wait_for(lambda _: client.pubsub_numsub(KEYS.wake())[0][1] == len(loops), "loops that wait")
    traps = [
        transfer.proxy.trap(CLAIMS, (before, after)[number % 2](transfer.restart), first=first)
        for number, first in enumerate((3, 20, 21, 60))
    ]
    expected = transfer.store()
    for trap in traps:
        trap.wait()
    loops[0].wait_for(lambda _: transfer.moved().total() >= MESSAGES, "all messages")
    assert [loop.stop() for loop in loops] == [0, 0]
    assert transfer.moved() == expected
    assert any("waiting for Redis: Redis does not answer" in loop.screen() for loop in loops)
