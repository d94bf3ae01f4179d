"""Any order of all that can happen to cold messages, compared with a dictionary after each step."""

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pipeline.core.clock import SystemClock
from pipeline.core.errors import StoreProtocolError
from pipeline.core.messages import Message
from pipeline.ingest import cold_merging
from pipeline.ingest.cold_merging import Merger
from pipeline.store.base import State
from pipeline.store.shards import open_shards, shard_of
from tests.examples import scaled
from tests.ingest.cold_world import HOUR_MS, ColdWorld
from tests.ingest.test_hydration import fail_after
from tests.servers import RealServer

KEYS = st.sampled_from("abcdef")
HOURS = st.sampled_from([0.25, 1, 1.5, 2, 3, 30, 1000])
FOR_EVER_MS = 4_102_444_800_000


class ColdMachine(RuleBasedStateMachine):
    """``waits`` has each message that is to be delivered: text -> hours to its due time, and key or "". ``known`` are its keys."""

    server: RealServer
    shards = 1

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.world = ColdWorld(self.server, Path(self.folder.name), shards=self.shards, transaction_messages=2)
        self.waits: dict[str, tuple[float, str]] = {}
        self.known: set[str] = set()
        self.cut_off: list[tuple[str, list[dict[str, Any]]]] = []
        self.texts = 0
        self.delivered: set[str] = set()  # of files that are not stored whole

    def lines(self, rows: list[tuple[float, str]]) -> list[dict[str, Any]]:
        found = []
        for hours, key in rows:
            self.texts += 1
            found.append(self.world.line(f"m{self.texts}", hours, key))
        return found

    def expect(self, lines: list[dict[str, Any]]) -> None:
        """Take lines for stored, in the order in which they are."""
        for line in sorted(lines, key=lambda line: line["due"]):
            key = line.get("id", "")
            if key not in self.known and line["message"] not in self.delivered:
                self.waits[line["message"]] = ((line["due"] - self.world.now_ms) / HOUR_MS, key)
                self.known |= {key} - {""}

    @rule(rows=st.lists(st.tuples(HOURS, st.one_of(st.just(""), KEYS)), min_size=1, max_size=6))
    def a_file_comes(self, rows: list[tuple[float, str]]) -> None:
        lines = self.lines(rows)
        assert self.world.write(lines).lines == len(lines)
        self.expect(lines)

    @rule(rows=st.lists(HOURS, min_size=1, max_size=6), transactions=st.integers(0, 3))
    def the_writer_of_a_file_dies(self, rows: list[float], transactions: int) -> None:
        lines = self.lines([(hours, "") for hours in rows])
        token = self.world.token(1_000_000 + self.texts)
        with pytest.MonkeyPatch.context() as patch:
            fail_after(patch, transactions)
            try:
                self.world.write(lines, token=token)
            except StoreProtocolError:
                self.cut_off.append((token, lines))
            else:
                self.expect(lines)

    @precondition(lambda self: self.cut_off)
    @rule(horizon_hours=HOURS)
    def another_one_goes_on(self, horizon_hours: float) -> None:
        token, lines = self.cut_off.pop()
        self.horizon(horizon_hours)
        self.world.write(lines, token=token)
        self.expect(lines)

    @rule(hours=HOURS)
    def horizon(self, hours: float) -> None:
        from dataclasses import replace

        place = replace(self.world.place, horizon_ms=round(hours * HOUR_MS))
        self.world.settings = replace(self.world.settings, cold=place)

    @rule(lead_hours=HOURS)
    def hydrate(self, lead_hours: float) -> None:
        self.world.hydrate(lead_hours)

    @rule()
    def merge(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cold_merging, "FILES_MIN", 2)
            for shard, store in enumerate(open_shards(self.world.client, self.world.redis)):
                Merger(self.world.folder, store, shard, -60_000).merge(SystemClock().wall_ms(), 0)

    @rule()
    def keep_house(self) -> None:
        hydrator = self.world.hydrator(0.01)
        assert hydrator.look()
        hydrator.keep_house()
        hydrator.leave()

    @rule(key=KEYS)
    def cancel(self, key: str) -> None:
        waiting = [text for text, (_, other) in self.waits.items() if other == key]
        found = self.world.by_id().cancel(key)
        assert (found.state is State.CANCELLED and found.message is not None) == bool(waiting)
        if waiting:
            assert found.message and found.message.body == waiting[0]
            del self.waits[waiting[0]]

    @rule(key=KEYS, hours=HOURS)
    def reschedule(self, key: str, hours: float) -> None:
        waiting = [text for text, (_, other) in self.waits.items() if other == key]
        found = self.world.by_id().reschedule(key, self.world.now_ms + round(hours * HOUR_MS))
        assert (found.state is State.SCHEDULED) == bool(waiting)
        if waiting:
            self.waits[waiting[0]] = (hours, key)

    @rule(key=KEYS, hours=HOURS)
    def a_line_replaces(self, key: str, hours: float) -> None:
        waiting = [text for text, (_, other) in self.waits.items() if other == key]
        [line] = self.lines([(hours, key)])
        self.world.write([line | {"replace": True}])
        if waiting:
            del self.waits[waiting[0]]
        if waiting or key not in self.known:
            self.waits[line["message"]] = (hours, key)
            self.known.add(key)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        waiting = [(text, hours) for text, (hours, other) in self.waits.items() if other == key]
        found = self.world.by_id().get(key)
        message = found.message
        assert ([(message.body, (message.due_ms - self.world.now_ms) / HOUR_MS)] if message else []) == waiting

    @rule()
    def all_that_is_in_redis_is_delivered(self) -> None:
        for shard, keys in enumerate(self.world.shards):
            for start in self.world.client.zrange(keys.buckets(), 0, -1):
                for member in self.world.client.zrange(keys.bucket(int(start)), 0, -1):
                    message = Message.from_member(member, 0)
                    if self.waits.pop(message.body, None) is None:  # of a file that is stored in part
                        self.delivered.add(message.body)
                    if message.id != message.message_id:
                        assert shard == shard_of(message.id, self.shards)
                        assert self.world.client.hdel(keys.places(), message.id) == 1
                        self.world.client.zadd(keys.ids(), {message.id: FOR_EVER_MS})
                self.world.client.unlink(keys.bucket(int(start)))
            self.world.client.unlink(keys.buckets())

    @invariant()
    def everything_is_there_once(self) -> None:
        if not hasattr(self, "world") or self.cut_off:
            return
        here, cold = self.world.waiting(), sum(self.world.cold_hours().values())
        assert {text: hours for text, (hours, _) in self.waits.items() if text in here} == {
            text: ms / HOUR_MS for text, ms in here.items()
        }
        assert len(here) + cold == len(self.waits)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            while self.cut_off:
                self.another_one_goes_on(2)
            self.world.hydrate()
            assert self.world.waiting() == {text: hours * HOUR_MS for text, (hours, _) in self.waits.items()}
            assert self.world.cold_hours() == {} and self.world.names() == []
            self.folder.cleanup()


@pytest.mark.parametrize("shards", [1, 3])
def test_cold_messages_are_what_a_dictionary_says(server: RealServer, shards: int) -> None:
    class Machine(ColdMachine):
        pass

    Machine.server, Machine.shards = server, shards
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=scaled(60),
            stateful_step_count=20,
            suppress_health_check=list(HealthCheck),
        ),
    )
