"""Killed servers and killed programs: each receipt stands for one message that is stored once."""

import subprocess
import sys
import threading
from collections import Counter
from datetime import timedelta

import pytest

from pipeline.client import Duetime, StoreUnavailable
from pipeline.config import ROOT
from tests.servers import RealServer, real_server

HOUR = timedelta(hours=1)
PROGRAM = """
import sys
from pipeline.client import Duetime

with Duetime(sys.argv[1]) as duetime:
    for number in range(1_000_000):
        duetime.schedule(f"{sys.argv[2]}:{number}", delay=3600)
        print(f"{sys.argv[2]}:{number}", flush=True)
"""

pytestmark = pytest.mark.process


def stored(server: RealServer) -> Counter[str]:
    with Duetime(server.url) as duetime:
        return Counter(found.message.body for found in duetime.upcoming())


def test_a_server_that_is_killed_under_load_keeps_every_receipt_once() -> None:
    with real_server() as server:
        receipts: list[str] = []
        in_doubt: list[str] = []
        is_over = threading.Event()

        def work(thread: int) -> None:
            with Duetime(server.url, patience_sec=20) as duetime:
                number = 0
                while not is_over.is_set():
                    number += 1
                    body = f"{thread}:{number}"
                    try:
                        duetime.schedule(body, delay=HOUR, id=body if number % 2 else "")
                    except StoreUnavailable:
                        in_doubt.append(body)
                    else:
                        receipts.append(body)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for crash in range(1, 5):
            enough = crash * 300
            waited = threading.Event()
            while len(receipts) < enough:
                assert not waited.wait(0.01)
            server.kill()
            server.start()
        is_over.set()
        for thread in threads:
            thread.join()
        found = stored(server)
        assert set(found.values()) == {1}
        assert {*receipts} <= found.keys() <= {*receipts, *in_doubt}
        assert len(receipts) > 1_000


def test_a_program_that_is_killed_leaves_what_it_was_told_stored_once(server: RealServer) -> None:
    told: list[str] = []
    for run in range(3):
        command = [sys.executable, "-P", "-c", PROGRAM, server.url, str(run)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            told += [next(program.stdout).strip() for _ in range(200)]
            program.kill()
            told += [line.strip() for line in program.stdout if line.endswith("\n")]
    found = stored(server)
    assert set(found.values()) == {1}
    # One that was stored in the moment of each kill was not told.
    assert {*told} <= found.keys()
    assert len(found) <= len(told) + 3
    with server.client() as client:
        client.flushall()  # the markers of the killed go after an hour
