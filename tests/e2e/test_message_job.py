"""One message at a time from the command line."""

import json

import pytest

from jobs.messages import as_text
from pipeline.core.messages import Message
from pipeline.store.base import NO_MARKER, IdentifiedMessage, MarkerMove, MessageRows, Transaction
from pipeline.store.by_id import Found, State
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from tests.e2e.commands import Checkout
from tests.e2e.test_topic_jobs import told
from tests.servers import RealServer, real_server

KEYS = Keys("duetime")
TEA_MS = 4_102_444_800_000  # 2100-01-01
JOB = "jobs/messages.py"


def schedule(server: RealServer, text: str, key: str, due_ms: int = TEA_MS, line: int = 1) -> None:
    member = Message(due_ms, text, "mail", key, {"lang": "en"}).to_member(f"{'P' * 14}{line:08x}")
    identified = [IdentifiedMessage(due_ms - due_ms % 600_000, due_ms, member, key)]
    move = MarkerMove(f"{'P' * 14}.{line}", NO_MARKER, "all")
    RedisStore(server.client(), KEYS).schedule("s", Transaction([move], MessageRows([], []), identified, 0))


def test_a_message_is_shown_moved_and_cancelled(checkout: Checkout) -> None:
    with real_server() as server:
        assert told(checkout, server, "jobs/topics.py", "set", "sink=screen")  # which makes the namespace
        schedule(server, "tea\x1b[2J", "tea")
        shown = told(checkout, server, JOB, "show", "tea")
        assert shown[:3] == ["tea", "  state    scheduled", shown[2]]
        assert shown[2].startswith("  due      2100-01-01 00:00:00Z (in ") and shown[2].endswith(" h)")
        assert shown[3:] == ["  topic    mail", '  headers  {"lang": "en"}', "  message  tea\\x1b[2J"]
        [moved] = told(checkout, server, JOB, "move", "tea", "--at", "2101-01-01T00:00:00+01:00")
        assert moved.startswith("tea moved: due 2100-12-31 23:00:00Z (in ")
        [record] = told(checkout, server, JOB, "show", "tea", "--format", "json")
        assert json.loads(record) == {
            "id": "tea",
            "state": "scheduled",
            "topic": "mail",
            "message": "tea\x1b[2J",
            "due_ms": 4_133_977_200_000,
            "attempt": 1,
            "headers": {"lang": "en"},
        }
        assert told(checkout, server, JOB, "move", "tea", "--in", "0s")[0].endswith(" ago)")
        [cancelled] = told(checkout, server, JOB, "cancel", "tea")
        assert cancelled.startswith("tea cancelled; it was due ")
        assert told(checkout, server, JOB, "cancel", "tea") == ["tea was cancelled before"]
        assert told(checkout, server, JOB, "move", "tea", "--in", "1h", code=1) == ["tea was cancelled before"]
        unknown = "coffee is unknown: never scheduled here, or forgotten"
        assert set(told(checkout, server, JOB, "show", "tea", "coffee", code=1)) == {
            "tea was cancelled before",
            unknown,
        }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("move", "tea"), "Say when: move ID --in TIME or --at TIME"),
        (("show", "tea", "--in", "3m"), "Say when: move ID --in TIME or --at TIME"),
        (("move", "tea", "--in", "soon"), "--in takes a number and s, m, h or d, at most 366d, not 'soon'."),
        (("move", "tea", "--in", "367d"), "at most 366d"),
        (("move", "tea", "--at", "2026-01-31 12:00"), "--at takes a time such as 2026-01-31T12:00:00Z"),
        (("move", "tea", "--at", "1969-01-31T12:00:00Z"), "--at takes a time such as 2026-01-31T12:00:00Z"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(checkout: Checkout, words: tuple[str, ...], said: str) -> None:
    with real_server() as server:
        lines = told(checkout, server, JOB, *words, code=2)
        assert len(lines) == 1 and said in lines[0]


def test_what_other_programs_wrote_cannot_drive_the_terminal() -> None:
    odd = "\x1b[2J\n"
    message = Message(1, odd, odd, odd, {odd: odd}, odd)
    shown = [as_text(odd, Found(State.SCHEDULED, message), what, 1) for what in ("show", "cancel", "move")]
    shown += [as_text(odd, Found(state), "show", 1) for state in State if state not in (State.SCHEDULED, State.HELD)]
    assert "\x1b" not in "".join(shown)
    assert [text.count("\n") for text in shown] == [5, 0, 0, 0, 0, 0, 0]
