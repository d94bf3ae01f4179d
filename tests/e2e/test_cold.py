"""Messages that are due much later, from a file into the cold folder, and from there to the screen."""

import json
import random
import subprocess
from collections import Counter

import pytest

from pipeline.config import RedisSettings
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.listing import list_scheduled
from tests.e2e.commands import CAN_MOUNT, Checkout
from tests.servers import real_server

DAY_SEC = 86_400


def run(checkout: Checkout, settings: dict[str, str], *words: str) -> list[str]:
    command = checkout.run(*words, environ=settings)
    assert command.end(30) == 0, command.screen()
    return command.lines()


def test_messages_wait_in_the_folder_and_are_delivered_each_once(checkout: Checkout) -> None:
    with real_server() as server:
        settings = {"REDIS_URL": server.url, "DUETIME_COLD_FOLDER": "cold", "DUETIME_REDIS_SHARDS": "2"}
        checkout.drop(
            "requests.jsonl",
            {"message": "now", "delay_sec": 0},
            *({"message": f"in {days} days", "delay_sec": days * DAY_SEC, "id": f"d{days}"} for days in range(2, 9)),
            *({"message": f"soon {n}", "delay_sec": 40 * 3_600} for n in range(20)),
        )
        ingest = checkout.run("jobs/ingest.py", "--once", environ=settings)
        assert ingest.end() == 0, ingest.screen()
        status = json.loads(run(checkout, settings, "jobs/status.py", "--format", "json")[0])
        assert (status["scheduled"], status["cold"], status["stored"]) == (28, 27, 28)
        assert "27 messages wait in cold files and no hydrator is running" in status["verdict"]

        shown = run(checkout, settings, "jobs/messages.py", "show", "d5", "--format", "json")
        assert json.loads(shown[0])["message"] == "in 5 days"
        assert "d6 cancelled; it was due " in run(checkout, settings, "jobs/messages.py", "cancel", "d6")[0]
        moved = run(checkout, settings, "jobs/messages.py", "move", "d7", "--in", "0s")
        assert moved[0].startswith("d7 moved: due ")

        soon = settings | {"DUETIME_COLD_HORIZON_HOURS": "8784", "DUETIME_COLD_LEAD_HOURS": "96"}
        hydrate = checkout.run("jobs/hydrate.py", "--once", environ=soon)
        assert hydrate.end() == 0, hydrate.screen()
        assert "brought 23 messages" in hydrate.screen()
        status = json.loads(run(checkout, settings, "jobs/status.py", "--format", "json")[0])
        assert (status["cold"], status["scheduled"]) == (2, 27)

        drain = checkout.run("jobs/drain.py", "--once", "--format", "json", environ=settings)
        assert drain.end() == 0, drain.screen()
        assert sorted(record["message"] for record in drain.records()) == ["in 7 days", "now"], drain.screen()

        refused = checkout.run("jobs/ingest.py", "--once", environ=settings | {"DUETIME_COLD_FOLDER": ""})
        assert refused.end() == 1
        assert "wait in a cold folder, and cold.folder names none" in refused.screen()


@pytest.mark.skipif(not CAN_MOUNT, reason="needs mount namespaces (unshare -rm)")
def test_a_folder_on_a_disk_that_is_full_is_waited_for_and_each_message_comes_once(checkout: Checkout) -> None:
    """A real disk of one mebibyte, nearly full with something else, which is then removed."""
    texts = [f"{n} {random.Random(n).randbytes(40).hex()}" for n in range(5_000)]  # 400 kB that no compression shrinks
    (checkout.root / "disk").mkdir()
    disk = 'mount -t tmpfs -o size=1m none disk && head -c 900k /dev/zero > disk/other && exec "$@"'
    with real_server() as server:
        settings = {"REDIS_URL": server.url, "DUETIME_COLD_FOLDER": "disk/cold"}
        ingest = checkout.run("jobs/ingest.py", environ=settings, within=["unshare", "-rm", "sh", "-c", disk, "sh"])
        ingest.wait_for_line("ingest is up")
        checkout.drop("large.jsonl", *({"message": text, "delay_sec": 8 * DAY_SEC} for text in texts))
        ingest.wait_for(lambda job: any("No space left on device" in line for _, line in job.err), "complaint")
        assert "waiting for the cold folder" in ingest.screen()
        with connect(RedisSettings(url=server.url)) as client:
            assert not client.hgetall(keys_of(RedisSettings())[0].cold()), "what is in no file is not counted as stored"

        inside = ["nsenter", "-t", str(ingest.process.pid), "-U", "-m", "--preserve-credentials"]
        beside = [*inside, "sh", "-c", f'cd {checkout.root} && exec "$@"', "sh"]
        soon = settings | {"DUETIME_COLD_HORIZON_HOURS": "8784", "DUETIME_COLD_LEAD_HOURS": "240"}
        subprocess.run([*beside, "rm", "disk/other"], check=True)
        ingest.wait_for_line("5,000 stored")
        assert "the cold folder can be used again" in ingest.screen()
        hydrate = checkout.run("jobs/hydrate.py", "--once", environ=soon, within=beside)
        assert hydrate.end() == 0 and "brought 5,000 messages" in hydrate.screen(), hydrate.screen()
        with connect(RedisSettings(url=server.url)) as client:
            found = Counter(each.message.body for each in list_scheduled(client, keys_of(RedisSettings())))
        assert found == Counter(texts)
        assert ingest.stop() == 0, ingest.screen()
