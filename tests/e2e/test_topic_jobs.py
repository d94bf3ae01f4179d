"""Looking after topics and dead letters from the command line."""

import json

import pytest

from jobs.dead_letters import as_text
from jobs.topics import groups_text, topic_text
from pipeline.store.dead_letters import DeadLetter
from pipeline.store.keys import Keys
from pipeline.store.topics import ConsumerInfo, GroupInfo, TopicInfo
from tests.e2e.commands import Checkout
from tests.servers import RealServer, real_server

KEYS = Keys("duetime")


def dead_letter(
    server: RealServer, *texts: str, topic: str = "mail", reason: str = "failed", group: str = "billing"
) -> None:
    client = server.client()
    for number, text in enumerate(texts):
        fields = {"id": f"id-{number}", "message": text, "topic": topic, "due_ms": 1, "attempt": 5}
        client.xadd(KEYS.dead(topic), {**fields, "reason": reason, "detail": "no\n", "group": group, "died_ms": 1_000})
    client.sadd(KEYS.topics(), topic)
    client.sadd(KEYS.dead_topics(), topic)


def told(checkout: Checkout, server: RealServer, *words: str, code: int = 0) -> list[str]:
    command = checkout.run(*words, environ={"REDIS_URL": server.url})
    assert command.end(30) == code, command.screen()
    return command.lines() if code == 0 else command.screen().splitlines()


def test_dead_letters_are_listed_shown_scheduled_again_and_dropped(checkout: Checkout) -> None:
    with real_server() as server:
        job, client = "jobs/dead_letters.py", server.client()
        assert told(checkout, server, job, "list") == ["no dead letters"]
        client.xgroup_create(KEYS.retry("mail", "billing"), "billing", "0", mkstream=True)
        dead_letter(server, "one\x1b[2J", "two", "three")
        dead_letter(server, "late", topic="news", reason="expired", group="")
        lines = told(checkout, server, job, "list")
        assert len(lines) == 4
        assert "failed by billing" in lines[0] and lines[0].endswith("ago, attempt 5: one\\x1b[2J (no\\n)")
        assert [
            json.loads(line)["message"]
            for line in told(checkout, server, job, "list", "--format", "json", "--reason", "expired")
        ] == ["late"]
        name = lines[1].partition(" ")[0]
        shown = told(checkout, server, job, "show", name)
        assert shown[0] == name
        assert "  detail   no\\n" in shown and "  message  two" in shown
        assert "  due      1970-01-01 00:00:00Z" in shown and "  died     1970-01-01 00:00:01Z" in shown
        assert "There is no dead letter mail/0/7-7" in told(checkout, server, job, "show", "mail/0/7-7", code=1)[-1]
        assert told(checkout, server, job, "purge", name) == ["1 dead letter purged"]
        assert told(checkout, server, job, "purge", "--topic", "mail", "--older-than", "99999d") == [
            "0 dead letters purged"
        ]
        assert told(checkout, server, job, "redrive", "--group", "billing") == ["2 dead letters redriven"]
        assert told(checkout, server, job, "redrive", "--all") == ["1 dead letter redriven"]
        assert told(checkout, server, job, "list") == ["no dead letters"]
        drain = checkout.run("jobs/drain.py", "--sink", "stream", "--until-empty", environ={"REDIS_URL": server.url})
        assert drain.end() == 0
        again = client.xrange(KEYS.retry("mail", "billing"))
        assert [fields[b"message"] for _, fields in again] == [b"one\x1b[2J", b"three"]
        assert {fields[b"attempt"] for _, fields in again} == {b"1"}
        assert [fields[b"message"] for _, fields in client.xrange(KEYS.stream("news"))] == [b"late"]


def test_what_other_programs_wrote_cannot_drive_the_terminal() -> None:
    odd = "\x1b[2J\n"
    message = {"due_ms": 1, "body": odd, "topic": odd, "id": odd, "headers": {odd: odd}, "attempt": 5, "group": odd}
    letter = DeadLetter(**message, shard=0, entry_id=odd, reason=odd, detail=odd, died_ms=1)  # type: ignore[arg-type]
    shown = [as_text(letter, what, "text", 1) for what in ("list", "show")]
    shown.append(topic_text(TopicInfo(odd, 1, 1, 1, None), "text", 1))
    group = GroupInfo(odd, 1, 1, None, False, [ConsumerInfo(odd, 1, 1)])
    shown += [groups_text(odd, groups, "text", 1) for groups in ([], [group])]
    assert "\x1b" not in "".join(shown)
    assert [text.count("\n") for text in shown] == [0, 10, 0, 0, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("jobs/dead_letters.py", "purge"), "Say which dead letters to purge"),
        (("jobs/dead_letters.py", "list", "--older-than", "soon"), "is not an age"),
        (("jobs/dead_letters.py", "list", "--reason", "foo"), "invalid choice: 'foo' (choose from"),
        (("jobs/drain.py", "--nonsense"), "drain: unrecognized arguments: --nonsense; see --help."),
        (("jobs/drain.py", "--lease", "abc"), "drain: drain.lease_sec must be a number of seconds, but is 'abc'."),
        (("jobs/topics.py", "pause"), "Say which topics to pause"),
        (("jobs/topics.py", "set", "mail", "sink=screen", "--from", "new"), "it belongs to set webhook=URL"),
        (("jobs/topics.py", "list", "a{b}"), "A topic has 1 to 64"),
        (("jobs/consume.py", "--topic", "a:b", "--group", "g"), "A topic has 1 to 64"),
        (("jobs/consume.py", "--topic", "t", "--group", "g", "--from", "yesterday"), "is no place to begin at"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(checkout: Checkout, words: tuple[str, ...], said: str) -> None:
    with real_server() as server:
        lines = told(checkout, server, *words, code=2)
        assert len(lines) == 1 and said in lines[0]


def test_topics_are_paused_resumed_and_counted(checkout: Checkout) -> None:
    with real_server() as server:
        job = "jobs/topics.py"
        assert told(checkout, server, job, "list") == ["no topic has a stream yet"]
        paused, hint = told(checkout, server, job, "pause", "default")
        assert paused == "default: 0 in its stream, 0 held, 0 dead, paused"
        assert hint == "default has had no stream, held message or dead letter so far: check that this is its name"
        assert len(told(checkout, server, job, "pause", "default")) == 1
        client = server.client()
        client.zadd(KEYS.bucket(0), {f"{'P' * 14}0000000{n}mtext {n}": n for n in range(3)})
        client.zadd(KEYS.buckets(), {"0": 0})
        drain = checkout.run("jobs/drain.py", "--sink", "stream", environ={"REDIS_URL": server.url})
        drain.wait_for(lambda _: client.zcard(KEYS.held("default")) == 3, "held messages")
        assert checkout_status(checkout, server)["held"] == 3
        assert told(checkout, server, job, "resume", "default") == ["default resumed; 3 held messages released"]
        drain.wait_for(lambda _: client.xlen(KEYS.stream("default")) == 3, "messages")
        client.xgroup_create(KEYS.stream("default"), "g", "0")
        assert told(checkout, server, job, "groups") == ["default g: lag 3, pending 0; 0 consumers"]
        [listed] = told(checkout, server, job, "list", "--format", "json")
        assert json.loads(listed) == {"name": "default", "in_stream": 3, "held": 0, "dead": 0, "paused_ms": None}
        assert drain.stop() == 0


def checkout_status(checkout: Checkout, server: RealServer) -> dict[str, int]:
    status: dict[str, int] = json.loads(told(checkout, server, "jobs/status.py", "--format", "json")[0])
    return status
