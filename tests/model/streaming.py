"""The machine with topics: some go into streams, some of these slowly or only for a while, and each may be paused."""

from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from pipeline.config import TopicSettings
from pipeline.core.errors import StoreProtocolError
from pipeline.core.messages import Message
from pipeline.store.base import Claim, ClaimReply
from pipeline.store.topics import Topics
from tests.model.changing import NAMES
from tests.model.machine import PERMANENT, StoreMachine
from tests.model.pair import Pair
from tests.model.times import AROUND_MS, START_MS
from tests.store.builders import BUCKET_MS, set_topic

SETTINGS = {
    "default": TopicSettings(sink="screen"),
    "mail": TopicSettings(sink="stream"),
    "slow": TopicSettings(sink="stream", max_rate=30),
    "bus": TopicSettings(sink="kafka"),
    "news": TopicSettings(sink="screen", webhook="https://example.org/", expire_after_sec=60),
}
TOPICS = tuple(SETTINGS)
MOVED = "moved"  # in place of a lease token


class StreamMachine(StoreMachine):
    """What is in a stream, or is a dead letter, has left the schedule for good."""

    topics: ClassVar[tuple[str, ...]] = TOPICS
    permanent: ClassVar[frozenset[str]] = PERMANENT | {
        "topic_settings",
        "stream",
        "outbox",
        "dead",
        "dead_topics",
        "topics",
        "rate_limits",
        "held_topics",
    }

    @initialize()
    def begin(self) -> None:
        super().begin()
        for topic, settings in SETTINGS.items():
            self.change_settings(topic, settings)

    @rule(topic=st.sampled_from(TOPICS), settings=st.sampled_from([*SETTINGS.values()]))
    def change_settings(self, topic: str, settings: TopicSettings) -> None:
        """All loops go by it from their next claim on."""
        set_topic(self.client, self.keys, topic, settings)
        self.reference.topics.settings[topic] = settings

    @rule(topic=st.sampled_from(TOPICS))
    def pause(self, topic: str) -> None:
        self.on_server().pause(topic, self.now_ms)
        self.reference.topics.pauses.setdefault(topic, self.now_ms)

    @rule(
        target=StoreMachine.claims,
        name=NAMES,
        number=st.integers(0, len(TOPICS) - 1),
        is_paused=st.booleans(),
        comes_again=st.booleans(),
    )
    def a_replacement_comes_due(self, name: str, number: int, is_paused: bool, comes_again: bool) -> Any:
        """When its topic is paused, or others have used up its rate; and another one comes then."""
        message = self.write_a_replacement(name, ("now", 0), number)
        self.replace(message, lifts_cancellation=True)
        if is_paused:
            self.pause(message.topic)
        else:
            go_ms = self.now_ms + 1_000
            self.client.hset(self.keys.rate_limits(), message.topic, go_ms)
            self.reference.topics.rate_limits[message.topic] = go_ms
        self.every_promise_holds()
        claim = self.claim(0)
        self.every_promise_holds()
        if comes_again:
            self.replace(self.write_a_replacement(name, ("now", 500), number), lifts_cancellation=False)
        return claim

    @rule(name=NAMES, number=st.integers(0, len(TOPICS) - 1))
    def what_was_held_is_given_back(self, name: str, number: int) -> None:
        message = self.write_a_replacement(name, ("now", 0), number)
        self.replace(message, lifts_cancellation=True)
        self.pause(message.topic)
        self.every_promise_holds()
        self.claim(0)
        self.every_promise_holds()
        self.resume(message.topic)
        self.every_promise_holds()
        claim = self.claim(0)
        self.every_promise_holds()
        if isinstance(claim, Claim):
            self.give_back(0, claim, 0)

    @rule(topic=st.sampled_from(TOPICS))
    def resume(self, topic: str) -> None:
        held = self.reference.topics.resume(topic)
        assert self.on_server().resume(topic) == held
        assert self.hear() == [0] * bool(held)

    @rule(topic=st.sampled_from(TOPICS))
    def what_is_held_stays_while_the_topic_is_paused(self, topic: str) -> None:
        if topic in self.seen.pauses:
            self.on_server().look_again(self.keys, topic)

    @rule(topic=st.sampled_from(TOPICS), place=st.sampled_from(["stream", "dead", "held", "claim", "claim"]))
    def claiming_fails_half_way(self, topic: str, place: str) -> None:
        """A key of another type stands where messages are to be; as long as none has to go there, it does no harm."""
        oldest_ms = min(self.seen.buckets, default=0)
        if any(due_ms >= oldest_ms + BUCKET_MS for due_ms in self.seen.buckets.get(oldest_ms, {}).values()):
            return  # the server would put these into their own bucket before it fails
        name = f"spoiled:{self.latest_ms}:{len(self.acknowledged)}"
        token = f"{oldest_ms}:{name}"
        keys = {"stream": self.keys.stream, "dead": self.keys.dead, "held": self.keys.held, "claim": self.keys.claim}
        key = keys[place](token if place == "claim" else topic)
        pair, aside = Pair(self), "aside"
        was_there = bool(self.client.exists(key))
        if was_there:
            self.client.rename(key, aside)
        self.client.set(key, "in the way")
        try:
            reply = pair.real.claim(name)
        except StoreProtocolError:
            reply = None
        self.client.delete(key)
        if was_there:
            self.client.rename(aside, key)
        if reply:
            assert reply == pair.model.claim(name)

    @precondition(lambda self: self.seen.waiting())
    @rule(ms=st.sampled_from(AROUND_MS))
    def time_comes_to_where_a_message_expires(self, ms: int) -> None:
        dues = [
            due_ms for _, due_ms in self.seen.waiting() if due_ms >= START_MS // 2
        ]  # not near 1970: delays end before it
        self.now_ms = min(dues, default=self.now_ms) + 60_000 + ms

    def on_server(self) -> Topics:
        return Topics(self.client, [self.keys], self.scripts)

    def check_wait(self, reply: ClaimReply) -> None:
        if reply.moved:
            assert reply.next_due_ms == self.now_ms
        elif reply.next_due_ms != self.now_ms or self.look() == self.seen:  # else something was held
            super().check_wait(reply)
        assert all(max(each.dues_ms) <= self.now_ms for each in reply.moved), "early"

    def check_that_each_is_in_one_place(self) -> None:
        of_text = {text_of(m): m for m in self.accepted}
        moved = [entry for entries in (*self.seen.streams.values(), *self.seen.outboxes.values()) for entry in entries]
        dead = [entry for entries in self.seen.dead.values() for entry in entries]
        for _, text, _, due_ms, _, _ in moved + dead:
            assert due_ms == self.accepted[of_text[text]]
            self.acknowledged.setdefault(of_text[text], (MOVED, self.now_ms))
        ended = [text_of(m) for m, (token, _) in self.acknowledged.items() if token == MOVED]
        assert sorted(entry[1] for entry in moved + dead) == sorted(ended), "moved twice, or also delivered otherwise"

        held = [row for rows in self.seen.held.values() for row in rows.items()]
        left = [text_of(m) for m in [*self.seen.everything(), *(m for m, _ in held)]]
        assert sorted(left) == sorted(text_of(m) for m in self.accepted.keys() - self.acknowledged.keys())
        for stored, score in [*self.seen.waiting(), *held]:
            assert Message.from_member(stored, score).due_ms == self.accepted[of_text[text_of(stored)]]
        assert self.seen.counters.get("delivered", 0) == len(self.acknowledged) - len(dead) - len(self.cancelled)
        assert self.seen.counters.get("dead", 0) == len(dead)

    def teardown(self) -> None:
        if self.sound:
            for topic in TOPICS:
                self.resume(topic)
        super().teardown()


def text_of(stored: bytes) -> str:
    return Message.from_member(stored, 0).body
