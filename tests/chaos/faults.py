"""What may happen to a writer, each a check that every request is delivered once all the same.

``test_faults.py`` runs them on the pipeline as it is, where they must pass; ``test_planted.py`` on one that was broken on purpose,
where they must not.
"""

import shutil
import threading
from collections.abc import Callable

import pytest

from pipeline.core.errors import StoreProtocolError
from tests.chaos.proxy import Cut, Exchange, Fault, Matches, after, before, lose_reply, pass_on, refuse, reply_with
from tests.chaos.rig import FILES, OTHER_TRANSACTION_MESSAGES, PAST_MS, TRANSACTION_MESSAGES, Rig, die

OOM = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
ALL_AT_ONCE = 1_000  # messages: more than there are

Check = Callable[[Rig], None]


def nothing_happens(rig: Rig) -> None:
    """The usual case, twins and idempotency keys in it."""
    rig.write()
    rig.expect_each_once()


def replayed_when_delivered(rig: Rig) -> None:
    rig.write()
    rig.drain()
    rig.write()
    rig.expect_each_once()


def replayed_when_ids_are_forgotten(rig: Rig) -> None:
    """A replay a day later: the idempotency keys are no protection any more."""
    rig.write()
    rig.drain()
    rig.forget_ids()
    rig.write()
    rig.expect_each_once()


def crashed_and_cut_elsewhere(rig: Rig) -> None:
    """A crash within a part of a file, a drain, and a restart with another size of transactions."""
    rig.crash(at=3)
    rig.drain()
    assert rig.delivered
    rig.write(transaction_messages=OTHER_TRANSACTION_MESSAGES)
    rig.expect_each_once()


def crashed_twice_and_cut_elsewhere(rig: Rig) -> None:
    """The second crash comes where a transaction of the first run ended in the middle of one of the second."""
    rig.crash(at=2)
    rig.drain()
    rig.crash(at=3, transaction_messages=OTHER_TRANSACTION_MESSAGES)
    rig.drain()
    rig.write(transaction_messages=ALL_AT_ONCE)
    rig.expect_each_once()


def crashed_at_every_transaction(rig: Rig) -> None:
    """Each run stores one transaction and dies, before the next or without having read that it is stored."""
    for number in range(len(FILES)):
        size = (TRANSACTION_MESSAGES, OTHER_TRANSACTION_MESSAGES)[number % 2]
        if number % 3:
            rig.crash(at=2, transaction_messages=size)
        else:
            rig.crash(at=1, transaction_messages=size, fault=die_when_stored)
        rig.drain()
    rig.write()
    rig.expect_each_once()


def die_when_stored(exchange: Exchange) -> None:
    exchange.forward()
    die(exchange)


def replies_lost(rig: Rig) -> None:
    """The server stores, the reply is lost, messages are delivered before the writer tries again."""

    def lose(exchange: Exchange) -> None:
        exchange.forward()
        rig.drain()
        raise Cut

    traps = [rig.proxy.trap(rig.stores, lose, first=number) for number in (1, 3, 9, 10)]
    rig.write()
    assert all(trap.was_sprung for trap in traps)
    rig.expect_each_once()


def commands_lost(rig: Rig) -> None:
    """Transactions never arrive, nor does what surrounds them."""
    traps = [rig.proxy.trap(rig.stores, refuse, first=number) for number in (1, 2, 5, 6, 7)]
    for matches in (rig.watches, rig.reads):
        traps += [rig.proxy.trap(matches, fault, first=n) for n, fault in ((4, refuse), (9, lose_reply))]
    rig.write()
    assert all(trap.was_sprung for trap in traps)
    rig.expect_each_once()


def each_refused_once(rig: Rig) -> None:
    """The server is full for every transaction, and no longer when it comes again."""
    refused: set[tuple[bytes, ...]] = set()

    def refuse_once(exchange: Exchange) -> None:
        words = tuple(word for command in exchange.call for word in command)
        if words in refused:
            pass_on(exchange)
        else:
            refused.add(words)
            reply_with(OOM)(exchange)

    rig.proxy.trap(rig.stores, refuse_once, last=float("inf"))
    rig.write()
    assert len(refused) > len(FILES)
    rig.expect_each_once()


def refused_bit_by_bit(rig: Rig) -> None:
    """The server refuses a command of a transaction, and its word on the whole comes when the writer has gone on."""

    def dribble(exchange: Exchange) -> None:
        exchange.answer(b"+OK\r\n" + b"+QUEUED\r\n" * (len(exchange.call) - 3) + OOM)
        exchange.wait_for_client()
        exchange.answer(b"-EXECABORT Transaction discarded because of previous errors.\r\n")

    trap = rig.proxy.trap(rig.stores, dribble, first=3)
    rig.write()
    assert trap.was_sprung
    rig.expect_each_once()


def overtaken_before_watching(rig: Rig) -> None:
    overtake(rig, rig.watches, before, lambda: rig.write(transaction_messages=OTHER_TRANSACTION_MESSAGES))


def overtaken_before_reading(rig: Rig) -> None:
    overtake(rig, rig.reads, before, lambda: rig.write(transaction_messages=OTHER_TRANSACTION_MESSAGES))


def overtaken_before_storing(rig: Rig) -> None:
    overtake(rig, rig.stores, before, lambda: rig.write(transaction_messages=OTHER_TRANSACTION_MESSAGES))


def overtaken_when_stored(rig: Rig) -> None:
    overtake(rig, rig.stores, after, lambda: rig.write(transaction_messages=OTHER_TRANSACTION_MESSAGES))


def overtaken_in_part(rig: Rig) -> None:
    """The other one stores some messages of the transaction that hangs, and dies."""
    overtake(rig, rig.stores, before, lambda: rig.crash(at=2, transaction_messages=3))


def overtaken_at_one_file_of_many(rig: Rig) -> None:
    """The transaction that hangs has all files in it, the other one stores one of them."""
    overtake(rig, rig.stores, before, lambda: rig.write([4]), first=1, transaction_messages=ALL_AT_ONCE)


def overtake(
    rig: Rig,
    matches: Matches,
    stall: Callable[[Callable[[], object]], Fault],
    other: Callable[[], None],
    first: int = 2,
    transaction_messages: int = TRANSACTION_MESSAGES,
) -> None:
    """Let a writer hang at a call while ``other`` writes and a drain delivers what is stored; then it goes on."""
    gate = threading.Event()
    trap = rig.proxy.trap(matches, stall(gate.wait), first=first)
    slow = rig.writing(transaction_messages)
    trap.wait()
    other()
    rig.drain()
    gate.set()
    slow.join()
    rig.expect_each_once()


def one_file_of_many_is_known(rig: Rig) -> None:
    rig.write([4])
    rig.drain()
    rig.write(transaction_messages=ALL_AT_ONCE)
    rig.expect_each_once()


def side_by_side(rig: Rig) -> None:
    """Two writers of different transactions take turns, a drain in between."""
    turns = threading.Semaphore(0)
    taken: list[bool] = []

    def acquire_active() -> None:
        rig.drain()
        taken.append(turns.acquire(timeout=1 / 50))  # no deadlock when the other one is done
        turns.release()

    rig.proxy.trap(rig.stores, after(acquire_active), last=float("inf"))
    writers = [rig.writing(TRANSACTION_MESSAGES), rig.writing(OTHER_TRANSACTION_MESSAGES)]
    for writer in writers:
        writer.join()
    assert len(taken) > len(FILES)
    rig.expect_each_once()


def server_killed_after_storing(rig: Rig) -> None:
    """The server dies between storing and replying, and comes back with what it has on disk, without its scripts."""

    def kill(exchange: Exchange) -> None:
        exchange.forward()
        rig.server.kill()
        rig.server.start()
        raise Cut

    traps = [rig.proxy.trap(rig.stores, kill, first=number) for number in (2, 8)]
    rig.write()
    assert all(trap.was_sprung for trap in traps)
    rig.expect_each_once()


def server_lost_its_last_writes(rig: Rig) -> None:
    """The server dies and comes back with what it had some transactions ago, as one may that doesn't wait for its disk."""
    data, copy = rig.server.folder / "appendonlydir", rig.server.folder / "older"

    def lose() -> None:
        rig.server.kill()
        shutil.rmtree(data)
        copy.rename(data)
        rig.server.start()

    rig.proxy.trap(rig.stores, after(lambda: shutil.copytree(data, copy)), first=3)
    lost = rig.proxy.trap(rig.stores, after(lose), first=9)
    rig.write()
    assert lost.was_sprung
    rig.expect_each_once(lost_files=True)


def server_full(rig: Rig) -> None:
    """The server has no memory left for a while."""
    client = rig.server.client()
    full = rig.proxy.trap(rig.stores, before(lambda: client.config_set("maxmemory", 1)), first=3)
    freed = rig.proxy.trap(rig.stores, before(lambda: client.config_set("maxmemory", 0)), first=6)
    rig.write()
    assert full.was_sprung and freed.was_sprung, "the writer did not try again"
    rig.expect_each_once()


def a_key_in_the_way(rig: Rig) -> None:
    """Somebody else's key is where a bucket belongs: the job ends, and what it could not store does not count as stored."""
    client = rig.server.client()
    client.mset(dict.fromkeys(rig.buckets(PAST_MS), "not ours"))
    with pytest.raises(StoreProtocolError, match="not ours"):
        rig.write()
    client.delete(*rig.buckets(PAST_MS))
    rig.write()
    rig.expect_each_once()


CHECKS: tuple[Check, ...] = (
    nothing_happens,
    replayed_when_delivered,
    replayed_when_ids_are_forgotten,
    crashed_and_cut_elsewhere,
    crashed_twice_and_cut_elsewhere,
    crashed_at_every_transaction,
    replies_lost,
    commands_lost,
    each_refused_once,
    refused_bit_by_bit,
    overtaken_before_watching,
    overtaken_before_reading,
    overtaken_before_storing,
    overtaken_when_stored,
    overtaken_in_part,
    overtaken_at_one_file_of_many,
    one_file_of_many_is_known,
    side_by_side,
    server_killed_after_storing,
    server_lost_its_last_writes,
    server_full,
    a_key_in_the_way,
)
