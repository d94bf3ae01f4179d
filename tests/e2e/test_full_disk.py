"""A private server whose disk is full, and jobs that wait for it."""

import subprocess

import pytest

from tests.e2e.commands import CAN_MOUNT, Checkout

FOLDER = ".duetime/server"
# A disk of eight mebibytes, nearly full with something else. The log is on another one: on this there may be no room for it.
DISK = f"""
set -e
mount -t tmpfs -o size=8m,mode=700 none {FOLDER}
head -c 7900k /dev/zero > {FOLDER}/other
ln -s ../server.log {FOLDER}/server.log
exec "$@"
"""


@pytest.mark.nightly  # how far a server gets on a disk that fills up is not the same each time
@pytest.mark.skipif(not CAN_MOUNT, reason="needs mount namespaces (unshare -rm)")
def test_a_server_whose_disk_is_full_is_waited_for_and_what_it_acknowledged_is_there(checkout: Checkout) -> None:
    (checkout.root / FOLDER).mkdir(mode=0o700, parents=True)
    loop = checkout.run("jobs/drain.py", "--format", "json", within=["unshare", "-rm", "sh", "-c", DISK, "sh"])
    loop.wait_for_line("delivering from")
    inside = ["nsenter", "-t", str(loop.process.pid), "-U", "-m", "--preserve-credentials"]
    beside = [*inside, "sh", "-c", f'cd {checkout.root} && exec "$@"', "sh"]
    ingest = checkout.run("jobs/ingest.py", within=beside)
    ingest.wait_for_line("ingest is up")
    checkout.drop("small.jsonl", *({"message": f"small {n}", "delay_sec": 3_600} for n in range(100)))
    ingest.wait_for_line("100 stored")
    checkout.drop("large.jsonl", *({"message": f"large {n} {'x' * 80}", "delay_sec": 0} for n in range(5_000)))
    ingest.wait_for_line("waiting for Redis: Redis does not answer")  # the loop may be asleep while the server is down
    log = checkout.root / ".duetime" / "server.log"
    assert "Can't recover from AOF write error" in log.read_text()
    assert "The server ended by itself (exit code 1): starting it again." in log.read_text()

    subprocess.run([*beside, "rm", f"{FOLDER}/other"], check=True)
    ingest.wait_for_line("5,000 stored")
    wanted = {f"large {n} {'x' * 80}" for n in range(5_000)}
    loop.wait_for(lambda _: {record["message"] for record in loop.records()} == wanted, "every message")
    ingest.wait_for_line("Redis answers again")
    status = checkout.run("jobs/status.py", "--format", "json", within=beside)
    assert status.end() == 0 and status.records()[0]["scheduled"] == 100, status.screen()
    assert (ingest.stop(), loop.stop()) == (0, 0), ingest.screen() + loop.screen()
