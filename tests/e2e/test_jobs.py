"""The jobs one by one, on a server that is not the private one."""

import contextlib
import json
import os
import signal
import socket
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.e2e.commands import Checkout, Command
from tests.servers import real_server

LINES = 10_000  # a file


def test_a_crash_in_the_middle_of_a_batch_leaves_no_hole_and_no_copy(checkout: Checkout) -> None:
    """kill -9 of the driver while it stores into three shards, messages delivered meanwhile, a restart with other settings."""
    with real_server() as server:
        environ = {"REDIS_URL": server.url, "DUETIME_REDIS_SHARDS": "3"}
        client = server.client()

        def stored() -> int:
            return sum(int(client.hget(f"{{duetime:{shard}}}:counters", "stored") or 0) for shard in range(3))

        for number in range(4):
            checkout.drop(
                f"{number}.jsonl", *({"message": f"{number}/{line}", "delay_sec": 0} for line in range(LINES))
            )
        slow = {**environ, "DUETIME_INGEST_TRANSACTION_MESSAGES": "20"}
        ingest = checkout.run("--master", "local[2]", "jobs/ingest.py", environ=slow)
        ingest.wait_for(lambda _: stored() > 2_000, "stored messages")
        ingest.stop(signal.SIGKILL)
        assert stored() < 4 * LINES, "the crash came too late to show anything"

        drained = checkout.run("jobs/drain.py", "--until-empty", "--format", "json", environ=environ)
        assert drained.end() == 0
        again = {**environ, "DUETIME_INGEST_TRANSACTION_MESSAGES": "777"}
        options = ("--master", "local[1]", "--conf", "spark.sql.files.maxPartitionBytes=100000")
        restarted = checkout.run(*options, "jobs/ingest.py", "--once", environ=again)
        assert restarted.end(180) == 0, restarted.screen()
        rest = checkout.run("jobs/drain.py", "--until-empty", "--format", "json", environ=environ)
        assert rest.end() == 0

        seen = Counter(record["message"] for record in [*drained.records(), *rest.records()])
        assert len(drained.records()) >= 2_000
        assert seen == Counter(f"{number}/{line}" for number in range(4) for line in range(LINES))
        assert stored() == 4 * LINES


def test_rows_cancel_and_replace_whichever_file_comes_first(checkout: Checkout) -> None:
    def requests(key: str, text: str) -> list[dict[str, object]]:
        return [{"id": f"{key}-{n}", "message": f"{text} {key}-{n}", "delay_sec": 0} for n in range(3)]

    def changes(key: str) -> list[dict[str, object]]:
        return [{"cancel": f"{key}-0"}, {**requests(key, "new")[1], "replace": True}]

    with real_server() as server:
        environ = {"REDIS_URL": server.url, "DUETIME_REDIS_SHARDS": "3"}
        ingest = checkout.run("jobs/ingest.py", environ=environ)
        checkout.drop("1.jsonl", *requests("first", "old"))
        ingest.wait_for_line(": 3 in, 3 stored, 0 duplicates, 0 rejected, ")
        checkout.drop("2.jsonl", *changes("first"))
        ingest.wait_for_line(": 2 in, 0 stored, 0 duplicates, 0 rejected, 1 cancelled, 1 replaced, ")
        checkout.drop("3.jsonl", *changes("last"))
        ingest.wait_for(lambda c: c.screen().count(", 1 cancelled, 1 replaced, ") == 2, "the changes that come first")
        checkout.drop("4.jsonl", *requests("last", "old"))
        ingest.wait_for_line(": 3 in, 1 stored, 2 duplicates, 0 rejected, ")
        drained = checkout.run("jobs/drain.py", "--until-empty", "--format", "json", environ=environ)
        assert drained.end() == 0
        checkout.drop("5.jsonl", {"cancel": "first-1"}, {"cancel": "last-0"})
        ingest.wait_for_line(": 2 in, 0 stored, 1 duplicates, 0 rejected, 1 late, ")
        assert ingest.stop() == 0, ingest.screen()
    assert " rejected, 2 cancelled, 2 replaced, 1 late" in ingest.screen()
    assert sorted(record["message"] for record in drained.records()) == [
        *("new first-1", "new last-1", "old first-2", "old last-2")
    ]


class LineServer:
    """Serves lines on a port to whoever connects, as ``nc -lk`` does."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._clients: list[socket.socket] = []
        self._connected = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._connected:
                self._clients.append(client)
                self._connected.notify_all()

    def send(self, connection: int, *lines: str) -> None:
        with self._connected:
            assert self._connected.wait_for(lambda: len(self._clients) >= connection, 90)
        self._clients[connection - 1].sendall("".join(line + "\n" for line in lines).encode())

    def close(self) -> None:
        self._listener.close()
        for client in self._clients:
            client.close()


def test_the_socket_source_loses_and_doubles_nothing_that_was_received(checkout: Checkout) -> None:
    lines = [json.dumps({"message": f"line {n}", "delay_sec": 0}) for n in range(3_000)]
    source = LineServer()
    with real_server() as server:
        environ = {"REDIS_URL": server.url}
        arguments = ("jobs/ingest.py", "--source", "socket", "--port", str(source.port))
        client = server.client()
        first = checkout.run(*arguments, environ=environ)
        source.send(1, *lines[:1_000])
        first.wait_for(lambda _: int(client.hget("{duetime:0}:counters", "stored") or 0) >= 1_000, "1,000 stored")
        source.send(1, *lines[1_000:2_000])
        landing = checkout.root / ".duetime" / "socket" / f"127.0.0.1_{source.port}"
        first.wait_for(lambda _: received(landing) or _stored(client) >= 2_000, "the second thousand received")
        first.stop(signal.SIGKILL)
        second = checkout.run(*arguments, environ=environ)
        source.send(2, *lines[2_000:], "not json")
        second.wait_for(lambda _: _stored(client) >= 3_000, "3,000 stored")
        assert second.stop() == 0, second.screen()
        assert " ingest: stopped after " in second.screen()
        drained = checkout.run("jobs/drain.py", "--until-empty", "--format", "json", environ=environ)
        assert drained.end() == 0
    source.close()
    assert Counter(r["message"] for r in drained.records()) == Counter(f"line {n}" for n in range(3_000))
    assert [(r["raw"], r["reason"]) for r in checkout.rejects()] == [("not json", "not_json")]


def _stored(client) -> int:  # type: ignore[no-untyped-def]
    return int(client.hget("{duetime:0}:counters", "stored") or 0)


def received(landing: Path) -> bool:
    """Whether the 2,000th line is on disk."""
    return any(b"line 1999" in path.read_bytes() for path in landing.iterdir() if path.is_file())


def test_ten_thousand_tiny_files_go_in(checkout: Checkout) -> None:
    with real_server() as server:
        for number in range(10_000):
            checkout.inbox.mkdir(exist_ok=True)
            (checkout.inbox / f"{number}.json").write_text(json.dumps({"message": str(number), "delay_sec": 3600}))
        ingest = checkout.run("jobs/ingest.py", "--once", environ={"REDIS_URL": server.url})
        assert ingest.end(180) == 0, ingest.screen()
        assert checkout.status("--redis", server.url)["scheduled"] == 10_000
    assert [p for p in checkout.inbox.iterdir() if p.name != ".landing"] == []


def test_drain_with_a_closed_reader_gives_its_claims_back_and_fails(checkout: Checkout) -> None:
    with real_server() as server:
        checkout.drop("many.jsonl", *({"message": "x" * 200, "delay_sec": 0} for _ in range(5_000)))
        assert checkout.run("jobs/ingest.py", "--once", environ={"REDIS_URL": server.url}).end() == 0
        command = Command(
            ["bash", "-c", f"./spark-submit.sh jobs/drain.py --redis {server.url} | head -1; exit ${{PIPESTATUS[0]}}"],
            {"PATH": os.environ["PATH"]},
            checkout.root,
        )
        assert command.end(30) == 1, command.screen()
        assert len(command.lines()) == 1
        status = checkout.status("--redis", server.url)
        assert (status["in_flight"], status["overdue_ms"] > 0) == (0, True)


def test_what_is_wrong_at_the_start_is_one_sentence_and_an_exit_code(checkout: Checkout) -> None:
    def outcome(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
        command = checkout.run(*arguments, environ=environ)
        return command.end(), "\n".join(line for _, line in command.err)

    code, text = outcome("jobs/drain.py", "--redis", "redis://127.0.0.1:1")
    assert code == 1 and "Start it, or name another with --redis" in text and "Traceback" not in text
    assert outcome("jobs/drain.py", "--redis", "http://x")[0] == 2
    assert outcome("jobs/drain.py", "--lease", "soon")[0] == 2
    assert outcome("jobs/drain.py", "--nonsense")[0] == 2
    code, text = outcome("jobs/status.py", "--config", "none.toml")
    assert code == 2 and "can't be read" in text
    code, text = outcome("jobs/ingest.py", environ={"JAVA_HOME": "/nowhere"})
    assert code == 2 and "JAVA_HOME" in text and "Traceback" not in text
    code, text = outcome("ingest")
    assert code == 2 and text == "There is no script ingest: did you mean jobs/ingest.py?"
    with real_server("--requirepass", "secret", "--appendonly", "no") as server:
        code, text = outcome("jobs/status.py", "--redis", f"unix://{server.folder}/s")
        assert code == 2 and "password" in text
    with real_server("--maxmemory-policy", "allkeys-lru") as server:
        code, text = outcome("jobs/status.py", "--redis", server.url)
        assert code == 2 and "maxmemory-policy allkeys-lru" in text
    with real_server("--appendonly", "no") as server:
        code, text = outcome("jobs/status.py", "--redis", server.url)
        assert code == 0 and "append-only" not in text
        code, text = outcome("jobs/drain.py", "--once", "--redis", server.url)
        assert code == 0 and "no append-only file" in text
        (checkout.root / "file").write_text("")
        code, text = outcome("jobs/ingest.py", "--redis", server.url, "--rejects", "file/rejects")
        assert code == 2 and "rejects folder" in text
        code, text = outcome("jobs/ingest.py", "--redis", server.url, "--input", "typo/inbox")
        assert code == 2 and "typo/inbox does not exist; make it, or correct --input." in text
        assert not (checkout.root / "typo").exists()
        for name in ("one", "two"):
            (checkout.root / name).mkdir()
        checkpoint = ("--checkpoint", "shared", "--once")
        assert outcome("jobs/ingest.py", "--redis", server.url, "--input", "one", *checkpoint)[0] == 0
        code, text = outcome("jobs/ingest.py", "--redis", server.url, "--input", "two", *checkpoint)
        assert code == 2 and "belongs to another input" in text
        code, text = outcome("jobs/drain.py", "--redis", server.url, environ={"DUETIME_REDIS_SHARDS": "2"})
        assert code == 2 and "has 1 shards, not 2; set redis.shards = 1" in text
        drain_first = ("--redis", server.url, "--namespace", "new")
        assert outcome("jobs/drain.py", *drain_first, "--once", environ={"DUETIME_REDIS_SHARDS": "2"})[0] == 0
        code, text = outcome("jobs/ingest.py", *drain_first)
        assert code == 2 and "has 2 shards, not 1" in text


def test_only_ingest_needs_java(checkout: Checkout) -> None:
    group = ("--topic", "mail", "--group", "g", "--once")
    with real_server() as server:
        environ = {"REDIS_URL": server.url, "JAVA_HOME": "/nowhere"}
        for job, *arguments in (
            ("drain", "--once"), ("consume", *group), ("topics", "list"), ("dead_letters", "list"), ("status",)
        ):  # fmt: skip
            command = checkout.run(f"jobs/{job}.py", *arguments, environ=environ)
            assert command.end() == 0, command.screen()
        ingest = checkout.run("jobs/ingest.py", environ=environ)
        assert ingest.end() == 2 and "JAVA_HOME" in ingest.screen()


@pytest.mark.parametrize("job", ["ingest", "drain", "status"])
def test_help_says_all_of_it(checkout: Checkout, job: str) -> None:
    command = checkout.run(f"jobs/{job}.py", "--help")
    assert command.end() == 0
    for option in ("--redis", "--namespace", "--config"):
        assert option in command.screen()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_spark_starts_ends_without_a_trace(checkout: Checkout, number: int) -> None:
    with real_server() as server:
        ingest = checkout.run("jobs/ingest.py", environ={"REDIS_URL": server.url})
        landing_lock = checkout.inbox / ".landing" / ".lock"
        ingest.wait_for(lambda _: landing_lock.exists(), "the input to be opened, just before Spark starts")
        assert ingest.stop(number) == 0, ingest.screen()
        assert "Traceback" not in ingest.screen()
        assert "Error" not in ingest.screen()


def test_a_stop_that_java_gets_as_well_while_spark_starts_is_no_error(checkout: Checkout) -> None:
    """As a service manager or a terminal sends it: to all processes of the job."""
    with real_server() as server:
        ingest = checkout.run("jobs/ingest.py", environ={"REDIS_URL": server.url})
        job = psutil.Process(ingest.process.pid)

        def is_java(process: psutil.Process) -> bool:
            try:
                return "org.apache.spark" in " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                return False  # or a zombie: Spark's start-up script may leave one to Java, which reaps none

        def java() -> list[psutil.Process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                return [process for process in job.children(recursive=True) if is_java(process)]
            return []

        ingest.wait_for(lambda _: bool(java()), "Java")
        ingest.process.terminate()
        for process in java():
            process.terminate()
        assert ingest.end(40) == 0, ingest.screen()
        assert "Error" not in ingest.screen()
