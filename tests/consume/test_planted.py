"""The tests of consumers notice what they are there for: each protection of a batch, taken out, is missed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from jobs import consume
from pipeline.consume import handling
from pipeline.consume.consumer import Consumer
from pipeline.consume.handling import Acks
from pipeline.core.errors import StoreProtocolError
from pipeline.store.groups import GroupStore
from tests.chaos.test_planted import Mutant, plant
from tests.consume import test_acks as acks
from tests.consume import test_handling as waiting
from tests.consume import test_reading_ahead as ahead
from tests.consume import test_settling as settling
from tests.consume.conftest import Stage

pytestmark = pytest.mark.planted

ACK, TAKE, READING, PRINT = (Consumer, "_ack"), (Consumer, "take"), (Consumer, "_reading"), (consume, "print_all")
MAY_READ = "self._ahead and has_looked and is_all"
DELIVER = "delivered = sink.deliver("
MIXED = settling.test_of_a_batch_those_that_are_anothers_or_came_again_are_refused_and_no_other
Check = Callable[..., None]


def many(verb: str) -> Check:
    return partial(settling.test_more_messages_than_a_call_takes_are_settled_each_by_its_own_count, verb=verb)


def first(cause: str) -> Check:
    return partial(ahead.test_an_acknowledgement_reads_nothing_when_something_else_comes_first, cause=cause)


fails = acks.test_a_message_whose_handler_fails_is_not_acknowledged_with_those_beside_it
HANDLE = (handling, "_handle")
at_once = acks.test_a_message_is_acknowledged_while_the_next_one_is_handled_and_not_before_its_own_handler_returns
lost = partial(acks.test_what_a_lost_connection_took_along_is_acknowledged_again_and_nothing_comes_twice, number=9)
lost_late = acks.test_an_acknowledgement_that_was_done_when_its_answer_was_lost_is_not_late

BEGIN, BEFORE_ITS_TURN = (handling, "_begin"), "turns.acquire(blocking=False)"
turn = waiting.test_a_message_waits_for_its_turn_and_gives_it_on

# By name: the script or function, old and new text, and what notices it.
FAULTS: dict[str, tuple[Any, str, str, Check]] = {
    "a message is handled though it is the turn of others": (BEGIN, BEFORE_ITS_TURN, "True", turn),
    "it does not matter who has a message": ("settle", "count, consumer)) do", "count)) do", MIXED),
    "it does not matter how often a message was delivered": (
        "settle",
        "delivered[id] == delivery_count",
        "delivered[id]",
        MIXED,
    ),
    "one that is another's refuses all": (
        "settle",
        "done[#done + 1] = is_own and",
        "done[#done + 1] = false and",
        MIXED,
    ),
    "a refused acknowledgement is not counted": (
        "settle",
        "redis.call('HINCRBY', counters",
        "tostring(counters",
        MIXED,
    ),
    "what is not between the first and the last is not looked at": (
        "settle",
        "if is_active and not delivered[id] then",
        "if false then",
        settling.test_in_whatever_order_messages_are_named_and_whatever_lies_between_them,
    ),
    "all get the count of the last one": ("settle", "delivery_count ~= run_delivered or", "", many("start")),
    "all is said in one call": ("settle", " or #run == RUN_MAX", "", many("ack")),
    "the last run is not settled": ("settle", "settle_run()\nreturn done", "return done", MIXED),
    "a replaced consumer of an ordered group settles a batch": (
        "settle",
        "redis.call('GET', active) == consumer",
        "true",
        settling.test_a_batch_of_an_ordered_group_is_refused_as_a_whole_once_another_one_is_active,
    ),
    "it reads ahead in an ordered group": (
        READING,
        "self.reads_ahead and not self.store.ordered",
        "self.reads_ahead",
        first("an ordered group"),
    ),
    "it reads ahead unasked": (READING, "self.reads_ahead and", "", first("not asked for")),
    "it reads ahead without a backlog": (READING, " and len(found) >= limit", "", first("no backlog")),
    "it reads ahead of what it has": (ACK, MAY_READ, "self._ahead and has_looked", first("a part")),
    "it reads when it stops": (ACK, "or self._is_ending()", "", first("a stop")),
    "a backlog keeps it from taking over": (
        ACK,
        MAY_READ,
        "self._ahead and is_all",
        ahead.test_a_backlog_does_not_keep_it_from_taking_over_what_is_silent,
    ),
    "it reads again when a reply was lost": (
        ACK,
        "or self._may_have_more",
        "",
        partial(ahead.test_a_reply_that_is_lost_costs_no_attempt_and_brings_nothing_twice, is_done=True),
    ),
    "a lost reply is forgotten": (
        READING,
        "self._may_have_more = self._lost_a_read = True",
        "pass",
        partial(ahead.test_a_reply_that_is_lost_costs_no_attempt_and_brings_nothing_twice, is_done=True),
    ),
    "a lost reply counts as a crash": (
        READING,
        "self._may_have_more = self._lost_a_read = True",
        "self._may_have_more = True",
        partial(ahead.test_a_reply_that_is_lost_costs_no_attempt_and_brings_nothing_twice, is_done=True),
    ),
    "what was read ahead is not kept": (
        TAKE,
        "self._keep_waiting()",
        "pass",
        ahead.test_what_was_read_ahead_keeps_its_lease_or_is_not_given_out,
    ),
    "what it read is acknowledged, too": (
        (GroupStore, "ack_and_read"),
        '"COUNT", limit',
        '"NOACK", "COUNT", limit',
        ahead.test_while_there_is_a_backlog_each_batch_is_read_with_the_acknowledgement_before_it,
    ),
    "a batch is acknowledged before it is printed": (
        PRINT,
        DELIVER,
        f"consumer.ack(*entries); {DELIVER}",
        partial(ahead.test_what_was_not_printed_is_not_acknowledged, closes=False),
    ),
    "a batch is acknowledged although only a part is printed": (
        PRINT,
        "consumer.ack(*entries[:delivered])",
        "consumer.ack(*entries)",
        partial(ahead.test_what_was_not_printed_is_not_acknowledged, closes=False),
    ),
    "a batch is acknowledged although the output was closed": (
        PRINT,
        "consumer.give_back(*entries[exc.started :])",
        "consumer.ack(*entries)",
        partial(ahead.test_what_was_not_printed_is_not_acknowledged, closes=True),
    ),
    "a message is acknowledged before it is handled": (
        HANDLE,
        "handler(entry)",
        "acks.add(entry); handler(entry)",
        at_once,
    ),
    "a message is acknowledged though its handler failed": (
        HANDLE,
        "now_ms = consumer.clock.monotonic_ms()",
        "acks.add(entry); now_ms = consumer.clock.monotonic_ms()",
        fails,
    ),
    "an acknowledgement is not sent at once": (
        (Acks, "add"),
        "self.consumer.store.send_ack(entry)",
        "self.consumer.wait(0)",
        at_once,
    ),
    "the answers of an ordered group are not waited for": (
        (Acks, "add"),
        "if self.consumer.store.ordered:",
        "if False:",
        acks.test_in_an_ordered_group_each_answer_is_waited_for,
    ),
    "any number of answers is not waited for": (
        (Acks, "add"),
        "len(self._sent) >= SENT_MAX or ",
        "",
        acks.test_answers_are_waited_for_together_but_of_so_many_at_most,
    ),
    "answers are never missed": (
        (Acks, "add"),
        " or now_ms - self._since_ms >= SENT_MS_MAX",
        "",
        acks.test_answers_are_not_waited_for_longer_than_a_moment_if_handlers_take_their_time,
    ),
    "it waits for more before there are answers": (
        (handling, "run"),
        "if not consumer.has_more():",
        "if False:",
        acks.test_before_it_waits_for_more_all_is_answered,
    ),
    "what was lost is not acknowledged again": ((Acks, "confirm"), "self.consumer.ack(*sent)", "list(sent)", lost),
    "what was lost may not be said to be acknowledged": (
        (GroupStore, "settle"),
        "self.repeated = 1",
        "pass",
        lost_late,
    ),
    "what was lost is lost": ((GroupStore, "settle"), "self.repeated = 1", "raise", lost),
    "a late answer is not told": (
        (GroupStore, "settle"),
        "bool(is_done) for [is_done]",
        "True for [is_done]",
        acks.test_of_several_only_those_whose_lease_was_over_are_told,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(
    name: str, stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, old, new, check = FAULTS[name]
    plant(Mutant(name, (), {target: ((old, new),)}), monkeypatch)
    wanted = check.func if isinstance(check, partial) else check
    given = {"monkeypatch": monkeypatch, "caplog": caplog}
    options = {each: value for each, value in given.items() if each in wanted.__code__.co_varnames}
    with pytest.raises((AssertionError, StoreProtocolError)):
        check(stage, **options)
