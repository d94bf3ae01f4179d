"""No password of a job is where others can read it: process list, logs, errors, Spark's pages and event log, files of the job."""

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import psutil
import pytest

from pipeline.client import Duetime
from pipeline.core.errors import PipelineError
from tests.e2e.commands import Checkout
from tests.e2e.conftest import checkout as checkout
from tests.ports import free_port
from tests.servers import DURABLE, RealServer, real_server, user_rights
from tests.tls import KEY_PASSWORD, Certificates, debians_server, needs_tls

pytestmark = [needs_tls, pytest.mark.process]

PASSWORD = "of/the user+9Zr"
SECRETS = (PASSWORD, quote(PASSWORD, safe=""), quote(PASSWORD), KEY_PASSWORD)
JOBS = {
    "consume": ("--topic", "t", "--group", "g"),
    "dead_letters": ("list",),
    "drain": (),
    "ingest": (),
    "messages": ("list",),
    "schedule": ("tea", "--in", "3m"),
    "serve": ("--port", "0"),
    "status": (),
    "topics": ("list",),
    "webhooks": (),
}
GO_ON = ("consume", "drain", "serve", "webhooks")
PAGES = (
    "jobs",
    "stages",
    "environment",
    "executors",
    "executors/threadDump/?executorId=driver",
    "SQL",
    "StreamingQuery",
)
RECORDS = ("environment", "jobs", "stages?details=true", "sql?details=true&planDescription=true", "allexecutors")


class Guarded:
    """A server that wants a certificate and a password, neither of which is in its own command line."""

    def __init__(self, server: RealServer, certificates: Certificates, port: int) -> None:
        self.server, self._certificates, self._port = server, certificates, port
        server.client().execute_command("ACL", "SETUSER", "shy", "on", f">{PASSWORD}", *user_rights())

    def url(self, user: str = "shy", port: int | None = None) -> str:
        password, query = quote(PASSWORD, safe=""), self._certificates.of_client()
        return f"rediss://{user}:{password}@localhost:{port or self._port}/0?{query}"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    port = free_port()
    with debians_server():
        certificates = Certificates(tmp_path)
        with real_server("--tls-port", str(port), "--bind", "127.0.0.1", *certificates.of_server(), *DURABLE) as server:
            yield Guarded(server, certificates, port)


def shows(text: str) -> bool:
    return any(secret in text for secret in SECRETS)


def processes_that_show() -> list[str]:
    lines = (" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
    return [line for line in lines if shows(line)]


def files_that_show(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.is_file() and ".venv" not in path.parts]
    assert found
    return [path for path in found if shows(path.read_bytes().decode("latin-1"))]


def read_spark(port: int) -> dict[str, str]:
    """Return what Spark shows of a job, by where."""
    base = f"http://127.0.0.1:{port}"
    [application] = httpx.get(f"{base}/api/v1/applications").json()
    paths = [*PAGES, *(f"api/v1/applications/{application['id']}/{record}" for record in RECORDS)]
    answers = {path: httpx.get(f"{base}/{path}", follow_redirects=True) for path in paths}
    assert {each.status_code for each in answers.values()} == {200}
    return {path: each.text for path, each in answers.items()}


def test_jobs_at_work_show_no_password(checkout: Checkout, guarded: Guarded, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(guarded.url())
    port, events = free_port(), checkout.root / "events"
    events.mkdir()
    conf = {"ui.enabled": "true", "ui.port": port, "eventLog.enabled": "true", "eventLog.dir": events.as_uri()}
    conf |= {"eventLog.compress": "false", "local.dir": checkout.root / "local"}
    options = [word for name, value in conf.items() for word in ("--conf", f"spark.{name}={value}")]
    in_file, in_environ = {"DUETIME_REDIS_URL_FILE": str(tmp_path / "url")}, {"REDIS_URL": guarded.url()}
    debug = ("--log-level", "debug")
    ingest = checkout.run(*options, "jobs/ingest.py", *debug, environ=in_file)
    checkout.drop("1.jsonl", {"message": "tea", "delay_sec": 1}, "no JSON")
    others = {
        job: checkout.run(f"jobs/{job}.py", *words, *debug, environ=in_environ)
        for job, words in JOBS.items()
        if job != "ingest"
    }
    ingest.wait_for_line(", 1 stored")
    assert processes_that_show() == []
    pages = read_spark(port)
    [settings] = [
        text for path, text in pages.items() if path.endswith("/environment")
    ]  # the page itself asks for them
    assert str(events) in settings, "Spark's settings are there"
    assert [path for path, text in pages.items() if shows(text)] == []
    assert all(command.end() == 0 for job, command in others.items() if job not in GO_ON)
    guarded.server.kill()
    checkout.drop("2.jsonl", {"message": "more tea", "delay_sec": 1})
    ingest.wait_for_line("waiting for Redis")
    for job in GO_ON:
        others[job].stop()
    ingest.stop()
    assert [job for job, command in (*others.items(), ("ingest", ingest)) if shows(command.screen())] == []
    assert files_that_show(checkout.root) == []
    assert list(events.rglob("events_*")) and list((checkout.root / ".duetime").rglob("*"))


def test_what_is_wrong_is_told_without_a_password(checkout: Checkout, guarded: Guarded) -> None:
    wrong = guarded.url().replace("9Zr@", "9Zr-of-another@")
    away, malformed = guarded.url(port=1), guarded.url().replace("localhost:", "localhost:x")
    locked = guarded.url().replace(KEY_PASSWORD, f"{KEY_PASSWORD}-of-another")
    urls = {"refuses the user or password": wrong, "does not answer": away}
    cases = [(told, url, job) for told, url in urls.items() for job in JOBS]
    cases += [("is not valid", malformed, "status"), ("does not answer", locked, "status")]
    started = [
        (told, checkout.run(f"jobs/{job}.py", *JOBS[job], "--log-level", "debug", environ={"REDIS_URL": url}))
        for told, url, job in cases
    ]
    for told, command in started:
        assert command.end() in (1, 2)
        assert told in command.screen() and not shows(command.screen()), command.screen()
    for url in (wrong, away, malformed, locked):
        with pytest.raises(PipelineError) as caught, Duetime(url) as duetime:
            duetime.schedule("tea", delay=1)
        assert not shows("".join(traceback.format_exception(caught.value)))


def test_the_search_finds_a_password_where_there_is_one(checkout: Checkout, guarded: Guarded) -> None:
    job = checkout.run("jobs/drain.py", "--redis", guarded.url())
    job.wait_for_line("every user of this machine can see the password of --redis")
    assert [line for line in processes_that_show() if "drain.py" in line]
    assert job.stop() == 0 and not shows(job.screen())
    (checkout.root / "kept").write_text(f"xx{KEY_PASSWORD}")
    assert files_that_show(checkout.root) == [checkout.root / "kept"]
    assert shows(f"redis://{os.fspath(PASSWORD)}")
