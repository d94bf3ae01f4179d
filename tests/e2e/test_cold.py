"""Messages that are due much later, from a file into the cold folder, and from there to the screen."""

import json

from tests.e2e.commands import Checkout
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
