"""The store twice: on the real server, and on the reference."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pipeline.config import DrainSettings
from pipeline.store.by_id import MessagesById
from pipeline.store.redis_store import RedisStore
from tests.model.reference import PlainScripts
from tests.model.times import ID_MEMORY_MS, LEASE_MS

if TYPE_CHECKING:
    from tests.model.machine import StoreMachine

DRAIN = DrainSettings(lease_sec=LEASE_MS / 1000, claim_limit=3, id_retention_sec=ID_MEMORY_MS // 1000)

T = TypeVar("T")


class Pair:
    """One loop's store, on the real server and on the reference."""

    def __init__(self, machine: "StoreMachine") -> None:
        self.real = machine.store_type(machine.client, machine.keys, DRAIN, machine.scripts, machine.server_ms)
        self.model = RedisStore(machine.reference, machine.keys, DRAIN, PlainScripts(), machine.now)
        self.passes = 0
        self._machine = machine

    def same_by_id(self, call: Callable[[MessagesById], T]) -> T:
        """Make a call for messages by their ids on both; the answers must be equal."""
        machine, memory_ms = self._machine, DRAIN.id_retention_sec * 1000
        answers = [
            call(MessagesById(client, [machine.keys], memory_ms, scripts, machine.server_ms))
            for client, scripts in ((machine.client, machine.scripts), (machine.reference, PlainScripts()))
        ]
        assert answers[0] == answers[1]
        return answers[0]

    def same(self, call: Callable[[RedisStore], T]) -> T:
        """Make a call on both; the answers must be equal."""
        answer, expected = call(self.real), call(self.model)
        assert answer == expected
        return answer
