"""What lasts: the checkpoint is started anew while files keep coming."""

import signal
from collections import Counter

import pytest

from tests.e2e.commands import Checkout, Command
from tests.servers import real_server

ROLLED = "rolled the checkpoint"


def rolls(command: Command) -> int:
    return sum(ROLLED in line for _, line in command.err)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_rolling_the_checkpoint_while_files_keep_coming_loses_and_doubles_nothing(checkout: Checkout) -> None:
    with real_server() as server:
        environ = {"REDIS_URL": server.url, "DUETIME_INGEST_CHECKPOINT_FILES_MAX": "5"}
        dropped = 0

        def drop_until_rolled(command: Command, times: int) -> None:
            nonlocal dropped

            # Called whenever the job says something, else five times a second.
            def drop_and_look(seen: Command) -> bool:
                nonlocal dropped
                if not any(checkout.inbox.glob("*.jsonl")):  # one is always on its way, and no backlog grows
                    checkout.drop(
                        f"{dropped}.jsonl", *({"message": f"{dropped}/{n}", "delay_sec": 0} for n in range(3))
                    )
                    dropped += 1
                return rolls(seen) >= times

            command.wait_for_line("ingest is up")
            command.wait_for(drop_and_look, f"{times} rolls", 120)

        first = checkout.run("jobs/ingest.py", environ=environ)
        drop_until_rolled(first, 1)
        first.stop(signal.SIGKILL)
        second = checkout.run("jobs/ingest.py", environ=environ)
        drop_until_rolled(second, 1)
        assert second.stop() == 0, second.screen()
        last = checkout.run("jobs/ingest.py", "--once", environ=environ)
        assert last.end(180) == 0, last.screen()

        [told] = checkout.status("--redis", server.url)["ingest"]
        assert (told["reads"], told["rejected"]) == (str(checkout.inbox), 0)
        # Since the start of the last job that had any; it may know those that a job before it stored and did not commit.
        assert 0 < told["files"] * 3 == told["stored"] + told["duplicates"] < dropped * 3
        for_eyes = checkout.run("jobs/status.py", environ=environ)
        assert for_eyes.end() == 0
        assert f"{told['stored']:,} stored, {told['known']:,} duplicates, 0 rejected" in for_eyes.screen()
        assert f"addBatch {told['last_phases_ms']['addBatch']:,}" in for_eyes.screen()

        landing = checkout.inbox / ".landing"
        drained = checkout.run("jobs/drain.py", "--until-empty", "--format", "json", environ=environ)
        assert drained.end(180) == 0
        seen = Counter(record["message"] for record in drained.records())
        assert seen == Counter(f"{file}/{n}" for file in range(dropped) for n in range(3))
        assert [path.name for path in landing.iterdir() if not path.name.startswith(".")] == []
