"""The tests of forwarders and of the outbox notice what they are there for: each protection, taken out, is missed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pipeline.kafka.forwarder import Forwarder
from pipeline.kafka.sender import KafkaSender
from pipeline.store import outbox, scripts
from pipeline.store.outbox import Outbox
from tests.chaos.test_planted import Mutant, plant
from tests.kafka import model, test_forwarder
from tests.kafka.forwarding_world import World
from tests.kafka.test_forwarder import OpenWorld, open_world, quick_server  # noqa: F401
from tests.store import test_outbox
from tests.store.conftest import Bench, bench  # noqa: F401

pytestmark = pytest.mark.planted

FORWARD, WRITE, TAKE_OVER, CLOSE, READ = (
    (Forwarder, name) for name in ("_forward", "_write", "_take_over", "close", "_read")
)
OPEN, SEND = (KafkaSender, "__init__"), (KafkaSender, "_send")
INIT = "self._producer.init_transactions(transaction_timeout_ms / 1000)"
FOUND = 'self.position = found.metadata or ""'
AHEAD = "self._read(entries[-1].entry_id)"
SET_BACK = "position ~= '' and is_set_back()"
HALVES = "left[:middle])\n            self._write(sender, left[middle:])"
REFUSE = "self._refuse(entries, refused)"
WRITE_THEM = "self._write(sender, [entry for entry in entries if entry.entry_id not in refused], read_ahead)"
COMMIT = "self._producer.commit_transaction(ANSWER_SEC)"
HOLDS = "redis.call('GET', forwarder) ~= token"
NOTHING = "redis.call('TIME')"


def committed_meanwhile(open_world: OpenWorld) -> None:  # noqa: F811
    test_forwarder.test_what_is_committed_while_another_loop_takes_over_is_not_written_again(
        open_world, "position done"
    )


def struck(strike: Callable[[World], bool], exactly_once: bool = True) -> Callable[[OpenWorld], None]:
    def check(open_world: OpenWorld) -> None:  # noqa: F811
        test_forwarder.strike_everywhere(open_world, strike, exactly_once)

    return check


crashed, failed, replaced = struck(test_forwarder.crash), struck(test_forwarder.fail), struck(test_forwarder.replace_it)
replaced_by_one_that_crashes = struck(test_forwarder.replace_by_one_that_crashes)
plain_failed = struck(test_forwarder.fail, exactly_once=False)
set_back = test_forwarder.test_a_server_that_lost_its_last_writes_takes_no_new_message_for_one_that_is_written
begun_again = test_forwarder.test_nothing_is_left_of_an_old_sender_when_its_loop_begins_again
replaced_in_refusal = test_forwarder.test_a_loop_that_was_replaced_in_a_refusal_makes_no_dead_letter_of_what_is_written


def undisturbed(open_world: OpenWorld) -> None:  # noqa: F811
    test_forwarder.test_without_a_fault_nothing_is_repeated_and_all_is_counted(open_world, True)


Change = tuple[str, str]
Fault = tuple[Any, Callable[[Any], None], *tuple[Change, ...]]

# By name: the script or function, what notices it, and old and new texts.
FAULTS: dict[str, Fault] = {
    "the position is not read": (OPEN, crashed, (FOUND, 'self.position = ""')),
    "nobody is fenced": ((model.Producer, "init_transactions"), replaced, ("writer.epoch += 1", "pass")),
    "the position is read before the one before is fenced": (
        OPEN,
        committed_meanwhile,
        (f"{INIT}\n", "pass\n"),
        (FOUND, f"{FOUND}; {INIT}"),
    ),
    "the position is not in the transaction": (SEND, crashed, ("if self._group and not self._failed:", "if False:")),
    "the position is that of the first entry": (SEND, undisturbed, ("entries[-1].entry_id", "entries[0].entry_id")),
    "what was refused is committed": (SEND, undisturbed, ("if self._group and refused:", "if False:")),
    "what failed counts as written": (SEND, plain_failed, ("if passing and", "if False and")),
    "a transaction with a refusal stays open": (SEND, undisturbed, ("self._producer.abort_transaction", "float")),
    "a commit that failed counts as one": (
        SEND,
        failed,
        (COMMIT, f"try:\n            {COMMIT}\n        except KafkaException:\n            pass"),
    ),
    "what is written is not dropped": (READ, undisturbed, ("read(self._sender.position,", 'read("",')),
    "what is read ahead counts as written": (
        READ,
        crashed,
        ("self._sender.position,", "after or self._sender.position,"),
    ),
    "it reads ahead from the first entry": (FORWARD, undisturbed, (AHEAD, "self._read(entries[0].entry_id)")),
    "it reads ahead what is being written": (FORWARD, undisturbed, (AHEAD, 'self._read("")')),
    "what was read ahead is not forgotten": (
        CLOSE,
        begun_again,
        ("_leading, self._ahead = False, []", "_leading = False"),
    ),
    "what is refused is a dead letter after the others are written": (
        FORWARD,
        crashed,
        (REFUSE, "pass"),
        (WRITE_THEM, f"{WRITE_THEM}\n    {REFUSE}"),
    ),
    "others count as written though one was refused": (WRITE, undisturbed, ("and sender.is_atomic", "and False")),
    "the second half is written first": (
        WRITE,
        undisturbed,
        (HALVES, HALVES.replace(":middle", "0:0").replace("middle:", ":middle").replace("0:0", "middle:")),
    ),
    "the second half is forgotten": (WRITE, undisturbed, ("self._write(sender, left[middle:])", "pass")),
    "lost writes are not looked for": ("forward", set_back, (SET_BACK, "false")),
    "who has no lease refuses": ("refuse", replaced_in_refusal, (HOLDS, "false")),
    "the entry at the position stays": ("forward", undisturbed, ("redis.call('XDEL', outbox, position)", NOTHING)),
    "what is refused stays": ("refuse", crashed, ("redis.call('XDEL', outbox, id)", NOTHING)),
    "what is refused is no dead letter": (
        "refuse",
        undisturbed,
        ("redis.call('XADD', dead, '*', unpack(fields))", NOTHING),
    ),
}

leases, reading, refusing = test_outbox.TestLease(), test_outbox.TestReading(), test_outbox.TestRefusing()
lost_writes = test_outbox.TestLostWrites()

OUTBOX_FAULTS: dict[str, Fault] = {
    "each lease has the same token": (
        (Outbox, "acquire"),
        leases.test_each_is_a_new_one_also_of_the_same_loop,
        ("self._leases += 1", "pass"),
    ),
    "two have the lease": (
        "acquire_active",
        leases.test_one_at_a_time_has_it_until_it_leaves,
        ("if holder and holder ~= consumer then", "if false then"),
    ),
    "who has no lease any more reads": (
        "forward",
        leases.test_what_an_earlier_one_began_can_do_nothing_under_a_later_one,
        (HOLDS, "false"),
    ),
    "who has no lease any more refuses": (
        "refuse",
        leases.test_what_an_earlier_one_began_can_do_nothing_under_a_later_one,
        (HOLDS, "false"),
    ),
    "reading renews nothing": (
        "forward",
        partial(leases.test_keeping_it_and_reading_renew_it, renew=Outbox.keep),
        ("redis.call('SET', forwarder, token, 'PX', lease_ms)", NOTHING),
    ),
    "an entry is read twice": (
        (Outbox, "read"),
        reading.test_it_begins_behind_an_entry_and_ends_at_the_limit,
        ('f"({after}"', "after"),
    ),
    "a key in the way is met when the dead letter is written": (
        "refuse",
        partial(refusing.test_a_key_in_the_way_leaves_nothing_half_done, name="topics"),
        ("redis.call('SCARD', topics)", NOTHING),
    ),
    "a refusal is repeated": (
        "refuse",
        refusing.test_a_message_becomes_a_dead_letter_once,
        ("redis.call('XDEL', outbox, id)", NOTHING),
    ),
    "new ids are not moved on": (
        "forward",
        lost_writes.test_what_comes_next_is_beyond_the_position_also_if_nothing_is_there,
        ("if #entries == 0 then", "if false then"),
    ),
    "headers that are none end the reading": (
        (outbox, "_headers"),
        reading.test_what_other_programs_wrote_is_read_as_messages,
        ("except (msgspec.DecodeError, UnicodeDecodeError):", "except MemoryError:"),
    ),
}


def mutant_of(name: str, fault: Fault) -> Mutant:
    target, _, *changes = fault
    return Mutant(name, (), {target: tuple(changes)})


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(
    name: str,
    open_world: OpenWorld,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(mutant_of(name, FAULTS[name]), monkeypatch)
    with pytest.raises(AssertionError):
        FAULTS[name][1](open_world)


@pytest.mark.parametrize("bench", ["real"], indirect=True)
@pytest.mark.parametrize("name", OUTBOX_FAULTS)
def test_a_fault_planted_into_the_outbox_is_noticed(
    name: str,
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(mutant_of(name, OUTBOX_FAULTS[name]), monkeypatch)
    bench.scripts = scripts.Scripts()
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        OUTBOX_FAULTS[name][1](bench)
