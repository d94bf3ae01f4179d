"""Redis lost, silent, full or killed; the API stopped or killed: what 201 and 503 say stays true."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.client import Duetime, Request
from pipeline.client.commit import SOURCE_ID
from pipeline.config import ROOT, ColdSettings, Settings
from pipeline.web import probes
from pipeline.web.api import THREADS
from tests.chaos.proxy import Proxy, lose_reply, naming, swallow
from tests.chaos.proxy import running as running_script
from tests.client.builders import KEYS
from tests.ingest.cold_world import HOUR_MS, ColdWorld
from tests.ports import free_port
from tests.servers import RealServer, needs_waitaof, real_server
from tests.waiting import wait_until
from tests.web.running import WAIT_SEC, Api, running, settings_of


@contextmanager
def proxied(server: RealServer, folder: Path) -> Iterator[tuple[Proxy, str]]:
    proxy = Proxy(server.folder / "s", folder / "p")
    try:
        yield proxy, server.url.replace(f"{server.folder}/s", f"{folder}/p")
    finally:
        proxy.close()


def reason(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("reason", "")


def bodies(api: Api) -> Counter[str]:
    return Counter(found["message"] for found in api.listed(limit=500))


@pytest.mark.parametrize("name", ["", "tea"])
def test_a_lost_reply_stores_no_message_twice(server: RealServer, tmp_path: Path, name: str) -> None:
    with proxied(server, tmp_path) as (proxy, url), running(settings_of(url)) as api:
        trap = proxy.trap(running_script("schedule"), lose_reply, first=1, last=3)
        assert api.schedule(**({"id": name} if name else {})).status_code == 201
        assert trap.was_sprung
        assert bodies(api) == {"tea": 1}


def test_work_that_was_given_up_starves_neither_probes_nor_messages(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    read = probes.read_status

    def slow(*given: Any) -> Any:
        assert go_on.wait(WAIT_SEC)
        return read(*given)

    monkeypatch.setattr(probes, "read_status", slow)
    with running(settings_of(server.url, patience_sec=0.2)) as api:
        try:
            for _ in range(THREADS):
                assert reason(api.get("/v1/status")) == (503, "took_too_long"), "Redis does answer"
            assert reason(api.get("/v1/topics")) == (503, "busy")
            assert "busy" in api.get("/topics").text
            assert api.get("/readyz").json()["ready"]
            assert api.schedule(id="tea").status_code == 201
            assert api.get("/v1/messages/tea").status_code == 200
        finally:
            go_on.set()
        wait_until(lambda: api.get("/v1/topics").status_code == 200)
        assert api.get("/v1/status").status_code == 200


def test_probes_ask_redis_once_a_second_at_most(server: RealServer) -> None:
    with running(settings_of(server.url)) as api:
        client = server.client()

        def asked() -> int:
            return int(client.info("commandstats").get("cmdstat_config|get", {}).get("calls", 0))

        api.get("/readyz")
        before = asked()
        assert before > 0
        for _ in range(50):
            assert api.get("/readyz").status_code == 200
        assert asked() - before < 25


def impatient(url: str) -> Settings:
    settings = settings_of(url, patience_sec=0.3)
    return replace(settings, redis=replace(settings.redis, reply_timeout_ms=1_000))


def test_a_silent_server_is_waited_for_no_longer_than_said(server: RealServer, tmp_path: Path) -> None:
    with proxied(server, tmp_path) as (proxy, url), running(impatient(url)) as api:
        assert api.schedule(id="before").status_code == 201
        silence = [proxy.trap(naming(word), swallow, 1, 10_000) for word in ("WATCH", "HGET", "TIME", "INFO", "ZRANGE")]
        for answer in (
            api.schedule(id="tea"),
            api.batch([{"message": "m", "delay_sec": 60}]),
            api.batch([{"message": "m", "delay_sec": 60}], **{"Idempotency-Key": "k"}),
            api.get("/v1/messages/tea"),
            api.delete("/v1/messages/tea"),
            api.get("/v1/status"),
            api.get("/readyz"),
        ):
            assert reason(answer) == (503, "store_away"), answer.request.url
            assert int(answer.headers["retry-after"]) > 0
        assert api.get("/livez").status_code == 200
        for trap in silence:
            proxy.remove(trap)
        wait_until(lambda: api.schedule(id="tea").status_code in (200, 201))
        wait_until(lambda: api.get("/readyz").status_code == 200)


def test_a_full_server_is_told_at_once_and_the_rest_goes_on(server: RealServer) -> None:
    with running(settings_of(server.url, patience_sec=60)) as api, server.client() as client:
        api.schedule(id="tea")
        client.config_set("maxmemory", 1)
        try:
            for answer in (
                api.schedule(),
                api.batch([{"message": "m", "delay_sec": 60}]),
                api.batch([{"message": "m", "delay_sec": 60}], **{"Idempotency-Key": "k"}),
            ):
                assert reason(answer) == (503, "store_full")
                assert "retry-after" in answer.headers
            assert api.get("/v1/messages/tea").json()["state"] == "scheduled"
            assert api.delete("/v1/messages/tea").json()["state"] == "cancelled"
        finally:
            client.config_set("maxmemory", 0)
        assert api.schedule().status_code == 201
        assert len(api.listed()) == 1


def test_a_cold_folder_that_is_away_is_told_and_cancelling_goes_on(server: RealServer, tmp_path: Path) -> None:
    world = ColdWorld(server, tmp_path, namespace="duetime")
    world.write([world.line(key, 24, key) for key in ("tea", "cake", "soup")])
    settings = settings_of(server.url)
    with (
        running(settings) as knows_no_folder,
        running(replace(settings, cold=ColdSettings(folder=str(world.path)))) as api,
    ):
        assert api.get("/v1/messages/tea").json()["message"] == "tea"
        world.path.rename(tmp_path / "away")
        sooner = {"due": world.now_ms + HOUR_MS}
        for answer in (
            api.get("/v1/messages/cake"),
            api.patch("/v1/messages/cake", json=sooner),
            knows_no_folder.get("/v1/messages/cake"),
            knows_no_folder.patch("/v1/messages/cake", json=sooner),
        ):
            assert reason(answer) == (503, "cold_away"), answer.request.url
            assert answer.headers["content-type"] == "application/problem+json"
            assert int(answer.headers["retry-after"]) > 0
        assert "mount the right one" in api.get("/v1/messages/cake").json()["detail"]
        assert "set cold.folder" in knows_no_folder.get("/v1/messages/cake").json()["detail"]
        for away, key in ((api, "tea"), (knows_no_folder, "soup")):
            assert away.delete(f"/v1/messages/{key}").json()["state"] == "cancelled"
            assert away.get("/readyz").json()["ready"]
        (tmp_path / "away").rename(world.path)
        assert api.get("/v1/messages/cake").json()["message"] == "cake"
        assert api.patch("/v1/messages/cake", json=sooner).json()["due_ms"] == sooner["due"]
    assert world.waiting() == {"cake": HOUR_MS}


def test_a_lost_reply_is_no_riddle_where_the_id_waits_in_a_cold_file(server: RealServer, tmp_path: Path) -> None:
    world = ColdWorld(server, tmp_path, namespace="duetime")
    world.write([world.line("tea", 24, "tea")])
    with proxied(server, tmp_path) as (proxy, url), Duetime(url) as duetime:
        duetime.schedule("first", delay=60, id="first")
        trap = proxy.trap(naming("MULTI"), lose_reply, 2, 2)  # the first one finds that tea is known
        done = duetime.schedule_many([Request("more tea", delay=60, id="tea"), Request("cake", delay=60, id="cake")])
        assert trap.was_sprung
        assert (done.stored, done.duplicates) == (1, (0,))
    assert sorted(world.waiting()) == ["cake", "first"]


def test_more_than_may_wait_is_busy(server: RealServer, tmp_path: Path) -> None:
    limits = {"patience_sec": 20, "waiting_messages_max": 8, "waiting_bytes_max": 30_000, "batches_max": 1}
    with proxied(server, tmp_path) as (proxy, url), running(settings_of(url, **limits)) as api:
        gate = threading.Event()
        trap = proxy.trap(running_script("schedule"), lambda exchange: (gate.wait(WAIT_SEC), lose_reply(exchange))[1])
        statuses: list[int] = []

        def work() -> None:
            with Api(api.port) as own:
                statuses.append(own.schedule().status_code)

        threads = [threading.Thread(target=work) for _ in range(8)]
        threads[0].start()
        trap.wait()
        for thread in threads[1:]:
            thread.start()
        wait_until(lambda: 'duetime_api_waiting{namespace="duetime"} 8.0' in api.get("/metrics").text)
        assert reason(api.schedule()) == (503, "busy")
        assert reason(api.batch([{"message": "m", "delay_sec": 60}])) == (503, "busy")
        assert reason(api.schedule("m" * 40_000)) == (503, "busy"), "the body alone is too much"
        gate.set()
        for thread in threads:
            thread.join()
        assert statuses == [201] * 8
        assert bodies(api) == {"tea": 8}
        assert reason(api.batch([{"message": "m", "delay_sec": 60}] * 9)) == (503, "busy")


@needs_waitaof
def test_with_wait_for_disk_a_message_is_on_disk() -> None:
    with (
        real_server("--appendonly", "yes", "--appendfsync", "everysec") as server,
        running(settings_of(server.url, wait_for_disk=True)) as api,
    ):
        assert "waits for WAITAOF" in api.get("/readyz").json()["stored_means"]
        assert api.schedule(id="tea").status_code == 201
        assert api.batch([{"message": "b", "delay_sec": 60}], **{"Idempotency-Key": "k"}).json()["stored"] == 1
        with server.client() as client:
            assert client.info("persistence")["aof_pending_bio_fsync"] == 0
        server.kill()
        server.start()
        wait_until(lambda: api.get("/readyz").status_code == 200)
        assert bodies(api) == {"tea": 1, "b": 1}


def test_a_stop_answers_what_is_under_way_and_drops_the_marker(server: RealServer, tmp_path: Path) -> None:
    with proxied(server, tmp_path) as (proxy, url):
        stop, gate = threading.Event(), threading.Event()
        trap = proxy.trap(running_script("schedule"), lambda exchange: (gate.wait(WAIT_SEC), lose_reply(exchange))[1])
        answers: list[httpx.Response] = []
        with running(settings_of(url), stop.is_set) as api:
            thread = threading.Thread(target=lambda: answers.append(api.schedule()))
            thread.start()
            trap.wait()
            stop.set()

            def is_closed() -> bool:
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", api.port)) != 0

            wait_until(is_closed)
            gate.set()
            thread.join()
        assert [answer.status_code for answer in answers] == [201]
        with server.client() as client:
            assert client.zcard(KEYS.markers(SOURCE_ID)) == 0


class Load:
    """Clients that post with and without ids until they are told to end; what was answered, by body."""

    def __init__(self, ports: Callable[[], int], clients: int = 12) -> None:
        self.stored: list[str] = []
        self.in_doubt: list[str] = []
        self._ports = ports
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _work(self, client: int) -> None:
        number = 0
        while not self._is_over.is_set():
            with Api(self._ports()) as api:
                try:
                    while not self._is_over.is_set():
                        number += 1
                        body = f"{client}:{number}"
                        name = {"id": body} if number % 2 else {}
                        self.in_doubt.append(body)
                        status = api.schedule(body, **name).status_code
                        assert status in (201, 503), status
                        if status == 201:
                            self.stored.append(body)
                except httpx.TransportError:
                    threading.Event().wait(0.01)

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.stored) >= count)

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def check(self, found: Counter[str]) -> None:
        assert set(found.values()) == {1}
        assert {*self.stored} <= found.keys() <= {*self.in_doubt}


@pytest.mark.process
def test_a_server_that_is_killed_under_load_keeps_every_201_once() -> None:
    with real_server() as server, running(settings_of(server.url, patience_sec=20)) as api:
        load = Load(lambda: api.port)
        try:
            for crash in range(1, 5):
                load.wait_for(crash * 200)
                server.kill()
                server.start()
            load.wait_for(1_000)
        finally:
            load.end()
        load.check(bodies(api))


@contextmanager
def process(server: RealServer, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the job as a process on a free port."""
    port = free_port()
    ready, told = os.pipe()
    environ = os.environ | {"REDIS_URL": server.url, "DUETIME_READY_FD": str(told), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "jobs/serve.py", "--port", str(port), *options]
    with open(ready, "rb") as answer:
        job = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, pass_fds=(told,))
        os.close(told)
        try:
            assert answer.readline() == b"up\n"
            yield job, port
        finally:
            job.kill()
            job.communicate()


@pytest.mark.process
@pytest.mark.leaves_rubbish
def test_an_api_that_is_killed_under_load_leaves_every_201_once(server: RealServer) -> None:
    ports: list[int] = []
    load = None
    for crash in range(1, 4):
        with process(server) as (_, port):
            ports.append(port)
            load = load or Load(lambda: ports[-1], clients=6)
            load.wait_for(crash * 100)
    assert load is not None
    load.end()
    with running(settings_of(server.url)) as api:
        load.check(bodies(api))


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_with_0(server: RealServer, number: int) -> None:
    with process(server, "--log-format", "json") as (job, port):
        with Api(port) as api:
            assert api.schedule("secret message", id="secret-id").status_code == 201
            assert api.get("/v1/messages/secret-id").status_code == 200
        job.send_signal(number)
        _, told = job.communicate(timeout=WAIT_SEC)
        assert job.returncode == 0
        said = [json.loads(line)["message"] for line in told.decode().splitlines()]
        assert f"the API is on http://127.0.0.1:{port}" in said
        assert [line.split(" ms")[0].rsplit(" ", 1)[0] for line in said[-2:]] == [
            "POST /v1/messages 201",
            "GET /v1/messages/{id} 200",
        ]
        assert "secret" not in told.decode()
    with server.client() as client:
        assert client.zcard(KEYS.markers(SOURCE_ID)) == 0


@pytest.mark.process
def test_a_unix_socket_is_for_its_user_alone(server: RealServer, tmp_path: Path) -> None:
    path = tmp_path / "api"
    with process(server, "--unix", str(path)) as (job, _):
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as api:
            assert api.get("/readyz").json()["ready"]
        job.kill()
        job.wait()
    with process(server, "--unix", str(path)) as (job, _):  # what a killed one left is in nobody's way
        second = subprocess.run(
            [sys.executable, "-P", "jobs/serve.py", "--unix", str(path)],
            cwd=ROOT,
            env=os.environ | {"REDIS_URL": server.url, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=WAIT_SEC,
            check=False,
        )
        assert (second.returncode, "can't listen" in second.stderr) == (2, True)
        job.send_signal(signal.SIGTERM)
        assert job.wait(WAIT_SEC) == 0
    assert not path.exists()


@pytest.mark.process
def test_wrong_use_is_told_before_anything_starts(server: RealServer) -> None:
    for options in (["--host", "0.0.0.0"], ["--tokens", "/none"], ["--port", "65536"]):
        ended = subprocess.run(
            [sys.executable, "-P", "jobs/serve.py", *options],
            cwd=ROOT,
            env=os.environ | {"REDIS_URL": server.url, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=WAIT_SEC,
            check=False,
        )
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr


def test_an_answer_that_nobody_waits_for_is_no_error(
    server: RealServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with proxied(server, tmp_path) as (proxy, url), running(settings_of(url)) as api:
        gate = threading.Event()
        trap = proxy.trap(running_script("schedule"), lambda exchange: (gate.wait(WAIT_SEC), lose_reply(exchange))[1])

        async def leave() -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", api.port)
            body = b'{"message":"left","delay_sec":60}'
            head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()
            await asyncio.to_thread(trap.wait)
            writer.close()
            await writer.wait_closed()

        asyncio.run(leave())
        gate.set()
        wait_until(lambda: bodies(api) == {"left": 1})
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
