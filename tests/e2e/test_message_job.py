"""One message at a time from the command line."""

import json
import os
import subprocess
import sys
from threading import Event

import pytest

from jobs.messages import as_text
from pipeline.client import Duetime
from pipeline.core.messages import Message
from pipeline.store.base import NO_MARKER, Found, MarkerMove, MessageRows, State, Transaction
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
    identified = MessageRows([due_ms], [member], [key])
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
        (
            ("move", "tea", "--in", "-3m"),
            "expected one argument (a time from now on, such as 3m, and none that is over)",
        ),
        (("move", "tea", "--in", "367d"), "--in takes at most 366d, not '367d'; --at takes any time"),
        (
            ("move", "tea", "--in", "3", "minutes"),
            "unrecognized arguments: minutes (write a time as one word, such as 3m)",
        ),
        (("move", "tea", "--at", "2026-01-31 12:00"), "+01:00; '2026-01-31 12:00' has none."),
        (("move", "tea", "--at", "2026-01-31T12:00 Europe/Berlin"), "a zone is Z or an offset, not a name as in"),
        ((), "the following arguments are required: what; see --help"),
        (("move", "tea", "--at", "1969-01-31T12:00:00Z"), "--at takes a time such as 2026-01-31T12:00:00Z"),
        (("list", "tea"), "show, cancel and move take the ids of messages, and list takes none."),
        (("show",), "show, cancel and move take the ids of messages, and list takes none."),
        (("list", "--limit", "0"), "--limit takes a number from 1 on, not 0."),
        (("list", "--until", "2026-01-31T12:00"), "--until takes a time with its zone"),
        (("list", "--from", "today"), "--from takes a time such as 2026-01-31T12:00:00Z, not 'today'."),
    ],
)
def test_wrong_use_is_told_in_a_sentence(checkout: Checkout, words: tuple[str, ...], said: str) -> None:
    with real_server() as server:
        lines = told(checkout, server, JOB, *words, code=2)
        assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Say what and when: MESSAGE --in TIME, or MESSAGE --at TIME."),
        (("tea",), "Say what and when: MESSAGE --in TIME, or MESSAGE --at TIME."),
        (("tea", "--in", "3x"), "--in takes a number and s, m, h or d, at most 366d, not '3x'."),
        (("", "--in", "3m"), "The field message is empty."),
        (("tea", "--in", "3m", "--id", "a b"), "The field id takes 1 to 128 of A-Z a-z 0-9 . _ : -, not 'a b'."),
        (("tea", "--in", "3m", "--id", "a" * 200), "aaa', which has 200 characters."),
        (("tea", "--in", "3m", "--header", "lang"), "--header takes NAME=VALUE, not 'lang'."),
        (("tea", "--lines"), "--lines takes everything from the lines: leave the message and its options out."),
        (("--lines", "--topic", "mail"), "--lines takes everything from the lines"),
    ],
)
def test_what_can_not_be_scheduled_is_told_in_a_sentence(checkout: Checkout, words: tuple[str, ...], said: str) -> None:
    with real_server() as server:
        lines = told(checkout, server, "jobs/schedule.py", *words, code=2)
        assert len(lines) == 1 and said in lines[0]


def test_a_message_is_scheduled_and_listed(checkout: Checkout) -> None:
    with real_server() as server:
        job = "jobs/schedule.py"
        [line] = told(checkout, server, job, "tea is ready", "--at", "2100-01-01T00:00:00Z", "--id", "tea")
        assert line.startswith("tea: due 2100-01-01 00:00:00Z, in ")
        [line] = told(checkout, server, job, "coffee", "--in", "3m", "--id", "tea")
        assert line.startswith("tea: not stored, as the id is known: due 2100-01-01 00:00:00Z, in ")
        again = ("coffee", "--in", "3m", "--id", "tea", "--fail-if-known")
        [line] = told(checkout, server, job, *again, code=1)
        assert "not stored, as the id is known" in line
        assert len(told(checkout, server, job, "new", "--in", "3m", "--id", "new", "--fail-if-known")) == 1
        assert told(checkout, server, JOB, "cancel", "new")
        options = ("--topic", "mail", "--header", "lang=en", "--header", "to=a=b", "--format", "json")
        receipt = json.loads(told(checkout, server, job, "x\ny", "--in", "2h", *options)[0])
        assert (receipt["state"], receipt["is_duplicate"]) == ("scheduled", False)
        [record] = told(checkout, server, JOB, "show", receipt["id"], "--format", "json")
        assert json.loads(record)["headers"] == {"lang": "en", "to": "a=b"}
        first, second = told(checkout, server, JOB, "list")
        assert first.endswith(f" mail {receipt['id']}: x\\ny")
        assert second == "2100-01-01 00:00:00Z tea: tea is ready"
        assert told(checkout, server, JOB, "list", "--from", "2099-01-01T00:00:00Z") == [second]
        more = [first, "There are more: --limit N shows so many."]
        assert told(checkout, server, JOB, "list", "--limit", "1") == more
        assert told(checkout, server, JOB, "list", "--until", "2020-01-01T00:00:00Z") == ["Nothing is scheduled there."]
        [record] = told(checkout, server, JOB, "list", "--topic", "mail", "--format", "json")
        assert json.loads(record)["id"] == receipt["id"]


def test_lines_are_scheduled_as_they_come(checkout: Checkout) -> None:
    with real_server() as server:
        environ = os.environ | {"PYTHONPATH": str(checkout.root), "REDIS_URL": server.url}
        command = [sys.executable, "-P", "jobs/schedule.py", "--lines"]
        with subprocess.Popen(
            command,
            cwd=checkout.root,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as job:
            assert job.stdin and job.stdout and job.stderr
            job.stdin.write(b'{"message": "first", "delay_sec": 3600, "id": "first"}\n')
            job.stdin.flush()
            with Duetime(server.url) as duetime:
                waited = Event()
                for _ in range(1_000):  # while more may come
                    if duetime.get("first").message or waited.wait(0.01):
                        break
                assert duetime.get("first").message
            long = b'{"message": "' + b"x" * 5_000_000 + b'", "delay_sec": 1}'
            lines = [
                b'{"cancel": "never"}',
                b'{"message": "f", "delay_sec": 1, "id": "first", "replace": true}',
                b"nonsense",
                b"",
                b'{"message": "f", "delay_sec": 1, "id": "first"}',
                long,
            ]
            lines.append(b'{"message": "last", "delay_sec": 1}')
            out, err = job.communicate(b"\n".join(lines))
            assert (job.returncode, out) == (
                1,
                b"8 lines: 2 stored, 1 duplicates, 2 rejected, 1 cancelled, 1 replaced\n",
            )
            rejected = [json.loads(line) for line in err.splitlines()]
            assert [(each["line"], each["reason"]) for each in rejected] == [(4, "not_json"), (7, "line_too_long")]


def test_what_other_programs_wrote_cannot_drive_the_terminal() -> None:
    odd = "\x1b[2J\n"
    message = Message(1, odd, odd, odd, {odd: odd}, odd)
    shown = [as_text(odd, Found(State.SCHEDULED, message), what, 1) for what in ("show", "cancel", "move")]
    shown += [as_text(odd, Found(state), "show", 1) for state in State if state not in (State.SCHEDULED, State.HELD)]
    assert "\x1b" not in "".join(shown)
    assert [text.count("\n") for text in shown] == [5, 0, 0, 0, 0, 0, 0]
