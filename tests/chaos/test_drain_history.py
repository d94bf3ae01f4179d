"""The checks of a history themselves: each notices what it is there for, and none complains of a history that is right."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from uuid import uuid4

import pytest

from pipeline.config import DrainSettings, RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.core.errors import StoreUnavailable
from pipeline.store.base import Claim as StoreClaim
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from tests.chaos.drain_history import KILLED, STOPPED, History, Interruption, LoopExit, Shown, check
from tests.chaos.drain_log import Claim, Row, asking, read_log
from tests.chaos.proxy import Exchange, Proxy, lose_reply, refuse, reply_with
from tests.servers import RealServer
from tests.store.builders import transaction

DUE_MS = 1_700_000_000_000
DEAD, ALIVE = 1, 2
FIRST, SECOND = (f"0:host:{DEAD}:x:0", DUE_MS + 100), (f"0:host:{ALIVE}:y:0", DUE_MS + 60_200)


def shown(loop: int, message_id: str, attempt: int) -> Shown:
    at_ms = DUE_MS + 10 * attempt
    record = {"id": message_id, "message": f"text {message_id}", "due_ms": DUE_MS, "delivered_ms": at_ms}
    return Shown(loop, at_ms, {**record, "attempt": attempt})


def good() -> History:
    """A loop shows one of two messages and is killed; another takes over, and loses Redis for a moment."""
    history = History()
    history.sent = {one: {"message": f"text {one}", "due_ms": DUE_MS} for one in "ab"}
    history.shown = [shown(DEAD, "a", 1), shown(ALIVE, "a", 2), shown(ALIVE, "b", 2)]
    history.interruptions = [Interruption(KILLED, DUE_MS + 50, loop=DEAD)]
    rows = [[Row(one, DUE_MS, attempt) for one in "ab"] for attempt in (1, 2)]
    history.log.claims = {
        FIRST: Claim(DEAD, FIRST[0], DUE_MS, FIRST[1], rows[0]),
        SECOND: Claim(ALIVE, SECOND[0], DUE_MS + 200, SECOND[1], rows[1], acknowledged=2),
    }
    history.log.taken_back = 2
    history.log.failed[ALIVE] = 1
    history.counters = {"stored": 2, "delivered": 2, "reclaimed": 2}
    outage = ["drain: waiting for Redis: it is away", "drain: Redis answers again"]
    history.exits = {
        DEAD: LoopExit(-9, []),
        ALIVE: LoopExit(0, [*outage, "drain: delivered 2 messages, lateness p50 1 ms; 0 late acks, 2 reclaimed"]),
    }
    return history


Break = Callable[[History], object]
BREAKS: list[tuple[Break, set[str]]] = []


def breaks(*checks: str) -> Callable[[Break], Break]:
    """Register what turns the good history into one of which exactly these checks complain."""

    def register(change: Break) -> Break:
        BREAKS.append((change, set(checks)))
        return change

    return register


@breaks("nothing_lost", "fencing", "exits")
def a_message_is_never_shown(history: History) -> None:
    history.shown.pop()


@breaks("nothing_lost")
def a_message_is_left(history: History) -> None:
    history.left.append("{duetime:0}:bucket:0")


@breaks("nothing_invented")
def a_message_was_never_sent(history: History) -> None:
    del history.sent["b"]
    history.counters.update(stored=1, delivered=1)


@breaks("nothing_invented")
def a_message_is_another(history: History) -> None:
    show(history, 1, message="text b")


@breaks("repeats", "claims")
def nothing_excuses_a_duplicate(history: History) -> None:
    history.interruptions = [Interruption(STOPPED, DUE_MS, loop=ALIVE)]
    history.exits[DEAD] = LoopExit(0, ["drain: delivered 0 messages; 1 late acks, 0 reclaimed"])


@breaks("repeats", "claims")
def the_fault_came_too_late(history: History) -> None:
    history.interruptions = [Interruption(KILLED, FIRST[1] + 1, loop=DEAD)]


@breaks("repeats", "claims")
def the_fault_was_over_before(history: History) -> None:
    history.interruptions = [Interruption(KILLED, DUE_MS - 9, DUE_MS - 1, loop=DEAD)]


@breaks("repeats")
def a_message_is_shown_twice_under_one_claim(history: History) -> None:
    history.shown.append(history.shown[0])


@breaks("repeats", "fencing")
def a_message_is_shown_and_was_not_claimed(history: History) -> None:
    show(history, 2, attempt=3)


@breaks("claims")
def a_claim_is_left_to_its_lease(history: History) -> None:
    history.log.claims["x", 0] = Claim(ALIVE, "x", DUE_MS + 1, DUE_MS + 9, [Row("b", DUE_MS, 1)])


@breaks("never_early")
def a_message_is_claimed_early(history: History) -> None:
    history.log.claims[SECOND].rows = [Row(one, DUE_MS + 201, 2) for one in "ab"]


@breaks("never_early")
def a_message_comes_early(history: History) -> None:
    show(history, 1, delivered_ms=DUE_MS - 1)


@breaks("never_early")
def a_message_is_read_early(history: History) -> None:
    history.shown[1] = replace(history.shown[1], read_ms=DUE_MS - 1)


@breaks("fencing")
def a_message_is_acknowledged_twice(history: History) -> None:
    claim_once_more(history, DUE_MS + 300, attempt=3)


@breaks("fencing")
def an_attempt_is_not_counted(history: History) -> None:
    history.log.claims[SECOND].rows[0] = Row("a", DUE_MS, 1)
    show(history, 1, attempt=1)
    history.shown[0] = shown(DEAD, "a", 2)
    history.log.claims[FIRST].rows[0] = Row("a", DUE_MS, 2)


@breaks("accounting")
def the_server_counts_a_message_too_little(history: History) -> None:
    history.counters["delivered"] = 1


@breaks("accounting")
def the_server_counts_a_late_acknowledgement_that_never_was(history: History) -> None:
    history.counters["late_acks"] = 1


@breaks("accounting")
def the_server_does_not_count_a_late_acknowledgement(history: History) -> None:
    history.log.late = 1


@breaks("told")
def a_loop_says_twice_that_it_waits(history: History) -> None:
    say(history, "waiting for Redis: 1", "waiting for Redis: 2", "Redis answers again")


@breaks("told")
def a_loop_never_says_that_redis_is_back(history: History) -> None:
    say(history, "waiting for Redis: it is away")


@breaks("told")
def a_loop_says_that_redis_is_back_and_it_was_not_away(history: History) -> None:
    say(history, "Redis answers again")


@breaks("told")
def a_loop_says_nothing_of_an_outage(history: History) -> None:
    say(history)


@breaks("exits")
def a_loop_ends_by_itself(history: History) -> None:
    end(history, 1, "delivered 2 messages; 0 late acks, 2 reclaimed")


@breaks("exits")
def a_loop_has_no_last_line(history: History) -> None:
    end(history, 0, "bye")


@breaks("exits")
def a_loop_counts_too_much(history: History) -> None:
    end(history, 0, "delivered 3 messages; 0 late acks, 2 reclaimed")


@breaks("exits")
def a_loop_takes_what_it_acknowledged_for_late(history: History) -> None:
    end(history, 0, "delivered 1 message; 1 late acks, 2 reclaimed")


def show(history: History, number: int, **changes: object) -> None:
    one = history.shown[number]
    history.shown[number] = replace(one, record={**one.record, **changes})


def say(history: History, *lines: str) -> None:
    """Let the loop that lives on say other lines before its last."""
    history.exits[ALIVE] = LoopExit(0, [*(f"drain: {line}" for line in lines), history.exits[ALIVE].said[-1]])


def end(history: History, code: int, last: str) -> None:
    history.exits[ALIVE] = LoopExit(code, [*history.exits[ALIVE].said[:-1], f"drain: {last}"])


def claim_once_more(history: History, begun_ms: int, attempt: int) -> None:
    """Let the loop that lives on claim, show and acknowledge a message that it had before."""
    rows = [Row("a", DUE_MS, attempt)]
    history.log.claims["more", 0] = Claim(ALIVE, "more", begun_ms, begun_ms + 60_000, rows, acknowledged=1)
    history.shown.append(shown(ALIVE, "a", attempt))
    end(history, 0, "delivered 3 messages; 0 late acks, 2 reclaimed")


def test_a_history_that_is_right_is_called_right() -> None:
    assert check(good()) == []


@pytest.mark.parametrize(("change", "checks"), BREAKS, ids=[change.__name__ for change, _ in BREAKS])
def test_a_planted_fault_is_noticed(change: Break, checks: set[str]) -> None:
    history = good()
    change(history)
    assert {said.partition(":")[0] for said in check(history)} == checks


class TestLog:
    """What it reads from the calls that a store of this process makes in the names of loops."""

    @pytest.fixture
    def proxy(self, server: RealServer) -> Iterator[Proxy]:
        self.exchanges: list[Exchange] = []
        with closing(Proxy(server.folder / "s", server.folder / f"p-{uuid4().hex[:8]}", self.exchanges.append)) as made:
            yield made
        server.client().flushall()

    @pytest.fixture
    def store(self, proxy: Proxy) -> RedisStore:
        store = RedisStore(
            connect(RedisSettings(url=proxy.url)), Keys("test-log"), DrainSettings(lease_sec=60, claim_limit=2)
        )
        assert store.schedule("s", transaction(*((line, DUE_MS) for line in range(1, 6))))
        return store

    def test_it_knows_what_became_of_each_claim(self, store: RedisStore) -> None:
        first, second = claim(store, "host:1:x:0"), claim(store, "host:2:y:0")
        assert claim(store, "host:1:x:0") == first, "a claim that is told again is one claim"
        begun_ms = SystemClock().wall_ms()
        assert store.ack(first, 1, [])
        assert store.release(first, 1) == 1
        assert not store.ack(replace(second, lease_until_ms=1), 2, [])
        log = read_log(self.exchanges)
        assert [(one.loop, one.acknowledged, one.given_back, one.is_finished) for one in log.claims.values()] == [
            (1, 1, True, True),
            (2, 0, False, False),
        ]
        one = log.claims[first.lease_token, first.lease_until_ms]
        assert [(row.id[-1], row.due_ms, row.attempt) for row in one.rows] == [("1", DUE_MS, 1), ("2", DUE_MS, 1)]
        assert one.until_ms - one.begun_ms == 60_000
        assert begun_ms - 60_000 < one.begun_ms <= begun_ms
        assert (log.late, log.taken_back, +log.unknown, +log.failed) == (1, 0, {}, {})
        assert log.forgotten == 1, "the first call, until the scripts are loaded"

    def test_it_knows_what_was_not_heard_and_what_nobody_knows(
        self, store: RedisStore, proxy: Proxy, server: RealServer
    ) -> None:
        held = claim(store, "host:1:x:0")
        for number, fault in enumerate((lose_reply, refuse, reply_with(b"-OOM full\r\n")), start=1):
            proxy.trap(asking("ack", loop=1), fault)
            with pytest.raises(StoreUnavailable):
                store.ack(held, 2, [])
            log = read_log(self.exchanges)
            assert (log.failed[1], +log.unknown) == (number, {})
            assert log.claims[held.lease_token, held.lease_until_ms].acknowledged == 2

        def kill(exchange: Exchange) -> None:
            server.kill()
            exchange.forward()

        proxy.trap(asking("ack", loop=1), kill)
        with pytest.raises(StoreUnavailable):
            store.ack(held, 2, [])
        server.start()
        assert read_log(self.exchanges).unknown == {"ack": 1}


def claim(store: RedisStore, name: str) -> StoreClaim:
    made = store.claim(name).claim
    assert made is not None
    return made
